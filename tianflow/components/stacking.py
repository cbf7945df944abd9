"""The one copy of the data path: from slots into the learner's batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from tianflow.interfaces import LearnerBatch
from tianflow.payloads import TrajectoryLayout

_ONE_LONGER = ("obs/", "start", "action_mask")


class BatchStacker:
    """Preallocated arrays for B trajectories side by side, pinned when the learner computes on a GPU.

    Args:
        layout: of one trajectory: T steps of N environments.
        trajectories: B.
        device: where batches are wanted.
    """

    def __init__(self, *, layout: TrajectoryLayout, trajectories: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self.trajectories = trajectories
        pinned = device.type == "cuda"
        self._tensors: dict[str, torch.Tensor] = {}
        for field in layout.fields:
            shape = self._stacked_shape(field.name, field.shape)
            self._tensors[field.name] = torch.zeros(shape, dtype=getattr(torch, field.dtype), pin_memory=pinned)
        self._arrays: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in self._tensors.items()}

    def fill(self, index: int, views: Mapping[str, NDArray[Any]], length: int) -> None:
        """Copy one trajectory of ``length`` rows into place ``index``; rows it does not have become zero and not valid."""
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
                rows = length + 1 if name.startswith(_ONE_LONGER) else length
                target[:rows, columns] = source[:rows]
                target[rows:, columns] = 0
                if name == "action_mask":
                    target[rows:, columns] = True  # a mask that forbids everything has no distribution

    def batch(self) -> LearnerBatch:
        """What was filled in, on the learner's device. On a CPU these are the stacker's own arrays, until the next `fill`."""
        if self._device.type == "cpu":
            return LearnerBatch(self._tensors)
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in self._tensors.items()}
        torch.cuda.current_stream(self._device).synchronize()
        return LearnerBatch(moved)

    def _stacked_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name == "version":
            return (shape[0], self.trajectories)
        if name.startswith("state/"):
            return (shape[0] * self.trajectories, *shape[1:])
        return (shape[0], shape[1] * self.trajectories, *shape[2:])
