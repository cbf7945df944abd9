"""Slots of the trajectory memory: free, in quarantine, or lent to a reader."""

from __future__ import annotations


class Slots:
    """Slots by number. A slot in none of the three states belongs to a granted, begun or committed
    ticket.

    A slot enters quarantine if its ticket is given up while the holder may still write to it. It
    leaves quarantine when the holder reports that it no longer writes, or ends.

    Args:
        count: number of slots at first, all free.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """Number of slots."""
        self._free = list(reversed(range(count)))
        self._quarantine: dict[int, tuple[str, int, bool]] = {}
        self._lent: dict[int, int] = {}

    def add(self, count: int) -> None:
        """Add ``count`` free slots."""
        self._free[:0] = reversed(range(self.count, self.count + count))
        self.count += count

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """Number of slots to which the holder of a given-up ticket may still write."""
        return len(self._quarantine)

    def without_ticket(self) -> list[int]:
        """All slots that are free, in quarantine or lent."""
        return [*self._free, *self._quarantine, *self._lent.values()]

    def take(self) -> int:
        """The slot that became free last, because it is most likely in a cache.

        Raises:
            IndexError: no slot is free.
        """
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Free ``slot``, which no process accesses."""
        self._free.append(slot)

    def quarantine(self, slot: int, holder: str, number: int, *, begun: bool = False) -> None:
        """Withhold ``slot`` while ``holder`` may still write to it for the given-up ticket
        ``number``. ``begun``: it has begun to write.
        """
        self._quarantine[slot] = (holder, number, begun)

    def written_in_quarantine(self) -> list[tuple[int, int, str]]:
        """(number, slot, holder) of each slot in quarantine to which its holder has begun to
        write.
        """
        return [
            (number, slot, holder)
            for slot, (holder, number, begun) in self._quarantine.items()
            if begun
        ]

    def leave_quarantine(self, slot: int, number: int) -> None:
        """Free ``slot`` if it is in quarantine for ticket ``number``."""
        if self._quarantine.get(slot, ("", -1, False))[1] == number:
            del self._quarantine[slot]
            self._free.append(slot)

    def rename(self, holder: str, name: str) -> None:
        """The slots in quarantine of ``holder`` belong to ``name``, so that another holder with the
        old name cannot free them.
        """
        for slot, (owner, number, _) in list(self._quarantine.items()):
            if owner == holder:
                # What cannot be reaped is not watched: a second kill would change nothing.
                self._quarantine[slot] = (name, number, False)

    def holder_lost(self, holder: str) -> None:
        """``holder`` ended: free its slots in quarantine."""
        for slot, (owner, number, _) in list(self._quarantine.items()):
            if owner == holder:
                self.leave_quarantine(slot, number)

    def lend(self, slot: int, number: int) -> None:
        """The learner, or a replay shard, reads ``slot`` for ticket ``number``."""
        self._lent[number] = slot

    def take_back(self, number: int) -> None:
        """Return an unread slot to its ticket ``number``."""
        del self._lent[number]

    def copied(self, number: int) -> None:
        """The reader of ticket ``number`` has copied its data: free the slot. Repeating it has no
        effect.
        """
        slot = self._lent.pop(number, None)
        if slot is not None:
            self._free.append(slot)

    def readers_lost(self) -> None:
        """The readers ended: free all lent slots."""
        self._free.extend(self._lent.values())
        self._lent.clear()
