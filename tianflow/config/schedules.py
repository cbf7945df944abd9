"""Settings that may follow a schedule: their form, their value at a point of the run, and refusals.

A scheduled setting is a number, which is constant, or a `Schedule`. Algorithms receive settings of
numbers only: `settings_at` replaces each schedule by its value in force.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, cast

from pydantic import (
    Discriminator,
    Field,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)

from tianflow import plugins
from tianflow.config.section import Fraction, Section
from tianflow.errors import ConfigError, Problem, RunError

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.config.on_policy import AlgorithmSettings

Unit = Literal["steps", "updates", "seconds"]
LIMITS: Mapping[Unit, str] = {
    "steps": "max_env_steps",
    "updates": "max_updates",
    "seconds": "max_seconds",
}
"""The limit of ``run`` in each unit. The first that is set is the limit of the run."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "constant": ("start",),
    "linear": ("start", "end"),
    "cosine": ("start", "end"),
    "exponential": ("start", "end"),
    "piecewise": ("points",),
}
"""Built-in schedules, and the settings that each needs."""
OBJECT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""``module:attribute``. `tianflow.config.imports` recognises every text of this form."""
PROBES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Progress at which a function is called when settings are checked."""


class Schedule(Section):
    """Value of a setting that changes during a run."""

    schedule: str
    """constant, linear, cosine, exponential, piecewise, or module:attribute of a function that
    returns the value for a progress from 0 to 1.
    """
    start: float | None = None
    """Value at the beginning of the run; for all but piecewise and functions."""
    end: float | None = None
    """Value after ``over``, and from then on (linear, cosine, exponential)."""
    over: PositiveFloat | None = None
    """Length of the schedule, in ``unit``; None: the limit of the run in that unit."""
    unit: Unit | None = None
    """steps (environment steps), updates, or seconds of training. None: that of the run's first
    limit, or steps where ``over`` or ``points`` are set.
    """
    points: tuple[tuple[float, float], ...] | None = None
    """Positions in ``unit`` with their values, joined by straight lines (piecewise)."""

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # TOML has no null for an entry of a table
        return {name: value for name, value in handler(self).items() if value is not None}


def _form(value: object) -> str:
    return "Schedule" if isinstance(value, Mapping | Schedule) else "number"


def _or_schedule(number: Any) -> Any:
    """The type of a setting that is a ``number`` or a schedule."""
    members = Annotated[number, Tag("number")] | Annotated[Schedule, Tag("Schedule")]
    return Annotated[members, Discriminator(_form)]


if TYPE_CHECKING:
    # Numbers for every reader but this module: the learner resolves schedules.
    ScheduledRate: TypeAlias = float
    ScheduledPositive: TypeAlias = float
    ScheduledFraction: TypeAlias = float
else:
    ScheduledRate = _or_schedule(Annotated[float, Field(ge=0.0)])
    ScheduledPositive = _or_schedule(PositiveFloat)
    ScheduledFraction = _or_schedule(Fraction)


class Elapsed(NamedTuple):
    """How far a run is, including what it did before a resume."""

    steps: float
    """Environment steps: those trained on, or with replay all of them."""
    updates: float
    seconds: float
    """Seconds of training."""


class Bounds(NamedTuple):
    """Values that a scheduled setting accepts."""

    lowest: float = 0.0
    highest: float = math.inf
    positive: bool = False

    def accept(self, value: float) -> bool:
        """True if the setting may have ``value``."""
        low_enough = math.isfinite(value) and value <= self.highest
        return low_enough and (value > 0.0 if self.positive else value >= self.lowest)

    @property
    def words(self) -> str:
        """Accepted values, as a phrase."""
        if self.highest < math.inf:
            return f"a number from {self.lowest:g} to {self.highest:g}"
        return "a number > 0" if self.positive else f"a number >= {self.lowest:g}"


SCHEDULED: Mapping[str, Bounds] = {
    "algorithm.learning_rate": Bounds(),
    "algorithm.entropy_cost": Bounds(),
    "algorithm.clip": Bounds(positive=True),
    "replay.beta": Bounds(highest=1.0),
}
"""Settings that accept a schedule."""
STATISTICS: Mapping[str, str] = {
    "algorithm.learning_rate": "train/learning_rate",
    "algorithm.entropy_cost": "train/entropy_cost",
    "algorithm.clip": "train/clip_range",
    "replay.beta": "train/beta",
}
"""Learning statistics that have the values in force."""
OF_ALGORITHMS = tuple(path for path in SCHEDULED if path.startswith("algorithm."))


# Values
# --------------------------------------------------------------------------------------------------


def schedule_limit(config: Config) -> tuple[Unit, float] | None:
    """The limit of the run: the first that is set, with its unit; None without a limit."""
    limits = ((unit, getattr(config.run, name)) for unit, name in LIMITS.items())
    return next(((unit, float(limit)) for unit, limit in limits if limit is not None), None)


def unit_of(schedule: Schedule, config: Config) -> Unit:
    """The unit in force of ``schedule``."""
    if schedule.unit is not None:
        return schedule.unit
    limit = schedule_limit(config)
    given = schedule.over is not None or schedule.points is not None
    return "steps" if given or limit is None else limit[0]


def length_of(schedule: Schedule, config: Config) -> float | None:
    """Its length in its unit; None if it needs a limit of the run that is not set."""
    if schedule.over is not None:
        return schedule.over
    limit = getattr(config.run, LIMITS[unit_of(schedule, config)])
    return None if limit is None else float(limit)


def setting_of(config: Config, path: str) -> float | Schedule | None:
    """The number or schedule at ``path`` of `SCHEDULED`; None if the algorithm lacks it.

    A number with ``learning_rate_schedule = "linear"`` is a schedule, and so is the default of
    ``replay.beta`` in a run with a limit (PER, arXiv 1511.05952, section 3.4).
    """
    section, _, key = path.partition(".")
    model = getattr(config, section)
    found: float | Schedule | None = getattr(model, key, None)
    if section == "replay" and config.algorithm.window is None:
        return None
    if key not in type(model).model_fields or type(model).model_fields[key].exclude:
        return None
    if path == "algorithm.learning_rate" and not isinstance(found, Schedule):
        linear = model.learning_rate_schedule == "linear" and schedule_limit(config) is not None
        return Schedule(schedule="linear", start=found, end=0.0) if linear else found
    if path == "replay.beta" and found is None:
        first = config.priority_exponents[1]
        limited = schedule_limit(config) is not None
        anneals = getattr(config.algorithm, "anneals_beta", True) and limited
        return Schedule(schedule="linear", start=first, end=1.0) if anneals else first
    return found


def schedules_of(config: Config) -> dict[str, Schedule]:
    """The settings of a run that follow a schedule, by path; not those without an effect."""
    found = {}
    for path in SCHEDULED:
        schedule = setting_of(config, path)
        unused = path == "replay.beta" and config.replay.selector != "prioritised"
        if isinstance(schedule, Schedule) and not unused:
            found[path] = schedule
    return found


def value_at(config: Config, path: str, elapsed: Elapsed) -> float | None:
    """The value in force of the setting at ``path``; None if the algorithm lacks it.

    Raises:
        RunError: a function fails, or returns a value that the setting does not accept.
    """
    found = setting_of(config, path)
    if not isinstance(found, Schedule):
        return found
    position = float(getattr(elapsed, unit_of(found, config)))
    value = _value(found, position, length_of(found, config), path)
    if not SCHEDULED[path].accept(value):
        message = f"{found.schedule} returned {value!r}"
        raise RunError(path, message, f"{SCHEDULED[path].words} is accepted")
    return value


def settings_at(config: Config, elapsed: Elapsed) -> AlgorithmSettings:
    """The algorithm's settings in force, with a number for every schedule."""
    settings = config.algorithm
    changed = {}
    for path in OF_ALGORITHMS:
        if isinstance(setting_of(config, path), Schedule):
            changed[path.rpartition(".")[2]] = value_at(config, path, elapsed)
    return settings.model_copy(update=changed) if changed else settings


def _value(schedule: Schedule, position: float, length: float | None, path: str) -> float:
    if schedule.schedule == "constant":
        return cast("float", schedule.start)
    if schedule.schedule == "piecewise":
        return _interpolated(cast("tuple[tuple[float, float], ...]", schedule.points), position)
    share = min(1.0, position / cast("float", length))
    if schedule.schedule not in PARTS:
        return _called(schedule.schedule, share, path)
    start, end = cast("float", schedule.start), cast("float", schedule.end)
    if schedule.schedule == "exponential":
        return math.exp(_between(math.log(start), math.log(end), share)) if share < 1.0 else end
    if schedule.schedule == "cosine":
        share = (1.0 - math.cos(math.pi * share)) / 2.0
    return _between(start, end, share)


def _between(start: float, end: float, share: float) -> float:
    """Linear interpolation; rounding does not carry it beyond ``start`` and ``end``."""
    value = start * (1.0 - share) + end * share
    return min(max(value, min(start, end)), max(start, end))


def _interpolated(points: tuple[tuple[float, float], ...], position: float) -> float:
    if position <= points[0][0]:
        return points[0][1]
    for (left, before), (right, after) in pairwise(points):
        if position < right:
            return _between(before, after, (position - left) / (right - left))
    return points[-1][1]


@cache
def _function(name: str, path: str) -> Callable[[float], Any]:
    found: Any = plugins.load_object(name, path=path)
    if not callable(found):
        message = f"is of type {type(found).__name__}, not a function"
        raise ConfigError([Problem(path, name, message, "a function of the progress from 0 to 1")])
    return cast("Callable[[float], Any]", found)


def _called(name: str, share: float, path: str) -> float:
    try:
        return float(_function(name, f"{path}.schedule")(share))
    except Exception as error:  # a user's function may raise anything
        raise RunError(path, f"{name}({share:g}) failed", repr(error)) from error


# Refusals
# --------------------------------------------------------------------------------------------------


def check_schedules(config: Config) -> list[Problem]:
    """Problems of all schedules of ``config``."""
    return [
        problem
        for path, bounds in SCHEDULED.items()
        if isinstance(found := setting_of(config, path), Schedule)
        for problem in _problems(found, path, bounds, config)
    ]


def _problems(found: Schedule, path: str, bounds: Bounds, config: Config) -> Iterator[Problem]:
    if found.schedule not in PARTS and not OBJECT.fullmatch(found.schedule):
        known = tuple(PARTS)
        yield Problem(
            f"{path}.schedule",
            found.schedule,
            "is not a valid choice",
            f"{', '.join(known)}, or module:attribute of a function",
            plugins.nearest(found.schedule, known),
        )
        return
    parts = list(_part_problems(found, path, bounds))
    yield from parts
    if found.schedule == "constant" or parts:
        return
    if found.schedule != "piecewise":
        yield from _length_problems(found, path, config)
    if found.schedule not in PARTS:
        yield from _function_problems(found, path, bounds)
    if config.run.deterministic and unit_of(found, config) == "seconds":
        yield Problem(
            f"{path}.unit",
            "seconds",
            "the value would follow the clock, so a deterministic run could not repeat bit for bit",
            "steps or updates, with over or a limit of the run in this unit",
        )


def _part_problems(found: Schedule, path: str, bounds: Bounds) -> Iterator[Problem]:
    needed = PARTS.get(found.schedule, ())
    unused = {"start", "end", "points"} - set(needed)
    if found.schedule in {"constant", "piecewise"}:
        unused.add("over")
    if found.schedule == "constant":
        unused.add("unit")
    for name in sorted(unused):
        if (value := getattr(found, name)) is not None:
            message = f"has no effect with schedule = {found.schedule!r}"
            yield Problem(f"{path}.{name}", value, message, "a table without it")
    for name in needed:
        value = getattr(found, name)
        if value is None:
            accepted = "[[position, value], ...]" if name == "points" else bounds.words
            yield Problem(f"{path}.{name}", None, "is required", accepted)
        elif name == "points":
            yield from _point_problems(value, path, bounds)
        elif not bounds.accept(value):
            yield Problem(f"{path}.{name}", value, "is out of range", bounds.words)
        elif found.schedule == "exponential" and value == 0.0:
            message = (
                "an exponential schedule multiplies by a constant, and cannot begin or end at 0"
            )
            yield Problem(f"{path}.{name}", value, message, "a number > 0, or linear or cosine")


def _point_problems(
    points: tuple[tuple[float, float], ...], path: str, bounds: Bounds
) -> Iterator[Problem]:
    if not points:
        yield Problem(f"{path}.points", [], "is empty", "[[position, value], ...]")
    for index, (position, value) in enumerate(points):
        before = points[index - 1][0] if index else -math.inf
        if position < 0.0 or position <= before:
            yield Problem(
                f"{path}.points.{index}.0",
                position,
                "is not in order",
                "a position >= 0" if position < 0.0 else f"a position > {before:g}",
            )
        if not bounds.accept(value):
            yield Problem(f"{path}.points.{index}.1", value, "is out of range", bounds.words)


def _length_problems(found: Schedule, path: str, config: Config) -> Iterator[Problem]:
    if length_of(found, config) is not None:
        return
    unit = unit_of(found, config)
    limits = f"run.{LIMITS[unit]}"
    if found.unit is None:
        limits = "one of " + ", ".join(f"run.{name}" for name in LIMITS.values())
    message = "is not set, and the run has no limit that the schedule could reach"
    yield Problem(f"{path}.over", None, message, f"a number of {unit}, or a run with {limits}")


def _function_problems(found: Schedule, path: str, bounds: Bounds) -> Iterator[Problem]:
    where = f"{path}.schedule"
    try:
        function = _function(found.schedule, where)
    except ConfigError as error:
        yield from error.problems
        return
    for share in PROBES:
        accepted = f"a function that returns {bounds.words}"
        try:
            value = function(share)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            yield Problem(
                where, found.schedule, f"raises {error!r} at progress {share:g}", accepted
            )
            return
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not bounds.accept(float(value)):
            message = f"returns {value!r} at progress {share:g}"
            yield Problem(where, found.schedule, message, accepted)
            return
