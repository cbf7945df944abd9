"""Sizes of the batches of a GPU's inference server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tianflow.components.device_batch import DeviceBatch

N = 3


class WithoutGpu(DeviceBatch):
    """A `DeviceBatch` that captures nothing.

    Attributes:
        captured: the numbers of observations for which a graph was made.
    """

    def __init__(self) -> None:
        self._n, self._inputs, self._sizes = N, {}, {}
        self.captured: list[int] = []

    def _grow(self, count: int) -> None:
        self._sizes.clear()
        self._inputs = {"noise": torch.zeros(count)}

    def _captured(self, count: int) -> Callable[[], dict[str, Any]]:
        self.captured.append(count)
        return dict


def test_every_size_is_ready_before_the_first_batch() -> None:
    batches = WithoutGpu()
    batches.prepare(5)
    assert sorted(batches.captured) == [N, 2 * N, 4 * N, 8 * N]
    for size in (1, 2, 4, 8):
        batches._prepared(size)
    assert 4 == len(batches.captured)


def test_a_larger_batch_makes_room_and_the_graphs_again() -> None:
    batches = WithoutGpu()
    batches.prepare(2)
    batches.prepare(4)
    assert batches.captured == [2 * N, N, 4 * N, 2 * N, N]
