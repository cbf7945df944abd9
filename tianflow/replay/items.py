"""Items of a shard: windows by number, their draws, and their removal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.replay.observations import Flags
from tianflow.replay.selection import Selector, check_priorities
from tianflow.replay.settings import REASONS, Reason, Tally
from tianflow.replay.sum_tree import Floats, Indices

_NEWEST = np.iinfo(np.int64).max


class Items:
    """Items numbered 0, 1, ... without end, in the order of their first rows.

    The newest ``capacity`` numbers can be resident. The number of an item is its key: place
    ``number % capacity``, generation ``number // capacity``.

    Args:
        capacity: largest number of items.
        selector: factory of the selector, given the capacity.
        state: {leaf: shape} of the float32 recurrent state stored with each item.
        max_samples: draws after which an item is removed; None: without limit.
    """

    def __init__(
        self,
        capacity: int,
        *,
        selector: Callable[[int], Selector],
        state: Mapping[str, tuple[int, ...]],
        max_samples: int | None,
    ) -> None:
        self.capacity, self.selector = capacity, selector(capacity)
        self.head = self.tail = 0
        self.first_row = np.zeros(capacity, np.int64)
        self.length = np.zeros(capacity, np.int64)
        self.version = np.zeros(capacity, np.int64)
        self.draws = np.zeros(capacity, np.int64)
        self.ready = np.zeros(capacity, np.bool_)
        """Complete and not removed: the item can be drawn."""
        self.state = {
            name: np.zeros((capacity, *shape), np.float32) for name, shape in state.items()
        }
        self.greatest_priority = 1.0
        """Largest priority so far, at least 1."""
        self.stale_updates = 0
        self._inserted = self._removed_unsampled = 0
        self._removed: Counter[Reason] = Counter()
        self._max_samples = max_samples
        self._draws_left = 0
        self._oldest = _NEWEST  # lower bound of the versions of ready items

    def __len__(self) -> int:
        return len(self.selector)

    @property
    def nbytes(self) -> int:
        """Memory of the items without the selector, in bytes."""
        arrays = (
            self.first_row,
            self.length,
            self.version,
            self.draws,
            self.ready,
            *self.state.values(),
        )
        return sum(array.nbytes for array in arrays)

    def tally(self) -> Tally:
        """Counts of items."""
        return Tally(
            self._inserted,
            len(self),
            {reason: self._removed[reason] for reason in REASONS},
            self._removed_unsampled,
        )

    def required_tail(self, count: int, tail: int, head: int) -> int:
        """The row (exclusive) up to which rows ``tail .. head - 1`` must be evicted to fit
        ``count`` items.

        A result past ``head`` means that the items never fit.
        """
        if count > self.capacity:
            return head + 1
        over = self.head + count - self.capacity - self.tail
        return (
            tail if over <= 0 else int(self.first_row[(self.tail + over - 1) % self.capacity]) + 1
        )

    def begin(self, first_rows: Indices) -> Indices:
        """Numbers [n] of new windows that begin at ``first_rows`` [n], ascending.

        They are not ready yet. The caller has made room.
        """
        numbers = np.arange(self.head, self.head + len(first_rows))
        places = numbers % self.capacity
        self.first_row[places], self.ready[places], self.draws[places] = first_rows, False, 0
        for leaf in self.state.values():
            leaf[places] = 0.0
        self.head += len(numbers)
        return numbers

    def complete(
        self, numbers: Indices, lengths: Indices, versions: Indices, priorities: Floats
    ) -> None:
        """Make these windows [n] ready. A priority of NaN means the largest so far.

        Raises:
            ValueError: a priority is infinite or negative; nothing has changed.
        """
        if not len(numbers):
            return
        given = ~np.isnan(priorities)
        check_priorities(priorities[given])
        self.greatest_priority = float(priorities[given].max(initial=self.greatest_priority))
        places = numbers % self.capacity
        self.selector.insert(places, np.where(given, priorities, self.greatest_priority))
        self.length[places], self.version[places], self.ready[places] = lengths, versions, True
        self._oldest = min(self._oldest, int(versions.min()))
        self._inserted += len(numbers)
        self._draws_left += len(numbers) * (self._max_samples or 0)

    def evict(self, count: int) -> None:
        """Remove the ``count`` oldest numbers, because their first rows are evicted."""
        places = np.arange(self.tail, self.tail + count) % self.capacity
        self.tail += count
        self.remove(places[self.ready[places]], "capacity")

    def remove(self, places: Indices, reason: Reason) -> None:
        """Remove ready items."""
        if not len(places):
            return
        self.selector.remove(places)
        self.ready[places] = False
        self._removed[reason] += len(places)
        self._removed_unsampled += int(np.count_nonzero(self.draws[places] == 0))
        if self._max_samples is not None:
            self._draws_left -= int(self._max_samples * len(places) - self.draws[places].sum())

    def older_than(self, version: int) -> Indices:
        """Places of the ready items with a step of a version below ``version``."""
        if version <= self._oldest:
            return np.zeros(0, np.int64)
        old = self.ready & (self.version < version)
        self._oldest = int(self.version[self.ready & ~old].min(initial=_NEWEST))
        return np.flatnonzero(old)

    def update(self, keys: Indices, priorities: Floats) -> int:
        """Set priorities [n] of the items ``keys`` [n]. Returns the number of skipped keys.

        Keys of removed items are skipped and counted.

        Raises:
            ValueError: a priority is NaN, infinite or negative; nothing has changed.
        """
        check_priorities(priorities)
        places = keys % self.capacity
        there = (keys >= self.tail) & (keys < self.head) & self.ready[places]
        self.selector.update(places[there], priorities[there])
        self.greatest_priority = float(priorities[there].max(initial=self.greatest_priority))
        skipped = int(np.count_nonzero(~there))
        self.stale_updates += skipped
        return skipped

    def keys(self, places: Indices) -> Indices:
        """Numbers of the items at ``places``."""
        numbers: Indices = self.tail + (places - self.tail) % self.capacity
        return numbers

    def draws_left(self) -> float:
        """Number of draws left; infinite without ``max_samples`` while an item is ready."""
        if self._max_samples is None:
            return np.inf if len(self) else 0.0
        return float(self._draws_left)

    def draw(self, n: int, generator: np.random.Generator) -> tuple[Indices, Floats, Indices]:
        """Draw n items: places [n], probabilities [n] at each draw, and places of the items
        removed.

        An item is removed after its ``max_samples``-th draw. The distribution is that of n draws
        one after the other: draws of a removed item are rejected and repeated. At least n draws
        must be left.
        """
        if self._max_samples is None:
            places, probabilities = self.selector.draw(n, generator)
            np.add.at(self.draws, places, 1)
            return places, probabilities, places[:0]
        drawn, chances, used_up = [], [], []
        while n > 0:
            places, probabilities = self.selector.draw(n, generator)
            accepted = self._within_limit(places, self._max_samples)
            np.add.at(self.draws, places[accepted], 1)
            self._draws_left -= int(np.count_nonzero(accepted))
            spent = np.unique(places[self.draws[places] >= self._max_samples])
            self.remove(spent, "max_samples")
            drawn.append(places[accepted])
            chances.append(probabilities[accepted])
            used_up.append(spent)
            n -= int(np.count_nonzero(accepted))
        return np.concatenate(drawn), np.concatenate(chances), np.concatenate(used_up)

    def _within_limit(self, places: Indices, limit: int) -> Flags:
        """[n] True for the draws, in order, that do not exceed the limit of their item."""
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        nth = np.arange(len(places)) - np.searchsorted(sorted_places, sorted_places)
        accepted = np.zeros(len(places), np.bool_)
        accepted[order] = self.draws[sorted_places] + nth < limit
        return accepted

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """All state, as views."""
        counts = [
            self.head,
            self.tail,
            self._inserted,
            self.stale_updates,
            self._removed_unsampled,
            *(self._removed[r] for r in REASONS),
        ]
        arrays = {
            "counts": np.array(counts, np.int64),
            "greatest_priority": np.array([self.greatest_priority]),
        }
        arrays |= {
            name: getattr(self, name)
            for name in ("first_row", "length", "version", "draws", "ready")
        }
        arrays |= {f"state/{name}": leaf for name, leaf in self.state.items()}
        return arrays | {
            f"selector/{name}": array for name, array in self.selector.snapshot().items()
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the `snapshot` of items of the same sizes."""
        counts = arrays["counts"].tolist()
        self.head, self.tail, self._inserted, self.stale_updates, self._removed_unsampled = counts[
            :5
        ]
        self._removed = Counter(dict(zip(REASONS, counts[5:], strict=True)))
        self.greatest_priority = float(arrays["greatest_priority"][0])
        for name in ("first_row", "length", "version", "draws", "ready"):
            getattr(self, name)[:] = arrays[name]
        for name, leaf in self.state.items():
            leaf[:] = arrays[f"state/{name}"]
        self.selector.restore(
            {
                name.removeprefix("selector/"): array
                for name, array in arrays.items()
                if name.startswith("selector/")
            }
        )
        self._draws_left = int((self._max_samples or 0) * len(self) - self.draws[self.ready].sum())
        self._oldest = int(self.version[self.ready].min(initial=_NEWEST))
