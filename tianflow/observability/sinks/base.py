"""For sinks: the conversion of a history row to named numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tianflow.rundir.history import Row, is_number

_CONTEXT = frozenset({"t", "time", "span_s", "marks", "generation", "learning"})
"""Fields that locate a row in time, or are converted on their own."""
_NAMES: Mapping[str, str] = {
    "mean_return": "rollout/ep_rew_mean",
    "mean_length": "rollout/ep_len_mean",
    "episodes": "rollout/episodes",
    "updates": "train/n_updates",
    "env_steps": "time/total_timesteps",
    "steps_per_s": "time/fps",
    "updates_per_s": "time/updates_per_s",
    "staleness": "balance/staleness",
    "queue": "balance/queue",
    "credits": "balance/credits",
    "dropped": "balance/dropped",
    "violations": "balance/violations",
    "replay": "replay",
}
"""Names of fields in sinks, those of Stable-Baselines3 where it has one. Other fields are
``system/...``.
"""
_EVALUATION: Mapping[str, str] = {"mean_return": "eval/mean_reward"}


class Point(NamedTuple):
    """Named numbers of one time. ``step``: environment steps; ``time``: Unix seconds."""

    step: int
    time: float
    values: Mapping[str, float]


def points(row: Row) -> list[Point]:
    """The evaluations in ``row``, then the numbers of the row. The main evaluation is ``eval/...``,
    a further one ``eval/NAME/...``.

    Learning is ``train/...`` and ``rollout/...``: means over the time since the row before, by the
    names of the statistics. Other numbers are ``time/...``, ``balance/...``, ``replay/...`` and
    ``system/...``, by their paths in the row (``balance/staleness/p99``).
    """
    step, now = int(row["env_steps"]), float(row["time"])
    found = [
        Point(step, now - (float(row["t"]) - float(mark["t"])), dict(_evaluation(mark)))
        for mark in row["marks"]
        if mark["kind"] == "evaluation"
    ]
    values = dict(_learning(row.get("learning") or {}))
    for key, value in row.items():
        if key not in _CONTEXT:
            values |= _numbers(value, _NAMES.get(key, f"system/{key}"))
    return [*found, Point(step, now, values)]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested tables by their dotted paths."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        leaves |= flat(value, path) if isinstance(value, Mapping) and value else {path: value}
    return leaves


def _evaluation(mark: Row) -> Iterator[tuple[str, float]]:
    name = mark.get("name")
    for key, value in mark.items():
        if key not in {"t", "kind", "name"}:
            main = _EVALUATION.get(key, f"eval/{key}")
            yield from _numbers(value, main if name is None else f"eval/{name}/{key}")


def _learning(learning: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, values in learning.items():
        yield from _numbers(values.get("mean"), name)


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, int | float) and is_number(value):
        yield name, float(value)
