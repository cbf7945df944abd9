"""ProcessUsage: CPU time and memory of the processes of a run, read from /proc."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tianflow.core.statistics import ProcessStatistics
from tianflow.logs import logger

log = logger("usage")
EVERY_S = 1.0
"""Seconds between two readings."""


class ProcessReading(NamedTuple):
    """One reading of a process.

    Attributes:
        identity: pid and start time, because a pid is reused.
        cpu_s: CPU time since the process began, in seconds.
        memory_bytes: resident memory.
    """

    identity: tuple[int, int]
    cpu_s: float
    memory_bytes: int


def read_process(pid: int) -> ProcessReading | None:
    """Read a process; None if it has ended, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command may hold spaces and parentheses; the fields after its last one may not.
    fields = text.rpartition(b")")[2].split()
    if fields[0] in {b"Z", b"X"}:
        return None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks
    return ProcessReading((pid, int(fields[19])), cpu_s, int(fields[21]) * page)


class ProcessUsage:
    """Reads the processes of a run at intervals.

    A process that replaces another one under its name continues its CPU time. The CPU time of a
    process that has ended stays, its memory does not.

    Args:
        pids: pid of each process that is alive, by name.
        read: reads one process. It may wait for the system, so it is called in a thread.
    """

    def __init__(
        self,
        *,
        pids: Callable[[], Mapping[str, int]],
        read: Callable[[int], ProcessReading | None] = read_process,
    ) -> None:
        self._pids, self._read = pids, read
        self._newest: dict[str, ProcessReading] = {}
        self._earlier: dict[str, float] = {}
        self.statistics: Mapping[str, ProcessStatistics] = {}
        """Of each process, by name; empty before the first reading."""

    async def run(self) -> None:
        """Read until cancelled. A failure costs one reading and not the run, and is logged."""
        last = ""
        while True:
            try:
                pids = dict(self._pids())
                self.take(await asyncio.to_thread(self._read_all, pids))
            except Exception as error:  # a boundary: later readings may be good
                failure = f"{type(error).__name__}: {error}"
                if failure != last:
                    log.exception("the processes of the run cannot be measured", error=failure)
                last = failure
            await asyncio.sleep(EVERY_S)

    def take(self, readings: Mapping[str, ProcessReading]) -> None:
        """Make `statistics` of new readings by name."""
        for name, reading in readings.items():
            before = self._newest.get(name)
            if before is not None and before.identity != reading.identity:
                self._earlier[name] = self._earlier.get(name, 0.0) + before.cpu_s
            self._newest[name] = reading
        self.statistics = {
            name: ProcessStatistics(
                cpu_s=self._earlier.get(name, 0.0) + newest.cpu_s,
                memory_bytes=newest.memory_bytes if name in readings else None,
            )
            for name, newest in self._newest.items()
        }

    def _read_all(self, pids: Mapping[str, int]) -> dict[str, ProcessReading]:
        found = {name: self._read(pid) for name, pid in pids.items()}
        return {name: reading for name, reading in found.items() if reading is not None}
