"""What `tianflow simulate` forecasts of a run, and `tianflow diagnose` of one that follows its
advice, beside what comes of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient
from benchmarks.lib.machine import ROOT
from benchmarks.workers import training

SLEEPING = training.CONFIGS / "sleeping.toml"
CARTPOLE = ROOT / "configs" / "cartpole_ppo.toml"
ENDLESS = ("run.target_return=null", "run.max_env_steps=null", "run.max_seconds=600")
VARIES = "env.kwargs.varies=true"
OTHERS = ("actors.count=2", "balance.max_staleness=1", "learner.slowdown=1")
WANTED = ("actors.count=5", "balance.max_staleness=2", "learner.slowdown=0")
QUIET_S = 5.5
"""A history tells nothing of the first five seconds, see `tianflow.simulation.calibration`."""
SETTLED_S = 2.0
"""After the last actor that was advised has begun its work."""
UPDATES = ("--updates", 1000, "--warmup", 100)
LEARNS = "cartpole_ppo as shipped"
ADVICE, CROWD = "advice on actors", "10,000 actors"
ACTORS, BATCH, BOUND = 10_000, 1000, 20
CROWD_SETTINGS = (
    f"algorithm.batch_trajectories={BATCH}",
    f"balance.max_staleness={BOUND}",
    "balance.min_fragment_steps=1",
)
HARD = {
    "trajectory_s": 1.0,
    "update_s": BATCH / ACTORS,
    "trajectory_spread": 0.3,
    "straggler_share": 0.02,
    "straggler_factor": 20.0,
    "failures_per_hour": 60.0,
    "latency_s": 0.001,
}
"""Actors together make a batch in the time of an update; two of a hundred take twenty times as
long, and each fails once a minute.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and the ``source`` whose history it is forecast from: settings of another run, or None
    for its own.
    """

    config: Path
    settings: tuple[str, ...]
    source: tuple[str, ...] | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """What the simulation is told beside the source's config."""
        return (
            ()
            if self.source is None
            else tuple(setting for setting in self.settings if setting not in self.source)
        )


CASES = {
    "trajectories vary": Case(SLEEPING, (VARIES,)),
    "updates vary, too": Case(SLEEPING, (VARIES, "algorithm.varies=true")),
    "from a run with other settings": Case(SLEEPING, (VARIES, *WANTED), source=(VARIES, *OTHERS)),
    LEARNS: Case(CARTPOLE, ENDLESS),
}


def simulated(*arguments: object) -> child.Finished:
    """``tianflow simulate arguments``, its outcome as JSON."""
    return child.run("tianflow", "simulate", *arguments, "--json", timeout_s=120.0)


def forecast(directory: Path, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the history in ``directory`` tells of its run, with ``changes``."""
    return simulated(directory / "config.toml", *changes, "--like", directory, *UPDATES).answer


def compare(case: Case, window: training.Window, seed: int, scratch: Path) -> Values:
    """Run ``case``, and forecast it."""
    with tempfile.TemporaryDirectory(dir=scratch) as runs:

        def run(name: str, settings: tuple[str, ...]) -> Values:
            arguments = (
                window.warm_s,
                window.seconds,
                runs,
                f"run.name={name}",
                f"run.seed={seed}",
                *settings,
            )
            return child.run(
                "benchmarks.workers.training", case.config, *arguments, timeout_s=180.0
            ).answer

        if case.source is not None:
            run("source", case.source)
        seen = run("seen", case.settings)
        told = forecast(Path(runs) / ("seen" if case.source is None else "source"), case.changes)
    return beside(seen, told)


def beside(seen: Values, told: dict[str, Any]) -> Values:
    """A window of a run (`training.between`) and the outcome of a simulation, as values of one
    side.
    """
    pace, age = told["steps_per_s"], told["staleness"]["mean"]
    found = {
        "pace": seen["committed_per_s"],
        "forecast_pace": pace,
        "age": seen["staleness_mean"],
        "forecast_age": age,
    }
    return {
        **found,
        "return": seen["return"],
        "learner_waits": seen["learner_waits"],
        "actors_wait": seen["actors_wait"],
    }


def crowd(seconds: float, seed: int) -> Values:
    """Simulate `ACTORS` of them for so many ``seconds`` of virtual time, in a process whose whole
    CPU time counts.
    """
    rates = [f"rates.{name}={value}" for name, value in HARD.items()]
    limits = ("--updates", 10**6, "--warmup", 0, "--seconds", seconds, "--seed", seed)
    done = simulated("cartpole_ppo", f"actors={ACTORS}", *CROWD_SETTINGS, *rates, *limits)
    told = done.answer
    return {
        "virtual_per_cpu_s": told["seconds"] / done.cpu_s,
        "staleness_max": float(told["staleness"]["max"]),
        "violations": float(told["staleness"]["violations"]),
        "died": float(told["dropped"].get("died", 0)),
        "cut": float(told["cuts"]),
        "trained": float(told["trained"]),
    }


def advised(seconds: float, scratch: Path) -> Values:
    """One actor of environments that sleep; as many as the diagnosis advises."""
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        return child.run(
            "benchmarks.workers.advised_run", SLEEPING, SETTLED_S, seconds, runs, timeout_s=180.0
        ).answer


def agreement(side: str, name: str) -> Callable[[RoundValues], float | None]:
    """The smaller of what was forecast and what was seen, over the larger."""

    def of(values: RoundValues) -> float | None:
        ratio = quotient(values[side][f"forecast_{name}"], values[side][name])
        return min(ratio, 1.0 / ratio) if ratio else None

    return of


def forecast_over_seen(side: str, name: str) -> Callable[[RoundValues], float | None]:
    """Above 1: it was forecast too high."""
    return lambda values: quotient(values[side][f"forecast_{name}"], values[side][name])


def ratios() -> tuple[Ratio, ...]:
    """How near what was forecast is to what was seen, and on which side of it."""
    found = [
        ratio
        for side in CASES
        for name, what in (("pace", "steps/s"), ("age", "mean staleness"))
        for ratio in (
            Ratio(
                f"forecast {what} over seen: {side}",
                forecast_over_seen(side, name),
                forecast=1.0,
                sides=(side,),
            ),
            Ratio(
                f"the smaller {what} over the larger: {side}",
                agreement(side, name),
                aim=0.9,
                sides=(side,),
            ),
        )
    ]
    return (
        *found,
        Ratio(
            "forecast steps/s over seen: advice",
            forecast_over_seen(ADVICE, "pace"),
            forecast=1.0,
            sides=(ADVICE,),
        ),
        Ratio(
            "the smaller steps/s over the larger: advice",
            agreement(ADVICE, "pace"),
            aim=0.8,
            sides=(ADVICE,),
        ),
        Ratio(
            "10,000 actors: virtual time over CPU time",
            lambda v: v[CROWD]["virtual_per_cpu_s"],
            aim=1.0,
            sides=(CROWD,),
        ),
        Ratio(
            "10,000 actors: bound over oldest",
            lambda v: quotient(BOUND, v[CROWD]["staleness_max"]),
            aim=1.0,
            sides=(CROWD,),
        ),
    )


def make(plan: Plan) -> Benchmark:
    """The benchmark, sized by ``plan``."""
    window = (
        training.Window(QUIET_S, 3.0)
        if plan.quick
        else training.Window(QUIET_S, plan.seconds or 5.0)
    )
    virtual_s = 1.0 if plan.quick else 10.0
    seeds = tuple(range(1, plan.rounds + 1))

    def side(name: str, case: Case) -> Side:
        return Side(name, lambda number: compare(case, window, seeds[number], plan.scratch))

    return Benchmark(
        name="forecast",
        title="what simulation and diagnosis forecast, beside what comes of it",
        sides=(
            *(side(name, case) for name, case in CASES.items()),
            Side(ADVICE, lambda _: advised(window.seconds, plan.scratch)),
            Side(CROWD, lambda number: crowd(virtual_s, seeds[number])),
        ),
        ratios=ratios(),
        units={
            "pace": "env steps/s",
            "forecast_pace": "env steps/s",
            "age": "updates, mean",
            "forecast_age": "updates, mean",
            **{
                name: training.UNITS[name]
                for name in (
                    "return",
                    "learner_waits",
                    "actors_wait",
                    "staleness_max",
                    "violations",
                )
            },
            "actors": "as advised",
            "before": "env steps/s of one actor",
            "virtual_per_cpu_s": "s of virtual time a CPU second, start of the process included",
            **dict.fromkeys(("trained", "died", "cut"), "trajectories"),
        },
        settings={
            "sleeping": "benchmarks/configs/sleeping.toml: A = 4, B = 4, T = 16, max_staleness = "
            "2; environments sleep 5 ms a step, "
            "exponentially where trajectories vary; IMPALA, 60 ms an update, exponentially where "
            "updates vary",
            "other settings": f"{' '.join(WANTED)}, forecast from a run with {' '.join(OTHERS)}",
            LEARNS: f"configs/cartpole_ppo.toml, {' '.join(ENDLESS)}: nothing sleeps, learning "
            "goes on, actor and learner share the cores",
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training; the history "
            "ends with it",
            "forecast": f"tianflow simulate --like, {UPDATES[1]} updates after {UPDATES[3]}",
            ADVICE: "one actor of two such environments that sleep 5 ms each, T = 8, B = 2, 40 ms "
            "an update; "
            f"{window.seconds:g} s, {SETTLED_S:g} s after all that were advised work",
            CROWD: f"{virtual_s:g} s of virtual time, B = {BATCH}, max_staleness = {BOUND}, "
            + ", ".join(f"{name} = {value:g}" for name, value in HARD.items()),
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=(
            (
                "Nothing of pace or staleness goes into a simulation: only where time went, and "
                "how "
                "much durations vary."
            ),
        ),
    )
