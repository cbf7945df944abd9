"""Harness of all benchmarks: sides alternate (A B A B), every sample is recorded, and each sample
carries the load of other processes.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.lib import machine

Values = dict[str, float | None]
"""Values of one sample of one side. None: the value does not exist, e.g. for a target that was not
reached.
"""
RoundValues = Mapping[str, Values]
"""Samples of one round, by side."""


class BenchmarkError(Exception):
    """Raised when a benchmark cannot run. The message names the part and the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a measurement.

    Attributes:
        quick: only prove that everything runs, with short windows and easy targets.
        rounds: number of samples of each side.
        scratch: directory for the files of runs.
        seconds: length of training in each run of the benchmarks with peers and of forecast. None:
            the benchmark chooses it.
        minutes: length of the storm, or of the faults of nodes. None: the benchmark chooses it.
    """

    quick: bool
    rounds: int
    scratch: Path
    seconds: float | None = None
    minutes: float | None = None


def require_atari() -> None:
    """Check that the Arcade Learning Environment is there.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    if importlib.util.find_spec("ale_py") is None:
        raise BenchmarkError("ale-py is not installed: pip install -e '.[bench]'")


def require_gpu(plan: Plan) -> None:
    """Check that there is a GPU. A quick run of ``plan`` needs none.

    Raises:
        BenchmarkError: this machine has no NVIDIA GPU.
    """
    if not plan.quick and not Path("/dev/nvidiactl").exists():
        raise BenchmarkError("this machine has no NVIDIA GPU")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison. ``measure`` gets the number of the round. ``warm_up`` runs once
    before the rounds, and its values are not samples.
    """

    name: str
    measure: Callable[[int], Values]
    warm_up: Callable[[], Values] | None = None


@dataclass(frozen=True, slots=True)
class Together:
    """Several sides that take turns in windows shorter than a sample. ``measure`` gets the number
    of the round and returns a sample of each side.
    """

    names: tuple[str, ...]
    measure: Callable[[int], Mapping[str, Values]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Quotient of two values of the same round.

    Attributes:
        of: computes the quotient from the values of one round. None: one of the two is missing.
        aim: lower limit that the median should reach.
        forecast: value that theory predicts.
        sides: sides whose values it needs. None: all of them.
    """

    name: str
    of: Callable[[RoundValues], float | None]
    aim: float | None = None
    forecast: float | None = None
    sides: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Sides of a comparison, their settings, and the ratios derived from them.

    Attributes:
        units: unit of each value, by name. A value without a unit stays in the JSON document and is
            not in the table.
        settings: everything that a reader needs to repeat the benchmark.
        seeds: seeds of the rounds, in order.
        notes: facts that a reader of the table needs. A benchmark may add to them while it runs.
    """

    name: str
    title: str
    sides: tuple[Side | Together, ...]
    ratios: tuple[Ratio, ...]
    units: Mapping[str, str]
    settings: Mapping[str, object]
    seeds: tuple[int, ...] = ()
    notes: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all sides, in order."""
        return tuple(name for side in self.sides for name in side_names(side))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one side. ``round`` is -1 for a warm-up, which does not count."""

    side: str
    round: int
    values: Values
    seconds: float
    load: machine.Load


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of ``count`` of ``asked`` samples. The other samples are missing.

    A missing sample counts as infinite in the median. The median is None if it falls on such a
    sample.
    """

    median: float | None
    low: float | None
    high: float | None
    count: int
    asked: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All samples of a benchmark."""

    benchmark: Benchmark
    samples: tuple[Sample, ...]
    seconds: float
    warm_ups: tuple[Sample, ...] = field(default=())
    interrupted: bool = False
    """The last round may lack sides."""

    def values(self, side: str, name: str) -> list[float | None]:
        """Return the samples of one value, in the order of the rounds."""
        return [
            sample.values[name]
            for sample in self.samples
            if sample.side == side and name in sample.values
        ]

    def rounds(self) -> Iterator[RoundValues]:
        """Yield the values of each round, by side."""
        for number in sorted({sample.round for sample in self.samples}):
            yield {sample.side: sample.values for sample in self.samples if sample.round == number}


def side_names(side: Side | Together) -> tuple[str, ...]:
    """Return the name of a side, or the names of sides that are measured together."""
    return side.names if isinstance(side, Together) else (side.name,)


def part(benchmark: Benchmark, text: str) -> Benchmark:
    """Select the sides whose name contains ``text``, and the ratios that need no other side.

    The result has a name of its own, so that it does not replace the whole benchmark's results.

    Raises:
        BenchmarkError: no side's name contains ``text``.
    """
    sides = tuple(
        side for side in benchmark.sides if any(text in name for name in side_names(side))
    )
    if not sides:
        raise BenchmarkError(
            f"no side's name contains {text!r} (expected a part of {', '.join(benchmark.names)})"
        )
    names, all_names = {name for side in sides for name in side_names(side)}, benchmark.names
    ratios = tuple(
        ratio
        for ratio in benchmark.ratios
        if names.issuperset(all_names if ratio.sides is None else ratio.sides)
    )
    return replace(benchmark, name=f"{benchmark.name}-part", sides=sides, ratios=ratios)


def spread(samples: Sequence[float | None]) -> Spread:
    """Return the median and the range of ``samples``."""
    known = [value for value in samples if value is not None]
    middle = (
        statistics.median(math.inf if value is None else value for value in samples)
        if samples
        else math.inf
    )
    return Spread(
        middle if math.isfinite(middle) else None,
        min(known, default=None),
        max(known, default=None),
        len(known),
        len(samples),
    )


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """Divide. None if a value is missing or the denominator is zero."""
    return numerator / denominator if numerator is not None and denominator else None


def alternate(
    benchmark: Benchmark,
    rounds: int,
    *,
    patience_s: float,
    log: Callable[[str], None],
    read: Callable[[], machine.Reading] = machine.read_cpu,
    quiet: Callable[[float], float] = machine.wait_until_quiet,
) -> Outcome:
    """Measure every side once in each of ``rounds`` rounds, always in the same order, after one
    warm-up of each.

    Before each sample it waits up to ``patience_s`` seconds until other processes are idle. Their
    load would distort the ratios. Ctrl-C ends it, and the samples so far remain.
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
            log(
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
    interrupted = False
    try:
        for number in range(rounds):
            for side in benchmark.sides:
                samples += take(number, lambda side=side, number=number: _measured(side, number))  # type: ignore[misc]
    except KeyboardInterrupt:
        if not samples:
            raise
        interrupted = True
        note = f"Interrupted in round {number + 1} of {rounds}, before it had measured all sides."
        benchmark = replace(benchmark, notes=(*benchmark.notes, note))
    seconds = time.monotonic() - began
    return Outcome(benchmark, tuple(samples), seconds, tuple(warm_ups), interrupted)


def _measured(side: Side | Together, number: int) -> Mapping[str, Values]:
    return side.measure(number) if isinstance(side, Together) else {side.name: side.measure(number)}


def _brief(values: Values) -> str:
    return ", ".join(
        f"{name} {'–' if value is None else format(value, '.4g')}" for name, value in values.items()
    )
