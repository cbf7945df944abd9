"""For sinks: the conversion of a history row to named numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tianflow.rundir.history import Row, is_number

_CONTEXT = frozenset({"t", "time", "span_s", "marks", "env_steps", "generation"})
"""Fields that locate a row in time and are not measurements."""


class Point(NamedTuple):
    """Named numbers of one time. ``step``: environment steps; ``time``: Unix seconds."""

    step: int
    time: float
    values: Mapping[str, float]


def points(row: Row) -> list[Point]:
    """The evaluations in ``row``, each as ``evaluation/...``, then the numbers of the row by their
    paths, for example ``staleness/p99``.
    """
    step, now = int(row["env_steps"]), float(row["time"])
    found = [
        Point(
            step,
            now - (float(row["t"]) - float(mark["t"])),
            dict(_numbers(mark, "evaluation", {"t", "kind"})),
        )
        for mark in row["marks"]
        if mark["kind"] == "evaluation"
    ]
    return [*found, Point(step, now, dict(_numbers(row, "", _CONTEXT)))]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested tables by their dotted paths."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        leaves |= flat(value, path) if isinstance(value, Mapping) and value else {path: value}
    return leaves


def _numbers(
    tree: Mapping[str, Any], prefix: str, without: frozenset[str] | set[str]
) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _numbers(value, name, frozenset())
        elif key not in without and is_number(value):
            yield name, float(value)
