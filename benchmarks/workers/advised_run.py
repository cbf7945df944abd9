"""A run that follows the advice of its own diagnosis: what that forecasts, beside what comes
of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import BenchmarkError, Values
from benchmarks.workers import training, turns
from tianflow import open_run
from tianflow.api import RunHandle
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
"""One actor makes 200 steps a second, and the learner could take 800."""
WINDOW_S = 5.0
"""A diagnosis of less looks back at the start."""
HELD_S = 2.0
PATIENCE_S = 60.0


async def advice(run: RunHandle) -> Diagnosis:
    """The diagnosis, once it is of a whole window, stays as it is and has something to suggest.

    Raises:
        BenchmarkError: there is none within `PATIENCE_S`.
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
    raise BenchmarkError(f"nothing was advised within {PATIENCE_S:g} s: {found}")


async def follow(config: Path, window: training.Window, runs: Path) -> Values:
    """Steps/s as forecast, and as measured over ``window`` after every setting that was suggested
    is in force.
    """
    async with open_run(config, ALONE, runs_dir=runs) as run:
        await training.until_started(run)
        told = await advice(run)
        sections: dict[str, dict[str, float]] = {}
        for path, value in told.suggested.items():
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
        "forecast_pace": told.forecast_steps_per_s,
        "before": told.steps_per_s,
        "actors": told.suggested.get("actors.count"),
        "learner_waits": found["learner_waits"],
        "actors_wait": found["actors_wait"],
    }


def main() -> None:
    """`benchmarks.workers.training.arguments`."""
    given = training.arguments().parse_args()
    child.say(
        loops.run(follow(given.config, training.Window(given.warm_s, given.seconds), given.runs))
    )


if __name__ == "__main__":
    main()
