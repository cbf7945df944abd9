"""fragments -> Shard -> batches of windows.

Steps are in preallocated columns, and items refer to them. The memory never grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.errors import WouldBlock
from tianflow.replay.fragments import Flow, Fragment, Placed, StepStream, complete, flow
from tianflow.replay.observations import Flags
from tianflow.replay.selection import Selector, Uniform
from tianflow.replay.sequences import InitialPriority, RunningMaximum
from tianflow.replay.settings import DrawnItems, Inserted, ShardSettings, ShardStatistics
from tianflow.replay.store import StepStore, with_prefix
from tianflow.replay.sum_tree import Floats, Indices

Array = NDArray[Any]


@dataclass(slots=True)
class _StreamPosition:
    """Position of the N environments of a stream; the last H = length - 1 steps are known."""

    stream: StepStream
    number: int
    """Number of the last fragment."""
    open_rows: Indices
    """[N] rows of the observations before the next steps; -1 where an episode ended."""
    positions: Indices
    """[N] number of steps before them in their episodes."""
    steps: Indices
    """[H, N] rows of the last steps; -1 without a step."""

    def close(self, where: Flags) -> None:
        """No step continues the environments ``where`` [N]."""
        self.open_rows = np.where(where, -1, self.open_rows)
        self.steps = np.where(where, -1, self.steps)

    @property
    def step_positions(self) -> Indices:
        """[H, N] number of steps before each of the last steps in its episode."""
        return self.positions + np.arange(-len(self.steps), 0)[:, None]


class Shard:
    """Replay table of one process. Methods never wait, and one caller uses them at a time.

    Items are windows of ``length`` steps that begin every ``period`` steps of an episode and never
    cross its end; the last windows of an episode are shorter. An item is ready when its last step
    is inserted, from whichever fragments its steps came. A new incarnation of an actor, a gap, or
    an unexpected observation ends windows like the end of an episode.

    Args:
        settings: contents and sizes.
        selector: factory of the selector of items, given the capacity.
        initial_priority: priority of items inserted without one; None: the largest so far.
    """

    def __init__(
        self,
        *,
        settings: ShardSettings,
        selector: Callable[[int], Selector] = Uniform,
        initial_priority: InitialPriority | None = None,
    ) -> None:
        self._settings = settings
        self._initial: InitialPriority = (
            RunningMaximum() if initial_priority is None else initial_priority
        )
        self._store = StepStore(settings, selector=selector, estimates=self._initial.columns)
        self._items = self._store.items
        self._streams: dict[int, _StreamPosition] = {}
        self._breaks = 0

    @property
    def settings(self) -> ShardSettings:
        return self._settings

    @property
    def mass(self) -> float:
        """Weight among several shards: the sum of all ``p^alpha``, or the number of items."""
        return self._items.selector.mass

    @property
    def draws_left(self) -> float:
        """Number of draws left; infinite without ``max_samples`` while an item is ready."""
        return self._items.draws_left()

    def __len__(self) -> int:
        """Number of items that can be drawn."""
        return len(self._items)

    def insert(self, fragment: Fragment, priority: float | None = None) -> Inserted:
        """Store a fragment. No reference to its arrays remains.

        Args:
            fragment: T steps of N environments. Rows that are not ``valid`` are part of no item.
            priority: priority of every item that it completes; None: from ``initial_priority``.

        Raises:
            ValueError: the fragment is larger than the shard, its flags contradict each other, or
                the priority is NaN, infinite or negative. Nothing was stored.
            KeyError: an array is missing.
        """
        if priority is not None and not 0.0 <= priority < np.inf:
            raise ValueError(f"priority = {priority}: a priority must be finite and at least 0")
        self._store.check(fragment)
        flow_, before = flow(fragment), self._items.tally()
        self._store.inspect(fragment)
        position = self._position(fragment, priority)
        placed = self._make_room(fragment, flow_, position)
        self._store.write(fragment, placed, flow_)
        self._finish(fragment, placed, flow_, position, priority)
        after = self._items.tally()
        removed = sum(after.removed.values()) - sum(before.removed.values())
        return Inserted(
            int(np.count_nonzero(flow_.valid)), after.inserted - before.inserted, removed
        )

    def draw(self, n: int, generator: np.random.Generator, out: Mapping[str, Array]) -> DrawnItems:
        """Write n windows to ``out``: arrays of `make_batch`, or parts of them along the second
        axis.

        Rows past the end of a window are not ``valid``, and zero. The observation after its last
        step is the true next one. It is the last of the episode after a truncation, and undefined
        after a termination.

        Raises:
            WouldBlock: fewer than n draws are left.
        """
        if self.draws_left < n:
            raise WouldBlock(
                f"{n} items were requested, but the shard holds {len(self)} items with "
                f"{self.draws_left:.0f} draws left"
            )
        mass, count = self.mass, len(self)
        places, probability, used_up = self._items.draw(n, generator)
        self._store.read(places, out)
        self._store.release(used_up, "max_samples")
        return DrawnItems(self._items.keys(places), probability, mass, count)

    def make_batch(self, n: int) -> dict[str, Array]:
        """Zero arrays for a draw of n.

        ``obs/<leaf>``, ``action_mask`` and ``start`` are [L+1, n, ...], with L = length; the first
        two are [2, n, ...] with ``ends_only``.
        ``action``, ``reward``, ``terminated``, ``truncated``, ``valid`` and extra columns are [L,
        n, ...]. ``state/<leaf>`` [n, ...] is the state before the first observation. ``version``
        [n] is that of the oldest step.
        """
        return self._store.make_batch(n)

    def update_priorities(self, keys: Indices, priorities: Floats) -> int:
        """Set priorities [n] of drawn items. Returns the number of removed items, which are
        skipped.

        The last of several priorities for one item counts.

        Raises:
            ValueError: a priority is NaN, infinite or negative. Nothing has changed.
        """
        return self._items.update(keys, priorities)

    def exclude_older_than(self, version: int) -> int:
        """Remove every item with a step of a version below ``version``. Returns their number."""
        places = self._items.older_than(version)
        self._items.remove(places, "age")
        self._store.release(places, "age")
        return len(places)

    def close_stream(self, actor: int) -> int:
        """Complete all windows in progress of ``actor``, which sends no more fragments.

        Returns the number of items that became ready.
        """
        position, before = self._streams.pop(actor, None), self._items.tally().inserted
        if position is not None:
            self._break(position, position.open_rows >= self._store.columns.tail, None)
        return self._items.tally().inserted - before

    def statistics(self) -> ShardStatistics:
        store = self._store
        return ShardStatistics(
            steps=store.columns.tally(),
            items=self._items.tally(),
            mass=self.mass,
            stale_updates=self._items.stale_updates,
            breaks=self._breaks,
            unknown_states=store.unknown_states,
            nbytes=store.nbytes,
        )

    def snapshot(self) -> dict[str, Array]:
        """All state, as arrays by name.

        The arrays are the shard's own memory: write or copy them before the next call.
        """
        arrays = {"breaks": np.array([self._breaks]), **self._store.snapshot()}
        for actor, position in self._streams.items():
            own = {
                "stream": np.array([position.stream.incarnation, position.number]),
                "open_rows": position.open_rows,
            }
            own |= {"positions": position.positions, "steps": position.steps}
            arrays |= {f"actor/{actor}/{name}": array for name, array in own.items()}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load the `snapshot` of a shard with the same settings: later draws are the same.

        Raises:
            ValueError: ``arrays`` belong to other settings. Nothing has changed.
        """
        self._store.restore(arrays)
        self._breaks = int(arrays["breaks"][0])
        self._streams.clear()
        streams = with_prefix("actor/", arrays)
        for actor in dict.fromkeys(int(name.partition("/")[0]) for name in streams):
            at = {name: array.copy() for name, array in with_prefix(f"{actor}/", streams).items()}
            incarnation, number = at["stream"].tolist()
            self._streams[actor] = _StreamPosition(
                StepStream(actor, incarnation),
                number,
                at["open_rows"],
                at["positions"],
                at["steps"],
            )

    def _position(self, fragment: Fragment, priority: float | None) -> _StreamPosition:
        """Position before the fragment. Windows that it does not continue are completed."""
        environments = fragment.arrays["valid"].shape[1]
        nothing = np.full((self._settings.length, environments), -1, np.int64)
        fresh = _StreamPosition(
            fragment.stream,
            fragment.number,
            nothing[0],
            np.zeros(environments, np.int64),
            nothing[1:],
        )
        position = self._streams.get(fragment.stream.actor, fresh)
        resident = position.open_rows >= self._store.columns.tail
        continued = np.zeros_like(resident)
        if (
            position.stream == fragment.stream
            and position.number + 1 == fragment.number
            and len(resident) == environments
        ):
            continued = resident & fragment.rows("valid")[0] & ~fragment.rows("start")[0]
            continued[continued] = self._store.same_observations(
                fragment, position.open_rows[continued], continued
            )
        self._break(position, resident & ~continued, priority)
        position.close(~continued)
        return position if continued.any() else fresh

    def _break(self, position: _StreamPosition, where: Flags, priority: float | None) -> None:
        """Complete the windows in progress of environments ``where`` [N], which do not continue.

        They end with the last step, whose next observation is stored.
        """
        self._breaks += int(np.count_nonzero(where))
        ends = np.zeros(position.steps.shape, np.bool_)
        ends[-1:] = True
        rows = np.where(where, position.steps, -1)
        self._complete(rows, position.step_positions, ends, priority)

    def _make_room(self, fragment: Fragment, flow_: Flow, position: _StreamPosition) -> Placed:
        """Evict the oldest rows until the fragment fits, possibly also rows that it continues."""
        while True:
            placed, tail = self._store.place(
                fragment, flow_, position.open_rows, position.positions
            )
            gone = (position.open_rows >= 0) & (position.open_rows < tail)
            if not gone.any():
                self._store.evict(tail)
                return placed
            position.close(gone)

    def _finish(
        self,
        fragment: Fragment,
        placed: Placed,
        flow_: Flow,
        position: _StreamPosition,
        priority: float | None,
    ) -> None:
        """Complete windows, and store the new position of the stream."""
        known = len(position.steps)
        rows, positions = (
            np.concatenate((position.steps, placed.step)),
            np.concatenate((position.step_positions, placed.position)),
        )
        ends = np.concatenate((np.zeros((known, rows.shape[1]), np.bool_), flow_.ends))
        self._complete(rows, positions, ends, priority)
        after = _StreamPosition(
            fragment.stream,
            fragment.number,
            placed.follower[-1],
            placed.position[-1] + 1,
            rows[len(rows) - known :],
        )
        after.steps = np.where(after.step_positions >= 0, after.steps, -1)
        after.close(~flow_.extra_row[-1] | flow_.ends[-1])
        self._streams[fragment.stream.actor] = after

    def _complete(
        self, rows: Indices, positions: Indices, ends: Flags, priority: float | None
    ) -> None:
        """Make items of the windows that these steps [K, N] complete; see `fragments.complete`."""
        s, tail = self._settings, self._store.columns.tail
        windows = complete(
            rows=rows, position=positions, ends=ends, length=s.length, period=s.period, tail=tail
        )
        if not len(windows.length):
            return
        priorities = np.full(len(windows.length), np.nan if priority is None else priority)
        if priority is None and self._initial.columns:
            priorities = self._initial(self._store.window_steps(windows))
            priorities = np.where(np.isfinite(priorities), priorities, np.nan)
        self._store.complete(windows, priorities)
