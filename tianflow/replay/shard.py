"""fragments -> Shard -> batches of windows. Steps in preallocated columns, items over them; the
memory never grows.
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
from tianflow.replay.settings import Drawn, Inserted, ShardSettings, ShardStatistics
from tianflow.replay.store import StepStore, below
from tianflow.replay.sum_tree import Floats, Indices

Array = NDArray[Any]


@dataclass(slots=True)
class _Stand:
    """Where the N environments of a stream stand; H = length - 1 steps are remembered."""

    stream: StepStream
    number: int
    """Of the last fragment."""
    open_rows: Indices
    """[N] rows of the observations that the next steps are taken from, -1 where an episode ended.
    """
    positions: Indices
    """[N] steps before them in their episodes."""
    steps: Indices
    """[H, N] rows of the last steps, -1 where there are none."""

    def close(self, where: Flags) -> None:
        """Nothing goes on from the environments ``where`` [N]."""
        self.open_rows = np.where(where, -1, self.open_rows)
        self.steps = np.where(where, -1, self.steps)

    @property
    def step_positions(self) -> Indices:
        """[H, N] steps before each of the last ones in its episode."""
        return self.positions + np.arange(-len(self.steps), 0)[:, None]


class Shard:
    """The replay of one process: plain calls, for one caller at a time.

    Items are windows of ``length`` steps that begin every ``period`` steps of an episode and never
    cross its end: windows there are shorter. An item can be drawn as soon as its last step is
    there, whichever fragments its steps came in. Another incarnation of an actor, a gap, or an
    observation that is not the one expected ends windows as the end of an episode does.

    Args:
        settings: what is kept, and how.
        selector: makes the selector of items, given how many there can be.
        initial_priority: of items that are inserted without a priority; None: the greatest given so
            far.
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
        self._stands: dict[int, _Stand] = {}
        self._breaks = 0

    @property
    def settings(self) -> ShardSettings:
        return self._settings

    @property
    def mass(self) -> float:
        """What this shard weighs among others: the sum of all ``p^alpha``, or the number of
        items.
        """
        return self._items.selector.mass

    @property
    def draws_left(self) -> float:
        """How many more draws there are; infinite without ``max_samples``, while an item is
        there.
        """
        return self._items.draws_left()

    def __len__(self) -> int:
        """Items that can be drawn."""
        return len(self._items)

    def insert(self, fragment: Fragment, priority: float | None = None) -> Inserted:
        """StepStore a fragment; nothing of its arrays is referred to afterwards.

        Args:
            fragment: T steps of N environments. Rows with ``valid`` False are no steps and part of
                no item.
            priority: of every item that it completes; None: what ``initial_priority`` says.

        Raises:
            ValueError: the fragment is larger than the shard, its flags contradict each other, or
                the priority is NaN, infinite or below 0. Nothing of it was stored then.
            KeyError: an array is missing.
        """
        if priority is not None and not 0.0 <= priority < np.inf:
            raise ValueError(f"priority = {priority}: a priority is finite and at least 0")
        self._store.check(fragment)
        flow_, before = flow(fragment), self._items.tally()
        self._store.look(fragment)
        stand = self._stand(fragment, priority)
        placed = self._make_room(fragment, flow_, stand)
        self._store.write(fragment, placed, flow_)
        self._finish(fragment, placed, flow_, stand, priority)
        after = self._items.tally()
        removed = sum(after.removed.values()) - sum(before.removed.values())
        return Inserted(
            int(np.count_nonzero(flow_.valid)), after.inserted - before.inserted, removed
        )

    def draw(self, n: int, generator: np.random.Generator, out: Mapping[str, Array]) -> Drawn:
        """Write n windows into ``out``, arrays as those of `make_batch` (or parts of such, along
        the second axis).

        Rows past the end of a window are not ``valid``, and zero. The observation after its last
        step is the true next one: the last of the episode where that was truncated, and of no
        meaning where it terminated.

        Raises:
            WouldBlock: fewer than n draws are left.
        """
        if self.draws_left < n:
            raise WouldBlock(
                f"{n} items were to be drawn, but {len(self)} are there, with "
                f"{self.draws_left:.0f} draws left"
            )
        mass, count = self.mass, len(self)
        places, probability, used_up = self._items.draw(n, generator)
        self._store.read(places, out)
        self._store.release(used_up, "max_samples")
        return Drawn(self._items.keys(places), probability, mass, count)

    def make_batch(self, n: int) -> dict[str, Array]:
        """Arrays of zeros for a draw of n.

        ``obs/<leaf>``, ``action_mask`` and ``start`` are [L+1, n, ...], with L = length;
        ``action``, ``reward``, ``terminated``, ``truncated``, ``valid`` and extra columns [L, n,
        ...]; ``state/<leaf>`` [n, ...] is that before the first observation; ``version`` [n] is
        that of the oldest step.
        """
        return self._store.make_batch(n)

    def update_priorities(self, keys: Indices, priorities: Floats) -> int:
        """New priorities [n] for drawn items. How many of them had gone, which changes nothing; of
        several for one item the last counts.

        Raises:
            ValueError: a priority is NaN, infinite or below 0. Nothing has changed then.
        """
        return self._items.update(keys, priorities)

    def exclude_older_than(self, version: int) -> int:
        """Remove every item of which a step is older than ``version``. How many."""
        places = self._items.older_than(version)
        self._items.remove(places, "age")
        self._store.release(places, "age")
        return len(places)

    def close_stream(self, actor: int) -> int:
        """Nothing more comes from ``actor``: its windows in the making are complete as they are.
        How many items that made.
        """
        stand, before = self._stands.pop(actor, None), self._items.tally().inserted
        if stand is not None:
            self._break(stand, stand.open_rows >= self._store.columns.tail, None)
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
        """Everything, as arrays by name. They are the shard's own memory: write them out, or copy
        them, before the next call.
        """
        arrays = {"breaks": np.array([self._breaks]), **self._store.snapshot()}
        for actor, stand in self._stands.items():
            own = {
                "stream": np.array([stand.stream.incarnation, stand.number]),
                "open_rows": stand.open_rows,
            }
            own |= {"positions": stand.positions, "steps": stand.steps}
            arrays |= {f"actor/{actor}/{name}": array for name, array in own.items()}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what a shard of the same settings was at its `snapshot`: the same draws, given the
        same generator.

        Raises:
            ValueError: ``arrays`` are those of other settings. Nothing has changed then.
        """
        self._store.restore(arrays)
        self._breaks = int(arrays["breaks"][0])
        self._stands.clear()
        streams = below("actor/", arrays)
        for actor in dict.fromkeys(int(name.partition("/")[0]) for name in streams):
            at = {name: array.copy() for name, array in below(f"{actor}/", streams).items()}
            incarnation, number = at["stream"].tolist()
            self._stands[actor] = _Stand(
                StepStream(actor, incarnation),
                number,
                at["open_rows"],
                at["positions"],
                at["steps"],
            )

    def _stand(self, fragment: Fragment, priority: float | None) -> _Stand:
        """Where the fragment begins. What it does not go on from is complete as it is."""
        environments = fragment.arrays["valid"].shape[1]
        nothing = np.full((self._settings.length, environments), -1, np.int64)
        fresh = _Stand(
            fragment.stream,
            fragment.number,
            nothing[0],
            np.zeros(environments, np.int64),
            nothing[1:],
        )
        stand = self._stands.get(fragment.stream.actor, fresh)
        there = stand.open_rows >= self._store.columns.tail
        goes_on = np.zeros_like(there)
        if (
            stand.stream == fragment.stream
            and stand.number + 1 == fragment.number
            and len(there) == environments
        ):
            goes_on = there & fragment.rows("valid")[0] & ~fragment.rows("start")[0]
            goes_on[goes_on] = self._store.same_observations(
                fragment, stand.open_rows[goes_on], goes_on
            )
        self._break(stand, there & ~goes_on, priority)
        stand.close(~goes_on)
        return stand if goes_on.any() else fresh

    def _break(self, stand: _Stand, where: Flags, priority: float | None) -> None:
        """The environments ``where`` [N] do not go on: windows in the making end with the last
        step, whose next observation is there.
        """
        self._breaks += int(np.count_nonzero(where))
        ends = np.zeros(stand.steps.shape, np.bool_)
        ends[-1:] = True
        self._complete(np.where(where, stand.steps, -1), stand.step_positions, ends, priority)

    def _make_room(self, fragment: Fragment, flow_: Flow, stand: _Stand) -> Placed:
        """Let the oldest rows go until the fragment fits. Of those that it was to go on from, some
        may be among them.
        """
        while True:
            placed, tail = self._store.place(fragment, flow_, stand.open_rows, stand.positions)
            gone = (stand.open_rows >= 0) & (stand.open_rows < tail)
            if not gone.any():
                self._store.evict(tail)
                return placed
            stand.close(gone)

    def _finish(
        self, fragment: Fragment, placed: Placed, flow_: Flow, stand: _Stand, priority: float | None
    ) -> None:
        """Complete windows, and remember where the environments stand."""
        known = len(stand.steps)
        rows, positions = (
            np.concatenate((stand.steps, placed.step)),
            np.concatenate((stand.step_positions, placed.position)),
        )
        ends = np.concatenate((np.zeros((known, rows.shape[1]), np.bool_), flow_.ends))
        self._complete(rows, positions, ends, priority)
        after = _Stand(
            fragment.stream,
            fragment.number,
            placed.follower[-1],
            placed.position[-1] + 1,
            rows[len(rows) - known :],
        )
        after.steps = np.where(after.step_positions >= 0, after.steps, -1)
        after.close(~flow_.looks_on[-1] | flow_.ends[-1])
        self._stands[fragment.stream.actor] = after

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
