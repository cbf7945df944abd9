"""What a metric family is, and readers that many of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tianflow.core.statistics import Histogram, RunStatistics

Kind = Literal["counter", "gauge", "histogram"]
Row = tuple[tuple[str, ...], float | Histogram]
Rows = Iterable[Row]
Reader = Callable[[RunStatistics], Rows]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. ``labels`` come after ``run``; ``read`` gives (label values, value or
    distribution) of one run.

    ``name`` has neither the prefix nor the ``_total`` of counters: the exposition adds that.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Reader


def counter(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A number that only grows while its process lives."""
    return Family("counter", name, text, labels, read)


def gauge(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A number as it is now."""
    return Family("gauge", name, text, labels, read)


def histogram(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A distribution that only grows."""
    return Family("histogram", name, text, labels, read)


def one(read: Callable[[RunStatistics], float | None]) -> Reader:
    """One series per run; none while the number does not exist."""

    def rows(run: RunStatistics) -> Rows:
        value = read(run)
        return [] if value is None else [((), value)]

    return rows


def each(read: Callable[[RunStatistics], Mapping[str, float]]) -> Reader:
    """One series per key of a mapping."""
    return lambda run: [((key,), value) for key, value in read(run).items()]


def of_components(kind: Literal["counters", "gauges", "distributions"], key: str) -> Reader:
    """One series per component that has ``key``."""

    def rows(run: RunStatistics) -> Rows:
        for component in run.components:
            values: Mapping[str, float | Histogram] = getattr(component, kind)
            if key in values:
                yield (component.name,), values[key]

    return rows
