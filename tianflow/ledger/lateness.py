"""Lateness: holders that the learner has waited for, and how long they rest."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Lateness:
    """Holders on other machines that the learner has waited for, although a full batch was there.

    Credits of a batch return after it. So others lose the time from when one of them needs a credit
    until the end of the wait. If n holders are late, each of them makes up for its loss of w
    seconds in w * n / share seconds since its last one. Until then it rests: it gets no grant. So
    late holders cost others at most ``share`` of the time, however slow they are.

    Afterwards they return one after the other: the next one when the trajectory of the last one has
    arrived. Those that share a link come back until it carries no more in time. Plain data; time
    is an argument.
    """

    def __init__(self) -> None:
        self._late: set[str] = set()
        self._returning = ""
        """The late holder that has a ticket; "" if none has one."""
        self._blocking: set[str] = set()
        self._since: float | None = None
        """Time since which others wait for the end of the wait."""
        self._last: dict[str, float] = {}
        """End of the last loss, by the holder that caused it."""
        self._until: dict[str, float] = {}
        """Time at which the losses are made up for, by the holder that caused them."""
        self._last_of_all = -math.inf

    @property
    def late(self) -> set[str]:
        """Holders whose last trajectory was late, or that rest since. Read-only."""
        return self._late

    @property
    def blocking(self) -> set[str]:
        """Holders that the learner waits for. Read-only."""
        return self._blocking

    def waits(self, holders: Iterable[str]) -> None:
        """The learner waits for tickets of ``holders``."""
        self._blocking.update(holders)

    def costs(self, now: float) -> None:
        """Another holder waits for a credit meanwhile, at ``now``."""
        if self._since is None:
            self._since = now

    def ends(self, now: float, share: float) -> None:
        """The learner does not wait, or no longer. If it cost others time, the holders rest."""
        if self._since is not None and self._blocking and share < 1.0:
            self._late |= self._blocking
            for holder in self._blocking:
                last = self._last.get(holder, self._last_of_all)
                begin = max(last, self._until.get(holder, last))
                self._until[holder] = begin + (now - self._since) * len(self._late) / share
                self._last[holder] = now
            self._last_of_all = now
            if self._returning in self._blocking:
                self._returning = ""
        self.cancel()

    def cancel(self) -> None:
        """The wait has no further consequence."""
        self._since = None
        self._blocking.clear()

    def rests(self, holder: str, now: float) -> bool:
        """True if ``holder`` gets no grant at ``now``."""
        return holder in self._late and (self._returning != "" or now < self._until[holder])

    def next_end(self, now: float) -> float | None:
        """Time of the next end of a rest after ``now``; None if there is none."""
        ends = (self._until[holder] for holder in self._late)
        return min((end for end in ends if end > now), default=None)

    def granted(self, holder: str) -> None:
        """``holder`` has got a ticket."""
        if holder in self._late:
            self._returning = holder

    def arrived(self, holder: str) -> None:
        """A trajectory of ``holder`` has arrived. If it was not waited for, it was in time."""
        if holder == self._returning:
            self._returning = ""
            if holder not in self._blocking:
                self._late.discard(holder)

    def lost(self, holder: str) -> None:
        """``holder`` has ended. Another one may have its name."""
        for those in (self._late, self._blocking):
            those.discard(holder)
        for times in (self._last, self._until):
            times.pop(holder, None)
        if self._returning == holder:
            self._returning = ""
