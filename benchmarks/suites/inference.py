"""Suite: central inference on a CPU.

It measures how well several actors a host hide the latency of a slow server, and the latency of
requests over that of batches. It trains Pong in both forms.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient
from benchmarks.lib.sleeping import STEP_S
from benchmarks.workers import training

ACT_S = 0.02
MAX_WAIT_S = 0.001
CENTRAL = (
    "actors.inference=central",
    "inference.device=cpu",
    f"inference.max_wait_s={MAX_WAIT_S}",
)
SLOW = (*CENTRAL, f"algorithm.act_seconds={ACT_S}", "algorithm.update_seconds=0.02")
HIDING = 5
"""Actors of one host: while a batch takes four steps of environments, four others step."""
ONE, FIVE = "slow server, 1 actor a host", f"slow server, {HIDING} actors a host"
FEW, MANY = "requests, 1 actor", "requests, 64 actors"
PACED = "requests, 64 actors with sleeping environments"
"""The cores are almost idle, so no part waits for a core."""
LOCAL, SERVED = "Pong, local", "Pong, central"


class Case(NamedTuple):
    """One side: a config and its settings."""

    config: str
    overrides: tuple[str, ...]


def cases(hosts: int) -> dict[str, Case]:
    """Return all sides. ``hosts``: processes of actors where a host does not wait."""

    def slow(actors: int) -> Case:
        settings = (f"actors.count={actors}", "actors.hosts=1", "algorithm.batch_trajectories=1")
        return Case("sleeping.toml", (*SLOW, *settings, f"balance.max_staleness={2 * actors}"))

    def requests(actors: int) -> Case:
        settings = (
            f"actors.count={actors}",
            f"actors.hosts={min(actors, hosts)}",
            "env.num_envs=8",
            f"algorithm.batch_trajectories={max(1, actors // 4)}",
            "balance.max_staleness=8",
        )
        return Case("impala_cartpole.toml", (*CENTRAL, *settings))

    return {
        ONE: slow(1),
        FIVE: slow(HIDING),
        FEW: requests(1),
        MANY: requests(64),
        PACED: Case(
            "sleeping.toml",
            (
                *CENTRAL,
                "actors.count=64",
                "actors.hosts=8",
                "algorithm.update_seconds=0.02",
                "algorithm.batch_trajectories=16",
                "balance.max_staleness=8",
            ),
        ),
        LOCAL: Case("pong_impala.toml", ("actors.count=1", "actors.hosts=1")),
        SERVED: Case("pong_impala.toml", (*CENTRAL, "actors.count=2", "actors.hosts=1")),
    }


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. Without ale-py there is no Pong."""
    window = training.Window(0.5, 1.0) if plan.quick else training.Window(5.0, 15.0)
    seeds = tuple(range(1, plan.rounds + 1))
    chosen = cases(max(1, len(os.sched_getaffinity(0)) - 1))
    notes: tuple[str, ...] = ()
    if importlib.util.find_spec("ale_py") is None:
        del chosen[LOCAL], chosen[SERVED]
        notes = ("ale-py is not installed, so Pong was not measured.",)

    def measure(case: Case, number: int) -> Values:
        settings = (f"run.seed={seeds[number]}", *case.overrides)
        return training.measure(case.config, settings, window, plan.scratch)

    def side(name: str) -> Side:
        return Side(name, lambda number: measure(chosen[name], number))

    ratios = [
        Ratio(
            f"steps/s with {HIDING} actors a host over one, steps of {1e3 * STEP_S:g} ms and "
            f"batches of {1e3 * ACT_S:g} ms",
            lambda v: quotient(v[FIVE]["committed_per_s"], v[ONE]["committed_per_s"]),
            aim=3.0,
            sides=(ONE, FIVE),
        ),
        *(
            Ratio(
                f"max_wait_s + 2 x p99 of a batch, over p99 from request to answer: {name}",
                latency(name),
                aim=1.0,
                sides=(name,),
            )
            for name in (FEW, MANY, PACED)
        ),
    ]
    if SERVED in chosen:
        ratios.append(
            Ratio(
                "Pong: steps/s with a server over local inference",
                lambda v: quotient(v[SERVED]["trained_per_s"], v[LOCAL]["trained_per_s"]),
                sides=(LOCAL, SERVED),
            )
        )
    return Benchmark(
        name="inference",
        title="central inference on a CPU",
        sides=tuple(side(name) for name in chosen),
        ratios=tuple(ratios),
        units=training.UNITS,
        settings={
            **{
                name: f"benchmarks/configs/{case.config}: {', '.join(case.overrides)}"
                for name, case in chosen.items()
            },
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training",
            "slow server": "algorithm benchmarks.lib.paced:PacedImpala, whose policy sleeps until "
            "a batch has taken algorithm.act_seconds",
            "p99": "interpolated between the edges of the histograms "
            "tianflow_inference_wait_seconds and tianflow_inference_seconds",
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=notes,
    )


def latency(name: str) -> Callable[[RoundValues], float | None]:
    """Return the bound of the latency over its p99, for one side."""

    def of(values: RoundValues) -> float | None:
        batch = values[name]["batch_p99"]
        limit = None if batch is None else MAX_WAIT_S + 2.0 * batch
        return quotient(limit, values[name]["wait_p99"])

    return of
