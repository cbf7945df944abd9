"""One training run in a process of its own, looked at over a window in which nothing starts and
nothing ends.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import child
from benchmarks.harness import Values
from tianflow import open_run
from tianflow.api import RunHandle
from tianflow.coordinator import ENDED
from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import RunStatistics
from tianflow.hosts import event_loop as loops

CONFIGS = Path(__file__).parent / "configs"
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
"""What `measure` gives, with units; beside that ``updates_per_s``, which says something only where
updates are all alike.
"""


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of training before anybody looks, and seconds looked at."""

    warm_s: float
    seconds: float


def measure(config: str, overrides: Sequence[str], window: Window, scratch: Path) -> Values:
    """Train ``config`` (a file in ``configs``, or a whole path) in a child process; rates and
    shares over ``window``.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        arguments = (CONFIGS / config, window.warm_s, window.seconds, runs, *overrides)
        return child.run(
            "benchmarks.training",
            *arguments,
            timeout_s=120.0 + 4.0 * (window.warm_s + window.seconds),
        ).answer


async def until_started(run: RunHandle) -> None:
    """Until learner and actors work, or the run has ended."""
    while run.control.state == "starting":  # noqa: ASYNC110 - a run has no bell for it, and this is not timed
        await asyncio.sleep(0.02)


async def watch(config: Path, overrides: Sequence[str], window: Window, runs: Path) -> Values:
    """In the child: the run itself, stopped after the window."""
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
    """Rates, staleness and shares from one look to a later one."""
    seconds = after.now - before.now
    first, last = before.ledger, after.ledger
    ages = Counter(last.staleness)
    ages.subtract(first.staleness)
    trained = ages.total()
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
        "staleness_mean": sum(age * count for age, count in ages.items()) / trained
        if trained
        else None,
        "staleness_max": float(max(+ages)) if trained else None,
        "dropped": float(sum(last.dropped.values()) - sum(first.dropped.values())),
        "violations": float(last.violations - first.violations),
        "learner_waits": (learner_after - learner_before) / seconds,
        "actors_wait": (actors_after - actors_before) / seconds / actors,
    }


def arguments() -> argparse.ArgumentParser:
    """``CONFIG WARM_S SECONDS RUNS``, of a child that watches a run over a window."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("warm_s", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("runs", type=Path)
    return parser


def main() -> None:
    """`arguments`, and then ``[section.key=value ...]``."""
    parser = arguments()
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    child.say(
        loops.run(
            watch(given.config, given.overrides, Window(given.warm_s, given.seconds), given.runs)
        )
    )


if __name__ == "__main__":
    main()
