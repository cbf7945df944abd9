"""Stackers: the single copy of the data path, from slots to the learner's batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tianflow.core.payloads import TrajectoryLayout
from tianflow.interfaces import LearnerBatch

_ONE_LONGER = ("obs/", "start", "action_mask")


class BatchStacker:
    """Preallocated arrays for B trajectories side by side; pinned memory if the learner uses a GPU.

    Args:
        layout: layout of one trajectory: T steps of N environments.
        trajectories: B.
        device: device of the batches.
    """

    def __init__(
        self, *, layout: TrajectoryLayout, trajectories: int, device: torch.device
    ) -> None:
        self._layout, self._device = layout, device
        self.trajectories = trajectories
        pinned = device.type == "cuda"
        self._tensors: dict[str, torch.Tensor] = {}
        for field in layout.fields:
            shape = stacked_shape(field.name, field.shape, trajectories)
            self._tensors[field.name] = torch.zeros(
                shape, dtype=getattr(torch, field.dtype), pin_memory=pinned
            )
        self._arrays: dict[str, NDArray[Any]] = {
            name: tensor.numpy() for name, tensor in self._tensors.items()
        }

    def fill(self, index: int, views: Mapping[str, NDArray[Any]], length: int) -> None:
        """Copy one trajectory of ``length`` rows to place ``index``. Missing rows become zero, not
        valid.
        """
        n, whole = self._layout.num_envs, length == self._layout.steps
        columns = slice(index * n, (index + 1) * n)
        for name, source in views.items():
            target = self._arrays[name]
            if name.startswith("state/"):
                target[columns] = source
            elif name == "version":
                target[:length, index] = source[:length]
                target[length:, index] = source[length - 1]
            elif whole:
                target[:, columns] = source
            else:
                rows = rows_of(name, length)
                target[:rows, columns] = source[:rows]
                target[rows:, columns] = 0
                if name == "action_mask":
                    # a mask without allowed actions has no distribution
                    target[rows:, columns] = True

    def batch(self) -> LearnerBatch:
        """The filled batch on the learner's device.

        On a CPU it refers to the stacker's own arrays, which the next `fill` overwrites.
        """
        return on_device(self._tensors, self._device)


class DrawStacker:
    """Stacker for draws from replay: one slot holds a whole batch.

    Args:
        layout: layout of a draw, from `tianflow.core.layout.make_draw_layout`.
        device: device of the batches.
        items: the items of the draw that are copied; None: all.
    """

    trajectories = 1

    def __init__(
        self, *, layout: TrajectoryLayout, device: torch.device, items: slice | None = None
    ) -> None:
        self._device = device
        chosen = slice(0, layout.num_envs) if items is None else items
        fields = [field for field in layout.fields if field.name not in NOT_TRAINED_ON]
        pinned = device.type == "cuda"
        self._chosen = {f.name: of_items(f.name, chosen) for f in fields}
        self._tensors = {
            f.name: torch.zeros(
                np.empty(f.shape, np.bool_)[self._chosen[f.name]].shape,
                dtype=getattr(torch, f.dtype),
                pin_memory=pinned,
            )
            for f in fields
        }
        self._arrays: dict[str, NDArray[Any]] = {
            name: tensor.numpy() for name, tensor in self._tensors.items()
        }

    def fill(self, index: int, views: Mapping[str, NDArray[Any]], length: int) -> None:  # noqa: ARG002 - as `BatchStacker.fill`
        """Copy the draw in ``views``."""
        for name, target in self._arrays.items():
            np.copyto(target, views[name][self._chosen[name]])

    def batch(self) -> LearnerBatch:
        """The copied batch on the learner's device.

        On a CPU it refers to the stacker's own arrays, which the next `fill` overwrites.
        """
        return on_device(self._tensors, self._device)


def stacked_shape(name: str, shape: tuple[int, ...], trajectories: int) -> tuple[int, ...]:
    """Shape of the field ``name`` of so many ``trajectories`` side by side."""
    if name == "version":
        return (shape[0], trajectories)
    if name.startswith("state/"):
        return (shape[0] * trajectories, *shape[1:])
    return (shape[0], shape[1] * trajectories, *shape[2:])


def rows_of(name: str, length: int) -> int:
    """Rows of the field ``name`` in a trajectory of ``length`` steps."""
    return length + 1 if name.startswith(_ONE_LONGER) else length


def of_items(name: str, items: slice) -> tuple[slice, ...]:
    """Index of ``items`` in the field ``name`` of a draw: on its first axis, or after time."""
    first = name in ("version", "weight") or name.startswith("state/")
    return (items,) if first else (slice(None), items)


NOT_TRAINED_ON = ("key", "probability", "priority")
"""Fields of a draw for replay and exchange, not for the algorithm."""


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> LearnerBatch:
    """``tensors`` themselves on a CPU, copies on another device."""
    if device.type == "cpu":
        return LearnerBatch(tensors)
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    torch.cuda.current_stream(device).synchronize()
    return LearnerBatch(moved)
