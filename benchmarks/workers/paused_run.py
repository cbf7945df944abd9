"""Worker: a paused run. It measures the CPU time of each process and the memory of all processes.

CPU time comes from `/proc/PID/task/*/schedstat`, in nanoseconds, because an idle process uses less
than a clock tick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from tianflow.hosts import event_loop as loops

SETTLE_S = 1.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all live threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return total / 1e9


def tree(pid: int | None = None) -> list[int]:
    """Return ``pid``, by default that of this process, and those of all its descendants."""
    import psutil

    own = psutil.Process(pid)
    return [own.pid, *(process.pid for process in own.children(recursive=True))]


def pss_mib(pids: Sequence[int], kinds: Sequence[str] = ("Pss",)) -> float:
    """Return the sum of proportional set sizes, in which shared pages are divided between
    processes. ``kinds``: lines of `smaps_rollup` that count.
    """
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.split(":")[0] in kinds)
    return total / 1024


async def shares(seconds: float) -> Values:
    """Return the cores used over ``seconds`` by this process, by the busiest other process, and by
    all processes.
    """
    pids = tree()
    before, began = {pid: cpu_seconds(pid) for pid in pids}, time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    used = {pid: (cpu_seconds(pid) - before[pid]) / took for pid in pids}
    own = used.pop(pids[0])
    return {
        "coordinator": 100 * own,
        "busiest_other": 100 * max(used.values()) if used else None,
        "all": 100 * (own + sum(used.values())),
        "processes": float(len(pids)),
        "pss": pss_mib(pids),
    }


async def paused(
    config: Path, overrides: Sequence[str], *, train_s: float, seconds: float, runs: Path
) -> Values:
    """Train for ``train_s``, pause, wait until the run has settled, and measure."""
    from benchmarks.workers import training
    from tianflow import open_run

    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await asyncio.sleep(train_s)
        run.control.pause(source="api")
        await asyncio.sleep(SETTLE_S)
        if run.control.state != "paused":
            raise RuntimeError(f"the run is {run.control.state} (expected paused)")
        return await shares(seconds)


async def nothing(seconds: float) -> Values:
    """Measure one process that has loaded the libraries of a run, and waits."""
    import gymnasium  # noqa: F401 - loaded for its memory
    import torch  # noqa: F401 - loaded for its memory

    return await shares(seconds)


def main() -> None:
    """Arguments: ``nothing SECONDS`` or ``paused SECONDS CONFIG TRAIN_S RUNS [section.key=value
    ...]``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("nothing", "paused"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("train_s", type=float, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.what == "nothing":
        child.report(loops.run(nothing(given.seconds)))
    else:
        work = paused(
            given.config,
            given.overrides,
            train_s=given.train_s,
            seconds=given.seconds,
            runs=given.runs,
        )
        child.report(loops.run(work))


if __name__ == "__main__":
    main()
