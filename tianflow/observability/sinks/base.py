"""`Sink`, the contract of sinks, and the conversion of a history row to named numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tianflow.rundir.history import Row, is_number

_CONTEXT = frozenset({"t", "time", "span_s", "marks", "env_steps", "generation"})
"""Fields that locate a row in time and are not measurements."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run of a sink. ``config`` holds every setting at the start, ready for JSON."""

    id: str
    directory: Path
    config: Mapping[str, Any]


class Sink(Protocol):
    """Receives the history of a run. ``factory(run=SinkRun, **kwargs)`` makes it, in a thread of
    its own, which also uses and closes it.

    A sink may block. If it raises, it is closed and receives no more rows. A factory may name the
    ``packages`` that it imports and the ``extra`` that installs them; a run checks for them before
    it starts.
    """

    def write(self, row: Row) -> None:
        """Write one row; see `tianflow.rundir.history.Row`. The times of rows differ, but a resumed
        run may go back in steps.
        """

    def close(self) -> None:
        """Close after the last row."""


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
