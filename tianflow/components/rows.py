"""A slot's arrays by row: taken apart before a trajectory is made, tidied up after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tianflow.envs.vector import StepRow

Arrays = Mapping[str, NDArray[Any]]


@dataclass(slots=True)  # not frozen, as `StepRow`
class Row:
    """One step's places in the slot."""

    observation: dict[str, torch.Tensor]
    """{leaf: [N, *leaf]} that the action is chosen from."""
    seen: dict[str, NDArray[Any]]
    """The same memory as ``observation``."""
    mask: torch.Tensor | None
    start: NDArray[np.bool_]
    action: NDArray[Any]
    action_tensor: torch.Tensor
    """The same memory as ``action``."""
    outcome: StepRow
    state: dict[str, torch.Tensor]
    """{leaf: [N, *leaf]}, recurrent state before the step; empty unless every row has its own."""


def take_apart(arrays: Arrays, *, replayed: bool = False) -> list[Row]:
    """Every row's views, made beforehand, so that a step indexes nothing. ``replayed``: as in `make_layout`."""
    leaves = [name.removeprefix("obs/") for name in arrays if name.startswith("obs/")]
    observations, starts = _by_row({name: list(arrays[f"obs/{name}"]) for name in leaves}), list(arrays["start"])
    tensors = _by_row({name: torch.from_numpy(arrays[f"obs/{name}"]).unbind(0) for name in leaves})
    finals: Sequence[Any] = [{}] * len(arrays["reward"])
    if any(name.startswith("final_obs/") for name in arrays):
        finals = _by_row({name: list(arrays[f"final_obs/{name}"]) for name in leaves})
    masks: Sequence[Any] = [None] * len(starts)
    mask_tensors: Sequence[Any] = masks
    if "action_mask" in arrays:
        masks, mask_tensors = list(arrays["action_mask"]), torch.from_numpy(arrays["action_mask"]).unbind(0)
    written = (arrays["terminated"], arrays["truncated"])
    outcomes = map(StepRow, *written, observations[1:], starts[1:], masks[1:], finals)
    actions = arrays["action"]
    action_tensors = torch.from_numpy(actions).unbind(0)
    return list(map(Row, tensors, observations, mask_tensors, starts, actions, action_tensors, outcomes, _states(arrays, replayed)))


class SlotRows:
    """The rows of the slots that were written last, so that a slot that comes round again is not taken apart again.

    Args:
        replayed: as in `make_layout`.
        most: rows to keep; each takes about 1.5 kB.
    """

    def __init__(self, *, replayed: bool, most: int = 256) -> None:
        self._replayed, self._most, self._count = replayed, most, 0
        self._kept: dict[int, tuple[Arrays, list[Row]]] = {}
        """By the identity of the arrays, which are kept too, so that no others can have it meanwhile."""

    def of(self, arrays: Arrays) -> list[Row]:
        """The rows of ``arrays``: the same list for the same mapping while it is kept."""
        found = self._kept.get(id(arrays))
        if found is not None:
            return found[1]
        rows = take_apart(arrays, replayed=self._replayed)
        while self._kept and self._count + len(rows) > self._most:
            _, oldest = self._kept.pop(next(iter(self._kept)))
            self._count -= len(oldest)
        if len(rows) <= self._most:
            self._kept[id(arrays)] = arrays, rows
            self._count += len(rows)
        return rows


def _states(arrays: Arrays, replayed: bool) -> Sequence[dict[str, torch.Tensor]]:
    names = [name.removeprefix("state/") for name in arrays if name.startswith("state/")] if replayed else []
    rows = {name: torch.from_numpy(arrays[f"state/{name}"]).unbind(0) for name in names}
    return _by_row(rows) if rows else [{}] * len(arrays["reward"])


def _by_row(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    names = tuple(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def blank(arrays: Arrays, length: int) -> None:
    """Rows past ``length`` say nothing and are finite: zeros, the last version, and masks that allow everything."""
    for name, array in arrays.items():
        if name.startswith("state/") or name == "stream":
            continue
        has_last = name.startswith("obs/") or name in ("start", "action_mask")
        array[length + has_last :] = array[length - 1] if name == "version" else name == "action_mask"


def accumulate(arrays: Arrays, length: int, discounted: NDArray[np.float64], discount: float) -> None:
    """R_t = r_t + discount * R_{t-1}, beginning at 0 in each episode; ``discounted`` [N] carries on."""
    over = arrays["terminated"] | arrays["truncated"]
    for t in range(length):
        discounted *= discount
        discounted += arrays["reward"][t]
        arrays["return_so_far"][t] = discounted
        discounted[over[t]] = 0.0
