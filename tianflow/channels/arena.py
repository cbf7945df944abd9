"""Arena: slots of one buffer, each with the arrays of one trajectory, and two words per slot that
both sides read.

The writer of a slot stores its progress, the coordinator requests a cut. Each word is one aligned
int64 that carries its ticket, so a word of an earlier ticket has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.layout import views
from tianflow.core.payloads import Grant, TrajectoryLayout, aligned

_WORDS = 8  # one cache line a slot, so that two writers never share one
_PROGRESS_TICKET, _PROGRESS, _CUT_TICKET = 0, 1, 2


def arena_nbytes(layout: TrajectoryLayout, slots: int) -> int:
    """Bytes an arena of ``slots`` slots needs."""
    return aligned(slots * _WORDS * 8) + slots * aligned(layout.nbytes)


class Arena:
    """Views into a buffer of slots.

    Args:
        layout: of one trajectory.
        buffer: uint8, at least `arena_nbytes` long; in shared or ordinary memory.
        capacity: slots it has room for.
    """

    def __init__(
        self, *, layout: TrajectoryLayout, buffer: NDArray[np.uint8], capacity: int
    ) -> None:
        if buffer.nbytes < arena_nbytes(layout, capacity):
            raise ValueError(
                f"{capacity} slots need {arena_nbytes(layout, capacity)} bytes, the buffer has "
                f"{buffer.nbytes}"
            )
        self.layout = layout
        self.capacity = capacity
        self._words = buffer[: capacity * _WORDS * 8].view(np.int64).reshape(capacity, _WORDS)
        self._first = aligned(capacity * _WORDS * 8)
        self._buffer = buffer
        self._views: dict[int, dict[str, NDArray[Any]]] = {}

    def views(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of ``slot``."""
        if slot not in self._views:
            start = self._first + slot * aligned(self.layout.nbytes)
            self._views[slot] = views(self.layout, self._buffer[start : start + self.layout.nbytes])
        return self._views[slot]

    def lease(self, grant: Grant) -> ArenaSlot:
        """The writer's side of a granted slot."""
        return ArenaSlot(self.views(grant.slot), self._words[grant.slot].data, grant.ticket)

    def request_cut(self, slot: int, ticket: int) -> None:
        """Ask the writer of ``ticket`` to commit the steps it has."""
        self._words[slot, _CUT_TICKET] = ticket + 1

    def progress(self, slot: int, ticket: int) -> int:
        """Steps taken so far for ``ticket``; -1 before its writer has stored the first."""
        row = self._words[slot]
        return int(row[_PROGRESS]) if row[_PROGRESS_TICKET] == ticket + 1 else -1


class ArenaSlot:
    """`tianflow.interfaces.SlotView` over one slot."""

    __slots__ = ("_ticket", "_words", "arrays")

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], words: memoryview[int], ticket: int
    ) -> None:
        self.arrays, self._words, self._ticket = arrays, words, ticket + 1

    def progress(self, step: int) -> None:
        """Store that the environment has taken ``step`` steps."""
        self._words[_PROGRESS] = step
        self._words[_PROGRESS_TICKET] = self._ticket

    def cut_requested(self) -> bool:
        """True once the steps made so far are wanted."""
        return self._words[_CUT_TICKET] == self._ticket
