"""Pure functions from a fragment to rows and windows.

A *row* is one stored observation. Most rows also hold the step taken from it. Rows are numbered 0,
1, ... without end. The rows of one fragment are ordered by environment, then by time.

Two kinds of rows hold no step: the last observation of a truncated episode, and the observation
after a fragment's last step. The second kind is *open*: it gets its step when the next fragment
continues the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tianflow.replay.observations import Flags, NewRows
from tianflow.replay.sum_tree import Indices

_NEVER = np.iinfo(np.int64).max


class StepStream(NamedTuple):
    """Source of fragments. A new incarnation of an actor or of its environments begins a stream."""

    actor: int
    incarnation: int
    """Order of the streams of one actor."""

    @classmethod
    def of(cls, actor: int, *, incarnation: int, environments: int) -> StepStream:
        """The stream of ``actor`` after creating its environments ``environments`` times."""
        return cls(actor, incarnation << 32 | environments)


@dataclass(frozen=True, slots=True)
class Fragment:
    """One trajectory: ``length`` written rows of the arrays in
    `tianflow.core.payloads.TrajectoryLayout`.

    ``number`` counts the fragments of a stream. The next number continues this fragment; any other
    number is a gap. ``state/<leaf>`` may also be [T, N, *leaf], the recurrent state before each
    observation.
    """

    arrays: Mapping[str, NDArray[Any]]
    length: int
    stream: StepStream
    number: int

    def rows(self, name: str, more: int = 0) -> NDArray[Any]:
        """The written part of an array: ``length + more`` rows."""
        return self.arrays[name][: self.length + more]


@dataclass(frozen=True, slots=True)
class Flow:
    """Connections between the steps of a fragment. Arrays are [T, N], undefined where not
    ``valid``.
    """

    valid: Flags
    ends: Flags
    """The last step of an episode, or the last before a break."""
    extra_row: Flags
    """The observation after the step needs a row of its own: the step does not terminate, and the
    fragment has no next step.
    """
    final: Flags
    """That observation is in ``final_obs``, not in the next row of ``obs``."""


def flow(fragment: Fragment) -> Flow:
    """Flags of a fragment.

    Raises:
        ValueError: an episode begins before the previous one ended, or continues after its end.
    """
    valid, start = fragment.rows("valid"), fragment.rows("start", 1)
    terminated, truncated = fragment.rows("terminated"), fragment.rows("truncated")
    done = terminated | truncated
    has_final = any(name.startswith("final_obs/") for name in fragment.arrays)
    next_valid = np.concatenate((valid[1:], np.zeros_like(valid[:1])))
    _refuse(valid & ~done & start[1:] & next_valid, "begins before the previous one ended")
    _refuse(valid & done & next_valid & ~start[1:], "continues after its end")
    if not has_final:
        _refuse(
            valid & done & next_valid,
            "begins right after the end of another, whose last observation is missing",
        )
    last = np.zeros_like(valid)
    last[-1] = True
    ends = valid & (done | (~next_valid & ~last))
    extra_row = valid & ~terminated & (ends | last)
    return Flow(valid, ends, extra_row, extra_row & done & has_final)


def _refuse(wrong: Flags, what: str) -> None:
    if wrong.any():
        step, environment = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"after step {step} of environment {environment} an episode {what}: such steps cannot "
            "be stored"
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows of the steps of a fragment."""

    step: Indices
    """[T, N] row of each step; -1 where not valid."""
    position: Indices
    """[T, N] number of known steps before it in its episode."""
    follower: Indices
    """[T, N] row of the observation after each step; -1 after a termination."""
    new: NewRows
    begins: Flags
    """[m] per new row: a window begins there, if the row gets a step."""


def place(
    flow_: Flow, *, head: int, period: int, open_rows: Indices, open_positions: Indices
) -> Placed:
    """Assign a row to every observation that needs one.

    Args:
        flow_: flags of the fragment, T steps of N environments.
        head: number of the first new row.
        period: steps from the beginning of one window to the beginning of the next.
        open_rows: [N] row of the observation before environment n's first step; -1 without one.
        open_positions: [N] number of steps before it in its episode.
    """
    valid, steps, columns = flow_.valid, *flow_.valid.shape
    chained = np.concatenate(((open_rows >= 0)[None], valid[:-1] & ~flow_.ends[:-1])) & valid
    own = valid.copy()
    own[0] &= open_rows < 0  # the observation of an open row is stored already
    per_step = (own.astype(np.int64) + flow_.extra_row).T
    offset = (np.cumsum(per_step).reshape(per_step.shape) - per_step).T
    step = np.where(own, head + offset, -1)
    step[0] = np.where(open_rows >= 0, open_rows, step[0])
    extra = head + offset + own
    # First step of each stretch: before this fragment, if the stretch continues an open row.
    first = np.where(valid & ~chained, np.arange(steps)[:, None], -_NEVER)
    first[0] = np.where(open_rows >= 0, -open_positions, first[0])
    position = np.arange(steps)[:, None] - np.maximum.accumulate(first, axis=0)
    following = np.concatenate((np.where(chained[1:], step[1:], -1), np.full((1, columns), -1)))
    before = np.concatenate((np.full((1, columns), -1), np.where(chained[1:], step[:-1], -1)))
    index, final, after = (
        np.zeros(per_step.sum(), np.int64),
        np.zeros(per_step.sum(), np.bool_),
        np.zeros(per_step.sum(), np.int64),
    )
    begins = np.zeros(len(index), np.bool_)
    flat = np.arange(steps * columns).reshape(steps, columns)
    places = offset[own]
    index[places], after[places], begins[places] = (
        flat[own],
        before[own],
        (position[own] % period) == 0,
    )
    # Rows without a step. An open row begins a window if its future step is due to begin one.
    on, places = flow_.extra_row, extra[flow_.extra_row] - head
    final[places], after[places] = flow_.final[on], step[on]
    index[places] = flat[on] + np.where(flow_.final[on], 0, columns)
    begins[places] = ~flow_.ends[on] & ((position[on] + 1) % period == 0)
    follower = np.where(flow_.extra_row, extra, following)
    return Placed(step, position, follower, NewRows(head, index, final, after), begins)


@dataclass(frozen=True, slots=True)
class Windows:
    """W complete windows."""

    rows: Indices
    """[L, W] rows of their steps; the last row repeats past the length."""
    length: Indices
    """[W]"""


def complete(
    *, rows: Indices, position: Indices, ends: Flags, length: int, period: int, tail: int
) -> Windows:
    """Windows completed by consecutive steps.

    A window begins at every step whose position is a multiple of ``period``. It has ``length``
    steps, or as many as the episode has left. The first steps, fewer than ``length``, are known
    from before and end no window.

    Args:
        rows: [K, N] rows of the steps; -1 without a step.
        position: [K, N] number of steps before each in its episode.
        ends: [K, N] last steps of an episode.
        length: length of a full window.
        period: steps between the beginnings of windows.
        tail: first row that still exists; windows that began before it are lost.
    """
    count = len(rows)
    k = np.arange(count)[:, None]
    end = np.minimum.accumulate(np.where(ends, k, _NEVER)[::-1], axis=0)[::-1]
    last = np.minimum(end, k + length - 1)
    begins = (rows >= max(tail, 0)) & (position % period == 0) & (last < count)
    step, column = begins.nonzero()
    lasts = last[step, column]
    steps = np.minimum(step + np.arange(length)[:, None], lasts)
    return Windows(rows[steps, column], lasts - step + 1)


def windows_over(position: Indices, *, length: int, period: int) -> Indices:
    """Number of windows that contain each step, from its ``position`` in the episode."""
    covering: Indices = position // period - np.maximum((position - length) // period, -1)
    return covering
