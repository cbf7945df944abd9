"""What a sink is, and how a row of history becomes numbers with names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tianflow.rundir.history import Row, is_number

_ABOUT = frozenset({"t", "time", "span_s", "marks", "env_steps", "generation"})
"""What says when a row was, and nothing of how the run did."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run that a sink is told about. ``config``: every setting in force at the start,
    JSON-ready.
    """

    id: str
    directory: Path
    config: Mapping[str, Any]


class Sink(Protocol):
    """Takes a run's history. Made by ``factory(run=SinkRun, **kwargs)``, used and closed in a
    thread of its own.

    It may wait as long as it likes, and raise: it is closed then, and gets nothing more. A factory
    may name the ``packages`` that it imports, and the ``extra`` that installs them; whether they
    are there is then known before a run starts.
    """

    def write(self, row: Row) -> None:
        """One row, as `tianflow.rundir.history.Row` describes it; no two are of one time, but a
        resumed run may go back in steps.
        """

    def close(self) -> None:
        """Nothing more will come."""


class Point(NamedTuple):
    """Numbers of one moment, by name. ``step``: environment steps; ``time``: Unix seconds."""

    step: int
    time: float
    values: Mapping[str, float]


def points(row: Row) -> list[Point]:
    """The evaluations in ``row``, each under ``evaluation/...``, and then its numbers, named as the
    row names them: ``staleness/p99``.
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
    return [*found, Point(step, now, dict(_numbers(row, "", _ABOUT)))]


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
