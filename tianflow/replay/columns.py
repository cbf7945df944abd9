"""Step columns of a shard: a ring of rows with every array but the observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.replay.fragments import Fragment, Placed, windows_over
from tianflow.replay.observations import Flags
from tianflow.replay.settings import REASONS, Reason, ShardSettings, Tally
from tianflow.replay.sum_tree import Indices

Array = NDArray[Any]


class Columns:
    """Rows numbered 0, 1, ... without end. Rows ``tail .. head - 1`` exist; row r is at ``r %
    size``.

    Args:
        settings: settings of the shard.
        estimates: names of float32 columns for initial priorities.
    """

    def __init__(self, settings: ShardSettings, estimates: Sequence[str]) -> None:
        self.size = settings.capacity
        self.head = self.tail = 0
        self._length, self._period = settings.length, settings.period
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "action": settings.action,
            "reward": ((), "float32"),
            "terminated": ((), "bool"),
            "truncated": ((), "bool"),
            "version": ((), "int64"),
            **{name: (shape, dtype) for name, shape, dtype in settings.extras},
            **dict.fromkeys(estimates, ((), "float32")),
        }
        self.steps: dict[str, Array] = {
            name: np.zeros((self.size, *shape), dtype) for name, (shape, dtype) in shapes.items()
        }
        """Arrays of each step, as in a fragment."""
        self.start = np.zeros(self.size, np.bool_)
        self.follower = np.full(self.size, -1, np.int64)
        """Place of the observation after a step; -1 after a termination and in rows without a
        step.
        """
        self.item = np.full(self.size, -1, np.int64)
        """Number of the item that begins at a row; -1 without one."""
        self._windows = np.zeros(self.size, np.int32)
        self._resident = np.zeros(self.size, np.bool_)
        self._drawn = np.zeros(self.size, np.bool_)
        self._inserted = self._removed_unsampled = 0
        self._removed: Counter[Reason] = Counter()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    def tally(self) -> Tally:
        """Counts of steps."""
        removed = {reason: self._removed[reason] for reason in REASONS}
        return Tally(
            self._inserted, self._inserted - sum(removed.values()), removed, self._removed_unsampled
        )

    def evict(self, end: int) -> int:
        """Remove the rows before ``end``. Returns the number of items that begin there."""
        places = np.arange(self.tail, end) % self.size
        self._remove(places[self._resident[places]], "capacity")
        self.tail = end
        return int(np.count_nonzero(self.item[places] >= 0))

    def append(self, fragment: Fragment, placed: Placed, valid: Flags) -> None:
        """Write the steps of a fragment to their rows, new and open ones."""
        new = (placed.new.first + np.arange(len(placed.new))) % self.size
        self.follower[new], self.item[new], self.start[new], self._windows[new] = -1, -1, False, 0
        self._resident[new] = self._drawn[new] = False
        self.head += len(new)
        places = placed.step[valid] % self.size
        for name, column in self.steps.items():
            given = fragment.rows(name)
            column[places] = (
                given[valid]
                if name != "version"
                else np.broadcast_to(given[:, None], valid.shape)[valid]
            )
        follower = placed.follower[valid]
        self.start[places] = fragment.rows("start")[valid]
        self.follower[places] = np.where(follower >= 0, follower % self.size, -1)
        self._windows[places] = windows_over(
            placed.position[valid], length=self._length, period=self._period
        )
        self._resident[places] = True
        self._inserted += len(places)

    def is_step(self, places: Indices) -> Flags:
        """[n] True for rows that hold a step that an item may need."""
        resident: Flags = self._resident[places]
        return resident

    def walk(self, first: Indices) -> Indices:
        """Places [L+1, W] of the observations of windows that begin at the places ``first`` [W].

        After the last step comes its next observation (after a termination, its own observation).
        That place repeats to the end, so a shorter window ends where its steps end.
        """
        places = np.empty((self._length + 1, len(first)), np.int64)
        places[0] = now = first
        for k in range(self._length):
            follower = self.follower[now]
            places[k + 1] = now = np.where(follower >= 0, follower, now)
        return places

    def mark_drawn(self, places: Indices) -> None:
        """Record that a draw included these steps."""
        self._drawn[places] = True

    def release(self, places: Indices, reason: Reason) -> None:
        """Reduce the window count of each of these steps [n]; remove those in no window."""
        np.subtract.at(self._windows, places, 1)
        places = np.unique(places)
        self._remove(places[(self._windows[places] == 0) & self._resident[places]], reason)

    def _remove(self, places: Indices, reason: Reason) -> None:
        self._resident[places] = False
        self._removed[reason] += len(places)
        self._removed_unsampled += int(np.count_nonzero(~self._drawn[places]))

    def _arrays(self) -> dict[str, Array]:
        own = {"start": self.start, "follower": self.follower, "item": self.item}
        own |= {"windows": self._windows, "resident": self._resident, "drawn": self._drawn}
        return own | {f"steps/{name}": column for name, column in self.steps.items()}

    def snapshot(self) -> dict[str, Array]:
        """All state, as views."""
        counts = [
            self.head,
            self.tail,
            self._inserted,
            self._removed_unsampled,
            *(self._removed[reason] for reason in REASONS),
        ]
        return {**self._arrays(), "counts": np.array(counts, np.int64)}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load the `snapshot` of columns of the same sizes."""
        for name, array in self._arrays().items():
            array[:] = arrays[name]
        self.head, self.tail, self._inserted, self._removed_unsampled, *removed = arrays[
            "counts"
        ].tolist()
        self._removed = Counter(dict(zip(REASONS, removed, strict=True)))
