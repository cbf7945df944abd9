"""Worker: a live run that trains only in its turn. `measure` starts several, and gives them short
windows in turn.

All runs are up, and one trains while the others are paused. The windows are too short for the
machine to change. A run does not end between two windows, so many windows cost the time of one
start, and foreign load meets every run alike.
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

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.workers import training
from tianflow import open_run
from tianflow.api import OpenRun
from tianflow.coordinator import ENDED
from tianflow.core.statistics import ComponentStatistics
from tianflow.hosts import event_loop as loops

ASLEEP_S = 0.01
"""Length of a sleep. Lag is its delay beyond that."""
SETTLE_S = 0.25
"""Seconds from the end of a pause to the start of a window. A run is at rest if nothing moved for
that time.
"""
START_S = 180.0
Case = tuple[Path, Sequence[str]]
"""A config and its overrides."""
Windows = dict[str, list[dict[str, Any]]]


def measure(
    cases: Mapping[str, Case], *, turns: int, window: training.Window, scratch: Path
) -> Windows:
    """Start every case and give each ``turns`` windows in turn. Return `training.between` of each
    window.

    ``window.warm_s`` is each run's training before its first window. Each window also has ``late``,
    delays of sleeps on the coordinator's loop in seconds, and ``bare_late``, delays on the loop of
    this process, which is idle.
    """
    with contextlib.ExitStack() as stack:
        live = {}
        for name, (config, overrides) in cases.items():
            runs = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch))
            arguments = (config, runs, window.warm_s, *overrides)
            live[name] = stack.enter_context(child.Partner("benchmarks.workers.turns", *arguments))
            live[name].receive(timeout_s=START_S)
        windows: Windows = {name: [] for name in cases}
        for _ in range(turns):
            for name, partner in live.items():
                partner.send(window.seconds)
                late = loops.run(_bare(SETTLE_S + window.seconds))
                windows[name].append(
                    {**partner.receive(timeout_s=60.0 + window.seconds), "bare_late": late}
                )
        return windows


def merged(windows: Sequence[Mapping[str, Any]]) -> Values:
    """Return the means of the windows' values, the largest staleness, the latest return, and the
    p99 lags.
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
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


async def _bare(seconds: float) -> list[float]:
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    return await lags(over)


async def lags(over: asyncio.Event) -> list[float]:
    """Return the delays in seconds of sleeps on this loop, until ``over`` is set."""
    late = []
    while not over.is_set():
        began = time.monotonic()
        await asyncio.sleep(ASLEEP_S)
        late.append(max(0.0, time.monotonic() - began - ASLEEP_S))
    return late


def p99_ms(late: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000.0 * sorted(late)[int(0.99 * len(late))]


async def until_all_work(run: OpenRun) -> None:
    """Wait until all actors have made their environments. The thread that makes them also runs the
    rollouts of other actors.
    """
    while (  # noqa: ASYNC110 - a run has no event for it, and this wait is not timed
        sum(component.time.current != "starting" for component in _actors(run))
        < run.control.config.actors.count
    ):
        await asyncio.sleep(0.1)


def _actors(run: OpenRun) -> list[ComponentStatistics]:
    return [
        component for component in run.control.statistics().components if component.role == "actor"
    ]


async def live(config: Path, overrides: Sequence[str], warm_s: float, runs: Path) -> None:
    """Run in the child until standard input ends."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await training.until_started(run)
        await until_all_work(run)
        await asyncio.sleep(warm_s)
        await _rest(run)
        child.report({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            run.control.resume(source="benchmark")
            await asyncio.sleep(SETTLE_S)
            found = await window(run, float(line))
            await _rest(run)
            child.report(found)


async def window(run: OpenRun, seconds: float) -> dict[str, Any]:
    """Measure from the end of an update to the end of another. A large batch has many steps, and a
    window holds few batches.
    """
    over = asyncio.Event()
    await _update(run)
    late, before = asyncio.create_task(lags(over)), run.control.statistics()
    await asyncio.sleep(seconds)
    await _update(run)
    found = training.between(before, run.control.statistics())
    over.set()
    return {**found, "late": [round(value, 6) for value in await late]}


async def _update(run: OpenRun) -> None:
    ledger = run.run.exchange.ledger
    version = ledger.version
    while ledger.version == version:
        if run.control.state in ENDED:
            raise RuntimeError(
                f"the run ended before the window did: {run.run.lifecycle.end_reason}"
            )
        await asyncio.sleep(0.001)


async def _rest(run: OpenRun) -> None:
    """Pause, and wait until granted trajectories are committed and trained on, as far as they fill
    batches.
    """
    run.control.pause(source="benchmark")
    before = None
    while before != (before := _progress(run)):  # noqa: ASYNC110 - a run has no event for it, and this wait is not timed
        await asyncio.sleep(SETTLE_S)


def _progress(run: OpenRun) -> tuple[int, int]:
    ledger = run.control.statistics().ledger
    return ledger.steps_committed, ledger.updates


def main() -> None:
    """Arguments: ``CONFIG RUNS WARM_S [section.key=value ...]``. Each line of standard input is the
    length of a window, and each line of output is its result.
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
