"""Selectors: distributions over item indices. All methods work on batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tianflow.replay.sum_tree import Floats, Indices, SumTree


class Selector(Protocol):
    """A set of items with indices 0 .. capacity - 1 from which items are drawn.

    The indices of one call are distinct, except in `update`.
    """

    @property
    def mass(self) -> float:
        """Weight of this selector among several: draws are distributed over selectors in
        proportion.
        """
        ...

    def __len__(self) -> int: ...

    def insert(self, indices: Indices, priorities: Floats) -> None:
        """Add new items [n].

        Raises:
            ValueError: a priority is not finite or negative; nothing has changed.
        """
        ...

    def remove(self, indices: Indices) -> None:
        """Remove items [n] of the set."""
        ...

    def update(self, indices: Indices, priorities: Floats) -> None:
        """Set priorities [n] of items in the set; the last of several for one item counts.

        Raises:
            ValueError: as `insert`.
        """
        ...

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:
        """Indices [n], and the probability [n] with which each was drawn.

        Raises:
            IndexError: the set is empty.
        """
        ...

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """All state, as arrays. They are views and change with the selector."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the `snapshot` of a selector of the same kind and capacity."""
        ...


def check_priorities(priorities: Floats) -> None:
    """Check that priorities are finite and not negative.

    Raises:
        ValueError: names the first priority that is NaN, infinite or negative.
    """
    bad = ~(np.isfinite(priorities) & (priorities >= 0.0))
    if bad.any():
        which = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"priority {which} of {len(priorities)} is {priorities[which]}: a priority must be "
            "finite and at least 0"
        )


def _refuse_empty(count: int) -> None:
    if not count:
        raise IndexError("nothing to draw: the selector holds no items")


class Uniform:
    """Equal probability for every item, independent draws. Priorities are checked and not used.

    Args:
        capacity: number of item indices.
    """

    def __init__(self, capacity: int) -> None:
        self._members = np.zeros(capacity, np.int64)
        self._place = np.full(capacity, -1, np.int64)
        self._count = 0

    @property
    def mass(self) -> float:
        return float(self._count)

    def __len__(self) -> int:
        return self._count

    def insert(self, indices: Indices, priorities: Floats) -> None:
        check_priorities(priorities)
        end = self._count + len(indices)
        self._members[self._count : end] = indices
        self._place[indices] = np.arange(self._count, end)
        self._count = end

    def remove(self, indices: Indices) -> None:
        # The last members fill the holes, so that the members stay contiguous.
        kept = self._count - len(indices)
        places = self._place[indices]
        self._place[indices] = -1
        last = self._members[kept : self._count]
        movers = last[self._place[last] >= 0]
        holes = places[places < kept]
        self._members[holes] = movers
        self._place[movers] = holes
        self._count = kept

    def update(self, indices: Indices, priorities: Floats) -> None:  # noqa: ARG002 - uniform draws ignore priorities
        check_priorities(priorities)

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:
        _refuse_empty(self._count)
        return self._members[generator.integers(0, self._count, n)], np.full(n, 1.0 / self._count)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        return {"members": self._members[: self._count]}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        members = arrays["members"]
        self._place[:] = -1
        self._count = len(members)
        self._members[: self._count] = members
        self._place[members] = np.arange(self._count)


class PrioritisedSelector:
    """Item i with probability ``p_i^alpha / sum_j p_j^alpha``, independent draws (PER, arXiv
    1511.05952, eq. 1).

    An item of priority 0 has no mass for any alpha. It is drawn only if no item has mass; then all
    items are equally probable.

    Args:
        capacity: number of item indices.
        alpha: exponent, finite and >= 0; applied once to each incoming priority.
    """

    def __init__(self, capacity: int, *, alpha: float) -> None:
        if not 0.0 <= alpha < np.inf:
            raise ValueError(f"alpha = {alpha}: must be finite and at least 0 (0 draws uniformly)")
        self._alpha = alpha
        self._tree = SumTree(capacity)
        self._present = Uniform(capacity)

    @property
    def mass(self) -> float:
        return self._tree.total

    def __len__(self) -> int:
        return len(self._present)

    def insert(self, indices: Indices, priorities: Floats) -> None:
        masses = self._masses(priorities)
        self._present.insert(indices, priorities)
        self._tree.set(indices, masses)

    def remove(self, indices: Indices) -> None:
        self._present.remove(indices)
        self._tree.set(indices, np.zeros(len(indices)))

    def update(self, indices: Indices, priorities: Floats) -> None:
        self._tree.set(indices, self._masses(priorities))

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:
        total = self._tree.total
        if total == 0.0:
            return self._present.draw(n, generator)
        indices = self._tree.find(generator.random(n) * total)
        return indices, self._tree.leaves[indices] / total

    def snapshot(self) -> dict[str, NDArray[Any]]:
        return {**self._present.snapshot(), **self._tree.snapshot()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._present.restore(arrays)
        self._tree.restore(arrays["leaves"])

    def _masses(self, priorities: Floats) -> Floats:
        check_priorities(priorities)
        with np.errstate(over="ignore"):  # refused below with a message of its own
            masses: Floats = np.where(priorities > 0.0, np.power(priorities, self._alpha), 0.0)
        if not np.isfinite(masses.sum()):
            raise ValueError(
                f"priority {priorities.max()} to the power {self._alpha} exceeds the range of "
                "float64"
            )
        return masses


class _InOrder:
    """Items in order of insertion, in a log of twice the capacity that is compacted when full."""

    def __init__(self, capacity: int) -> None:
        self._log = np.zeros(2 * capacity, np.int64)
        self._place = np.full(capacity, -1, np.int64)
        self._first = self._end = self._count = 0

    @property
    def mass(self) -> float:
        return float(self._count)

    def __len__(self) -> int:
        return self._count

    def insert(self, indices: Indices, priorities: Floats) -> None:
        check_priorities(priorities)
        if self._end + len(indices) > len(self._log):
            self._compact()
        end = self._end + len(indices)
        self._log[self._end : end] = indices
        self._place[indices] = np.arange(self._end, end)
        self._end, self._count = end, self._count + len(indices)

    def remove(self, indices: Indices) -> None:
        self._place[indices] = -1
        self._count -= len(indices)

    def update(self, indices: Indices, priorities: Floats) -> None:  # noqa: ARG002 - the order ignores priorities
        check_priorities(priorities)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        self._compact()
        return {"order": self._log[: self._end]}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        order = arrays["order"]
        self._place[:] = -1
        self._first, self._end, self._count = 0, len(order), len(order)
        self._log[: len(order)] = order
        self._place[order] = np.arange(len(order))

    def _alive(self, begin: int, end: int) -> Indices:
        """Items of the log between two places that still exist, in order."""
        part = self._log[begin:end]
        alive: Indices = part[self._place[part] == np.arange(begin, end)]
        return alive

    def _compact(self) -> None:
        alive = self._alive(self._first, self._end)
        self._log[: len(alive)] = alive
        self._place[alive] = np.arange(len(alive))
        self._first, self._end = 0, len(alive)

    def _drawn(self, distinct: Indices, n: int) -> tuple[Indices, Floats]:
        return np.resize(distinct, n), np.ones(n)


class Fifo(_InOrder):
    """The n oldest items, in order; repeated from the oldest if the set has fewer. Not random.

    Args:
        capacity: number of item indices.
    """

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:  # noqa: ARG002 - the draw is not random
        _refuse_empty(self._count)
        wanted, end = min(n, self._count), self._first
        found = self._log[:0]
        while len(found) < wanted:
            begin, end = end, min(self._end, end + 2 * n)
            found = np.concatenate((found, self._alive(begin, end)))
        self._first = int(self._place[found[0]])  # all entries before it were removed
        return self._drawn(found[:wanted], n)


class Lifo(_InOrder):
    """The n newest items, newest first; repeated from the newest if the set has fewer. Not random.

    Args:
        capacity: number of item indices.
    """

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:  # noqa: ARG002 - the draw is not random
        _refuse_empty(self._count)
        wanted, begin = min(n, self._count), self._end
        found = self._log[:0]
        while len(found) < wanted:
            end, begin = begin, max(self._first, begin - 2 * n)
            found = np.concatenate((found, self._alive(begin, end)[::-1]))
        self._end = int(self._place[found[0]]) + 1  # all entries after it were removed
        return self._drawn(found[:wanted], n)
