"""``tianflow simulate``: from arguments to an outcome."""

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

from tianflow.cli.common import RUNS, AsJson, ConfigArgument, RunsDir, complain, exit_codes
from tianflow.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.simulation.outcome import SimulationResult
    from tianflow.simulation.rates import MeasuredRates

RATES, ACTORS = "rates.", "actors="
MOST = 1_000_000
MOST_UPDATES = 10_000_000
"""A million takes a minute or more, whatever an update takes."""
SUPPOSED = ("trajectory_spread", "update_spread")
"""MeasuredRates that have a default for want of anything better."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[actors=N] [section.key=value] [rates.key=value]",
        help="As many actors, each with a core of its own unless actors.hosts is given; settings "
        "that replace those of CONFIG; rates.",
    ),
]


def simulate(
    config: ConfigArgument,
    changes: Arguments = None,
    *,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="RUN", help="Take rates from a run, by name or directory."),
    ] = None,
    rates: Annotated[
        Path | None, typer.Option("--rates", metavar="FILE", help="A TOML or JSON file of rates.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="First measure a trajectory and an update here, for two seconds."
        ),
    ] = False,
    updates: Annotated[
        int, typer.Option(min=1, max=MOST_UPDATES, help="Updates to simulate.")
    ] = 200,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_UPDATES,
            help="Updates before these, left out; a tenth of them by default.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0, help="End after so many seconds of virtual time at the latest; 0: never."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the times that are drawn.")] = 0,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Say how CONFIG would run, in virtual time.

    Throughput, staleness, drops and what binds.
    """
    with exit_codes():
        made = prepare(
            config,
            changes or (),
            sources=RateSources(like=like, runs_dir=runs_dir, file=rates, measure=measure),
        )
        outcome = made.run(
            updates=updates,
            warmup=max(1, updates // 10) if warmup is None else warmup,
            seconds=seconds or inf,
            seed=seed,
        )
    if as_json:
        typer.echo(
            json.dumps(
                {**outcome.document(), "rates": made.rates.model_dump(), "supposed": made.supposed}
            )
        )
    else:
        supposed = (
            [f"supposed, for nobody told it: {_listed(made.supposed)}"] if made.supposed else []
        )
        typer.echo("\n".join([f"rates: {_told(made.rates)}", *supposed, *outcome.lines()]))
    raise typer.Exit(1 if outcome.bottleneck == "stalled" else 0)


@dataclass(frozen=True, slots=True)
class RateSources:
    """Where rates come from, besides arguments. What comes later here replaces what comes before:
    measured, like a run, a file.
    """

    measure: bool
    like: str | None
    runs_dir: Path
    file: Path | None

    def read(self, config: Config) -> tuple[dict[str, object], set[str]]:
        """Unchecked rates for ``config``, and which of them are no more than supposed.

        Raises:
            ConfigError: one of the sources cannot be used.
            ReportError: there is no such run.
        """
        from tianflow.simulation.rates import read_rates

        found: dict[str, object] = {}
        supposed: set[str] = set()
        if self.measure:
            from tianflow.simulation.measuring import measure

            found |= measure(config)
        if self.like is not None:
            from tianflow.report.records import find
            from tianflow.simulation.calibration import read_like

            told, supposed = read_like(find(self.like, self.runs_dir), config)
            found |= told
        if self.file is not None:
            told = read_rates(self.file)
            supposed -= told.keys()
            found |= told
        return found, supposed


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """A simulation that only waits to be run. ``actors`` None: as the config says."""

    config: Config
    rates: MeasuredRates
    actors: int | None
    supposed: dict[str, float]
    """MeasuredRates that no source tells, and that shape what is forecast."""

    def run(self, *, updates: int, warmup: int, seconds: float, seed: int) -> SimulationResult:
        """See `Simulation.run`. What takes a while says on stderr how far it is."""
        from tianflow.simulation.progress import Progress
        from tianflow.simulation.simulation import Simulation

        simulation = Simulation(self.config, self.rates, actors=self.actors, seed=seed)
        with _without_collector():
            return simulation.run(
                updates=updates, warmup=warmup, seconds=seconds, report=Progress(complain)
            )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Thousands of events wait at any time and none goes in circles: looking for circles takes a
    fifth of a simulation.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def prepare(source: str, changes: Sequence[str], *, sources: RateSources) -> PreparedSimulation:
    """What is to be simulated. MeasuredRates among ``changes`` replace those of ``sources``.

    As many actors as a config may have are dealt out as a run on this machine would deal them out.

    Raises:
        ConfigError: config or rates cannot be used, or a rate is missing.
        ReportError: there is no such run.
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
    supposed = sorted(doubtful - own.keys() | {*SUPPOSED} - found.keys() - own.keys())
    return PreparedSimulation(
        config, rates, actors, {name: getattr(rates, name) for name in supposed}
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ConfigError(
            [
                Problem(
                    "actors",
                    text,
                    "is not how many actors can be simulated",
                    f"a whole number from 1 to {MOST}",
                )
            ]
        )
    return int(text)


def _told(rates: MeasuredRates) -> str:
    """What differs from the defaults."""
    return _listed(rates.model_dump(exclude_defaults=True))


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.4g}" for name, value in values.items())
