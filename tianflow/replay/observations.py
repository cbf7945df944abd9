"""Observations by row: plain leaves, and stacked leaves that store each frame once."""

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
_CHUNK = 256
"""Rows per step of the search for frames that an eviction would free."""


@dataclass(frozen=True, slots=True)
class NewRows:
    """Observations of one fragment (length T, N environments) for the rows ``first .. first + m -
    1``.
    """

    first: int
    index: Indices
    """[m] t * N + n: index into ``obs``, or into ``final_obs`` where ``final``."""
    final: Flags
    """[m]"""
    after: Indices
    """[m] row of the observation one step before in the same episode; -1 without one.

    It is the previous row, or a row of an earlier fragment.
    """

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class LeafArrays:
    """One leaf of a fragment: ``obs`` [T+1, N, *leaf], and ``final`` [T, N, *leaf] if it exists."""

    obs: Array
    final: Array | None


class Leaf(Protocol):
    """One leaf of the observations in a ring of rows.

    Rows are numbered 0, 1, ... without end; the newest ``rows`` can be resident.
    """

    @property
    def nbytes(self) -> int:
        """Size of its memory in bytes; constant."""
        ...

    def inspect(self, arrays: LeafArrays) -> None:
        """Prepare the next `required_tail` and `write` for this fragment. No reference to it
        remains.
        """
        ...

    def required_tail(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:
        """The row (exclusive) up to which rows ``tail .. head - 1`` must be evicted to fit ``new``.

        A result past ``head`` means that ``new`` never fits.
        """
        ...

    def evict(self, first: int, end: int) -> None:
        """Evict the oldest rows, ``first .. end - 1``."""
        ...

    def write(self, new: NewRows, arrays: LeafArrays) -> None:
        """Store ``new``; the caller has made room."""
        ...

    def read(self, rows: Indices, out: Array) -> None:
        """Copy the observations of ``rows`` [...] to ``out`` [..., *leaf]."""
        ...

    def snapshot(self) -> dict[str, Array]:
        """All state, as views."""
        ...

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Load the `snapshot` of a leaf of the same sizes."""
        ...


class PlainLeaf:
    """One observation per row, with its own dtype.

    Args:
        leaf: shape and dtype.
        rows: number of rows.
        unknown: value of a final observation that the fragment does not contain.
    """

    def __init__(self, leaf: LeafSpec, *, rows: int, unknown: int = 0) -> None:
        self._data = np.zeros((rows, *leaf.shape), leaf.dtype)
        self._unknown = unknown

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def inspect(self, arrays: LeafArrays) -> None:
        """Do nothing: the contents have no influence."""

    def required_tail(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:  # noqa: ARG002 - every observation needs the same memory
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
    """Stacks ``[S, *frame]`` of the last S frames, newest last.

    If a stack equals its predecessor shifted by one frame, only its newest frame is stored, else
    all S frames. A frame is freed with the last row that refers to it.

    Args:
        leaf: shape [S, *frame] and dtype.
        rows: number of rows.
        frames: capacity in frames; when it is exhausted, the oldest rows are evicted.
    """

    def __init__(self, leaf: LeafSpec, *, rows: int, frames: int) -> None:
        if len(leaf.shape) < 2 or leaf.shape[0] < 2:
            raise ValueError(
                f"{leaf.name!r} of shape {leaf.shape} is not a stack: accepted is [S, *frame] with "
                "S >= 2"
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
        """Number of frames that a row refers to."""
        return len(self._free) - self._free_count

    def inspect(self, arrays: LeafArrays) -> None:
        self._continues = continues(arrays.obs)

    def required_tail(self, new: NewRows, arrays: LeafArrays, tail: int, head: int) -> int:
        needed = int(self._fresh(new, arrays).sum()) - self._free_count
        while needed > 0 and tail < head:
            end = min(head, tail + _CHUNK)
            freed = np.cumsum(self._shown_last(tail, end).sum(axis=1))
            enough = int(np.searchsorted(freed, needed))
            tail, needed = min(end, tail + enough + 1), needed - int(freed[-1])
        return tail if needed <= 0 else head + 1

    def evict(self, first: int, end: int) -> None:
        for begin in range(first, end, _CHUNK):
            until = min(end, begin + _CHUNK)
            shown = self._shown[np.arange(begin, until) % len(self._shown)]
            freed = shown[self._shown_last(begin, until)]
            self._free[self._free_count : self._free_count + len(freed)] = freed
            self._free_count += len(freed)

    def write(self, new: NewRows, arrays: LeafArrays) -> None:
        fresh, depth, rows = self._fresh(new, arrays), self._depth, len(self._shown)
        # All frames in the order of their rows. The frames of a row of an earlier fragment come
        # before those of the row that continues it. Every row then refers to the S frames up to its
        # newest one.
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
        # If several rows refer to a frame, the last one counts: NumPy assigns in order.
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
        """[rows, S] True for frames of these rows to which no later row refers."""
        rows = np.arange(first, end)
        last: Flags = self._last_row[self._shown[rows % len(self._shown)]] == rows[:, None]
        return last

    def _fresh(self, new: NewRows, arrays: LeafArrays) -> Indices:
        """[m] frames to store per row: 1 where it continues the row before, else S."""
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
        """Copy the stored frames: the newest of rows that continue, all frames of the others."""
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
    """[T, N] True where stack ``obs[t + 1]`` is ``obs[t]`` shifted by one frame, bit for bit.

    obs is [T+1, N, S, *frame].
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
    """Names of the leaves whose first axis is a stack of frames, detected from one fragment.

    A leaf is a stack if most observations are shifted by one frame. Only leaves with at least three
    axes are considered. A constant leaf counts as a stack, too, which costs little.
    """
    continued = ~arrays["start"][1 : length + 1]
    found = []
    for leaf in observation:
        if len(leaf.shape) >= 3 and leaf.shape[0] >= 2 and continued.any():
            moved = continues(arrays[f"obs/{leaf.name}"][: length + 1])
            if 2 * np.count_nonzero(moved & continued) > np.count_nonzero(continued):
                found.append(leaf.name)
    return frozenset(found)


def same_observations(left: Array, right: Array) -> Flags:
    """[N] True where two sets of observations [N, *leaf] are equal bit for bit."""
    axes = tuple(range(1, left.ndim + 1))
    as_bytes = [np.ascontiguousarray(side)[..., None].view(np.uint8) for side in (left, right)]
    same: Flags = (as_bytes[0] == as_bytes[1]).all(axis=axes)
    return same


def _words(obs: Array) -> Array:
    """[T+1, N, S, W] frames as the widest unsigned integers that divide them."""
    nbytes = math.prod(obs.shape[3:]) * obs.dtype.itemsize
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    return np.ascontiguousarray(obs).reshape(*obs.shape[:3], -1).view(f"u{width}")


def _flat(array: Array) -> Array:
    """[T, N, ...] as [T * N, ...]."""
    return array.reshape(-1, *array.shape[2:])
