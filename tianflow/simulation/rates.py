"""`MeasuredRates`: the durations and sizes that a simulation takes as given, and files of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from tianflow.config.model import Fraction, Section
from tianflow.errors import ConfigError, Problem

SHORTEST_S, LONGEST_S = 1e-6, 1e6
"""Accepted range of a computation, in seconds (1e6 s are twelve days)."""
Work = Annotated[float, Field(ge=SHORTEST_S, le=LONGEST_S)]
Delay = Annotated[float, Field(ge=0.0, le=LONGEST_S)]
Spread = Annotated[float, Field(ge=0.0, le=1e3)]
Skew = Annotated[float, Field(ge=-1e6, le=1e6)]
Size = Annotated[float, Field(ge=0.0, le=1e15)]


class MeasuredRates(Section):
    """Durations in seconds, sizes in bytes. A spread is a standard deviation over its mean; see
    `tianflow.simulation.durations`.
    """

    trajectory_s: Work
    """One whole trajectory of an actor that is not a straggler, without waiting."""
    update_s: Work
    """One update, with copying out of the slots and laying out the weights."""
    trajectory_spread: Spread = 0.1
    """Spread between the trajectories of one actor."""
    trajectory_skew: Skew = 0.0
    """Third central moment over the cube of the standard deviation; a value below twice the spread
    counts as twice the spread.
    """
    update_spread: Spread = 0.0
    update_skew: Skew = 0.0
    actor_spread: Spread = 0.0
    """Spread between the means of different actors."""
    env_steps: Annotated[float, Field(gt=0.0, le=1e15)] | None = None
    """Valid environment steps of a whole trajectory; None: ``actors.rollout_steps * env.num_envs``.
    """
    publish_s: Delay = 0.0
    """Extra time of each update that publishes its version."""
    turn_s: Delay = 0.0
    """From a grant to the first step if the compute thread is free: the way to that thread."""
    straggler_share: Fraction = 0.0
    """Fraction of the actors that are slower; always the same ones."""
    straggler_factor: Annotated[float, Field(ge=1.0, le=1e6)] = 1.0
    failures_per_hour: Annotated[float, Field(ge=0.0, le=3.6e6)] = 0.0
    """Failures of one actor; each loses the trajectory in progress."""
    restart_s: Delay = 10.0
    latency_s: Delay = 0.0
    """One way, between an actor and the machine of learner and coordinator."""
    learner_latency_s: Delay = 0.0
    """One way, between learner and coordinator, which are processes of one machine."""
    bandwidth: Annotated[float, Field(ge=1.0)] | None = None
    """Bytes per second of each actor's link; None: no limit."""
    trajectory_bytes: Size = 0.0
    weights_bytes: Size = 0.0

    def transfer_s(self, nbytes: float) -> float:
        """Seconds that ``nbytes`` take to cross a link."""
        return self.latency_s + (nbytes / self.bandwidth if self.bandwidth is not None else 0.0)


def make_rates(values: Mapping[str, object]) -> MeasuredRates:
    """Check ``values``. Raises `ConfigError` with every problem; paths begin with ``rates``."""
    try:
        rates = MeasuredRates.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(
            [
                _problem(values, tuple(found["loc"]), found["type"], found["msg"])
                for found in error.errors()
            ]
        ) from error
    longest = rates.transfer_s(max(rates.trajectory_bytes, rates.weights_bytes))
    if longest > LONGEST_S:
        raise ConfigError(
            [
                Problem(
                    "rates.bandwidth",
                    rates.bandwidth,
                    f"a transfer over a link would take {longest:.3g} s",
                    f"at most {LONGEST_S:g} s",
                )
            ]
        )
    return rates


def _problem(
    values: Mapping[str, object], loc: tuple[int | str, ...], kind: str, message: str
) -> Problem:
    key = str(loc[0]) if loc else ""
    if kind == "missing":
        message = (
            "is missing: take it from a run with --like, measure it with --measure, or set "
            f"rates.{key}"
        )
    elif kind == "extra_forbidden":
        message, accepted = "is not a rate", "one of " + ", ".join(MeasuredRates.model_fields)
        return Problem(f"rates.{key}", values.get(key), message, accepted)
    return Problem(f"rates.{key}", values.get(key), message)


def read_rates(path: Path) -> dict[str, object]:
    """Read the table of rates in a TOML or JSON file, unchecked.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path.is_dir():
        raise ConfigError(
            [
                Problem(
                    "--rates",
                    str(path),
                    "is a directory",
                    "a TOML or JSON file of rates (use --like for a run)",
                )
            ]
        )
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            [Problem("--rates", str(path), str(error), "a TOML or JSON file of rates")]
        ) from error
    table = table.get("rates", table) if isinstance(table, dict) else table
    if not isinstance(table, dict):
        raise ConfigError([Problem("--rates", str(path), "is not a table", "keys of rates")])
    return table
