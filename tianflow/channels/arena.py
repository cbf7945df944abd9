"""Arena: slots of one buffer, each with the arrays of one trajectory, and eight words per slot that
several processes read.

The writer of a slot stores its progress, the coordinator requests a cut. With central inference the
writer requests actions, and an inference server answers. Each word is one aligned int64 with one
writer. Progress, cut, request and answer carry a ticket, so those of an earlier one have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.layout import ASKED_AT, request_views, views
from tianflow.core.payloads import MOST_ROWS, Grant, TrajectoryLayout, Version, aligned

_WORDS = 8  # one cache line a slot, so that two writers never share one
_PROGRESS_TICKET, _PROGRESS, _CUT_TICKET, _ASKED, _ANSWERED, _LINEAGE, _NUMBER, _SLOTS = range(8)

OBSERVATION, STATE, MASK = "obs/", "state/", "action_mask"
"""Names of fields that a policy reads, or their prefixes."""
MOST_PLACES = 2**8
"""A request is one word: ticket, row (below `MOST_ROWS`), and the place of the actor's host."""


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
        self.words = buffer[: capacity * _WORDS * 8].view(np.int64).reshape(capacity, _WORDS)
        """[capacity, 8] int64."""
        self._first = aligned(capacity * _WORDS * 8)
        self._buffer = buffer
        self.on_cut: Callable[[int, int], None] | None = None
        """Called with slot and ticket of every cut that is requested here: the writer may be on
        another machine.
        """
        self._views: dict[int, dict[str, NDArray[Any]]] = {}
        self._requests: dict[int, dict[str, NDArray[Any]]] = {}

    @property
    def slots(self) -> int:
        """Slots that have memory so far."""
        return int(self.words[0, _SLOTS])

    @slots.setter
    def slots(self, count: int) -> None:
        self.words[0, _SLOTS] = count

    def memory(self, slots: int) -> NDArray[np.uint8]:
        """The bytes of the first ``slots`` slots, without their words."""
        return self._buffer[self._first : self._first + slots * aligned(self.layout.nbytes)]

    def views(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of ``slot``."""
        if slot not in self._views:
            self._views[slot] = views(self.layout, self.slot_memory(slot))
        return self._views[slot]

    def request_views(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of the request in ``slot`` (`TrajectoryLayout.request`)."""
        if slot not in self._requests:
            self._requests[slot] = request_views(self.layout, self.slot_memory(slot))
        return self._requests[slot]

    def slot_memory(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of ``slot``, without its words."""
        start = self._first + slot * aligned(self.layout.nbytes)
        return self._buffer[start : start + self.layout.nbytes]

    def lease(self, grant: Grant) -> ArenaSlot:
        """The writer's side of a granted slot."""
        return ArenaSlot(self, grant)

    def request_cut(self, slot: int, ticket: int) -> None:
        """Ask the writer of ``ticket`` to commit the steps it has."""
        self.words[slot, _CUT_TICKET] = ticket + 1
        if self.on_cut is not None:
            self.on_cut(slot, ticket)

    def ask_for(self, slot: int, request: int) -> None:
        """Store ``request`` of a writer on another machine. All that it consists of has been
        written.
        """
        self.request_views(slot)[ASKED_AT][...] = time.monotonic()
        self.words[slot, _ASKED] = request

    def answer_to(self, slot: int, request: int) -> Version | None:
        """The version that has answered ``request``; None while it is open."""
        row = self.words[slot]
        if row[_ANSWERED] != request:
            return None
        return Version(int(row[_LINEAGE]), int(row[_NUMBER]))

    def report(self, slot: int, ticket: int, steps: int) -> None:
        """Store that the writer of ``ticket``, on another machine, has taken ``steps`` steps."""
        row = self.words[slot]
        row[_PROGRESS], row[_PROGRESS_TICKET] = steps, ticket + 1

    def progress(self, slot: int, ticket: int) -> int:
        """Steps taken so far for ``ticket``; -1 before its writer has stored the first."""
        row = self.words[slot]
        return int(row[_PROGRESS]) if row[_PROGRESS_TICKET] == ticket + 1 else -1


class ArenaSlot:
    """`tianflow.interfaces.SlotView` over one slot."""

    __slots__ = ("_arena", "_asked", "_ticket", "_words", "arrays", "number")

    def __init__(self, arena: Arena, grant: Grant) -> None:
        self._arena, self.number = arena, grant.slot
        self.arrays = arena.views(grant.slot)
        self._words: memoryview[int] = arena.words[grant.slot].data
        self._ticket, self._asked = grant.ticket + 1, 0

    @property
    def request(self) -> Mapping[str, NDArray[Any]]:
        """See `Arena.request_views`."""
        return self._arena.request_views(self.number)

    def progress(self, step: int) -> None:
        """Store that the environment has taken ``step`` steps."""
        self._words[_PROGRESS] = step
        self._words[_PROGRESS_TICKET] = self._ticket

    def cut_requested(self) -> bool:
        """True once the steps made so far are wanted."""
        return self._words[_CUT_TICKET] == self._ticket

    def ask(self, row: int, place: int) -> None:
        """Request the actions of ``row`` for a host at ``place``. All that the request consists of
        has been written.
        """
        self._asked = (self._ticket * MOST_ROWS + row) * MOST_PLACES + place
        self.request[ASKED_AT][...] = time.monotonic()
        self._words[_ASKED] = self._asked

    def answered(self) -> bool:
        """True once the request was answered."""
        return self._words[_ANSWERED] == self._asked

    def answer_version(self) -> Version:
        """The version that computed the answer."""
        return Version(self._words[_LINEAGE], self._words[_NUMBER])


class SlotRequests:
    """The requests in the slots of an arena, as inference server ``index`` of ``servers`` sees
    them. It answers the slots ``index``, ``index + servers``, …

    One server answers a slot, one request after the other. A late answer to an earlier request of a
    slot is therefore complete before the next one begins, and changes only what an actor does not
    read before its own answer.
    """

    def __init__(self, arena: Arena, *, index: int, servers: int) -> None:
        self._arena, self._index, self._servers = arena, index, servers

    def open(self) -> list[tuple[int, int]]:
        """(slot, request) of all requests without an answer."""
        words = self._arena.words[self._index : self._arena.slots : self._servers]
        asked = words[:, _ASKED]
        found = np.flatnonzero(asked != words[:, _ANSWERED])
        return [
            (self._index + place * self._servers, request)
            for place, request in zip(found.tolist(), asked[found].tolist(), strict=True)
        ]

    def asked_at(self, slot: int) -> float:
        """When the open request of ``slot`` was made (`time.monotonic`, which all processes of a
        machine share).
        """
        return float(self._arena.request_views(slot)[ASKED_AT])

    def answer(self, slot: int, request: int, version: Version) -> None:
        """The answer to ``request`` is written, computed with ``version``."""
        words = self._arena.words[slot]
        words[_LINEAGE], words[_NUMBER] = version
        words[_ANSWERED] = request


def row_of(request: int) -> int:
    """The row that ``request`` asks about."""
    return request // MOST_PLACES % MOST_ROWS


def at_place(request: int, place: int) -> int:
    """``request`` as one of a host at ``place``."""
    return request // MOST_PLACES * MOST_PLACES + place


def place_of(request: int) -> int:
    """The place of the host that asks."""
    return request % MOST_PLACES


def input_rows(arena: Arena, slot: int, row: int) -> dict[str, NDArray[Any]]:
    """What the policy sees in ``row`` of ``slot``, as views: ``obs/<leaf>``, ``action_mask``,
    ``noise`` and ``state/<leaf>``, [N, ...] each.
    """
    found = {
        name: array[row]
        for name, array in arena.views(slot).items()
        if name == MASK or name.startswith(OBSERVATION)
    }
    for name, array in arena.request_views(slot).items():
        if name == "noise":
            found[name] = array[row]
        elif name.startswith(STATE):
            found[name] = array
    return found


def answer_fields(request: Mapping[str, NDArray[Any]]) -> list[str]:
    """Names of the fields of a request that an inference server writes."""
    return [
        name for name in request if name not in ("noise", ASKED_AT) and not name.startswith(STATE)
    ]
