"""Suite: IMPALA on CartPole at full speed, over the limits of its two halves."""

from __future__ import annotations

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient
from benchmarks.workers import bare_loops, training

CONFIG = "impala_cartpole.toml"
RUN, ALONE, TOGETHER, PARTS, PLAIN = (
    "tianflow impala",
    "limits, one at a time",
    "limits, both at once",
    "parts",
    "plain PyTorch",
)
REFERENCE = {"act": 620_000.0, "step": 490_000.0}
"""Observations/s and samples/s of plain PyTorch on a two-core reference machine, at 64 and at 32 x
64.
"""
LOOP_TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    window = training.Window(0.5, 1.5) if plan.quick else training.Window(3.0, 12.0)
    seconds = 0.5 if plan.quick else 3.0
    seeds = tuple(range(1, plan.rounds + 1))

    def loops(**halves: str) -> dict[str, float]:
        """Return the rates of the named loops, run at once: {half: loop}."""
        commands = [
            bare_loops.command(loop, training.CONFIGS / CONFIG, half, seconds)
            for half, loop in halves.items()
        ]
        return {
            half: said["per_s"]
            for half, said in zip(
                halves,
                child.run_together(commands, timeout_s=LOOP_TIMEOUT_S + seconds),
                strict=True,
            )
        }

    def run(seed: int) -> Values:
        return training.measure(CONFIG, (f"run.seed={seed}",), window, plan.scratch)

    def alone() -> Values:
        return {
            "actor": loops(actor="rollout")["actor"],
            "learner": loops(learner="step")["learner"],
        }

    return Benchmark(
        name="impala_cartpole",
        title="IMPALA on CartPole-v1, 64 environments in one actor, over the smaller of its limits",
        sides=(
            Side(RUN, lambda number: run(seeds[number]), None if plan.quick else lambda: run(0)),
            Side(ALONE, lambda _: alone()),
            Side(TOGETHER, lambda _: {**loops(actor="rollout", learner="step")}),
            Side(PARTS, lambda _: {"act": loops(actor="act")["actor"]}),
            Side(
                PLAIN,
                lambda _: {
                    "act": loops(actor="torch_act")["actor"],
                    "step": loops(learner="torch_step")["learner"],
                },
            ),
        ),
        ratios=(
            Ratio(
                "steps/s over the smaller limit, one at a time",
                lambda values: _over(values, ALONE),
                aim=0.8,
            ),
            Ratio(
                "steps/s over the smaller limit, both at once",
                lambda values: _over(values, TOGETHER),
                aim=0.8,
            ),
            Ratio(
                "act at 64 over 0.62 M obs/s (reference machine)",
                lambda v: quotient(v[PARTS]["act"], REFERENCE["act"]),
                aim=0.75,
            ),
            Ratio(
                "step over 0.49 M samples/s (reference machine)",
                lambda v: quotient(v[ALONE]["learner"], REFERENCE["step"]),
                aim=0.75,
            ),
            Ratio(
                "act at 64 over plain PyTorch's here",
                lambda v: quotient(v[PARTS]["act"], v[PLAIN]["act"]),
                aim=0.75,
            ),
            Ratio(
                "step over plain PyTorch's V-trace here",
                lambda v: quotient(v[ALONE]["learner"], v[PLAIN]["step"]),
                aim=0.75,
            ),
        ),
        units={
            **training.UNITS,
            "actor": "env steps/s, the policy on the bare environment",
            "learner": "samples/s, step on a resident batch",
            "act": "obs/s at 64",
            "step": "samples/s, T = 32, B = 64",
        },
        settings={
            "config": f"benchmarks/configs/{CONFIG}: 1 actor of 64 environments, T = 32, B = 1, "
            "max_staleness = 4, mlp 64-64 relu",
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training; loops "
            f"{seconds:g} s",
            "cores": "learner on one, actor on the next, in the run as in the loops",
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=(
            "One pass over the data: one gradient sample for each environment step. No frame skip.",
            (
                "The limits exclude writing slots, log-probabilities, NaN checks, copying the "
                "batch, and messages."
            ),
            (
                "Plain PyTorch: tanh for relu, multinomial sampling, a log-probability and a value "
                "at each step, PyTorch's Adam."
            ),
        ),
    )


def _over(values: RoundValues, limits: str) -> float | None:
    steps = values[RUN]["trained_per_s"]
    smaller = min(value for value in values[limits].values() if value is not None)
    return quotient(steps, smaller)
