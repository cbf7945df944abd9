"""Live runs that take turns: all are up, and one trains while the others are paused, in windows too
short for the machine to change.

A run in a process of its own does not end between two of its windows, so that many of them cost the
time of one start, and what others do to the machine meets every run alike. A child opens its run,
lets it train for a while, and is then told of each window.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import child, training
from benchmarks.harness import Values
from tianflow import open_run
from tianflow.api import RunHandle
from tianflow.coordinator import ENDED
from tianflow.core.statistics import ComponentStatistics
from tianflow.hosts import event_loop as loops

ASLEEP_S = 0.01
"""Lag is how much later than asked a sleep of so many seconds ends."""
SETTLE_S = 0.25
"""From the end of a pause to the beginning of a window. A run in which nothing has moved for so
long is really paused.
"""
START_S = 180.0
Case = tuple[Path, Sequence[str]]
"""A config and what differs from it."""
Windows = dict[str, list[dict[str, Any]]]


def measure(
    cases: Mapping[str, Case], *, turns: int, window: training.Window, scratch: Path
) -> Windows:
    """Start every case, and give each ``turns`` windows, one after the other; what
    `training.between` says of each window.

    ``window.warm_s`` is how long each run trains by itself first. Beside that a window has
    ``late``, seconds by which sleeps on the coordinator's loop ended late, and ``bare_late``, those
    on the loop of this process, which does nothing else meanwhile.
    """
    with contextlib.ExitStack() as stack:
        live = {}
        for name, (config, overrides) in cases.items():
            runs = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch))
            arguments = (config, runs, window.warm_s, *overrides)
            live[name] = stack.enter_context(child.Partner("benchmarks.turns", *arguments))
            live[name].hear(timeout_s=START_S)
        windows: Windows = {name: [] for name in cases}
        for _ in range(turns):
            for name, partner in live.items():
                partner.tell(window.seconds)
                late = loops.run(_bare(SETTLE_S + window.seconds))
                windows[name].append(
                    {**partner.hear(timeout_s=60.0 + window.seconds), "bare_late": late}
                )
        return windows


def merged(windows: Sequence[Mapping[str, Any]]) -> Values:
    """Means of what is the same in all windows of a run but for chance; the largest staleness; the
    newest return; and the p99 lags.
    """
    lags = {
        name: p99_ms([late for window in windows for late in window[f"{name[:-3]}late"]])
        for name in ("lag", "bare_lag")
    }
    plain = [
        {name: value for name, value in window.items() if not isinstance(value, list)}
        for window in windows
    ]
    means = {name: _mean([window[name] for window in plain]) for name in plain[0]}
    return {
        **means,
        "staleness_max": max(window["staleness_max"] for window in plain),
        "return": plain[-1]["return"],
        **lags,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


async def _bare(seconds: float) -> list[float]:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return await lags(over)


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
    """Until no actor is still making its environments: the thread that does it is the one that the
    others roll out on.
    """
    while (  # noqa: ASYNC110 - as there
        sum(component.time.current != "starting" for component in _actors(run))
        < run.control.config.actors.count
    ):
        await asyncio.sleep(0.1)


def _actors(run: RunHandle) -> list[ComponentStatistics]:
    return [
        component for component in run.control.statistics().components if component.role == "actor"
    ]


async def live(config: Path, overrides: Sequence[str], warm_s: float, runs: Path) -> None:
    """In the child: the run itself, until standard input ends."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await until_all_work(run)
        await asyncio.sleep(warm_s)
        await _rest(run)
        child.say({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            run.control.resume(source="benchmark")
            await asyncio.sleep(SETTLE_S)
            found = await window(run, float(line))
            await _rest(run)
            child.say(found)


async def window(run: RunHandle, seconds: float) -> dict[str, Any]:
    """From the end of an update to the end of another: a large batch is many steps, and a window
    holds few of them.
    """
    over = asyncio.Event()
    await _update(run)
    late, before = asyncio.create_task(lags(over)), run.control.statistics()
    await asyncio.sleep(seconds)
    await _update(run)
    found = training.between(before, run.control.statistics())
    over.set()
    return {**found, "late": [round(value, 6) for value in await late]}


async def _update(run: RunHandle) -> None:
    ledger = run.run.exchange.ledger
    version = ledger.version
    while ledger.version == version:
        if run.control.state in ENDED:
            raise RuntimeError(
                f"the run ended before the window did: {run.run.lifecycle.end_reason}"
            )
        await asyncio.sleep(0.001)


async def _rest(run: RunHandle) -> None:
    """Pause, until what was granted already is made and trained on, as far as it fills batches."""
    run.control.pause(source="benchmark")
    before = None
    while before != (before := _progress(run)):  # noqa: ASYNC110 - a run has no bell for it, and this is not timed
        await asyncio.sleep(SETTLE_S)


def _progress(run: RunHandle) -> tuple[int, int]:
    ledger = run.control.statistics().ledger
    return ledger.steps_committed, ledger.updates


def main() -> None:
    """``CONFIG RUNS WARM_S [section.key=value ...]``; each line of standard input is the length of
    a window, each of output what it was.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("warm_s", type=float)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    loops.run(live(given.config, given.overrides, given.warm_s, given.runs))


if __name__ == "__main__":
    main()
