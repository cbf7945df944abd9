"""Suite: the cost of a paused run, as CPU of each process and memory of all processes."""

from __future__ import annotations

import tempfile

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, quotient
from benchmarks.workers import training

PAUSED, NOTHING = "tianflow, paused", "limit: one process that waits"
OVERRIDES = ("actors.count=4", "actors.hosts=2")
MOST = 2.0
"""Largest use of a core by a process of a paused run, in per cent."""
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    train_s, seconds = (0.5, 1.0) if plan.quick else (1.0, 3.0)
    config = training.CONFIGS / "impala_cartpole.toml"

    def paused() -> Values:
        with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
            arguments = ("paused", seconds, config, train_s, runs, *OVERRIDES)
            return child.run(
                "benchmarks.workers.paused_run", *arguments, timeout_s=TIMEOUT_S
            ).answer

    def nothing() -> Values:
        return child.run(
            "benchmarks.workers.paused_run", "nothing", seconds, timeout_s=TIMEOUT_S
        ).answer

    return Benchmark(
        name="idle",
        title="CPU and memory of a run that is paused",
        sides=(Side(PAUSED, lambda _: paused()), Side(NOTHING, lambda _: nothing())),
        ratios=(
            Ratio(
                "2 % of a core over the coordinator's share",
                lambda v: quotient(MOST, v[PAUSED]["coordinator"]),
                aim=1.0,
            ),
            Ratio(
                "2 % of a core over the busiest other process's share",
                lambda v: quotient(MOST, v[PAUSED]["busiest_other"]),
                aim=1.0,
            ),
            Ratio(
                "memory of all processes over that of one that waits",
                lambda v: quotient(v[PAUSED]["pss"], v[NOTHING]["pss"]),
            ),
        ),
        units={
            "coordinator": "% of a core; for the limit, its only process",
            "busiest_other": "% of a core",
            "all": "% of a core",
            "processes": "processes",
            "pss": "MiB, proportional set sizes",
        },
        settings={
            "run": f"benchmarks/configs/impala_cartpole.toml, {' '.join(OVERRIDES)}, paused after "
            f"{train_s:g} s of training",
            "window": f"{seconds:g} s, a second after the pause",
            "limit": "asyncio, with PyTorch and Gymnasium loaded",
        },
        notes=("The coordinator's process contains the program that opened the run.",),
    )
