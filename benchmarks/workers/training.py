"""Worker: one training run, measured over a window in which nothing starts and nothing ends."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import Values
from benchmarks.lib.machine import ROOT
from tianflow import open_run
from tianflow.api import RunHandle
from tianflow.coordinator import ENDED
from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import RunStatistics
from tianflow.hosts import event_loop as loops

CONFIGS = ROOT / "benchmarks" / "configs"
UNITS = {
    "committed_per_s": "env steps/s",
    "trained_per_s": "env steps/s",
    "return": "mean of the last 100 training episodes",
    "staleness_mean": "updates",
    "staleness_max": "updates",
    "dropped": "trajectories",
    "violations": "trajectories",
    "learner_waits": "of the time",
    "actors_wait": "of the time",
}
"""Units of the values of `measure`. Beside these there is ``updates_per_s``, which is meaningful
only if all updates are alike.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of training before the measurement, and seconds of the measurement."""

    warm_s: float
    seconds: float


def measure(config: str, overrides: Sequence[str], window: Window, scratch: Path) -> Values:
    """Train ``config`` (a file in ``configs``, or a whole path) in a child process. Return rates
    and shares over ``window``.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        arguments = (CONFIGS / config, window.warm_s, window.seconds, runs, *overrides)
        return child.run(
            "benchmarks.workers.training",
            *arguments,
            timeout_s=120.0 + 4.0 * (window.warm_s + window.seconds),
        ).answer


async def until_started(run: RunHandle) -> None:
    """Wait until learner and actors work, or the run has ended."""
    while run.control.state == "starting":  # noqa: ASYNC110 - a run has no event for it, and this wait is not timed
        await asyncio.sleep(0.02)


async def watch(config: Path, overrides: Sequence[str], window: Window, runs: Path) -> Values:
    """Run in the child: train, and stop after the window."""
    async with open_run(config, overrides, runs_dir=runs) as run:
        await until_started(run)
        await asyncio.sleep(window.warm_s)
        before = run.control.statistics()
        await asyncio.sleep(window.seconds)
        after = run.control.statistics()
        if run.control.state in ENDED:
            raise RuntimeError(
                f"the run ended before the window did: {run.run.lifecycle.end_reason}"
            )
    return between(before, after)


def between(before: RunStatistics, after: RunStatistics) -> Values:
    """Return rates, staleness and shares between two snapshots."""
    seconds = after.now - before.now
    first, last = before.ledger, after.ledger
    staleness = Counter(last.staleness)
    staleness.subtract(first.staleness)
    trained = staleness.total()
    actors = max(1, sum(component.role == "actor" for component in after.components))
    (learner_before, actors_before), (learner_after, actors_after) = (
        waiting_seconds(s.components, s.now) for s in (before, after)
    )
    returns = after.recent_returns
    return {
        "committed_per_s": (last.steps_committed - first.steps_committed) / seconds,
        "updates_per_s": (last.updates - first.updates) / seconds,
        "trained_per_s": (last.steps_trained - first.steps_trained) / seconds,
        "return": sum(returns) / len(returns) if returns else None,
        "staleness_mean": sum(updates * count for updates, count in staleness.items()) / trained
        if trained
        else None,
        "staleness_max": float(max(+staleness)) if trained else None,
        "dropped": float(sum(last.dropped.values()) - sum(first.dropped.values())),
        "violations": float(last.violations - first.violations),
        "learner_waits": (learner_after - learner_before) / seconds,
        "actors_wait": (actors_after - actors_before) / seconds / actors,
    }


def arguments() -> argparse.ArgumentParser:
    """Return the parser of ``CONFIG WARM_S SECONDS RUNS``, of a worker that measures a run over a
    window.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("warm_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("runs", type=Path)
    return parser


def main() -> None:
    """Arguments: those of `arguments`, then ``[section.key=value ...]``."""
    parser = arguments()
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    child.report(
        loops.run(
            watch(given.config, given.overrides, Window(given.warm_s, given.seconds), given.runs)
        )
    )


if __name__ == "__main__":
    main()
