"""Suite: the cost of a staleness bound. It compares throughput under the controller with throughput
without balance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Together,
    Values,
    quotient,
)
from benchmarks.workers import lockstep, training, turns

PACED, FREE = "paced.toml", "impala_cartpole.toml"
UPDATE_S, STEPS = 0.04, 32
"""As in ``paced.toml``: an update takes as long as T steps of one actor."""
OPEN_LOOP = ("balance.controller=open_loop", "balance.max_staleness=unbounded")


PACING = (
    "Paced: a step and an update sleep until a set time has passed. A actors together make one "
    "trajectory in the time of one update. Both halves are equally fast, where the controller "
    "costs most, and nothing else limits the run, not even a shared core. Free: the same without "
    "sleep, limited by this machine."
)
HALVES = (
    "Bare halves: the shipped rollout and update, each in a process of its own, which exchange one "
    "byte; no coordinator, no weights. With η = 1 trajectory n begins when update n - 2 has ended, "
    "and update n - 1 begins when trajectory n - 1 has arrived. Any delay of one half in a cycle "
    "is therefore lost. That costs every implementation the same."
)
SHOWN = ("trained_per_s", "return", "staleness_mean", "staleness_max", "dropped")


def paced(actors: int) -> tuple[str, ...]:
    """Return settings with which ``actors`` actors together make one trajectory in the time of one
    update, each in a process of its own.
    """
    return (
        f"actors.count={actors}",
        f"actors.hosts={actors}",
        f"env.kwargs.seconds={UPDATE_S * actors / STEPS}",
    )


def bound(value: int) -> tuple[str, ...]:
    """Return settings of the default controller with ``value`` as its bound."""
    return ("balance.controller=staleness", f"balance.max_staleness={value}")


def forecast(actors: int, batch: int, max_staleness: int) -> float:
    """Return min(1, C/(A + B)). Of C = (max_staleness + 1) B credits the update holds B, so C - B
    trajectories roll out meanwhile.
    """
    return min(1.0, (max_staleness + 1) * batch / (actors + batch))


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "paced, A = 1, open loop": (PACED, (*paced(1), *OPEN_LOOP)),
    "paced, A = 1, η = 1": (PACED, (*paced(1), *bound(1))),
    "paced, A = 1, η = 0": (PACED, (*paced(1), *bound(0))),
    "paced, A = 4, open loop": (PACED, (*paced(4), *OPEN_LOOP)),
    "paced, A = 4, η = 4": (PACED, (*paced(4), *bound(4))),
    "paced, A = 4, η = 1": (PACED, (*paced(4), *bound(1))),
    "free, A = 1, open loop": (FREE, OPEN_LOOP),
    "free, A = 1, η = 1": (FREE, bound(1)),
}
"""Config and overrides by side. B = 1 throughout."""
FREE_CASES = tuple(case for case in CASES if case.startswith("free"))
TURNS = 16
SLOTS = 32
LIMITS = {"bare halves, open loop": SLOTS, "bare halves, η = 1": 2}
"""Credits: (η + 1) B, or one for each slot. See `benchmarks.workers.lockstep`."""


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    window = training.Window(0.3, 1.5) if plan.quick else training.Window(2.0, 8.0)
    free, times = (
        (training.Window(0.3, 0.5), 2) if plan.quick else (training.Window(2.0, 0.75), TURNS)
    )
    loops = training.Window(0.2, 0.5) if plan.quick else training.Window(1.0, 4.0)
    seeds = tuple(range(1, plan.rounds + 1))

    def bare(case: str) -> Values:
        return lockstep.measure(training.CONFIGS / FREE, LIMITS[case], loops.warm_s, loops.seconds)

    def measure(case: str, seed: int) -> Values:
        config, overrides = CASES[case]
        return training.measure(config, (f"run.seed={seed}", *overrides), window, plan.scratch)

    def in_turn(number: int) -> Mapping[str, Values]:
        cases = {
            case: (
                training.CONFIGS / CASES[case][0],
                (f"run.seed={seeds[number]}", *CASES[case][1]),
            )
            for case in FREE_CASES
        }
        windows = turns.measure(cases, turns=times, window=free, scratch=plan.scratch)
        return {case: turns.merged(found) for case, found in windows.items()}

    def side(case: str) -> Side:
        return Side(case, lambda number: measure(case, seeds[number]))

    return Benchmark(
        name="cost_of_balance",
        title="trained steps/s under a staleness bound over those of an open loop",
        sides=(
            *(side(case) for case in CASES if case not in FREE_CASES),
            Together(FREE_CASES, in_turn),
            *(Side(case, lambda _, case=case: bare(case)) for case in LIMITS),  # type: ignore[misc]
        ),
        ratios=(
            Ratio(
                "η = 1, A = B: nothing is lost (A ≤ η·B)",
                _over("paced, A = 1, η = 1", "paced, A = 1, open loop"),
                0.95,
                forecast(1, 1, 1),
            ),
            Ratio(
                "η = 4, A = 4·B: nothing is lost (A ≤ η·B)",
                _over("paced, A = 4, η = 4", "paced, A = 4, open loop"),
                0.95,
                forecast(4, 1, 4),
            ),
            Ratio(
                "η = 1, A = 4·B: the controller idles actors",
                _over("paced, A = 4, η = 1", "paced, A = 4, open loop"),
                None,
                forecast(4, 1, 1),
            ),
            Ratio(
                "η = 0, A = B: synchronous",
                _over("paced, A = 1, η = 0", "paced, A = 1, open loop"),
                None,
                forecast(1, 1, 0),
            ),
            Ratio(
                "η = 1, A = B, unpaced",
                _over("free, A = 1, η = 1", "free, A = 1, open loop"),
                0.95,
            ),
            Ratio(
                "η = 1 over open loop, bare halves",
                _over("bare halves, η = 1", "bare halves, open loop"),
            ),
            Ratio(
                "η = 1, unpaced, over bare halves under η = 1",
                _over("free, A = 1, η = 1", "bare halves, η = 1"),
            ),
        ),
        units={name: training.UNITS[name] for name in SHOWN},
        settings={
            "paced": f"benchmarks/configs/{PACED}: CartPole and IMPALA, B = 1, T = {STEPS}, 8 "
            "environments an actor, "
            f"update {1000 * UPDATE_S:g} ms, step {1000 * UPDATE_S / STEPS:g} ms × A",
            "free": f"benchmarks/configs/{FREE}: CartPole and IMPALA unpaced, 64 environments, B "
            "= 1, T = 32",
            "window": f"paced {window.seconds:g} s after {window.warm_s:g} s of training; "
            f"free {times} of {free.seconds:g} s in each round for each side, in turn, while the "
            "other run is paused; "
            f"bare halves {loops.seconds:g} s after {loops.warm_s:g} s",
            "cores": "learner on one, actors on the others; a host process for each actor",
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=(
            PACING,
            (
                "Open loop: no bound, credits for all slots, batches in order of arrival. The only "
                f"limit is {SLOTS} slots."
            ),
            HALVES,
            "Forecast: min(1, C/(A + B)) with C = (η + 1)·B.",
        ),
    )


def _over(case: str, base: str) -> Callable[[RoundValues], float | None]:
    return partial(_quotient_of, case=case, base=base)


def _quotient_of(values: RoundValues, *, case: str, base: str) -> float | None:
    return quotient(values[case]["trained_per_s"], values[base]["trained_per_s"])
