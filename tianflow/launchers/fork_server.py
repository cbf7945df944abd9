"""The process that forks and reaps a run's hosts: requests + descriptors -> hosts -> exit reports.

It is the hosts' parent, so it reaps them exactly and never signals a number that the system has
reused. The end of the socket shows the death of the coordinator. It imports what hosts need once,
and stays single-threaded, because a fork copies the locks of other threads but not the threads. It
does not use asyncio: hosts start without a loop.

Requests (JSON, one datagram each): ``{"preload": [module, ...]}`` first, then ``{"spawn": id,
"name": ..., "target": "module:function"}`` with descriptors (the first holds the payload),
``{"kill": id}``, ``{"terminate": id}``.
Reports: ``{"ready": {module: why it failed}}``, ``{"spawned": id, "pid": ...}``, ``{"refused": id,
"reason": ...}``, ``{"exited": id, "status": ...}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from tianflow.core.process_table import ProcessEntry, carries, processes

MAX_DESCRIPTORS = 253
"""Linux passes no more with one message."""
MESSAGE_BYTES = 64 * 1024
REAP_POLL_S = 0.002
"""Processes that a host leaves die soon after their SIGKILL; not all of them send a SIGCHLD."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int | bytes) -> None:
    """One ``prctl`` call; OSError if the system refuses."""
    if (
        _libc.prctl(
            option,
            ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument),
            0,
            0,
            0,
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


@dataclass(slots=True)
class _Host:
    id: int
    name: str
    pid: int
    status: int | None = None
    """Set once it is dead. It stays a zombie, so that its number is not reused, until its group is
    gone.
    """


class ForkServer:
    """Forks hosts on request, reports their ends, and leaves no process.

    An exit is reported only when no process of the host's group is left, so none of them can still
    write to shared memory. Its descendants that changed their session become children of
    this process (it is their subreaper) and are killed too, unless another living host is known, by
    session or environment, to have started them.

    Waits: for requests and for signals, never for a full socket. Unblocked by: the coordinator,
    whose end of the socket ends this process, after all others.
    """

    def __init__(self, *, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._hosts: dict[int, _Host] = {}
        # As many reports as were asked for, and one ready: the coordinator's requests bound it.
        self._outbox: deque[bytes] = deque()
        self._ending = False
        self._signalled = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the coordinator's end of the socket is gone and every descendant is dead and
        reaped.
        """
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        while self._tend() or not self._ending:
            timeout = (
                REAP_POLL_S
                if self._ending or any(host.status is not None for host in self._hosts.values())
                else None
            )
            for key, events in self._selector.select(timeout):
                if key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._signalled = True
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush()
                if events & selectors.EVENT_READ:
                    self._receive()

    def _receive(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._connection, MESSAGE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, fds, flags = b"", [], 0
        if not data:
            self._ending = True
            self._selector.unregister(self._connection)
            return
        try:
            self._obey(json.loads(data), fds, whole=not flags & socket.MSG_CTRUNC)
        finally:
            for fd in fds:
                os.close(fd)

    def _obey(self, request: dict[str, object], fds: Sequence[int], *, whole: bool) -> None:
        match request:
            case {"preload": list(modules)}:
                self._report({"ready": _preload(modules)})
            case {"spawn": int(number)} if not whole:
                self._report(
                    {
                        "refused": number,
                        "reason": "some descriptors were lost: the limit of open files is too low",
                    }
                )
            case {"spawn": int(number), "name": str(name), "target": str(target)}:
                self._spawn(number, name, target, fds)
            case {"kill": int(number)} if number in self._hosts:
                _kill_group(self._hosts[number].pid)
            case {"terminate": int(number)} if number in self._hosts:
                os.kill(self._hosts[number].pid, signal.SIGTERM)

    def _spawn(self, number: int, name: str, target: str, fds: Sequence[int]) -> None:
        threads = max(threading.active_count(), len(os.listdir("/proc/self/task")))  # noqa: PTH208 - a count is wanted
        if threads != 1:
            reason = (
                f"{threads} threads run in the fork server, and a fork would copy their "
                "locks for ever; preload nothing that starts threads"
            )
            self._report({"refused": number, "reason": reason})
            return
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        # Blocked, a signal waits until the child has handlers of its own; this process ignores it,
        # and the child would too.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                self._become_host(name, target, fds, server)
        except OSError as error:
            self._report({"refused": number, "reason": f"fork failed: {error.strerror}"})
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._hosts[number] = _Host(number, name, pid)
        self._report({"spawned": number, "pid": pid})

    def _become_host(self, name: str, target: str, fds: Sequence[int], server: int) -> NoReturn:
        """In the child: leave everything of the fork server behind, then be the host."""
        code = 1
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before the line above
                os._exit(1)
            os.setsid()
            prctl(PR_SET_NAME, name.encode()[:15])
            self._reset_process(fds)
            os.environ["TIANFLOW_HOST"] = name
            payload = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
            os.close(fds[0])
            code = _run(target, payload, list(fds[1:]))
        except BaseException:  # noqa: BLE001 - the last frame of a process: the error is printed, then the process ends
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code & 0xFF)

    def _reset_process(self, fds: Sequence[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._selector.close()
        self._connection.close()
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *fds}:  # noqa: PTH208 - numbers are wanted
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(fd)
        if (
            "numpy.random" in sys.modules
        ):  # else every host would draw the same numbers from its global generator
            sys.modules["numpy.random"].seed()

    # Reaping: exact, because only this process reaps what it forked or adopted
    # ------------------------------------------

    def _tend(self) -> bool:
        """Find dead hosts, kill the rest of their groups, and report those whose group is gone.
        True while a descendant is left.
        """
        for host in self._hosts.values():
            if self._ending:
                _kill_group(host.pid)
            if host.status is None and (
                info := os.waitid(os.P_PID, host.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ):
                host.status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        dead = [host for host in self._hosts.values() if host.status is not None]
        if not (dead or self._ending or self._signalled):
            return True
        self._signalled = False
        table = list(processes())
        adopted = self._adopted(table)
        stray = self._kill_strays(adopted)
        for entry in adopted:
            os.waitid(os.P_PID, entry.pid, os.WEXITED | os.WNOHANG)
        for host in dead:
            # A process that was reaped just now still counts: the table may be older than the
            # adoption of its children.
            if stray or any(entry.group == host.pid and entry.pid != host.pid for entry in table):
                _kill_group(host.pid)
                continue
            os.waitpid(host.pid, 0)
            del self._hosts[host.id]
            self._report({"exited": host.id, "status": host.status})
        self._flush()
        return bool(self._hosts or adopted)

    def _adopted(self, table: Sequence[ProcessEntry]) -> list[ProcessEntry]:
        own, hosts = os.getpid(), {host.pid for host in self._hosts.values()}
        return [entry for entry in table if entry.parent == own and entry.pid not in hosts]

    def _kill_strays(self, adopted: Sequence[ProcessEntry]) -> bool:
        """Kill adopted processes that no living host answers for; True if there were any."""
        living = (
            [] if self._ending else [host for host in self._hosts.values() if host.status is None]
        )
        some_died = self._ending or len(living) < len(self._hosts)
        stray = False
        for entry in adopted:
            if some_died and not any(
                entry.session == host.pid or carries(entry.pid, "TIANFLOW_HOST", host.name)
                for host in living
            ):
                stray = True
                os.kill(entry.pid, signal.SIGKILL)
        return stray

    def _report(self, report: dict[str, object]) -> None:
        self._outbox.append(json.dumps(report).encode())
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                self._connection.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone; the end of the socket follows
            self._outbox.clear()
        if not self._ending:
            self._selector.modify(
                self._connection,
                selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0),
            )


def _kill_group(pid: int) -> None:
    """Kill a child that was not reaped yet, and its process group once it has made one."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _wake_up(_number: int, _frame: object) -> None:
    """Receive a signal whose only work is done by the wake-up descriptor."""


def _preload(modules: Sequence[str]) -> dict[str, str]:
    failures = {}
    # This process does not watch the socket during an import, and it has no host yet to reap.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()  # imports make hardly any garbage, and looking for it takes a tenth of their time
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a host that needs it reports its own traceback
            failures[module] = repr(error)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    # Pages that collections in hosts do not touch stay shared. Of 300,000 objects imports leave
    # 8,000 as garbage, and looking for it would delay every start by 0.15 s.
    gc.freeze()
    gc.enable()
    return failures


def _run(target: str, payload: bytes, fds: list[int]) -> int:
    module, _, attribute = target.partition(":")
    function = cast(
        "Callable[[bytes, list[int]], object]", getattr(importlib.import_module(module), attribute)
    )
    try:
        result = function(payload, fds)
    except SystemExit as end:
        result = 0 if end.code is None else end.code
        if isinstance(result, str):
            print(result, file=sys.stderr)  # noqa: T201 - what the interpreter does with it
            return 1
    return result if isinstance(result, int) else 0


def main(fd: int) -> None:
    """Be a fork server on the inherited socket ``fd``."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # it ends when the coordinator does, and not before
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_NAME, b"tianflow-forks")
    # Stopped, it would neither see the end of the socket nor end its hosts. A SIGKILL would leave
    # what hosts have started.
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    with socket.socket(fileno=fd) as connection:
        connection.set_inheritable(False)
        ForkServer(connection=connection).serve()
