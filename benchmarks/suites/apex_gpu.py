"""Suite: Ape-X on Pong with its learner on a GPU, over the smaller limit of its shards and its
learner.
"""

from __future__ import annotations

from benchmarks.lib import machine
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, require_atari, require_gpu
from benchmarks.suites.pong_gpu import STANDARD
from benchmarks.suites.replay import PONG, limits_of, over_limit, run_of
from benchmarks.workers import shards, training
from tianflow.config.loading import load_config

COUNTS = (1, 4)
"""Numbers of shards."""
TABLE = (*STANDARD, "replay.capacity=20_000", "replay.min_size=15_000")
"""The table of a run stays between the two sizes. That of its limits has the larger one."""
RUN = (
    "run.max_env_steps=1_000_000_000",
    "run.target_return=null",
    "actors.count=4",
    "replay.samples_per_insert=1000",
)
"""Actors wait almost all the time, and the learner never waits for them."""
SHOWN = (
    "committed_per_s",
    "cores_learner",
    "cores_replay",
    "cores_actors",
    "cores_coordinator",
)


def overrides(count: int) -> tuple[str, ...]:
    """Return the settings that a run and its limits share, for ``count`` shards."""
    return (*TABLE, f"replay.shards={count}")


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    require_atari()
    require_gpu(plan)
    window = training.Window(*((2.0, 1.0) if plan.quick else (12.0, 10.0)), every_actor=True)
    device, seconds = ("cpu", 0.05) if plan.quick else ("cuda", 2.0)
    counts = COUNTS[: 1 if plan.quick else None]
    shorter = ("env.num_envs=2", "replay.capacity=2000", "replay.min_size=100")
    smaller = (*shorter, "actors.count=1") if plan.quick else ()
    seeds = tuple(range(1, plan.rounds + 1))
    items = load_config(PONG).algorithm.items

    def train(count: int, seed: int) -> Values:
        settings = (*overrides(count), *RUN, f"learner.device={device}", f"run.seed={seed}")
        found = training.measure(str(PONG), (*settings, *smaller), window, plan.scratch)
        updates, waits = found["updates_per_s"], found["learner_waits"]
        assert updates is not None
        assert waits is not None
        return {**found, "samples_per_s": items * updates, "learner_busy": 1.0 - waits}

    def limits(count: int) -> Values:
        return shards.measure("limits", PONG, (*overrides(count), *smaller), seconds, device)

    return Benchmark(
        name="apex_gpu",
        title="Ape-X on Pong, learner on a GPU, over the smaller limit of shards and learner",
        sides=tuple(
            side
            for count in counts
            for side in (
                Side(run_of(count), lambda number, c=count: train(c, seeds[number])),  # type: ignore[misc]
                Side(limits_of(count), lambda _, c=count: limits(c)),  # type: ignore[misc]
            )
        ),
        ratios=tuple(
            Ratio(
                f"{run_of(count)}: samples/s over the smaller limit",
                lambda values, c=count: over_limit(values, c),  # type: ignore[misc]
                aim=0.8,
                sides=(run_of(count), limits_of(count)),
            )
            for count in counts
        ),
        units={
            **{name: training.UNITS[name] for name in SHOWN},
            "updates_per_s": f"updates/s of {items} items",
            "samples_per_s": "items/s into the learner",
            "learner_busy": "of the time",
            "draws": f"updates/s of {items} items, a shard's draw with its priorities",
            "steps": f"updates/s of {items} items, step on a resident draw",
        },
        settings={
            "cards": machine.cards(),
            "both": f"configs/pong_apex.toml: 16 environments, T = 20, n = 3; {', '.join(TABLE)}",
            "apex": f"{', '.join(RUN)}, so that neither the ratio of draws to inserts nor the "
            f"actors limit it; error_buffer as derived; {window.seconds:g} s, {window.warm_s:g} s "
            "after every actor has started, no evaluation",
            "limits": "a full shard and a learner on a GPU in one process on one core; parts take "
            f"turns, {seconds:g} s each",
            "threads": "1 a process, and those of CUDA",
        },
        seeds=seeds,
        notes=(
            "Each of 4 shards draws a quarter of an update, at the same time as the others.",
            "The limits exclude messages, copies to the GPU, and the publication of weights.",
        ),
    )
