"""Which slots are free, which may still be written to, and which are lent to a reader."""

from __future__ import annotations


class Slots:
    """Slots by number. One that is in none of the three places belongs to a live ticket that is
    granted, begun or committed.

    A slot goes into quarantine when its ticket is given up while the holder may still write to it,
    and comes out when the holder says that it will not, or was reaped.

    Args:
        count: slots that exist at first, all free.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """Slots that exist."""
        self._free = list(reversed(range(count)))
        self._quarantine: dict[int, tuple[str, int]] = {}
        self._lent: dict[int, int] = {}

    def add(self, count: int) -> None:
        """``count`` more exist, all free."""
        self._free[:0] = reversed(range(self.count, self.count + count))
        self.count += count

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """How many may still be written to by somebody whose ticket was given up."""
        return len(self._quarantine)

    def without_ticket(self) -> list[int]:
        """All that are free, in quarantine or lent."""
        return [*self._free, *self._quarantine, *self._lent.values()]

    def take(self) -> int:
        """The one that became free last: it is the likeliest to be in a cache. Raises IndexError if
        there is none.
        """
        return self._free.pop()

    def release(self, slot: int) -> None:
        """``slot`` is free: nobody writes to it or reads from it."""
        self._free.append(slot)

    def quarantine(self, slot: int, holder: str, number: int) -> None:
        """``holder`` may still write to ``slot`` for ticket ``number``, which was given up."""
        self._quarantine[slot] = (holder, number)

    def leave_quarantine(self, slot: int, number: int) -> None:
        """The holder of ticket ``number`` no longer touches ``slot``, which is free if it was kept
        for that ticket.
        """
        if self._quarantine.get(slot, ("", -1))[1] == number:
            del self._quarantine[slot]
            self._free.append(slot)

    def holder_lost(self, holder: str) -> None:
        """``holder`` was reaped: what it might still have written to is free."""
        for slot, (owner, number) in list(self._quarantine.items()):
            if owner == holder:
                self.leave_quarantine(slot, number)

    def lend(self, slot: int, number: int) -> None:
        """The learner, or a replay shard, reads ``slot`` for ticket ``number``."""
        self._lent[number] = slot

    def take_back(self, number: int) -> None:
        """The slot of ticket ``number`` is the ticket's again, unread."""
        del self._lent[number]

    def copied(self, number: int) -> None:
        """What ticket ``number`` was lent for has been copied out: the slot is free. Repeating it
        changes nothing.
        """
        slot = self._lent.pop(number, None)
        if slot is not None:
            self._free.append(slot)

    def readers_lost(self) -> None:
        """Whoever read was reaped: all that was lent is free."""
        self._free.extend(self._lent.values())
        self._lent.clear()
