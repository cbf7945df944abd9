"""Suite: IMPALA on Pong with its learner on a GPU and an actor on every core, over the environments
alone on these cores.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.harness import (
    Benchmark,
    BenchmarkError,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import training

CONFIG = ROOT / "configs" / "pong_impala.toml"
STANDARD = ("env.kwargs.img_height=84", "env.kwargs.img_width=84")
CASES: dict[str, tuple[tuple[str, ...], bool]] = {
    "42 x 42, B = 1 as shipped": ((), False),
    "42 x 42, B = A/2": ((), True),
    "84 x 84, B = A/2": (STANDARD, True),
}
"""Overrides, and whether a batch has a trajectory for every two actors. With one trajectory in a
batch, the controller idles most actors.
"""
RESERVED = 2
"""Number of cores for the learner and the coordinator."""
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    if importlib.util.find_spec("ale_py") is None:
        raise BenchmarkError("ale-py is not installed: pip install -e '.[bench]'")
    if not plan.quick and not Path("/dev/nvidiactl").exists():
        raise BenchmarkError("this machine has no NVIDIA GPU")
    window = training.Window(0.5, 1.0) if plan.quick else training.Window(10.0, 20.0)
    seconds = 0.5 if plan.quick else 10.0
    cores = sorted(os.sched_getaffinity(0))
    actors = max(1, len(cores) - RESERVED)
    seeds = tuple(range(1, plan.rounds + 1))

    def trained(case: str, seed: int) -> Values:
        settings = (
            f"run.seed={seed}",
            f"actors.count={actors}",
            f"actors.hosts={actors}",
            "run.target_return=null",
            *CASES[case][0],
        )
        if CASES[case][1]:
            settings += (f"algorithm.batch_trajectories={max(1, actors // 2)}",)
        return training.measure(str(CONFIG), settings, window, plan.scratch)

    def alone(case: str) -> Values:
        """Run one process of environments on every core."""
        commands = [
            (
                "benchmarks.workers.bare_loops",
                ("environments", CONFIG, seconds, *CASES[case][0], "--core", core),
            )
            for core in cores
        ]
        return {
            "environments": sum(
                said["per_s"]
                for said in child.run_together(commands, timeout_s=TIMEOUT_S + seconds)
            )
        }

    def sides(case: str) -> tuple[Side, Side]:
        return Side(case, lambda number: trained(case, seeds[number])), Side(
            _limit(case), lambda _: alone(case)
        )

    return Benchmark(
        name="pong_gpu",
        title="IMPALA on Pong, learner on a GPU, over the environments alone on all cores",
        sides=tuple(side for case in CASES for side in sides(case)),
        ratios=tuple(
            Ratio(f"{case}: trained steps/s over the environments alone", _over(case))
            for case in CASES
        ),
        units={**training.UNITS, "environments": "env steps/s, all cores"},
        settings={
            "run": f"configs/pong_impala.toml, learner.device = auto, {actors} actors of 16 "
            "environments in as many processes; "
            "as shipped: 42 x 42 images, max_staleness = 2; frame skip 4, not multiplied",
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training; environments "
            f"alone {seconds:g} s",
            "limit": f"{len(cores)} processes of 16 environments, one thread and one core each, "
            "random actions",
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=("The windows are short, so a return only shows how far a run had come.",),
    )


def _limit(case: str) -> str:
    return f"{case}, environments alone"


def _over(case: str) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(
        values[case]["trained_per_s"], values[_limit(case)]["environments"]
    )
