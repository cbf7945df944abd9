"""The memory of a shard: observations, steps and items in step with each other. It knows rows and
windows, not where they come from.
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
"""Windows that are taken apart in one go, so that removing very many needs little memory."""


class StepStore:
    """Rows and what hangs on them. When something runs out (rows, frames or items), the oldest rows
    go.

    Args:
        settings: of the shard.
        selector: makes the selector of items, given how many there can be.
        estimates: columns of steps that initial priorities are computed from.
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
        """Bytes of all columns, frames and items."""
        return (
            self.columns.nbytes
            + self.items.nbytes
            + sum(leaf.nbytes for leaf in self._leaves.values())
        )

    def check(self, fragment: Fragment) -> None:
        """Raise KeyError for a missing array, ValueError for an impossible length."""
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
                f"length = {fragment.length}: the arrays have {len(fragment.arrays['valid'])} rows"
            )

    def look(self, fragment: Fragment) -> None:
        """Look at the observations of the fragment that is to be stored next."""
        for name, leaf in self._leaves.items():
            leaf.look(_leaf_arrays(fragment, name))

    def same_observations(self, fragment: Fragment, rows: Indices, where: Flags) -> Flags:
        """[n] for the n environments ``where`` [N]: the fragment's first observation is that of
        ``rows`` [n].
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
        """Where the steps of a fragment go, and up to which row (exclusive) the oldest have to go
        for that.

        Raises:
            ValueError: it is more than fits at all.
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
            leaf.room(placed.new, _leaf_arrays(fragment, name), columns.tail, columns.head)
            for name, leaf in leaves
        ]
        tails += [
            columns.tail,
            items.room(int(np.count_nonzero(placed.begins)), columns.tail, columns.head),
        ]
        tails += [columns.head + len(placed.new) - columns.size]
        if max(tails) > columns.head:
            raise ValueError(
                f"a fragment of {len(placed.new)} observations is more than the whole shard holds: "
                f"{columns.size} observations, {items.capacity} items, "
                f"{self._settings.frames_per_row} frames for each observation"
            )
        return placed, max(tails)

    def evict(self, tail: int) -> None:
        """Let all rows before ``tail`` go, and the items that begin in them."""
        for leaf in self._leaves.values():
            leaf.evict(self.columns.tail, tail)
        self.items.evict(self.columns.evict(tail))

    def write(self, fragment: Fragment, placed: Placed, flow: Flow) -> None:
        """StepStore observations and steps, and begin items; there is room."""
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
        """These windows [W] are items from now on. A priority of NaN means the greatest given so
        far.
        """
        places = windows.rows % self.columns.size
        versions = self.columns.steps["version"][places].min(axis=0)
        self.items.complete(self.columns.item[places[0]], windows.length, versions, priorities)

    def window_steps(self, windows: Windows) -> WindowSteps:
        """What an initial priority is computed from."""
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
        """Write the windows of the items at these places [n] into ``out``; see `Shard.draw`."""
        columns, kept = self.columns, self.items
        lengths = kept.length[items]
        places = columns.walk(kept.first_row[items] % columns.size)
        steps = places[:-1]
        valid = np.arange(len(steps))[:, None] < lengths
        padded = None if valid.all() else ~valid
        for name, leaf in self._leaves.items():
            leaf.read(places, out[name])
        for name in self._handed_out:
            gather(columns.steps[name], steps, out[name])
            if padded is not None:
                out[name][padded] = 0
        out["valid"][:] = valid
        out["start"][0], out["start"][1:] = columns.start[places[0]], False
        out["version"][:] = kept.version[items]
        for name, state in kept.state.items():
            gather(state, items, out[f"state/{name}"])
        columns.note_drawn(steps if padded is None else steps[valid])

    def release(self, items: Indices, reason: Reason) -> None:
        """The items at these places have gone, though their rows are there: steps that no other
        item needs go, too.
        """
        for begin in range(0, len(items), _RELEASED_AT_ONCE):
            some = items[begin : begin + _RELEASED_AT_ONCE]
            lengths = self.items.length[some]
            steps = self.columns.walk(self.items.first_row[some] % self.columns.size)[:-1]
            self.columns.release(steps[np.arange(len(steps))[:, None] < lengths], reason)

    def make_batch(self, n: int) -> dict[str, Array]:
        """Arrays of zeros for `read` of n windows."""
        s = self._settings
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            name: ((s.length + 1, n, *leaf.shape), leaf.dtype)
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
        """All of it, as views."""
        arrays: dict[str, Array] = {"unknown_states": np.array([self.unknown_states])}
        arrays |= {f"columns/{name}": array for name, array in self.columns.snapshot().items()}
        arrays |= {f"items/{name}": array for name, array in self.items.snapshot().items()}
        for leaf_name, leaf in self._leaves.items():
            arrays |= {f"leaf/{leaf_name}/{name}": array for name, array in leaf.snapshot().items()}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what a store of the same settings was at its `snapshot`. ValueError if the
        settings were others.
        """
        for name, array in self.snapshot().items():
            free_size = name.endswith("/free") or name.startswith("items/selector/")
            if name not in arrays or (
                not free_size
                and (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype)
            ):
                found = (
                    f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "not there"
                )
                raise ValueError(
                    f"{name} is {found}, not {array.dtype} {array.shape}: the snapshot is of a "
                    "shard with other settings"
                )
        self.unknown_states = int(arrays["unknown_states"][0])
        self.columns.restore(below("columns/", arrays))
        self.items.restore(below("items/", arrays))
        for name, leaf in self._leaves.items():
            leaf.restore(below(f"leaf/{name}/", arrays))

    def _write_states(
        self, fragment: Fragment, step: Indices, column: Indices, rows: Indices
    ) -> None:
        """Recurrent states of the windows that begin at these steps [n] of these environments [n],
        stored in ``rows`` [n].
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


def below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _leaf_specs(settings: ShardSettings) -> dict[str, LeafSpec]:
    """Everything that is known of an observation, by the name of its array."""
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
            # An episode that was cut off says nothing of its last observation's mask: everything is
            # allowed then.
            leaves[name] = PlainLeaf(leaf, rows=settings.capacity, unknown=1 if name == MASK else 0)
    return leaves


def _leaf_arrays(fragment: Fragment, name: str) -> LeafArrays:
    final = f"final_{name}"
    return LeafArrays(
        fragment.rows(name, 1), fragment.rows(final) if final in fragment.arrays else None
    )
