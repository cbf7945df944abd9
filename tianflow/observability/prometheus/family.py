"""Metric families, and the readers that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tianflow.core.metrics import Kind
from tianflow.core.statistics import Histogram, RunStatistics

Row = tuple[tuple[str, ...], float | Histogram]
Rows = Iterable[Row]
Reader = Callable[[RunStatistics], Rows]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. ``labels`` come after ``run``; ``read`` gives (label values, value or
    histogram) of one run.

    ``name`` has neither the prefix nor the ``_total`` of counters: the exposition adds them.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Reader


def gauge(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A family of current values."""
    return Family("gauge", name, text, labels, read)


def counter(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A family of values that only grow while their process lives."""
    return Family("counter", name, text, labels, read)


def one(read: Callable[[RunStatistics], float | None]) -> Reader:
    """One series per run; none while the value does not exist."""

    def rows(run: RunStatistics) -> Rows:
        value = read(run)
        return [] if value is None else [((), value)]

    return rows
