"""One run with many actors, looked at from the coordinator's own process: throughput, lag of its loop, memory while its learner stands."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import child, resting, training
from benchmarks.harness import Values
from tianflow import loops, open_run
from tianflow.api import RunHandle
from tianflow.statistics import ComponentStatistics

ASLEEP_S = 0.01
"""Lag is how much later than asked a sleep of so many seconds ends."""
SETTLE_S = 10.0


async def lags(over: asyncio.Event) -> list[float]:
    """Seconds by which sleeps on this loop ended late, until it is over."""
    late = []
    while not over.is_set():
        asked = time.monotonic()
        await asyncio.sleep(ASLEEP_S)
        late.append(max(0.0, time.monotonic() - asked - ASLEEP_S))
    return late


def p99_ms(late: Sequence[float]) -> float:
    """99th percentile, in milliseconds."""
    return 1000.0 * sorted(late)[int(0.99 * len(late))]


async def until_all_work(run: RunHandle) -> None:
    """Until no actor is still making its environments: the thread that does it is the one that the others roll out on."""
    while sum(component.time.current != "starting" for component in _actors(run)) < run.control.config.actors.count:  # noqa: ASYNC110 - as there
        await asyncio.sleep(0.1)


def _actors(run: RunHandle) -> list[ComponentStatistics]:
    return [component for component in run.control.statistics().components if component.role == "actor"]


async def bare() -> list[float]:
    """Lags of a loop that does nothing else, until standard input ends."""
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)
    return await lags(over)


async def busy(config: Path, overrides: Sequence[str], window: training.Window, runs: Path) -> Values:
    """Throughput, and the p99 lag of the coordinator's loop beside that of a bare loop in a process of its own."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await until_all_work(run)
        beside = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.crowd", "bare"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await asyncio.sleep(window.warm_s)
        over = asyncio.Event()
        measured = asyncio.create_task(lags(over))
        before = run.control.statistics()
        await asyncio.sleep(window.seconds)
        after = run.control.statistics()
        over.set()
        late = await measured
        said, _ = await beside.communicate(b"")
    found = training.between(before, after)
    return {**found, "lag": p99_ms(late), "bare_lag": child.parse(said.decode())["lag"]}


async def stalled(config: Path, overrides: Sequence[str], *, train_s: float, seconds: float, looks: int, runs: Path) -> Values:
    """Memory of all processes while the learner is stopped: once what is in flight has settled, and ``looks`` times over ``seconds``."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await asyncio.sleep(train_s)
        learner = next(pid for pid in resting.tree() if _name(pid) == "learner")
        os.kill(learner, signal.SIGSTOP)
        try:
            await asyncio.sleep(SETTLE_S)
            first = resting.pss_mib(resting.tree())
            found = []
            for _ in range(looks):
                await asyncio.sleep(seconds / looks)
                found.append(resting.pss_mib(resting.tree()))
        finally:
            os.kill(learner, signal.SIGCONT)
        return {"first": first, "last": found[-1], "highest": max(found), "processes": float(len(resting.tree()))}


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def main() -> None:
    """``bare``, ``busy CONFIG WARM_S SECONDS RUNS [...]`` or ``stalled CONFIG TRAIN_S SECONDS RUNS [...]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("bare", "busy", "stalled"))
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("warm_s", type=float, nargs="?")
    parser.add_argument("seconds", type=float, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    if given.what == "bare":
        child.say({"lag": p99_ms(loops.run(bare()))})
    elif given.what == "busy":
        child.say(loops.run(busy(given.config, given.overrides, training.Window(given.warm_s, given.seconds), given.runs)))
    else:
        looks = max(1, round(given.seconds / 60.0))
        work = stalled(given.config, given.overrides, train_s=given.warm_s, seconds=given.seconds, looks=looks, runs=given.runs)
        child.say(loops.run(work))


if __name__ == "__main__":
    main()
