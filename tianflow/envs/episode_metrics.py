"""Metrics of episodes: the ``metrics`` in the info of the step that ends an episode.

    info["metrics"] = {"success": 1.0, "distance": 3.2}

A synchronous vector brings the tables of its environments as they are (`merge`). Other vectors
bring one table of arrays, as Gymnasium merges infos, or one table for each environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "metrics"
FINAL = "final_info"
"""Key of the infos before a reset in the same step."""
Metrics = Mapping[str, object]


class _ByEnvironment(dict[int, Any]):
    """Metrics as environments gave them, by the environment's place in its vector."""


def merge(infos: dict[str, Any], info: Mapping[str, Any], index: int) -> None:
    """Add the metrics in the ``info`` of environment ``index`` to the ``infos`` of its vector.

    The info before a reset is the one that counts, and it comes first.
    """
    last = info.get(FINAL)
    if isinstance(last, Mapping):
        infos.setdefault(KEY, _ByEnvironment())[index] = last.get(KEY, {})
    elif KEY in info:
        infos.setdefault(KEY, _ByEnvironment()).setdefault(index, info[KEY])


def metrics_in(infos: Mapping[str, Any], environments: list[int]) -> dict[int, Metrics]:
    """The metrics in the ``infos`` of a vector for those ``environments`` whose episode has ended.

    A value that is not a table appears as a metric of its own name, and is refused as one.
    """
    last = infos.get(FINAL)
    source = last if isinstance(last, Mapping) and KEY in last else infos
    given = source.get(KEY)
    if given is None:
        return {}
    present = source.get(f"_{KEY}")
    found: dict[int, Metrics] = {}
    for index in environments:
        try:
            if present is None or present[index]:
                metrics = _of(given, index)
                found[index] = dict(metrics) if isinstance(metrics, Mapping) else {KEY: metrics}
        except (IndexError, KeyError, TypeError, ValueError):
            found[index] = {KEY: given}
    return {index: metrics for index, metrics in found.items() if metrics}


def _of(given: Any, index: int) -> Any:
    """What ``given`` has for environment ``index``: a table if it is a valid one."""
    if isinstance(given, _ByEnvironment):
        return given.get(index, {})
    if not isinstance(given, Mapping):
        return given[index]
    found = {}
    for name, values in given.items():
        if isinstance(name, str) and name.startswith("_") and name[1:] in given:
            continue  # the mask of another metric
        mask = given.get(f"_{name}")
        if mask is None or mask[index]:
            found[name] = values[index]
    return found
