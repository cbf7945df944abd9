"""Observations by row: leaves kept as they are, and stacks of frames of which every frame is kept
once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import LeafSpec
from tianflow.replay.rings import gather, pieces
from tianflow.replay.sum_tree import Indices

Array = NDArray[Any]
Flags = NDArray[np.bool_]
_LOOK_AHEAD = 256
"""Rows looked at in one go for frames that their removal would free."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """m observations of one fragment (length T, N environments) that are about to become the rows
    ``first .. first + m - 1``.
    """

    first: int
    index: Indices
    """[m] t * N + n: which observation of ``obs``, or of ``final_obs`` where ``final``."""
    final: Flags
    """[m]"""
    after: Indices
    """[m] the row of the observation one step before in the same episode, -1 if that is not there.
    It is the row before this one, or one that an earlier fragment wrote."""

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class LeafArrays:
    """One leaf of a fragment: ``obs`` [T+1, N, *leaf] and ``final`` [T, N, *leaf], if there are
    final observations.
    """

    obs: Array
    final: Array | None


class Leaf(Protocol):
    """One leaf of the observations of all rows in a ring. Rows are numbered 0, 1, ... for ever; the
    newest ``rows`` can be there.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all its memory, which never grows."""
        ...

    def look(self, arrays: LeafArrays) -> None:
        """Look at the fragment that the next `room` and `write` will be about. Nothing refers to it
        afterwards.
        """
        ...

    def room(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:
        """Up to which row (exclusive) the rows ``tail .. head - 1`` have to go so that ``new``
        fits; past ``head`` if it never does.
        """
        ...

    def evict(self, first: int, end: int) -> None:
        """Let the oldest rows go, which are ``first .. end - 1``."""
        ...

    def write(self, new: NewRows, arrays: LeafArrays) -> None:
        """Store them; there is room."""
        ...

    def read(self, rows: Indices, out: Array) -> None:
        """Write the observations of ``rows`` [...] into ``out`` [..., *leaf]."""
        ...

    def snapshot(self) -> dict[str, Array]:
        """All it holds, as views."""
        ...

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Become what a leaf of the same sizes was at its `snapshot`."""
        ...


class PlainLeaf:
    """Each observation in a row of its own, with the dtype it has.

    Args:
        leaf: shape and dtype.
        rows: how many.
        unknown: what a final observation is if the fragment has none for this leaf.
    """

    def __init__(self, leaf: LeafSpec, *, rows: int, unknown: int = 0) -> None:
        self._data = np.zeros((rows, *leaf.shape), leaf.dtype)
        self._unknown = unknown

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def look(self, arrays: LeafArrays) -> None:
        """Nothing depends on what it holds."""

    def room(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:  # noqa: ARG002 - all take the same room
        return max(tail, head + len(new) - len(self._data))

    def evict(self, first: int, end: int) -> None:
        """Rows are overwritten."""

    def write(self, new: NewRows, arrays: LeafArrays) -> None:
        observations = _flat(arrays.obs)
        for place, part in pieces(new.first, len(new), len(self._data)):
            np.take(observations, new.index[part], axis=0, out=self._data[place], mode="clip")
        if new.final.any():
            places = (new.first + np.flatnonzero(new.final)) % len(self._data)
            self._data[places] = (
                self._unknown if arrays.final is None else _flat(arrays.final)[new.index[new.final]]
            )

    def read(self, rows: Indices, out: Array) -> None:
        gather(self._data, rows % len(self._data), out)

    def snapshot(self) -> dict[str, Array]:
        return {"data": self._data}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        self._data[:] = arrays["data"]


class StackedLeaf:
    """Stacks ``[S, *frame]`` of the S last frames, the newest last. Where a stack really is the one
    before moved on by one frame, only its newest frame is stored; else all S are. A frame is freed
    with the last row that shows it.

    Args:
        leaf: shape [S, *frame] and dtype.
        rows: how many.
        frames: how many frames there is memory for; if they run out, the oldest rows have to go.
    """

    def __init__(self, leaf: LeafSpec, *, rows: int, frames: int) -> None:
        if len(leaf.shape) < 2 or leaf.shape[0] < 2:
            raise ValueError(
                f"{leaf.name!r} of shape {leaf.shape} is no stack: that is [S, *frame] with S >= 2"
            )
        self._depth = leaf.shape[0]
        self._frames = np.zeros((frames, *leaf.shape[1:]), leaf.dtype)
        self._shown = np.zeros((rows, self._depth), np.int32)
        self._last_row = np.full(frames, -1, np.int64)
        self._free = np.arange(frames, dtype=np.int32)
        self._free_count = frames
        self._continues: Flags = np.zeros((0, 0), np.bool_)

    @property
    def nbytes(self) -> int:
        return self._frames.nbytes + self._shown.nbytes + self._last_row.nbytes + self._free.nbytes

    @property
    def frames_in_use(self) -> int:
        """Frames that some row shows."""
        return len(self._free) - self._free_count

    def look(self, arrays: LeafArrays) -> None:
        self._continues = continues(arrays.obs)

    def room(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:
        needed = int(self._fresh(new, arrays).sum()) - self._free_count
        while needed > 0 and tail < head:
            end = min(head, tail + _LOOK_AHEAD)
            freed = np.cumsum(self._shown_last(tail, end).sum(axis=1))
            enough = int(np.searchsorted(freed, needed))
            tail, needed = min(end, tail + enough + 1), needed - int(freed[-1])
        return tail if needed <= 0 else head + 1

    def evict(self, first: int, end: int) -> None:
        for begin in range(first, end, _LOOK_AHEAD):
            until = min(end, begin + _LOOK_AHEAD)
            shown = self._shown[np.arange(begin, until) % len(self._shown)]
            freed = shown[self._shown_last(begin, until)]
            self._free[self._free_count : self._free_count + len(freed)] = freed
            self._free_count += len(freed)

    def write(self, new: NewRows, arrays: LeafArrays) -> None:
        fresh, depth, rows = self._fresh(new, arrays), self._depth, len(self._shown)
        # All frames in the order of their rows, with those of a row that an earlier fragment wrote
        # before those of the row that goes on from it: then every row shows the S frames up to its
        # own newest one.
        carried = np.flatnonzero((fresh == 1) & (new.after < new.first))
        counts = fresh.copy()
        counts[carried] += depth
        newest = np.cumsum(counts) - 1
        frames = np.full(int(newest[-1]) + 1, -1, np.int32)
        before = newest[carried, None] + np.arange(-depth, 0)
        frames[before] = self._shown[new.after[carried] % rows]
        taken = np.flatnonzero(frames < 0)
        self._free_count -= len(taken)
        frames[taken] = self._free[self._free_count : self._free_count + len(taken)]
        shown = frames[newest[:, None] + np.arange(1 - depth, 1)]
        for place, part in pieces(new.first, len(new), rows):
            self._shown[place] = shown[part]
        # Of several rows that show a frame the last one is kept: NumPy assigns in order.
        self._last_row[shown] = np.arange(new.first, new.first + len(new))[:, None]
        self._copy(new, arrays, fresh, shown)

    def read(self, rows: Indices, out: Array) -> None:
        gather(self._frames, self._shown[rows % len(self._shown)], out)

    def snapshot(self) -> dict[str, Array]:
        free = self._free[: self._free_count]
        return {
            "frames": self._frames,
            "shown": self._shown,
            "last_row": self._last_row,
            "free": free,
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        self._frames[:], self._shown[:], self._last_row[:] = (
            arrays["frames"],
            arrays["shown"],
            arrays["last_row"],
        )
        self._free_count = len(arrays["free"])
        self._free[: self._free_count] = arrays["free"]

    def _shown_last(self, first: int, end: int) -> Flags:
        """[rows, S]: which of the frames of these rows no later row shows."""
        rows = np.arange(first, end)
        last: Flags = self._last_row[self._shown[rows % len(self._shown)]] == rows[:, None]
        return last

    def _fresh(self, new: NewRows, arrays: LeafArrays) -> Indices:
        """[m] frames to be stored for each row: 1 where it continues the one before, else S."""
        moved = np.zeros(len(new), np.bool_)
        chained = new.after >= 0
        by_obs = ~new.final & chained
        moved[by_obs] = self._continues.reshape(-1)[new.index[by_obs] - self._continues.shape[1]]
        by_final = new.final & chained
        if arrays.final is not None and by_final.any():
            index = new.index[by_final]
            before, after = _flat(arrays.obs)[index], _flat(arrays.final)[index]
            moved[by_final] = continues(np.stack((before, after)))[0]
        return np.where(moved, 1, self._depth)

    def _copy(self, new: NewRows, arrays: LeafArrays, fresh: Indices, shown: Array) -> None:
        """Copy the frames that are stored: the newest of rows that continue, all of the others."""
        frame = self._frames.shape[1:]
        for final, source in ((False, arrays.obs), (True, arrays.final)):
            chosen = new.final == final
            one, all_ = chosen & (fresh == 1), chosen & (fresh > 1)
            if source is None or not chosen.any():
                continue
            stacks = _flat(source)
            singles = stacks.reshape(-1, *frame)
            self._frames[shown[one, -1]] = singles[new.index[one] * self._depth + self._depth - 1]
            self._frames[shown[all_]] = stacks[new.index[all_]]


def continues(obs: Array) -> Flags:
    """[T, N]: where the stack ``obs[t + 1]`` is ``obs[t]`` moved on by one frame, compared to the
    last bit. obs [T+1, N, S, *frame].
    """
    words = _words(obs)
    same = [
        (after[:, :-1] == before[:, 1:]).all(axis=(1, 2))
        for before, after in itertools.pairwise(words)
    ]
    return np.stack(same) if same else np.zeros((0, obs.shape[1]), np.bool_)


def find_stacks(
    observation: Sequence[LeafSpec], arrays: Mapping[str, Array], length: int
) -> frozenset[str]:
    """Names of the leaves whose first axis is a stack of frames, judged by one fragment: most
    observations go on from the one before.

    Only leaves of at least three axes are looked at. A leaf that never changes is taken for one,
    too, which costs little.
    """
    goes_on = ~arrays["start"][1 : length + 1]
    found = []
    for leaf in observation:
        if len(leaf.shape) >= 3 and leaf.shape[0] >= 2 and goes_on.any():
            moved = continues(arrays[f"obs/{leaf.name}"][: length + 1])
            if 2 * np.count_nonzero(moved & goes_on) > np.count_nonzero(goes_on):
                found.append(leaf.name)
    return frozenset(found)


def same_observations(left: Array, right: Array) -> Flags:
    """[N]: where two sets of observations [N, *leaf] are the same to the last bit."""
    axes = tuple(range(1, left.ndim + 1))
    as_bytes = [np.ascontiguousarray(side)[..., None].view(np.uint8) for side in (left, right)]
    same: Flags = (as_bytes[0] == as_bytes[1]).all(axis=axes)
    return same


def _words(obs: Array) -> Array:
    """[T+1, N, S, W]: frames as the widest unsigned words that divide them."""
    nbytes = math.prod(obs.shape[3:]) * obs.dtype.itemsize
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return np.ascontiguousarray(obs).reshape(*obs.shape[:3], -1).view(f"u{width}")


def _flat(array: Array) -> Array:
    """[T, N, ...] as [T * N, ...]."""
    return array.reshape(-1, *array.shape[2:])
