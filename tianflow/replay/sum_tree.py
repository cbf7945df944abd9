"""Sum tree: draws in proportion to mass, in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
FEW = 512
"""Leaves that are set at once without removing duplicate parents; summing twice is faster."""


class SumTree:
    """``capacity`` masses, initially 0, and their sums in a binary tree.

    Every inner node is recomputed from its two children when one changes, so rounding errors do not
    accumulate. All values are float64.

    Args:
        capacity: number of leaves, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: a tree needs at least one leaf")
        self.capacity = capacity
        self._base = 1 << (capacity - 1).bit_length()
        self._depth = self._base.bit_length() - 1
        self._nodes = np.zeros(2 * self._base, np.float64)
        self.leaves: Floats = self._nodes[self._base : self._base + capacity]
        """[capacity] the masses. Read-only."""

    @property
    def total(self) -> float:
        """Sum of all masses."""
        return float(self._nodes[1])

    def set(self, indices: Indices, masses: Floats) -> None:
        """Set the leaves ``indices`` [n] to ``masses`` [n] (finite, >= 0).

        The last of several masses for one leaf counts.
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
        """The leaf of each of ``masses`` [n] in [0, total): the first whose prefix sum exceeds it.

        A leaf of mass 0 is never found while the total is above 0. The search never enters a child
        without mass, whatever the rounding.
        """
        found = self._descend(masses, lambda remaining, left, _: remaining >= left)
        lost = self._nodes.take(found) == 0.0  # rounding left a remainder above the mass of a node
        if lost.any():
            found[lost] = self._descend(
                masses[lost],
                lambda remaining, left, nodes: (remaining >= left) & (self._nodes[nodes + 1] > 0.0),
            )
        found -= self._base
        return found

    def _descend(
        self, masses: Floats, goes_right: Callable[[Floats, Floats, Indices], NDArray[np.bool_]]
    ) -> Indices:
        """Descend from the root to a leaf for each of ``masses`` [n].

        ``goes_right`` gets the remaining mass, the mass of the left child, and the left child.
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
        """The leaves; the sums follow from them."""
        return {"leaves": self.leaves}

    def restore(self, leaves: Floats) -> None:
        """Load the masses ``leaves`` [capacity]."""
        self.set(np.arange(self.capacity), leaves)
