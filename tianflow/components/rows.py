"""Row views of a slot's arrays, and operations on rows of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.envs.vector import StepRow

Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True)  # not frozen, as `StepRow`
class Row:
    """Views of one step in the slot."""

    observation: dict[str, NDArray[Any]]
    """{leaf: [N, *leaf]} the observation before the action."""
    mask: NDArray[np.bool_] | None
    start: NDArray[np.bool_]
    action: NDArray[Any]
    outcome: StepRow
    state: dict[str, NDArray[Any]]
    """{leaf: [N, *leaf]} recurrent state before the step; empty unless every row stores it."""


def split_rows(arrays: Arrays, *, replayed: bool = False) -> list[Row]:
    """The views of every row, created in advance so that steps do no indexing.

    ``replayed``: as in `make_layout`.
    """
    steps = len(arrays["reward"])
    observations, starts = _by_row(arrays, "obs/", steps + 1), list(arrays["start"])
    masks = list(arrays["action_mask"]) if "action_mask" in arrays else [None] * (steps + 1)
    states = _by_row(arrays, "state/", steps) if replayed else [{}] * steps
    finals = _by_row(arrays, "final_obs/", steps)
    outcomes = map(StepRow, observations[1:], starts[1:], masks[1:], finals)
    return list(map(Row, observations, masks, starts, arrays["action"], outcomes, states))


def _by_row(arrays: Arrays, prefix: str, rows: int) -> list[dict[str, NDArray[Any]]]:
    """{name: row} for each of ``rows``, over all arrays whose name begins with ``prefix``."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in range(rows)]
    for name, array in arrays.items():
        if name.startswith(prefix):
            leaf = name.removeprefix(prefix)
            for row, view in zip(found, array, strict=True):
                row[leaf] = view
    return found


def clear_rows(arrays: Arrays, length: int) -> None:
    """Fill rows past ``length``: zeros, the last version, and masks that allow all actions."""
    for name, array in arrays.items():
        if name.startswith("state/") or name == "stream":
            continue
        has_last = name.startswith("obs/") or name in ("start", "action_mask")
        array[length + has_last :] = (
            array[length - 1] if name == "version" else name == "action_mask"
        )


def accumulate(
    arrays: Arrays, length: int, discounted: NDArray[np.float64], discount: float
) -> None:
    """R_t = r_t + discount * R_{t-1}, from 0 in each episode. ``discounted`` [N] is updated."""
    over = arrays["terminated"] | arrays["truncated"]
    for t in range(length):
        discounted *= discount
        discounted += arrays["reward"][t]
        arrays["return_so_far"][t] = discounted
        discounted[over[t]] = 0.0
