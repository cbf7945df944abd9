"""``tianflow simulate``: prepares a simulation from its arguments, runs it, and prints
the result.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import RUNS, AsJson, ConfigArgument, RunsDir, echo, exit_codes, print_error
from tianflow.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.simulation.outcome import SimulationResult
    from tianflow.simulation.rates import MeasuredRates

RATES, ACTORS = "rates.", "actors="
MOST = 1_000_000
MOST_UPDATES = 10_000_000
"""A million updates take a minute or more of real time."""
ASSUMED = ("trajectory_spread", "update_spread")
"""Rates whose defaults are assumptions."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[actors=N] [section.key=value] [rates.key=value]",
        help="Number of actors (one core each, unless actors.hosts is set), settings that override "
        "those of CONFIG, and rates.",
    ),
]


def simulate(
    config: ConfigArgument,
    changes: Arguments = None,
    *,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="RUN", help="Run to take rates from: name or directory."),
    ] = None,
    rates: Annotated[
        Path | None, typer.Option("--rates", metavar="FILE", help="TOML or JSON file of rates.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measurement of the rates here, for two seconds."),
    ] = False,
    updates: Annotated[
        int, typer.Option(min=1, max=MOST_UPDATES, help="Number of updates to simulate.")
    ] = 200,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_UPDATES,
            help="Number of updates before these, not counted; default: a tenth of them.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Maximum seconds of virtual time; 0: no limit."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the simulated durations.")] = 0,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Forecast a run of CONFIG in virtual time.

    The forecast covers throughput, staleness, dropped trajectories and the bottleneck.
    """
    with exit_codes():
        simulation = prepare(
            config,
            changes or (),
            sources=RateSources(like=like, runs_dir=runs_dir, file=rates, measure=measure),
        )
        outcome = simulation.run(
            updates=updates,
            warmup=max(1, updates // 10) if warmup is None else warmup,
            seconds=seconds or inf,
            seed=seed,
        )
    if as_json:
        echo(
            json.dumps(
                {
                    **outcome.document(),
                    "rates": simulation.rates.model_dump(),
                    "assumed": simulation.assumed,
                }
            )
        )
    else:
        assumed = [f"assumed: {_listed(simulation.assumed)}"] if simulation.assumed else []
        changed = _listed(simulation.rates.model_dump(exclude_defaults=True))
        echo("\n".join([f"rates: {changed}", *assumed, *outcome.lines()]))
    raise typer.Exit(1 if outcome.bottleneck == "stalled" else 0)


@dataclass(frozen=True, slots=True)
class RateSources:
    """Sources of rates, besides arguments. A later source replaces an earlier one: measurement, a
    run, a file.
    """

    measure: bool
    like: str | None
    runs_dir: Path
    file: Path | None

    def read(self, config: Config) -> tuple[dict[str, object], set[str]]:
        """Read unchecked rates for ``config``. The second result names those that are assumptions.

        Raises:
            ConfigError: one of the sources cannot be used.
            ReportError: the run does not exist.
        """
        from tianflow.simulation.rates import read_rates

        found: dict[str, object] = {}
        assumed: set[str] = set()
        if self.measure:
            from tianflow.simulation.measuring import measure

            found |= measure(config)
        if self.like is not None:
            from tianflow.report.records import find
            from tianflow.simulation.calibration import read_like

            of_run, assumed = read_like(find(self.like, self.runs_dir), config)
            found |= of_run
        if self.file is not None:
            of_file = read_rates(self.file)
            assumed -= of_file.keys()
            found |= of_file
        return found, assumed


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """A simulation that is ready to run. ``actors`` None: the count of the config."""

    config: Config
    rates: MeasuredRates
    actors: int | None
    assumed: dict[str, float]
    """Rates that affect the forecast and come from no source."""

    def run(self, *, updates: int, warmup: int, seconds: float, seed: int) -> SimulationResult:
        """Run it, see `Simulation.run`. A simulation that takes a while reports its progress on
        stderr.
        """
        from tianflow.simulation.progress import Progress
        from tianflow.simulation.simulation import Simulation

        simulation = Simulation(self.config, self.rates, actors=self.actors, seed=seed)
        with _without_collector():
            return simulation.run(
                updates=updates, warmup=warmup, seconds=seconds, report=Progress(print_error)
            )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Run without the garbage collector, which takes a fifth of a simulation: thousands of events
    wait at any time, and none is part of a cycle.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prepare(source: str, changes: Sequence[str], *, sources: RateSources) -> PreparedSimulation:
    """Prepare a simulation. Rates among ``changes`` replace those of ``sources``.

    A number of actors that a config may have is spread over hosts as in a run on this machine.

    Raises:
        ConfigError: config or rates cannot be used, or a rate is missing.
        ReportError: the run does not exist.
    """
    from tianflow.config.loading import load_config, parse_overrides
    from tianflow.planning.placement import hosts_wanted
    from tianflow.simulation.rates import make_rates
    from tianflow.simulation.simulation import refuse

    given = [text for text in changes if text.startswith(RATES)]
    counts = [text for text in changes if text.startswith(ACTORS)]
    config = load_config(
        source, [text for text in changes if text not in given and text not in counts]
    )
    actors = _count(counts[-1].removeprefix(ACTORS)) if counts else None
    refuse(config, actors)
    if actors is None:
        config = config.model_copy(
            update={"actors": config.actors.model_copy(update={"hosts": hosts_wanted(config)})}
        )
    own = {path.removeprefix(RATES): value for path, value in parse_overrides(given).items()}
    found, doubtful = sources.read(config)
    rates = make_rates(found | own)
    assumed = sorted(doubtful - own.keys() | {*ASSUMED} - found.keys() - own.keys())
    return PreparedSimulation(
        config, rates, actors, {name: getattr(rates, name) for name in assumed}
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ConfigError(
            [
                Problem(
                    "actors",
                    text,
                    "is not a valid number of actors",
                    f"a whole number from 1 to {MOST}",
                )
            ]
        )
    return int(text)


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.4g}" for name, value in values.items())
