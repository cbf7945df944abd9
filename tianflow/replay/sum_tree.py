"""Masses in a binary tree of sums: drawing in proportion to mass, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
FEW = 512
"""Leaves that are set at once without looking for what they have in common: summing twice is
quicker than finding out.
"""


class SumTree:
    """``capacity`` masses, all 0 at first, and their sums.

    Every inner node is the sum of its two children, computed anew whenever one of them changes:
    nothing is added up over time, so nothing drifts. Everything is float64 and works on batches.

    Args:
        capacity: leaves, at least 1; any number.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: a tree needs at least one leaf")
        self.capacity = capacity
        self._base = 1 << (capacity - 1).bit_length()
        self._depth = self._base.bit_length() - 1
        self._nodes = np.zeros(2 * self._base, np.float64)
        self.leaves: Floats = self._nodes[self._base : self._base + capacity]
        """[capacity] the masses, to be read."""

    @property
    def total(self) -> float:
        """Sum of all masses."""
        return float(self._nodes[1])

    def set(self, indices: Indices, masses: Floats) -> None:
        """Give the leaves ``indices`` [n] their ``masses`` [n] (finite, >= 0). Of several for one
        leaf the last one counts.
        """
        if not len(indices):
            return
        nodes, sums = indices + self._base, self._nodes
        sums[nodes] = masses
        if len(nodes) > FEW:
            nodes.sort()
        for _ in range(self._depth):
            if len(nodes) > FEW:
                nodes = nodes[np.concatenate(([True], nodes[1:] >> 1 != nodes[:-1] >> 1))]
            right = nodes | 1
            nodes >>= 1
            sums[nodes] = sums.take(right - 1) + sums.take(right)

    def find(self, masses: Floats) -> Indices:
        """The leaf that owns each of ``masses`` [n] in [0, total): the first whose prefix sum is
        above it.

        A leaf of mass 0 is never found while the total is above 0: the way down never takes a child
        without mass, however the sums were rounded.
        """
        found = self._down(masses, lambda remaining, left, _: remaining >= left)
        lost = self._nodes.take(found) == 0.0  # rounding left more than there is below some node
        if lost.any():
            found[lost] = self._down(
                masses[lost],
                lambda remaining, left, nodes: (remaining >= left) & (self._nodes[nodes + 1] > 0.0),
            )
        found -= self._base
        return found

    def _down(
        self, masses: Floats, goes_right: Callable[[Floats, Floats, Indices], NDArray[np.bool_]]
    ) -> Indices:
        """From the root to a leaf for each of ``masses`` [n], by ``goes_right(what is left of it,
        mass of the left child, left child)``.
        """
        remaining = np.array(masses, np.float64)
        nodes = np.ones(len(remaining), np.int64)
        for _ in range(self._depth):
            nodes <<= 1
            left = self._nodes.take(nodes)
            right = goes_right(remaining, left, nodes)
            left *= right
            remaining -= left
            nodes += right
        return nodes

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """The leaves; all else follows from them."""
        return {"leaves": self.leaves}

    def restore(self, leaves: Floats) -> None:
        """Take the masses of ``leaves`` [capacity]."""
        self.set(np.arange(self.capacity), leaves)
