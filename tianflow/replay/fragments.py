"""What the rows of one fragment are: which observations are stored, in which order, and which
windows they make. Pure functions.

A *row* is one stored observation; most are also the step that was taken from it. Rows are numbered
0, 1, ... for ever. Those of one fragment lie environment by environment, in the order of time. Two
kinds of rows are no steps: the true last observation of an episode that was cut off, and the one
after a fragment's last step, which becomes a step when the next fragment goes on from it (*open*).
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
    """Where fragments come from. Another incarnation of an actor is another stream."""

    actor: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """One trajectory: the arrays of `tianflow.core.payloads.TrajectoryLayout`, of which ``length``
    rows are written.

    ``number`` counts the fragments of a stream: the one after goes on where this one ends, and any
    other number is a gap. ``state/<leaf>`` may also be [T, N, *leaf], the recurrent state before
    each observation.
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
    """How the steps of a fragment hang together. [T, N] each; of no meaning where ``valid`` is
    False.
    """

    valid: Flags
    ends: Flags
    """The last step of an episode, or before a break."""
    looks_on: Flags
    """What follows is stored in a row that is no step (yet): no termination, and no next step in
    this fragment.
    """
    final: Flags
    """That observation is in ``final_obs``, not in the next row of ``obs``."""


def flow(fragment: Fragment) -> Flow:
    """Read the flags of a fragment.

    Raises:
        ValueError: if an episode begins where the one before has not ended, or goes on after its
            end.
    """
    valid, start = fragment.rows("valid"), fragment.rows("start", 1)
    terminated, truncated = fragment.rows("terminated"), fragment.rows("truncated")
    done = terminated | truncated
    has_final = any(name.startswith("final_obs/") for name in fragment.arrays)
    next_valid = np.concatenate((valid[1:], np.zeros_like(valid[:1])))
    _refuse(
        valid & ~done & start[1:] & next_valid, "begins, but the step before it did not end one"
    )
    _refuse(valid & done & next_valid & ~start[1:], "goes on after its end")
    if not has_final:
        _refuse(
            valid & done & next_valid,
            "begins right after the end of another, whose last observation is not there",
        )
    last = np.zeros_like(valid)
    last[-1] = True
    ends = valid & (done | (~next_valid & ~last))
    looks_on = valid & ~terminated & (ends | last)
    return Flow(valid, ends, looks_on, looks_on & done & has_final)


def _refuse(wrong: Flags, what: str) -> None:
    if wrong.any():
        step, environment = np.argwhere(wrong)[0].tolist()
        raise ValueError(
            f"after step {step} of environment {environment} an episode {what}: such steps must "
            "not be stored"
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the steps of a fragment go, given which environments go on from an open row."""

    step: Indices
    """[T, N] row of each step, -1 where not valid."""
    position: Indices
    """[T, N] steps before it in its episode, as far as they are known here."""
    follower: Indices
    """[T, N] row of the observation after each step, -1 after a termination."""
    new: NewRows
    begins: Flags
    """[m] for each new row: a window begins there (if a step is taken from it)."""


def place(
    flow_: Flow, *, head: int, period: int, open_rows: Indices, open_positions: Indices
) -> Placed:
    """Give a row to every observation that needs one.

    Args:
        flow_: of the fragment, T steps of N environments.
        head: the first new row.
        period: steps from the beginning of one window to that of the next.
        open_rows: [N] the row that environment n's first step is taken from, -1 if there is none.
        open_positions: [N] steps before it in its episode.
    """
    valid, steps, columns = flow_.valid, *flow_.valid.shape
    chained = np.concatenate(((open_rows >= 0)[None], valid[:-1] & ~flow_.ends[:-1])) & valid
    own = valid.copy()
    own[0] &= open_rows < 0  # the observation of an open row is there already
    per_step = (own.astype(np.int64) + flow_.looks_on).T
    offset = (np.cumsum(per_step).reshape(per_step.shape) - per_step).T
    step = np.where(own, head + offset, -1)
    step[0] = np.where(open_rows >= 0, open_rows, step[0])
    extra = head + offset + own
    # The step at which the stretch of each began: before this fragment, if it goes on from an open
    # row.
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
    # Rows that are no steps. An open one begins a window if its step, when it comes, will be due
    # to.
    on, places = flow_.looks_on, extra[flow_.looks_on] - head
    final[places], after[places] = flow_.final[on], step[on]
    index[places] = flat[on] + np.where(flow_.final[on], 0, columns)
    begins[places] = ~flow_.ends[on] & ((position[on] + 1) % period == 0)
    follower = np.where(flow_.looks_on, extra, following)
    return Placed(step, position, follower, NewRows(head, index, final, after), begins)


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows that are complete."""

    rows: Indices
    """[L, W] their steps' rows; past the length the last one again."""
    length: Indices
    """[W]"""


def complete(
    *, rows: Indices, position: Indices, ends: Flags, length: int, period: int, tail: int
) -> Windows:
    """The windows that consecutive steps complete, of which the first, fewer than ``length``, were
    there before and ended nothing.

    A window begins at every step whose position is a multiple of ``period``, and has ``length``
    steps, or as many as are left in the episode.

    Args:
        rows: [K, N] rows of the steps; -1 where there is none.
        position: [K, N] steps before each in its episode.
        ends: [K, N] last steps of an episode.
        length: of a whole window.
        period: see above.
        tail: older rows are gone, and with them the windows that began there.
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
    """How many windows each step is part of, from its ``position`` in the episode."""
    covering: Indices = position // period - np.maximum((position - length) // period, -1)
    return covering
