"""Worker: a run that follows the advice of its own diagnosis. It measures the forecast throughput
and the actual one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import BenchmarkError, Values
from benchmarks.workers import training, turns
from tianflow import open_run
from tianflow.api import OpenRun
from tianflow.core.statistics import Diagnosis
from tianflow.hosts import event_loop as loops

ALONE = (
    "actors.count=1",
    "actors.rollout_steps=8",
    "env.num_envs=2",
    "algorithm.batch_trajectories=2",
    "algorithm.update_seconds=0.04",
    "balance.max_staleness=4",
)
"""One actor makes 200 steps/s, and the learner could take 800."""
WINDOW_S = 5.0
"""Shortest window of a diagnosis that does not look back at the start."""
HELD_S = 2.0
PATIENCE_S = 60.0


async def advice(run: OpenRun) -> Diagnosis:
    """Return the diagnosis as soon as it covers a whole window, is stable, and suggests a change.

    Raises:
        BenchmarkError: there is no such diagnosis within `PATIENCE_S`.
    """
    loop = asyncio.get_running_loop()
    end, found = loop.time() + PATIENCE_S, None
    while loop.time() < end:
        found = run.control.statistics().diagnosis
        if (
            found.window_s >= WINDOW_S
            and found.for_s >= HELD_S
            and found.suggested
            and found.forecast_steps_per_s
        ):
            return found
        await asyncio.sleep(0.2)
    raise BenchmarkError(f"no diagnosis suggested a change within {PATIENCE_S:g} s: {found}")


async def follow(config: Path, window: training.Window, runs: Path) -> Values:
    """Return the forecast steps/s, and the steps/s measured over ``window`` after all suggested
    settings took effect.
    """
    async with open_run(config, ALONE, runs_dir=runs) as run:
        await training.until_started(run)
        diagnosis = await advice(run)
        sections: dict[str, dict[str, float]] = {}
        for path, value in diagnosis.suggested.items():
            section, key = path.split(".")
            sections.setdefault(section, {})[key] = value
        run.control.change(sections, source="python")
        await turns.until_all_work(run)
        await asyncio.sleep(window.warm_s)
        before = run.control.statistics()
        await asyncio.sleep(window.seconds)
        found = training.between(before, run.control.statistics())
    return {
        "pace": found["committed_per_s"],
        "forecast_pace": diagnosis.forecast_steps_per_s,
        "before": diagnosis.steps_per_s,
        "actors": diagnosis.suggested.get("actors.count"),
        "learner_waits": found["learner_waits"],
        "actors_wait": found["actors_wait"],
    }


def main() -> None:
    """Arguments: `benchmarks.workers.training.arguments`."""
    given = training.arguments().parse_args()
    child.report(
        loops.run(follow(given.config, training.Window(given.warm_s, given.seconds), given.runs))
    )


if __name__ == "__main__":
    main()
