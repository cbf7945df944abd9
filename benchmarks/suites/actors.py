"""Suite: the cost of slots for an actor. It compares environments alone, with inference, and with
inference and slots.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lib import sleeping
from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    quotient,
    require_atari,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import halves, training

PONG = (
    "env.num_envs=8",
    "env.kwargs.img_height=84",
    "env.kwargs.img_width=84",
    "network.name=nature_cnn",
    "actors.rollout_steps=20",
)
CASES = {
    "CartPole, 64": (training.CONFIGS / "impala_cartpole.toml", ()),
    "ALE Pong 84x84x4, 8": (ROOT / "configs" / "pong_impala.toml", PONG),
    "sleeping 5 ms, 4": (
        training.CONFIGS / "impala_cartpole.toml",
        ("env.id=benchmarks.lib.sleeping:Sleeping", "env.num_envs=4", "actors.rollout_steps=4"),
    ),
}
"""Config and overrides by environments and their number."""


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    require_atari()
    seconds = 0.02 if plan.quick else 0.6
    shorter = ("actors.rollout_steps=2", "env.num_envs=2") if plan.quick else ()

    def side(name: str) -> Side:
        config, overrides = CASES[name]
        return Side(
            name, lambda _: halves.measure("actor", config, (*overrides, *shorter), seconds)
        )

    def over(name: str, numerator: str, denominator: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(values[name][numerator], values[name][denominator])

    return Benchmark(
        name="actors",
        title="an actor's steps/s with slots over those without, and over its environments alone",
        sides=tuple(side(name) for name in CASES),
        ratios=(
            *(
                Ratio(
                    f"{name}: with slots over with inference",
                    over(name, "slots", "inference"),
                    aim=0.85,
                )
                for name in CASES
            ),
            *(
                Ratio(f"{name}: with inference over alone", over(name, "inference", "environment"))
                for name in CASES
            ),
        ),
        units={
            "environment": "env steps/s, environments alone",
            "inference": "env steps/s, with the policy as a rollout calls it",
            "slots": "env steps/s, the shipped rollout",
        },
        settings={
            "parts": f"take turns of {halves.TURN_S:g} s in one process on one core, {seconds:g} "
            "s each",
            "CartPole": "64 environments, T = 32, mlp 64-64 relu",
            "ALE Pong": "8 environments of one thread, 84 x 84 x 4, frame skip 4 (not "
            "multiplied), T = 20, nature_cnn",
            "sleeping": f"4 environments of Python, one after another, {sleeping.STEP_S * 1e3:g} "
            "ms a step each, T = 4, mlp 64-64 relu",
        },
        notes=("With slots: also log-probabilities, flags, episode returns, and a check for NaN.",),
    )
