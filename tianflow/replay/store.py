"""Memory of a shard: observations, steps and items, consistent with each other.

The store handles rows and windows, not streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import LeafSpec
from tianflow.replay.columns import Columns
from tianflow.replay.fragments import Flow, Fragment, Placed, Windows, place
from tianflow.replay.items import Items
from tianflow.replay.observations import (
    Flags,
    Leaf,
    LeafArrays,
    PlainLeaf,
    StackedLeaf,
    same_observations,
)
from tianflow.replay.rings import gather
from tianflow.replay.selection import Selector
from tianflow.replay.sequences import WindowSteps
from tianflow.replay.settings import Reason, ShardSettings
from tianflow.replay.sum_tree import Floats, Indices

Array = NDArray[Any]
MASK = "action_mask"
_RELEASED_AT_ONCE = 4096
"""Windows released at a time, which limits the temporary memory of large removals."""


class StepStore:
    """Rows with their steps and items. When rows, frames or items run out, the oldest rows are
    evicted.

    Args:
        settings: settings of the shard.
        selector: factory of the selector of items, given the capacity.
        estimates: step columns for initial priorities.
    """

    def __init__(
        self,
        settings: ShardSettings,
        *,
        selector: Callable[[int], Selector],
        estimates: Sequence[str],
    ) -> None:
        self._settings = settings
        self._leaves = _leaves(settings)
        self.columns = Columns(settings, estimates)
        self.items = Items(
            settings.item_capacity,
            selector=selector,
            state=dict(settings.state),
            max_samples=settings.max_samples,
        )
        self.unknown_states = 0
        self._handed_out = (
            "action",
            "reward",
            "terminated",
            "truncated",
            *(name for name, _, _ in settings.extras),
        )

    @property
    def nbytes(self) -> int:
        """Memory of all columns, frames and items, in bytes."""
        return (
            self.columns.nbytes
            + self.items.nbytes
            + sum(leaf.nbytes for leaf in self._leaves.values())
        )

    def check(self, fragment: Fragment) -> None:
        """Check that all arrays exist and the length is possible.

        Raises:
            KeyError: an array is missing.
            ValueError: the length is out of range.
        """
        names = {
            *self.columns.steps,
            *self._leaves,
            "valid",
            "start",
            *(f"state/{name}" for name in self.items.state),
        }
        missing = names - fragment.arrays.keys()
        if missing:
            raise KeyError(
                f"the fragment lacks {sorted(missing)}; it has {sorted(fragment.arrays)}"
            )
        if not 1 <= fragment.length <= len(fragment.arrays["valid"]):
            raise ValueError(
                f"length = {fragment.length}: accepted is 1 to the number of rows, "
                f"{len(fragment.arrays['valid'])}"
            )

    def inspect(self, fragment: Fragment) -> None:
        """Prepare the leaves for the observations of the next fragment."""
        for name, leaf in self._leaves.items():
            leaf.inspect(_leaf_arrays(fragment, name))

    def same_observations(self, fragment: Fragment, rows: Indices, where: Flags) -> Flags:
        """[n] True where the first observation of environment ``where`` [N] equals that of ``rows``
        [n].
        """
        same = np.ones(len(rows), np.bool_)
        for leaf in self._settings.observation:
            first = fragment.arrays[f"obs/{leaf.name}"][0][where]
            stored = np.empty_like(first)
            self._leaves[f"obs/{leaf.name}"].read(rows, stored)
            same &= same_observations(first, stored)
        return same

    def place(
        self, fragment: Fragment, flow: Flow, open_rows: Indices, open_positions: Indices
    ) -> tuple[Placed, int]:
        """Rows of the steps of a fragment, and the row (exclusive) up to which the oldest must be
        evicted.

        Raises:
            ValueError: the fragment is larger than the shard.
        """
        columns, items = self.columns, self.items
        placed = place(
            flow,
            head=columns.head,
            period=self._settings.period,
            open_rows=open_rows,
            open_positions=open_positions,
        )
        leaves = self._leaves.items()
        tails = [
            leaf.required_tail(placed.new, _leaf_arrays(fragment, name), columns.tail, columns.head)
            for name, leaf in leaves
        ]
        tails += [
            columns.tail,
            items.required_tail(int(np.count_nonzero(placed.begins)), columns.tail, columns.head),
        ]
        tails += [columns.head + len(placed.new) - columns.size]
        if max(tails) > columns.head:
            raise ValueError(
                f"a fragment of {len(placed.new)} observations is larger than the shard, which "
                f"holds {columns.size} observations, {items.capacity} items and "
                f"{self._settings.frames_per_row} frames per observation"
            )
        return placed, max(tails)

    def evict(self, tail: int) -> None:
        """Evict all rows before ``tail``, and the items that begin in them."""
        for leaf in self._leaves.values():
            leaf.evict(self.columns.tail, tail)
        self.items.evict(self.columns.evict(tail))

    def write(self, fragment: Fragment, placed: Placed, flow: Flow) -> None:
        """Store observations and steps, and begin items. The caller has made room."""
        if len(placed.new):
            for name, leaf in self._leaves.items():
                leaf.write(placed.new, _leaf_arrays(fragment, name))
        columns = self.columns
        columns.append(fragment, placed, flow.valid)
        begins = placed.new.first + np.flatnonzero(placed.begins)
        columns.item[begins % columns.size] = self.items.begin(begins)
        if self.items.state:
            begun = flow.valid & (placed.position % self._settings.period == 0)
            step, column = begun.nonzero()
            self._write_states(fragment, step, column, placed.step[begun])

    def complete(self, windows: Windows, priorities: Floats) -> None:
        """Make these windows [W] ready items. A priority of NaN means the largest so far."""
        places = windows.rows % self.columns.size
        versions = self.columns.steps["version"][places].min(axis=0)
        self.items.complete(self.columns.item[places[0]], windows.length, versions, priorities)

    def window_steps(self, windows: Windows) -> WindowSteps:
        """Steps of the windows, for initial priorities."""
        columns, length = self.columns, windows.length
        places = windows.rows % columns.size
        reward, q_taken, q_max = (columns.steps[name] for name in ("reward", "q_taken", "q_max"))
        last = places[length - 1, np.arange(len(length))]
        after = columns.follower[last]
        known = (after >= 0) & columns.is_step(after)
        q_last = np.where(
            columns.steps["terminated"][last], 0.0, np.where(known, q_max[after], np.nan)
        )
        q_next = np.concatenate((q_max[places[1:]], q_last[None])).astype(np.float64)
        q_next[length - 1, np.arange(len(length))] = q_last
        begins = columns.start[places[0]]
        return WindowSteps(
            reward[places].astype(np.float64),
            q_taken[places].astype(np.float64),
            q_next,
            length,
            begins,
        )

    def read(self, items: Indices, out: Mapping[str, Array]) -> None:
        """Copy the windows of the items at these places [n] to ``out``; see `Shard.draw`."""
        columns, kept = self.columns, self.items
        lengths = kept.length[items]
        places = columns.walk(kept.first_row[items] % columns.size)
        steps = places[:-1]
        valid = np.arange(len(steps))[:, None] < lengths
        padded = None if valid.all() else ~valid
        observed = places[[0, -1]] if self._settings.ends_only else places
        for name, leaf in self._leaves.items():
            leaf.read(observed, out[name])
        for name in self._handed_out:
            gather(columns.steps[name], steps, out[name])
            if padded is not None:
                out[name][padded] = 0
        out["valid"][:] = valid
        out["start"][0], out["start"][1:] = columns.start[places[0]], False
        out["version"][:] = kept.version[items]
        for name, state in kept.state.items():
            gather(state, items, out[f"state/{name}"])
        columns.mark_drawn(steps if padded is None else steps[valid])

    def release(self, items: Indices, reason: Reason) -> None:
        """Release the steps of removed items whose rows remain. Steps that no item needs are
        removed.
        """
        for begin in range(0, len(items), _RELEASED_AT_ONCE):
            some = items[begin : begin + _RELEASED_AT_ONCE]
            lengths = self.items.length[some]
            steps = self.columns.walk(self.items.first_row[some] % self.columns.size)[:-1]
            self.columns.release(steps[np.arange(len(steps))[:, None] < lengths], reason)

    def make_batch(self, n: int) -> dict[str, Array]:
        """Zero arrays for `read` of n windows."""
        s = self._settings
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            name: ((s.observations_drawn, n, *leaf.shape), leaf.dtype)
            for name, leaf in _leaf_specs(s).items()
        }
        shapes |= {
            "start": ((s.length + 1, n), "bool"),
            "valid": ((s.length, n), "bool"),
            "version": ((n,), "int64"),
        }
        for name in self._handed_out:
            column = self.columns.steps[name]
            shapes[name] = ((s.length, n, *column.shape[1:]), column.dtype.name)
        shapes |= {f"state/{name}": ((n, *shape), "float32") for name, shape in s.state}
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}

    def snapshot(self) -> dict[str, Array]:
        """All state, as views."""
        arrays: dict[str, Array] = {"unknown_states": np.array([self.unknown_states])}
        arrays |= {f"columns/{name}": array for name, array in self.columns.snapshot().items()}
        arrays |= {f"items/{name}": array for name, array in self.items.snapshot().items()}
        for leaf_name, leaf in self._leaves.items():
            arrays |= {f"leaf/{leaf_name}/{name}": array for name, array in leaf.snapshot().items()}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load the `snapshot` of a store with the same settings.

        Raises:
            ValueError: the settings were different.
        """
        for name, array in self.snapshot().items():
            free_size = name.endswith("/free") or name.startswith("items/selector/")
            if name not in arrays or (
                not free_size
                and (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype)
            ):
                found = (
                    f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "missing"
                )
                raise ValueError(
                    f"{name} is {found}, expected {array.dtype} {array.shape}: the snapshot is of "
                    "a shard with other settings"
                )
        self.unknown_states = int(arrays["unknown_states"][0])
        self.columns.restore(with_prefix("columns/", arrays))
        self.items.restore(with_prefix("items/", arrays))
        for name, leaf in self._leaves.items():
            leaf.restore(with_prefix(f"leaf/{name}/", arrays))

    def _write_states(
        self, fragment: Fragment, step: Indices, column: Indices, rows: Indices
    ) -> None:
        """Store the recurrent states of windows that begin at these steps [n] of environments [n].

        ``rows`` [n] are the rows of the steps.
        """
        places = self.columns.item[rows % self.columns.size] % self.items.capacity
        unknown = np.zeros(len(step), np.bool_)
        for name, kept in self.items.state.items():
            given = fragment.arrays[f"state/{name}"]
            if given.ndim == kept.ndim + 1:
                kept[places] = given[step, column]
                continue
            first = step == 0
            kept[places[first]], kept[places[~first]] = given[column[first]], 0.0
            unknown |= ~first & ~fragment.rows("start")[step, column]
        self.unknown_states += int(np.count_nonzero(unknown))


def with_prefix(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _leaf_specs(settings: ShardSettings) -> dict[str, LeafSpec]:
    """All arrays of an observation, by name."""
    leaves = {f"obs/{leaf.name}": leaf for leaf in settings.observation}
    return leaves | (
        {MASK: LeafSpec(MASK, (settings.mask_size,), "bool")} if settings.mask_size else {}
    )


def _leaves(settings: ShardSettings) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, leaf in _leaf_specs(settings).items():
        if name != MASK and leaf.name in settings.stacks:
            frames = math.ceil(settings.capacity * settings.frames_per_row) + leaf.shape[0]
            leaves[name] = StackedLeaf(leaf, rows=settings.capacity, frames=frames)
        else:
            # A truncated episode has no mask for its last observation; all actions are allowed
            # then.
            leaves[name] = PlainLeaf(leaf, rows=settings.capacity, unknown=1 if name == MASK else 0)
    return leaves


def _leaf_arrays(fragment: Fragment, name: str) -> LeafArrays:
    final = f"final_{name}"
    return LeafArrays(
        fragment.rows(name, 1), fragment.rows(final) if final in fragment.arrays else None
    )
