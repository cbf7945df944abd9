"""Suite: the controller that minimises staleness, compared with the default controller where
sampling is the faster half.
"""

from __future__ import annotations

from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, quotient
from benchmarks.suites.cost_of_balance import PACING, SHOWN, STEPS
from benchmarks.workers import training

ACTORS, BATCH, BOUND, FASTER = 8, 4, 4, 2.0
"""FASTER: number of batches that all actors make in the time of an update."""
UPDATE_S = 0.16
"""An actor's step then takes 5 ms and computes for 0.3 ms, so one core suffices for eight actors.
"""
BOUNDED, FRESHEST = "staleness", "freshest"


def overrides(controller: str, seed: int) -> tuple[str, ...]:
    """Return the settings of one run."""
    return (
        f"run.seed={seed}",
        f"balance.controller={controller}",
        f"balance.max_staleness={BOUND}",
        f"algorithm.batch_trajectories={BATCH}",
        f"actors.count={ACTORS}",
        f"actors.hosts={ACTORS}",
        f"algorithm.update_seconds={UPDATE_S}",
        f"env.kwargs.seconds={UPDATE_S * ACTORS / (BATCH * STEPS * FASTER)}",
    )


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    # the controller returns a credit every few updates, so it needs seconds to settle
    window = training.Window(0.5, 1.5) if plan.quick else training.Window(15.0, 15.0)
    seeds = tuple(range(1, plan.rounds + 1))

    def measure(controller: str, seed: int) -> Values:
        return training.measure("paced.toml", overrides(controller, seed), window, plan.scratch)

    def side(controller: str) -> Side:
        return Side(controller, lambda number: measure(controller, seeds[number]))

    return Benchmark(
        name="freshness",
        title="the controller `freshest` beside `staleness`, where actors are twice as fast as the "
        "learner",
        sides=(side(BOUNDED), side(FRESHEST)),
        ratios=(
            Ratio(
                "trained steps/s",
                lambda v: quotient(v[FRESHEST]["trained_per_s"], v[BOUNDED]["trained_per_s"]),
                aim=0.95,
            ),
            Ratio(
                "half the mean staleness of `staleness`, over that of `freshest`",
                lambda v: quotient(
                    v[BOUNDED]["staleness_mean"], 2.0 * (v[FRESHEST]["staleness_mean"] or 0.0)
                ),
                aim=1.0,
            ),
        ),
        units={name: training.UNITS[name] for name in (*SHOWN, "learner_waits", "actors_wait")},
        settings={
            "run": f"benchmarks/configs/paced.toml: CartPole and IMPALA, A = {ACTORS}, B = "
            f"{BATCH}, T = {STEPS}, max_staleness = {BOUND}, "
            f"update {1000 * UPDATE_S:g} ms; all actors together make {FASTER:g} batches in that "
            "time",
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training",
            "cores": "learner on one, actors on the others; a host process for each actor",
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=(PACING,),
    )
