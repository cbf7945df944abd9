"""Helpers to measure how far two policies differ on the states of a batch.

`tianflow.interfaces.MeasuresDivergence` has the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tianflow.algorithms.common.update import Tree, subtree

if TYPE_CHECKING:
    from tianflow.algorithms.common.model import ActorCriticModel
    from tianflow.algorithms.common.off_policy_models import QModel


class States(NamedTuple):
    """States on which two policies are compared, time first: [rows, columns, ...].

    ``state`` [columns, ...] belongs to the first row. ``mask`` is None without action masks. Only
    rows where ``valid`` count.
    """

    observation: Tree
    state: Tree
    start: Tensor
    mask: Tensor | None
    valid: Tensor


def copy_weights(
    source: ActorCriticModel | QModel[Any], into: ActorCriticModel | QModel[Any]
) -> None:
    """Make ``into`` the same policy as ``source``, with its own copy of weights and normalisers."""
    into.buffer.bytes.copy_(source.buffer.bytes)
    into.observations.refresh()


def spread(places: Tensor, most: int) -> Tensor:
    """At most ``most`` of ``places`` [n], evenly spaced, in their order."""
    count = places.numel()
    if count <= most:
        return places
    return places[torch.arange(most, device=places.device) * count // most]


def chosen_transitions(arrays: Tree, most: int) -> States:
    """At most ``most`` valid transitions of a batch (`LearnerBatch`), in one row.

    For networks without recurrent state.
    """
    valid = arrays["valid"]
    places = spread(valid.flatten().nonzero().squeeze(1), most)

    def pick(rows: Tensor) -> Tensor:
        return rows[: valid.shape[0]].flatten(0, 1).index_select(0, places).unsqueeze(0)

    mask = arrays.get("action_mask")
    return States(
        observation={name: pick(leaf) for name, leaf in subtree(arrays, "obs/").items()},
        state={},
        start=pick(arrays["start"]),
        mask=None if mask is None else pick(mask),
        valid=pick(valid),
    )


def chosen_columns(arrays: Tree, most: int) -> States:
    """Whole columns of a batch, from their stored states on, with at most ``most`` rows in all.

    At least one column is chosen. It is cut if it is longer than ``most``.
    """
    valid = arrays["valid"]
    rows = min(valid.shape[0], most)
    columns = spread(valid[:rows].any(0).nonzero().squeeze(1), most // rows)

    def pick(table: Tensor) -> Tensor:
        return table[:rows].index_select(1, columns)

    mask = arrays.get("action_mask")
    return States(
        observation={name: pick(leaf) for name, leaf in subtree(arrays, "obs/").items()},
        state={
            name: leaf.index_select(0, columns) for name, leaf in subtree(arrays, "state/").items()
        },
        start=pick(arrays["start"]),
        mask=None if mask is None else pick(mask),
        valid=pick(valid),
    )
