"""How every benchmark is run: its sides in alternation (A B A B), every sample kept, the load of
others beside each.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.lib import machine

Values = dict[str, float | None]
"""What one sample of one side measured. None: it did not come about, e.g. a target that was not
reached.
"""
RoundValues = Mapping[str, Values]
"""The samples of one round, by side."""


class BenchmarkError(Exception):
    """A benchmark could not be run; says which part of it, and why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is to be measured.

    Attributes:
        quick: prove that everything runs, measure nothing: short windows, easy targets.
        rounds: how often each side is measured.
        scratch: a directory for whatever runs write.
        seconds: of training looked at in each run beside peers, or forecast; None for as many as a
            benchmark takes by itself.
    """

    quick: bool
    rounds: int
    scratch: Path
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the things compared. ``measure`` gets the number of the round; ``warm_up`` runs once
    before, apart from the samples.
    """

    name: str
    measure: Callable[[int], Values]
    warm_up: Callable[[], Values] | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """Sides that take turns in windows shorter than a sample. ``measure`` gets the number of the
    round, and gives a sample of each.
    """

    names: tuple[str, ...]
    measure: Callable[[int], Mapping[str, Values]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient of two values of the same round.

    Attributes:
        of: the quotient, from the values of one round; None when one of the two did not come about.
        aim: what its median should at least be.
        forecast: what theory says of it.
        sides: whose values it needs; None for all of them.
    """

    name: str
    of: Callable[[RoundValues], float | None]
    aim: float | None = None
    forecast: float | None = None
    sides: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What is compared, under which settings, and what is made of it.

    Attributes:
        units: of every value, by name; a value that has none is kept in the JSON and left out of
            the table.
        settings: everything a reader needs to repeat it.
        seeds: of the rounds, in order.
        notes: what must be known to read the table.
    """

    name: str
    title: str
    sides: tuple[Side | Together, ...]
    ratios: tuple[Ratio, ...]
    units: Mapping[str, str]
    settings: Mapping[str, object]
    seeds: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all sides, in order."""
        return tuple(name for side in self.sides for name in side_names(side))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one side. ``round`` is -1 for the warm-up, which counts for nothing."""

    side: str
    round: int
    values: Values
    seconds: float
    load: machine.Load


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of ``count`` of ``asked`` samples; the others did not come about.

    A sample that did not come about counts as endlessly large in the median, which is None when it
    is one of those.
    """

    median: float | None
    low: float | None
    high: float | None
    count: int
    asked: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a benchmark brought to light."""

    benchmark: Benchmark
    samples: tuple[Sample, ...]
    seconds: float
    warm_ups: tuple[Sample, ...] = field(default=())

    def values(self, side: str, name: str) -> list[float | None]:
        """The samples of one value, in the order of the rounds."""
        return [
            sample.values[name]
            for sample in self.samples
            if sample.side == side and name in sample.values
        ]

    def rounds(self) -> Iterator[RoundValues]:
        """The values of each round, by side."""
        for number in sorted({sample.round for sample in self.samples}):
            yield {sample.side: sample.values for sample in self.samples if sample.round == number}


def side_names(side: Side | Together) -> tuple[str, ...]:
    """Of one side, or of those that are measured at once."""
    return side.names if isinstance(side, Together) else (side.name,)


def part(benchmark: Benchmark, text: str) -> Benchmark:
    """Only the sides whose name holds ``text``, and the ratios that need no other; under a name of
    its own, so that it replaces nothing.

    Raises:
        BenchmarkError: there is no such side.
    """
    sides = tuple(
        side for side in benchmark.sides if any(text in name for name in side_names(side))
    )
    if not sides:
        raise BenchmarkError(
            f"no side's name holds {text!r}; there are {', '.join(benchmark.names)}"
        )
    names, everybody = {name for side in sides for name in side_names(side)}, benchmark.names
    ratios = tuple(
        ratio
        for ratio in benchmark.ratios
        if names.issuperset(everybody if ratio.sides is None else ratio.sides)
    )
    return replace(benchmark, name=f"{benchmark.name}-part", sides=sides, ratios=ratios)


def spread(samples: Sequence[float | None]) -> Spread:
    """Median and range of ``samples``."""
    there = [value for value in samples if value is not None]
    middle = (
        statistics.median(math.inf if value is None else value for value in samples)
        if samples
        else math.inf
    )
    return Spread(
        middle if math.isfinite(middle) else None,
        min(there, default=None),
        max(there, default=None),
        len(there),
        len(samples),
    )


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """None when either did not come about, or there is nothing to divide by."""
    return numerator / denominator if numerator is not None and denominator else None


def alternate(
    benchmark: Benchmark,
    rounds: int,
    *,
    patience_s: float,
    say: Callable[[str], None],
    read: Callable[[], machine.Reading] = machine.read_cpu,
    quiet: Callable[[float], float] = machine.wait_until_quiet,
) -> Outcome:
    """Measure every side once in each of ``rounds`` rounds, in the same order, after one warm-up of
    each.

    Before each sample others are waited for, up to ``patience_s`` seconds: what they use is used up
    twice in a benchmark.
    """
    began = time.monotonic()

    def take(number: int, measure: Callable[[], Mapping[str, Values]]) -> list[Sample]:
        if patience_s > 0.0:
            quiet(patience_s)
        before = read()
        found = measure()
        after = read()
        load = machine.load_between(before, after)
        what = "warm-up" if number < 0 else f"round {number + 1} of {rounds}"
        for name, values in found.items():
            say(
                f"{benchmark.name}  {what}  {name}: {_brief(values)}  (others: "
                f"{load.foreign_cores:.2f} cores)"
            )
        return [
            Sample(name, number, values, after.at - before.at, load)
            for name, values in found.items()
        ]

    warm_ups: list[Sample] = []
    samples: list[Sample] = []
    for side in benchmark.sides:
        if isinstance(side, Side) and side.warm_up is not None:
            warm_ups += take(-1, lambda name=side.name, warm_up=side.warm_up: {name: warm_up()})  # type: ignore[misc]
    for number in range(rounds):
        for side in benchmark.sides:
            samples += take(number, lambda side=side, number=number: _measured(side, number))  # type: ignore[misc]
    return Outcome(benchmark, tuple(samples), time.monotonic() - began, tuple(warm_ups))


def _measured(side: Side | Together, number: int) -> Mapping[str, Values]:
    return side.measure(number) if isinstance(side, Together) else {side.name: side.measure(number)}


def _brief(values: Values) -> str:
    return ", ".join(
        f"{name} {'–' if value is None else format(value, '.4g')}" for name, value in values.items()
    )
