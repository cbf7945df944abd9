"""Suite: the forecasts of `tianflow simulate` and of a diagnosis, compared with measurements."""

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
"""A history does not count the first five seconds, see `tianflow.simulation.calibration`."""
SETTLED_S = 2.0
"""Seconds from the start of the last advised actor to the measurement."""
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
"""The actors together make a batch in the time of an update. Two per cent of the trajectories take
twenty times as long, and each actor fails once a minute.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A run and the ``source`` of its forecast: settings of another run whose history is used, or
    None for its own history.
    """

    config: Path
    settings: tuple[str, ...]
    source: tuple[str, ...] | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """Settings of the simulation beside the source's config."""
        return (
            ()
            if self.source is None
            else tuple(setting for setting in self.settings if setting not in self.source)
        )


CASES = {
    "trajectories vary": Case(SLEEPING, (VARIES,)),
    "updates vary too": Case(SLEEPING, (VARIES, "algorithm.varies=true")),
    "from a run with other settings": Case(SLEEPING, (VARIES, *WANTED), source=(VARIES, *OTHERS)),
    LEARNS: Case(CARTPOLE, ENDLESS),
}


def simulated(*arguments: object) -> child.Finished:
    """Run ``tianflow simulate arguments`` and parse its JSON."""
    return child.run("tianflow", "simulate", *arguments, "--json", timeout_s=120.0)


def forecast(directory: Path, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Forecast a run from the history in ``directory``, with ``changes``."""
    return simulated(directory / "config.toml", *changes, "--like", directory, *UPDATES).answer


def compare(case: Case, window: training.Window, seed: int, scratch: Path) -> Values:
    """Run ``case`` and forecast it."""
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
        predicted = forecast(
            Path(runs) / ("seen" if case.source is None else "source"), case.changes
        )
    return compared(seen, predicted)


def compared(seen: Values, predicted: dict[str, Any]) -> Values:
    """Combine a window of a run (`training.between`) and the result of a simulation into the values
    of one side.
    """
    pace, staleness = predicted["steps_per_s"], predicted["staleness"]["mean"]
    found = {
        "pace": seen["committed_per_s"],
        "forecast_pace": pace,
        "staleness": seen["staleness_mean"],
        "forecast_staleness": staleness,
    }
    return {
        **found,
        "return": seen["return"],
        "learner_waits": seen["learner_waits"],
        "actors_wait": seen["actors_wait"],
    }


def crowd(seconds: float, seed: int) -> Values:
    """Simulate `ACTORS` actors for ``seconds`` of virtual time, in a process whose whole CPU time
    counts.
    """
    rates = [f"rates.{name}={value}" for name, value in HARD.items()]
    limits = ("--updates", 10**6, "--warmup", 0, "--seconds", seconds, "--seed", seed)
    done = simulated("cartpole_ppo", f"actors={ACTORS}", *CROWD_SETTINGS, *rates, *limits)
    outcome = done.answer
    return {
        "virtual_per_cpu_s": outcome["seconds"] / done.cpu_s,
        "staleness_max": float(outcome["staleness"]["max"]),
        "violations": float(outcome["staleness"]["violations"]),
        "died": float(outcome["dropped"].get("died", 0)),
        "cut": float(outcome["cuts"]),
        "trained": float(outcome["trained"]),
    }


def advised(seconds: float, scratch: Path) -> Values:
    """Measure one actor of sleeping environments, then the number of actors that the diagnosis
    suggests.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as runs:
        return child.run(
            "benchmarks.workers.advised_run", SLEEPING, SETTLED_S, seconds, runs, timeout_s=180.0
        ).answer


def agreement(side: str, name: str) -> Callable[[RoundValues], float | None]:
    """Return the smaller of forecast and measurement over the larger."""

    def of(values: RoundValues) -> float | None:
        ratio = quotient(values[side][f"forecast_{name}"], values[side][name])
        return min(ratio, 1.0 / ratio) if ratio else None

    return of


def forecast_over_measured(side: str, name: str) -> Callable[[RoundValues], float | None]:
    """Return forecast over measurement. Above 1, the forecast is too high."""
    return lambda values: quotient(values[side][f"forecast_{name}"], values[side][name])


def ratios() -> tuple[Ratio, ...]:
    """Return the agreement of forecast and measurement, and its direction."""
    found = [
        ratio
        for side in CASES
        for name, what in (("pace", "steps/s"), ("staleness", "mean staleness"))
        for ratio in (
            Ratio(
                f"forecast {what} over measured: {side}",
                forecast_over_measured(side, name),
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
            "forecast steps/s over measured: advice",
            forecast_over_measured(ADVICE, "pace"),
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
            "10,000 actors: bound over largest staleness",
            lambda v: quotient(BOUND, v[CROWD]["staleness_max"]),
            aim=1.0,
            sides=(CROWD,),
        ),
    )


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
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
        title="forecasts of simulation and diagnosis over measurements",
        sides=(
            *(side(name, case) for name, case in CASES.items()),
            Side(ADVICE, lambda _: advised(window.seconds, plan.scratch)),
            Side(CROWD, lambda number: crowd(virtual_s, seeds[number])),
        ),
        ratios=ratios(),
        units={
            "pace": "env steps/s",
            "forecast_pace": "env steps/s",
            "staleness": "updates, mean",
            "forecast_staleness": "updates, mean",
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
            "actors": "suggested number",
            "before": "env steps/s of one actor",
            "virtual_per_cpu_s": "s of virtual time for each CPU second, process start included",
            **dict.fromkeys(("trained", "died", "cut"), "trajectories"),
        },
        settings={
            "sleeping": "benchmarks/configs/sleeping.toml: A = 4, B = 4, T = 16, max_staleness = "
            "2; environments sleep 5 ms a step, "
            "exponentially where trajectories vary; IMPALA, 60 ms an update, exponentially where "
            "updates vary",
            "other settings": f"{' '.join(WANTED)}, forecast from a run with {' '.join(OTHERS)}",
            LEARNS: f"configs/cartpole_ppo.toml, {' '.join(ENDLESS)}: nothing sleeps, the policy "
            "learns, actor and learner share the cores",
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training; the history "
            "ends with the window",
            "forecast": f"tianflow simulate --like, {UPDATES[1]} updates after {UPDATES[3]}",
            ADVICE: "one actor of two environments that sleep 5 ms each, T = 8, B = 2, 40 ms an "
            f"update; {window.seconds:g} s, {SETTLED_S:g} s after all suggested actors work",
            CROWD: f"{virtual_s:g} s of virtual time, B = {BATCH}, max_staleness = {BOUND}, "
            + ", ".join(f"{name} = {value:g}" for name, value in HARD.items()),
            "threads": "1 a process",
        },
        seeds=seeds,
        notes=(
            (
                "A simulation gets the durations of the work and their spread. It does not get "
                "pace or staleness."
            ),
        ),
    )
