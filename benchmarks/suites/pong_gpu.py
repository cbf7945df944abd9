"""Suite: IMPALA on Pong with its learner, and with central inference its servers, on a GPU, over
the environments alone on these cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import child, machine
from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
    require_atari,
    require_gpu,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import training

CONFIG = ROOT / "configs" / "pong_impala.toml"
SHIPPED = ROOT / "configs" / "pong_gpu.toml"
STANDARD = ("env.kwargs.img_height=84", "env.kwargs.img_width=84")
CENTRAL = (
    "actors.inference=central",
    "placement.affinity=auto",
    "balance.max_staleness=4",
    "inference.max_wait_s=0.002",
)
A_HOST = 3
"""Actors of a host with central inference: one steps while the others wait for actions."""


class Case(NamedTuple):
    """One setting of the run."""

    overrides: tuple[str, ...]
    large_batch: bool = True
    """A batch has a trajectory for every two actors, or three with central inference. With one
    trajectory in a batch, the controller idles most actors.
    """
    config: Path = CONFIG
    """`SHIPPED` chooses actors and batches itself."""

    @property
    def central(self) -> bool:
        """True with inference servers. A host then has `A_HOST` actors, which step in turn."""
        return CENTRAL[0] in self.overrides


CASES = {
    "42 x 42, local, B = 1 as shipped": Case((), large_batch=False),
    "42 x 42, local": Case(()),
    "42 x 42, central": Case(CENTRAL),
    "84 x 84, local": Case(STANDARD),
    "84 x 84, central": Case((*STANDARD, *CENTRAL)),
    "84 x 84, central, as shipped": Case((), config=SHIPPED),
    "84 x 84, two servers": Case((*STANDARD, *CENTRAL, "inference.servers=2")),
}
RESERVED = 2
"""Number of cores without an actor host, for learner and coordinator, with local inference."""
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    require_atari()
    require_gpu(plan)
    # 48 environments of a core take 15 s of CPU time to start
    window = training.Window(0.5, 1.0) if plan.quick else training.Window(25.0, 15.0)
    seconds = 0.5 if plan.quick else 10.0
    cores = sorted(os.sched_getaffinity(0))

    def hosts(case: str) -> int:
        return len(cores) if CASES[case].central else max(1, len(cores) - RESERVED)

    seeds = tuple(range(1, plan.rounds + 1))

    def trained(case: str, seed: int) -> Values:
        chosen = CASES[case]
        if chosen.config == SHIPPED:
            shipped = (f"run.seed={seed}", "run.target_return=null")
            return training.measure(str(SHIPPED), shipped, window, plan.scratch)
        actors = hosts(case) * (A_HOST if chosen.central else 1)
        settings = (
            f"run.seed={seed}",
            f"actors.count={actors}",
            f"actors.hosts={hosts(case)}",
            "run.target_return=null",
            *chosen.overrides,
        )
        if chosen.large_batch:
            size = actors // (A_HOST if chosen.central else 2)
            settings += (f"algorithm.batch_trajectories={max(1, size)}",)
        return training.measure(str(CONFIG), settings, window, plan.scratch)

    def alone(case: str) -> Values:
        """Run one process of environments on every core."""
        commands = [
            (
                "benchmarks.workers.bare_loops",
                (
                    "environments",
                    CASES[case].config,
                    seconds,
                    *CASES[case].overrides,
                    "--core",
                    core,
                ),
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
            Ratio(
                f"{case}: trained steps/s over the environments alone",
                _over(case),
                0.9 if CASES[case].config == SHIPPED else None,
                sides=(case, _limit(case)),
            )
            for case in CASES
        ),
        units={**training.UNITS, "environments": "env steps/s, all cores"},
        settings={
            "cards": machine.cards(),
            "run": "configs/pong_impala.toml, learner.device = auto; local: "
            f"{max(1, len(cores) - RESERVED)} actors of 16 environments in as many processes, "
            f"B = A/2, max_staleness = 2; central: {len(cores)} hosts of {A_HOST} actors, "
            f"B = A/{A_HOST}, {', '.join(CENTRAL)}; as shipped: configs/pong_gpu.toml; "
            "frame skip 4, not multiplied",
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
