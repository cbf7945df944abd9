"""Host processes as the coordinator sees them: spawn, kill, wait. The forking is done by
`tianflow.launchers.fork_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import mmap
import os
import secrets
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tianflow.core.allocator import RETAINED_MEMORY
from tianflow.core.process_table import kill_marked
from tianflow.core.resource_limits import refusal
from tianflow.errors import RunError
from tianflow.launchers.fork_server import MAX_DESCRIPTORS, MESSAGE_BYTES
from tianflow.logs import logger

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from "
    "tianflow.launchers.fork_server import main; main(int(sys.argv[1]))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_NO_THREADS_AT_IMPORT = {"OPENBLAS_NUM_THREADS": "1", "GOTO_NUM_THREADS": "1"}
"""Hosts get these whatever the shell says: OpenBLAS starts its threads when NumPy is imported, and
a fork server with threads cannot fork.
"""
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _huge_pages() -> dict[str, str]:
    """For glibc: request huge pages, where the kernel grants them on request. An update touches
    thousands of small pages, and the address cache of a core holds few. Pages of more than 2 MiB
    are not requested: a heap grows by one page at once.
    """
    try:
        size = int(_HUGE_PAGE.read_text())
    except (OSError, ValueError):
        return {}
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if size <= 2 << 20 else {}


HOST_ENVIRONMENT = {**_ONE_THREAD, **RETAINED_MEMORY, **_huge_pages()}
"""Environment variables that hosts get, unless they have other values already."""
_SPAWN_ATTEMPTS = 3
_DESCRIPTORS_TO_START = 16
"""More than a loop opens to start a process: two ends, standard streams, and pipes for its status.
"""

_log = logger("launcher")


class ForkedHost:
    """One host process; its process group and session have its ``pid`` as number, too."""

    def __init__(self, *, forker: HostForker, number: int, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.returncode: int | None = None
        """Its exit status, or minus the signal that ended it; None while a process of its group is
        left.
        """
        self._forker, self._number = forker, number
        self._exited = asyncio.Event()

    async def wait(self) -> int:
        """Wait until no process of its group is left. Its exit status, or minus the signal. Any
        number of callers may wait.
        """
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL its process group, stopped or not. Does nothing once it has exited."""
        self._request("kill")

    def terminate(self) -> None:
        """SIGTERM the process itself. Does nothing once it has exited."""
        self._request("terminate")

    def _request(self, action: str) -> None:
        if self.returncode is None:
            self._forker._post({action: self._number})  # noqa: SLF001 - the two are one thing

    def _exit(self, status: int) -> None:
        self.returncode = status
        self._exited.set()


class _LostError(Exception):
    """The fork server died before it answered."""


@dataclass(frozen=True, slots=True, eq=False)
class _Server:
    """One incarnation of the fork server. All its descendants have ``token`` in the environment."""

    process: Process
    connection: socket.socket
    token: str
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class HostForker:
    """Starts host processes by forking one that has ``preload`` imported, and leaves no process.

    Consumes: spawn requests. Produces: children and their exit statuses. Waits: `spawn` for the
    fork server's answer (the first time for its imports, too); leaving the context for the end of
    every child. Unblocked by: the fork server; when that dies every child is killed and counts as
    exited with -9, and the next `spawn` starts a new one.

    If the coordinator dies, the fork server kills all its descendants, and ends.

    Args:
        run_id: value of ``TIANFLOW_RUN`` in the environment of every process of the run.
        preload: modules that are imported before any fork, so that hosts share their pages. A
            failure is logged and listed in `preload_failures`. A module that starts a thread makes
            `spawn` fail: a fork would copy its locks for ever.
        end_timeout_s: limit for the end of all children on leaving. After it, the fork server is
            killed as well.
    """

    def __init__(
        self, *, run_id: str, preload: Sequence[str] = (), end_timeout_s: float = 5.0
    ) -> None:
        self.preload_failures: Mapping[str, str] = {}
        self._run_id, self._preload, self._end_timeout_s = run_id, tuple(preload), end_timeout_s
        self._numbers = itertools.count(1)
        self._children: dict[int, ForkedHost] = {}
        self._pending: dict[int, tuple[str, asyncio.Future[ForkedHost]]] = {}
        # Requests that a full socket refuses. A coordinator sends a few for each child, so the
        # number of children bounds them.
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._starting = asyncio.Lock()
        self._server: _Server | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._open = self._ready = False

    @property
    def alive(self) -> bool:
        """True while a fork server is known to run."""
        return self._server is not None

    @property
    def pid(self) -> int | None:
        """The fork server's process; None while it does not run."""
        return None if self._server is None else self._server.process.pid

    async def __aenter__(self) -> Self:
        self._open = True
        await self._ensure_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        if (server := self._server) is not None:
            with contextlib.suppress(OSError):  # it died a moment ago
                server.connection.shutdown(socket.SHUT_WR)
            if not self._ready:
                server.kill()  # it still imports and has no host: there is nothing to end in order
            try:
                async with asyncio.timeout(self._end_timeout_s):
                    await server.gone.wait()
            except TimeoutError:
                _log.warning(
                    "fork server does not end, killing it",
                    pid=server.process.pid,
                    after_s=self._end_timeout_s,
                )
            finally:  # also when this is cancelled: a second Ctrl-C must not leave processes
                server.kill()
                await server.gone.wait()
        if self._reaping is not None:
            await self._reaping

    async def spawn(
        self, name: str, target: str, payload: bytes, fds: Sequence[int] = ()
    ) -> ForkedHost:
        """Fork a host that calls ``target(payload, fds)``. Its exit status is the result (0 unless
        it is an int).

        Args:
            name: of the host; no other living child may have it.
            target: ``"module:function"``, imported in the child.
            payload: of any size.
            fds: duplicated for the child, where they have other numbers; the caller closes its own.

        Raises:
            RunError: it cannot be forked, or the fork server died again and again.
            ValueError: an impossible name, target or number of descriptors.
        """
        self._check(name, target, fds)
        for _ in range(_SPAWN_ATTEMPTS):
            await self._ensure_server()
            try:
                return await self._ask_for(name, target, payload, fds)
            except _LostError:
                continue
        summary = (
            f"the fork server died {_SPAWN_ATTEMPTS} times in a row while starting "
            f"{name!r}; its last output is on stderr"
        )
        raise RunError("launcher", f"{summary}; preloaded: {', '.join(self._preload) or 'nothing'}")

    def _check(self, name: str, target: str, fds: Sequence[int]) -> None:
        if not self._open:
            raise RuntimeError(
                "spawn works inside `async with forker` only: outside, the child would not be ended"
            )
        if not all(target.partition(":")):
            raise ValueError(
                f"target {target!r} cannot be imported by another process; accepted: "
                "'module:function'"
            )
        if len(fds) > MAX_DESCRIPTORS - 1:
            raise ValueError(
                f"{len(fds)} descriptors for {name!r}: the system passes at most "
                f"{MAX_DESCRIPTORS - 1}"
            )
        if name in {child.name for child in self._children.values()} | {
            pending for pending, _ in self._pending.values()
        }:
            raise ValueError(
                f"a living child is called {name!r} already; await its wait() before it is replaced"
            )

    async def _ask_for(
        self, name: str, target: str, payload: bytes, fds: Sequence[int]
    ) -> ForkedHost:
        number = next(self._numbers)
        answer: asyncio.Future[ForkedHost] = asyncio.get_running_loop().create_future()
        self._pending[number] = name, answer
        memory = _in_memory(payload)
        try:
            self._post({"spawn": number, "name": name, "target": target}, (memory, *fds))
        except BaseException:
            del self._pending[number]
            raise
        finally:
            os.close(memory)
        return await answer

    # The fork server
    # ----------------------------------------------------------------------------------------------

    async def _ensure_server(self) -> None:
        async with self._starting:
            if self._reaping is not None:
                await asyncio.shield(self._reaping)
            if self._server is None:
                self._ready = False
                self._server = await self._start_server()
                self._post({"preload": self._preload})

    async def _start_server(self) -> _Server:
        try:
            _require_descriptors(_DESCRIPTORS_TO_START)
            return await self._exec_server()
        except OSError as error:
            raise RunError("launcher", refusal(error, "the fork server cannot start")) from error

    async def _exec_server(self) -> _Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        token = secrets.token_hex(16)
        environment = {
            **HOST_ENVIRONMENT,
            **os.environ,
            **_NO_THREADS_AT_IMPORT,
            "TIANFLOW_RUN": self._run_id,
            "TIANFLOW_FORKER": token,
        }
        arguments = ("-P", "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *arguments,
                    stdin=DEVNULL,
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        server = _Server(process, ours, token)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, server)
        return server

    def _post(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send now, or as soon as the socket takes it. Does nothing without a fork server."""
        if self._server is None:
            return
        # Duplicates, because a caller that is cancelled meanwhile closes its own.
        self._outbox.append((json.dumps(request).encode(), tuple(os.dup(fd) for fd in fds)))
        self._flush(self._server)

    def _flush(self, server: _Server) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._outbox:
                data, fds = self._outbox[0]
                socket.send_fds(server.connection, [data], fds)
                self._drop_first()
        except BlockingIOError:
            loop.add_writer(server.connection.fileno(), self._flush, server)
            return
        except OSError:  # it died; the reader will see that
            self._drop_all()
        loop.remove_writer(server.connection.fileno())

    def _drop_first(self) -> None:
        for fd in self._outbox.popleft()[1]:
            os.close(fd)

    def _drop_all(self) -> None:
        while self._outbox:
            self._drop_first()

    def _receive(self, server: _Server) -> None:
        while True:
            try:
                data = server.connection.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except (
                ConnectionResetError
            ):  # it died with requests unread; its earlier reports can still be read
                continue
            if not data:
                break
            self._handle(json.loads(data))
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.connection.fileno())
        loop.remove_writer(server.connection.fileno())
        server.connection.close()
        self._server = None
        self._drop_all()
        self._reaping = loop.create_task(self._reap_orphans(server), name="reap orphans")
        server.gone.set()

    def _handle(self, report: Mapping[str, object]) -> None:
        match report:
            case {"ready": dict(failures)}:
                self._ready, self.preload_failures = True, failures
                for module, reason in failures.items():
                    _log.warning(
                        "preload failed, every host imports for itself",
                        preload=module,
                        reason=reason,
                    )
            case {"spawned": int(number), "pid": int(pid)}:
                name, answer = self._pending.pop(number)
                self._children[number] = child = ForkedHost(
                    forker=self, number=number, name=name, pid=pid
                )
                if answer.done():  # the caller was cancelled
                    child.kill()
                else:
                    answer.set_result(child)
            case {"refused": int(number), "reason": str(reason)}:
                name, answer = self._pending.pop(number)
                if not answer.done():
                    answer.set_exception(RunError("launcher", f"cannot start {name!r}: {reason}"))
            case {"exited": int(number), "status": int(status)}:
                self._children.pop(number)._exit(status)  # noqa: SLF001 - the two are one thing

    async def _reap_orphans(self, server: _Server) -> None:
        """After the fork server's end: kill every process of the run, then report its children as
        killed.
        """
        await server.process.wait()
        children, self._children = self._children, {}
        pending, self._pending = self._pending, {}
        if self._open or children or any(not answer.done() for _, answer in pending.values()):
            _log.error(
                "fork server died, its children are killed",
                pid=server.process.pid,
                status=server.process.returncode,
            )
            left = await asyncio.to_thread(
                kill_marked,
                "TIANFLOW_FORKER",
                server.token,
                {child.pid for child in children.values()},
                self._end_timeout_s,
            )
            if left:  # with a SIGKILL pending they run no instruction of their own
                _log.error("processes are stuck inside the system", pids=sorted(left))
        for child in children.values():
            child._exit(-signal.SIGKILL)  # noqa: SLF001 - the two are one thing
        for _, answer in pending.values():
            if not answer.done():
                answer.set_exception(_LostError())
        self._reaping = None


def _require_descriptors(count: int) -> None:
    """Raise OSError if this process cannot open ``count`` more files. An event loop that meets the
    limit in the middle of starting a process reports it on stderr, with traces of its own.
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _in_memory(payload: bytes) -> int:
    """A descriptor of anonymous memory that holds ``payload``: messages have a size limit, memory
    has not.
    """
    memory = os.memfd_create("payload")
    if payload:
        os.ftruncate(memory, len(payload))
        with mmap.mmap(memory, len(payload)) as view:
            view[:] = payload
    return memory
