"""``tianflow simulate``: from arguments to an outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.errors import ConfigError, TianflowError

if TYPE_CHECKING:
    from tianflow.simulation.outcome import Outcome
    from tianflow.simulation.rates import Rates

PREFIX = "rates."


def simulate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a config that comes with tianflow.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="section.key=value", help="Settings that replace those of CONFIG; rates.key=value, too."),
    ] = None,
    *,
    rates: Annotated[Path | None, typer.Option("--rates", metavar="FILE", help="A TOML or JSON file of rates.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="First measure a trajectory and an update here, for two seconds.")] = False,
    updates: Annotated[int, typer.Option(min=1, help="Updates to simulate.")] = 200,
    warmup: Annotated[int | None, typer.Option(min=0, help="Updates before these, left out; a tenth of them by default.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="End after so many seconds of virtual time at the latest; 0: never.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the times that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how CONFIG would run, in virtual time: throughput, staleness, drops and what binds."""
    try:
        outcome, given = run(
            config, overrides or (), rates=rates, measure=measure, updates=updates, warmup=warmup, seconds=seconds or inf, seed=seed
        )
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(" ".join(str(problem).split("\n")), err=True)
        raise typer.Exit(2) from None
    except TianflowError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({**outcome.document(), "rates": given.model_dump()}))
    else:
        typer.echo("\n".join([f"rates: {_told(given)}", *outcome.lines()]))
    raise typer.Exit(1 if outcome.bottleneck == "stalled" else 0)


def run(
    source: str,
    overrides: Sequence[str],
    *,
    rates: Path | None,
    measure: bool,
    updates: int,
    warmup: int | None,
    seconds: float,
    seed: int,
) -> tuple[Outcome, Rates]:
    """The outcome, and the rates it is for: those measured, over them those of the file, over them those among ``overrides``.

    Raises:
        ConfigError: config or rates cannot be used, or a rate is missing.
    """
    from tianflow.config_loading import load_config, parse_overrides
    from tianflow.simulation.rates import make_rates, read_rates
    from tianflow.simulation.world import Simulation, refuse

    own = [text for text in overrides if text.startswith(PREFIX)]
    config = load_config(source, [text for text in overrides if not text.startswith(PREFIX)])
    refuse(config)
    given = read_rates(rates) if rates is not None else {}
    given |= {path.removeprefix(PREFIX): value for path, value in parse_overrides(own).items()}
    if measure:
        from tianflow.simulation.measuring import measure as measured

        given = {**measured(config), **given}
    simulation = Simulation(config, made := make_rates(given), seed=seed)
    return simulation.run(updates=updates, warmup=max(1, updates // 10) if warmup is None else warmup, seconds=seconds), made


def _told(rates: Rates) -> str:
    """What differs from the defaults."""
    return ", ".join(f"{name} = {value:.4g}" for name, value in rates.model_dump(exclude_defaults=True).items())
