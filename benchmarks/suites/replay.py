"""Suite: a replay shard alone, and Ape-X on CartPole over the smaller limit of its shards and its
learner.
"""

from __future__ import annotations

from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
    require_atari,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import shards, training

CARTPOLE, PONG = ROOT / "configs" / "cartpole_apex.toml", ROOT / "configs" / "pong_apex.toml"
ATARI = (
    "env.kwargs.img_height=84",
    "env.kwargs.img_width=84",
    "replay.capacity=8000",
    "replay.min_size=1000",
)
SHARDS = {"CartPole-like shard": (CARTPOLE, ()), "Atari-like shard": (PONG, ATARI)}
ENDLESS = (
    "run.max_env_steps=1_000_000_000",
    "run.target_return=1_000_000",
    "evaluation.every_s=3600",
)


def run_of(count: int) -> str:
    """Return the side that trains with ``count`` shards."""
    return f"apex, {count} shard{'s' * (count > 1)}"


def limits_of(count: int) -> str:
    """Return the side that measures the limits with ``count`` shards."""
    return f"limits, {count} shard{'s' * (count > 1)}"


def over_limit(values: RoundValues, count: int) -> float | None:
    """Return updates/s over the smaller limit."""
    found = [values[limits_of(count)][name] for name in ("draws", "steps")]
    return quotient(
        values[run_of(count)]["updates_per_s"], min(value for value in found if value is not None)
    )


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    require_atari()
    window = training.Window(0.5, 1.0) if plan.quick else training.Window(2.0, 4.0)
    seconds = 0.05 if plan.quick else 0.5
    seeds = tuple(range(1, plan.rounds + 1))
    shorter = ("env.num_envs=2", "replay.capacity=2000") if plan.quick else ()

    def rates(name: str) -> Values:
        config, overrides = SHARDS[name]
        return shards.measure("rates", config, (*overrides, *shorter), seconds)

    def train(count: int, seed: int) -> Values:
        overrides = (*ENDLESS, f"replay.shards={count}", f"run.seed={seed}")
        return training.measure(str(CARTPOLE), overrides, window, plan.scratch)

    def limits(count: int) -> Values:
        return shards.measure("limits", CARTPOLE, (f"replay.shards={count}",), seconds)

    return Benchmark(
        name="replay",
        title="a shard's transitions/s, and updates/s over the smaller limit",
        sides=(
            *(Side(name, lambda _, n=name: rates(n)) for name in SHARDS),  # type: ignore[misc]
            *(
                side
                for count in (1, 2)
                for side in (
                    Side(run_of(count), lambda number, c=count: train(c, seeds[number])),  # type: ignore[misc]
                    Side(limits_of(count), lambda _, c=count: limits(c)),  # type: ignore[misc]
                )
            ),
        ),
        ratios=(
            *(
                Ratio(
                    f"{name}: insert over plain copy",
                    lambda v, n=name: quotient(v[n]["insert"], v[n]["copy"]),  # type: ignore[misc]
                )
                for name in SHARDS
            ),
            *(
                Ratio(
                    f"{name}: draw over picking rows",
                    lambda v, n=name: quotient(v[n]["draw"], v[n]["pick"]),  # type: ignore[misc]
                )
                for name in SHARDS
            ),
            *(
                Ratio(
                    f"{run_of(count)}: updates/s over the smaller limit",
                    lambda v, c=count: over_limit(v, c),  # type: ignore[misc]
                    aim=0.8,
                )
                for count in (1, 2)
            ),
        ),
        units={
            "insert": "transitions/s",
            "copy": "transitions/s, plain copy of their arrays",
            "draw": "transitions/s",
            "pick": "transitions/s, random rows of plain arrays",
            "updates_per_s": "updates/s of 128 items",
            "committed_per_s": training.UNITS["committed_per_s"],
            "return": training.UNITS["return"],
            "draws": "updates/s, a shard's draw with its priorities",
            "steps": "updates/s, step on a resident draw",
        },
        settings={
            "CartPole-like": "configs/cartpole_apex.toml: 16 environments, T = 16, n = 3, "
            "prioritised, capacity 50,000",
            "Atari-like": "configs/pong_apex.toml at 84 x 84 x 4, frames stored once: 16 "
            "environments, T = 20, n = 3, capacity 8,000",
            "shards": f"full, in one process on one core; parts take turns, {seconds:g} s each",
            "apex": f"configs/cartpole_apex.toml, {window.seconds:g} s after {window.warm_s:g} s "
            "of training, no evaluation",
        },
        seeds=seeds,
        notes=(
            (
                "A drawn window of n = 3 steps is 3 transitions. Inserting also finds windows, "
                "frames and first priorities."
            ),
            "Each of 2 shards draws half an update, at the same time as the other.",
            (
                "The limits have a core each. A run cannot reach them with fewer cores than the "
                "learner, the actor and the shards need."
            ),
        ),
    )
