"""The process table of Linux: find processes by what they were started with, and kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

POLL_S = 0.01
"""Seconds between two looks at the table while processes end."""


class ProcessEntry(NamedTuple):
    """One line of the process table."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> Iterator[ProcessEntry]:
    """Every process that /proc shows, zombies included."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, thousands of Paths are not
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # The command may hold spaces and parentheses; what follows its last one may not.
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                yield ProcessEntry(
                    int(name), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3])
                )


def carries(pid: int, variable: str, value: str) -> bool:
    """True if the environment with which ``pid`` was started holds ``variable=value``."""
    try:
        return f"{variable}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
            b"\0"
        )
    except OSError:
        return False


def kill_marked(variable: str, value: str, groups: Collection[int], timeout_s: float) -> set[int]:
    """Kill every process that was started with ``variable=value`` in its environment, or belongs to
    one of ``groups``, until none is left. The processes still there after ``timeout_s``.

    Blocks. It finds also orphans, whose end is reported to other parents.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = {
            entry.pid
            for entry in processes()
            if entry.group in groups or carries(entry.pid, variable, value)
        }
        left = {pid for pid in left if not is_dead(pid)}
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def is_dead(pid: int) -> bool:
    """True for a zombie without threads, and for no process.

    A child of this process is reaped, such as one that the first process of a container adopted.
    """
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state in {b"Z", b"X"} and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    except OSError:
        return True
