"""Which items are drawn: selectors over item indices, one contract, batches in and batches out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tianflow.replay.sum_tree import Floats, Indices, SumTree


class Selector(Protocol):
    """A set of items, numbered 0 .. capacity - 1, of which some are drawn. Indices in one call are
    distinct but in `update`.
    """

    @property
    def mass(self) -> float:
        """What this selector weighs among others of its kind: the probability of drawing from it is
        in proportion.
        """
        ...

    def __len__(self) -> int: ...

    def insert(self, indices: Indices, priorities: Floats) -> None:
        """Add items [n] that are not there. ValueError, and nothing changes, unless all priorities
        [n] are finite and >= 0.
        """
        ...

    def remove(self, indices: Indices) -> None:
        """Take away items [n] that are there."""
        ...

    def update(self, indices: Indices, priorities: Floats) -> None:
        """New priorities [n] of items that are there; of several for one item the last one counts.
        Raises as `insert`.
        """
        ...

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:
        """Indices [n] and the probability [n] with which each was drawn. IndexError if no item is
        there.
        """
        ...

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """All it knows, as arrays; views, so they change with it."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what a selector of the same kind and capacity was at its `snapshot`."""
        ...


def check_priorities(priorities: Floats) -> None:
    """Raise ValueError for the first priority that is NaN, infinite or below 0."""
    bad = ~(np.isfinite(priorities) & (priorities >= 0.0))
    if bad.any():
        which = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"priority {which} of {len(priorities)} is {priorities[which]}: a priority is finite "
            "and at least 0"
        )


def _refuse_empty(count: int) -> None:
    if not count:
        raise IndexError("nothing to draw: no item is there")


class Uniform:
    """Every item with the same probability, independently. Priorities are checked, and otherwise of
    no meaning.

    Args:
        capacity: items are numbered below it.
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
        # The last members move into the holes, so that what is left lies side by side.
        kept = self._count - len(indices)
        places = self._place[indices]
        self._place[indices] = -1
        last = self._members[kept : self._count]
        movers = last[self._place[last] >= 0]
        holes = places[places < kept]
        self._members[holes] = movers
        self._place[movers] = holes
        self._count = kept

    def update(self, indices: Indices, priorities: Floats) -> None:  # noqa: ARG002 - priorities mean nothing here
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


class Prioritised:
    """Item i with probability ``p_i^alpha / sum_j p_j^alpha`` (PER, arXiv 1511.05952, eq. 1),
    independently.

    A priority of 0 has no mass, whatever alpha is: such an item is drawn only if all are so, and
    then each with the same probability.

    Args:
        capacity: items are numbered below it.
        alpha: exponent, finite and >= 0; applied to each priority once, on its way in.
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
        with np.errstate(over="ignore"):  # refused below, by name
            masses: Floats = np.where(priorities > 0.0, np.power(priorities, self._alpha), 0.0)
        if not np.isfinite(masses.sum()):
            raise ValueError(
                f"a priority of {priorities.max()} to the power {self._alpha} is too large for "
                "float64"
            )
        return masses


class _InOrder:
    """Items in the order in which they came, in a log of twice their number that is tidied up when
    it is full.
    """

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
            self._tidy()
        end = self._end + len(indices)
        self._log[self._end : end] = indices
        self._place[indices] = np.arange(self._end, end)
        self._end, self._count = end, self._count + len(indices)

    def remove(self, indices: Indices) -> None:
        self._place[indices] = -1
        self._count -= len(indices)

    def update(self, indices: Indices, priorities: Floats) -> None:  # noqa: ARG002 - priorities mean nothing here
        check_priorities(priorities)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        self._tidy()
        return {"order": self._log[: self._end]}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        order = arrays["order"]
        self._place[:] = -1
        self._first, self._end, self._count = 0, len(order), len(order)
        self._log[: len(order)] = order
        self._place[order] = np.arange(len(order))

    def _alive(self, begin: int, end: int) -> Indices:
        """What is still there of the log between two places, in order."""
        part = self._log[begin:end]
        alive: Indices = part[self._place[part] == np.arange(begin, end)]
        return alive

    def _tidy(self) -> None:
        alive = self._alive(self._first, self._end)
        self._log[: len(alive)] = alive
        self._place[alive] = np.arange(len(alive))
        self._first, self._end = 0, len(alive)

    def _drawn(self, distinct: Indices, n: int) -> tuple[Indices, Floats]:
        return np.resize(distinct, n), np.ones(n)


class Fifo(_InOrder):
    """The n items that came first, in order; from the first again if there are fewer. Nothing is
    random.

    Args:
        capacity: items are numbered below it.
    """

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:  # noqa: ARG002 - nothing is random
        _refuse_empty(self._count)
        wanted, end = min(n, self._count), self._first
        found = self._log[:0]
        while len(found) < wanted:
            begin, end = end, min(self._end, end + 2 * n)
            found = np.concatenate((found, self._alive(begin, end)))
        self._first = int(self._place[found[0]])  # what lies before it is gone for ever
        return self._drawn(found[:wanted], n)


class Lifo(_InOrder):
    """The n items that came last, the last one first; from it again if there are fewer. Nothing is
    random.

    Args:
        capacity: items are numbered below it.
    """

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats]:  # noqa: ARG002 - nothing is random
        _refuse_empty(self._count)
        wanted, begin = min(n, self._count), self._end
        found = self._log[:0]
        while len(found) < wanted:
            end, begin = begin, max(self._first, begin - 2 * n)
            found = np.concatenate((found, self._alive(begin, end)[::-1]))
        self._end = int(self._place[found[0]]) + 1  # what lies behind it is gone for ever
        return self._drawn(found[:wanted], n)
