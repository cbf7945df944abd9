"""What hosts are made to do by tests of the forker. Imported in the forked process."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path


def echo(payload: bytes, fds: list[int]) -> int:
    """Send back the payload with what this process sees of itself, then wait for the other end to
    close.
    """
    with socket.socket(fileno=fds[0]) as connection:
        connection.send(payload + b"|" + str(os.getpid()).encode())
        connection.recv(1)
    return 0


def look_around(payload: bytes, fds: list[int]) -> None:
    """Describe this process as JSON."""
    description = {
        "payload": len(payload),
        "fds": sorted(
            int(entry.name) for entry in list(Path("/proc/self/fd").iterdir()) if entry.exists()
        ),
        "given": fds,
        "session": os.getsid(0),
        "pid": os.getpid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "run": os.environ["TIANFLOW_RUN"],
        "host": os.environ["TIANFLOW_HOST"],
        "omp": os.environ["OMP_NUM_THREADS"],
        "ignored": [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) == signal.SIG_IGN
        ],
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "modules": sorted(sys.modules),
        "random": _numpy_draw(),
    }
    with socket.socket(fileno=fds[0]) as connection:
        connection.sendall(json.dumps(description).encode())


def _numpy_draw() -> float:
    return float(sys.modules["numpy.random"].random()) if "numpy.random" in sys.modules else 0.0


def work_in_memory(payload: bytes, fds: list[int]) -> None:
    """Take 48 MB in pieces and free them, twenty times over, on a thread as components do; send the
    page faults of the last ten.
    """
    faults: list[int] = []

    def work() -> None:
        for _ in range(20):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            pieces = [
                ctypes.create_string_buffer(8 << 20) for _ in range(6)
            ]  # zeroed, so that every page is touched
            del pieces
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with socket.socket(fileno=fds[0]) as connection:
        connection.sendall(json.dumps(sum(faults[10:])).encode())


def pages(payload: bytes, fds: list[int]) -> None:
    """Take 8 MB, and send whether the kernel was asked for huge pages where they lie."""
    piece = ctypes.create_string_buffer(8 << 20)
    middle, here, asked = ctypes.addressof(piece) + (4 << 20), False, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(address, 16) for address in name.split("-"))
            here = first <= middle < last
        elif here and name == "VmFlags:":
            asked = "hg" in rest
    with socket.socket(fileno=fds[0]) as connection:
        connection.sendall(json.dumps(asked).encode())


def end(payload: bytes, fds: list[int]) -> int | None:
    """End in the way that the payload says."""
    match payload.decode().split():
        case ["return", number]:
            return int(number)
        case ["nothing"]:
            return None
        case ["exit", number]:
            sys.exit(int(number))
        case ["_exit", number]:
            os._exit(int(number))
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["raise"]:
            raise ValueError("on purpose")
    time.sleep(60)
    return 99


def sleep(payload: bytes, fds: list[int]) -> None:
    """Sleep for as long as nobody ends it."""
    time.sleep(600)


def with_daemon(payload: bytes, fds: list[int]) -> None:
    """Start a process in a session of its own, whose parent ends at once; report its pid,
    and stay.
    """
    command = "setsid sleep 600 >/dev/null & echo $!"
    daemon = subprocess.run(
        ["sh", "-c", command], stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    with socket.socket(fileno=fds[0]) as connection:
        connection.send(json.dumps(int(daemon)).encode())
    time.sleep(600)


def with_descendants(payload: bytes, fds: list[int]) -> int:
    """Start descendants of several kinds, report their pids and, unless told to stay, end at
    once.
    """
    ready, tell = os.pipe()
    pids = []
    for escape in (False, True):
        if (pid := os.fork()) == 0:
            if escape:
                os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(tell, b"x")
            time.sleep(600)
            os._exit(0)
        pids.append(pid)
    pids.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    seen = b""
    while len(seen) < 2:
        seen += os.read(ready, 2)
    with socket.socket(fileno=fds[0]) as connection:
        connection.send(json.dumps(pids).encode())
        if payload == b"stay":
            time.sleep(600)
        os._exit(7)
