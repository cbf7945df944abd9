"""The contents of the slots of a node: data that other machines send, and that it sends to them.

A slot belongs to one ticket at a time. Data of an earlier ticket may still arrive, from a machine
that the run has given up. They are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tianflow.channels.attachments import Attachments, DrawParts, Encoding, Views
from tianflow.channels.frames import MalformedMessageError

if TYPE_CHECKING:
    from tianflow.channels.arena import Arena


class SlotContents:
    """Reads and writes parts of slots.

    Args:
        slots: of trajectories.
        draws: of draws; None: no replay shard works here.
        encoding: of what is read.
    """

    def __init__(self, slots: Arena, draws: Arena | None, encoding: Encoding) -> None:
        self._slots, self._draws = slots, draws
        self._attachments = Attachments(slots.layout, encoding)
        self._columns = None if draws is None else DrawParts(draws.layout, encoding)
        self._newest: dict[int, int] = {}
        """By slot, the newest ticket that was granted here, or whose data came here."""

    def require(self, slot: Any, *others: Any) -> None:
        """Refuse a ``slot`` that does not exist here, and ``others`` that are not numbers.

        Raises:
            MalformedMessageError: there is one.
        """
        whole = all(type(value) is int and 0 <= value < 2**63 for value in (slot, *others))
        if not whole or slot >= self._slots.slots:
            raise MalformedMessageError(f"there is no slot {slot!r:.20}, or {others!r:.60}")

    def granted(self, slot: int, ticket: int) -> None:
        """A host here writes ``ticket`` into ``slot``."""
        self._newest[slot] = ticket

    def trajectory(self, slot: int, length: int) -> dict[str, Any]:
        """The rows of a trajectory (`Attachments.of`)."""
        return self._attachments.of(self._slots.views(slot), length)

    def write(self, ticket: int, slot: int, length: object, arrays: object) -> None:
        """Write a trajectory that the head sends. MalformedMessageError if it does not fit."""
        self.require(slot, ticket)
        if self._newest.get(slot, -1) <= ticket:
            self._attachments.write(self._slots.views(slot), length, arrays)
            self._newest[slot] = ticket

    def store(self, ticket: int, slot: int, length: int, arrays: object) -> bool:
        """Write a trajectory that another node sends. MalformedMessageError if it does not fit.

        False if the head has sent it meanwhile, if the slot has a later one, or if this node has
        not heard of the slot yet.
        """
        if self._slots.slots <= slot < self._slots.capacity:
            return False
        self.require(slot, ticket)
        if self._newest.get(slot, -1) >= ticket:
            return False
        self.write(ticket, slot, length, arrays)
        return True

    def require_draw(self, slot: Any) -> None:
        """Refuse a ``slot`` of draws that does not exist here.

        Raises:
            MalformedMessageError: it does not.
        """
        self._draw(slot)

    def drawn(self, slot: int, first: int, items: int) -> dict[str, Any]:
        """Columns of a draw (`DrawParts.of`)."""
        columns, views = self._draw(slot)
        return columns.of(views, first, items)

    def write_priorities(self, slot: Any, first: object, items: object, arrays: object) -> None:
        """Write priorities of columns. MalformedMessageError if they do not fit."""
        columns, views = self._draw(slot)
        columns.write_priorities(views, first, items, arrays)

    def _draw(self, slot: Any) -> tuple[DrawParts, Views]:
        if self._columns is None or self._draws is None:
            raise MalformedMessageError("no replay shard works here")
        if type(slot) is not int or not 0 <= slot < self._draws.slots:
            raise MalformedMessageError(f"there is no slot {slot!r:.20} of draws")
        return self._columns, self._draws.views(slot)
