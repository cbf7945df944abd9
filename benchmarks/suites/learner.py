"""Suite: the learner's step from slots to gradient, over the same step on a resident batch."""

from __future__ import annotations

from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, quotient, require_atari
from benchmarks.lib.machine import ROOT
from benchmarks.suites.actors import PONG
from benchmarks.workers import halves, training

PIXELS = ROOT / "configs" / "pong_impala.toml"
CASES = {
    "mlp": (training.CONFIGS / "impala_cartpole.toml", ()),
    "nature_cnn": (PIXELS, PONG),
    "impala_resnet": (PIXELS, (*PONG, "env.num_envs=4", "network.name=impala_resnet")),
}
"""Config and overrides by network."""
BF16 = "nature_cnn, bf16"
SIDES = {**CASES, BF16: (PIXELS, (*PONG, "learner.precision=bf16"))}


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    require_atari()
    seconds = 0.02 if plan.quick else 0.8
    shorter = ("actors.rollout_steps=2", "env.num_envs=2") if plan.quick else ()

    def side(name: str) -> Side:
        config, overrides = SIDES[name]
        return Side(
            name, lambda _: halves.measure("learner", config, (*overrides, *shorter), seconds)
        )

    return Benchmark(
        name="learner",
        title="samples/s from slots to gradient over the same step on a resident batch",
        sides=tuple(side(name) for name in SIDES),
        ratios=(
            *(
                Ratio(
                    f"{name}: from slots over resident",
                    lambda v, n=name: quotient(v[n]["slots"], v[n]["resident"]),  # type: ignore[misc]
                    0.9,
                )
                for name in SIDES
            ),
            Ratio(
                "nature_cnn resident: bf16 over fp32",
                lambda v: quotient(v[BF16]["resident"], v["nature_cnn"]["resident"]),
            ),
        ),
        units={
            "resident": "samples/s, the step alone",
            "slots": "samples/s, copy out of slots, step, weights laid out flat",
        },
        settings={
            "parts": f"take turns of {halves.TURN_S:g} s or one update in one process on one "
            f"core, {seconds:g} s each",
            "mlp": "IMPALA, 64 x 32 samples of CartPole, mlp 64-64 relu",
            "nature_cnn": "IMPALA, 8 x 20 samples of 84 x 84 x 4",
            BF16: "the same with learner.precision = bf16",
            "impala_resnet": "IMPALA, 4 x 20 samples of 84 x 84 x 4",
        },
        notes=(
            "Both exclude messages and the publication of weights.",
            "A CPU without bfloat16 arithmetic emulates bf16, which is slower than fp32.",
        ),
    )
