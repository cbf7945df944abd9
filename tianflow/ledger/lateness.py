"""Lateness: holders that the learner has waited for, and how long they rest."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Lateness:
    """Holders on other machines that the learner has waited for, although a full batch was there.

    Credits of a batch return after it. So others lose the time from when one of them needs a credit
    until the end of the wait. A loss of w seconds is made up for in w / share seconds since the end
    of the loss before. Until then the holders that caused it rest: they get no grant. So late
    holders cost others at most ``share`` of the time, however slow they are.

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
        self._last = -math.inf
        """Time of the end of the last loss."""
        self.until = -math.inf
        """Time at which all losses are made up for. Late holders rest until then."""

    @property
    def late(self) -> set[str]:
        """Holders whose last trajectory was late, or that rest since."""
        return self._late

    @property
    def blocking(self) -> set[str]:
        """Holders that the learner waits for."""
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
            self.until = max(self.until, self._last) + (now - self._since) / share
            self._last = now
            self._late |= self._blocking
            if self._returning in self._blocking:
                self._returning = ""
        self.cancel()

    def cancel(self) -> None:
        """The wait has no further consequence."""
        self._since = None
        self._blocking.clear()

    def rests(self, holder: str, now: float) -> bool:
        """True if ``holder`` gets no grant at ``now``."""
        return holder in self._late and (now < self.until or self._returning != "")

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
        """``holder`` has no ticket any more, or has ended: another one may return."""
        self._late.discard(holder)
        self._blocking.discard(holder)
        if self._returning == holder:
            self._returning = ""
