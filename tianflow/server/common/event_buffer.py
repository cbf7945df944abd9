"""What is told to readers, kept for a while: numbered, encoded once, and the same for all of
them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

KEPT = 1024
"""Events that can be read again: minutes of a busy run, a few hundred kilobytes."""


class EventFrame(Protocol):
    """One event of a stream."""

    @property
    def number(self) -> int:
        """Rises from event to event."""

    @property
    def text(self) -> bytes:
        """As it goes over the wire."""


class EventBuffer:
    """The newest frames, for any number of readers, none of which is ever waited for.

    Args:
        keep: how many are kept.
    """

    def __init__(self, *, keep: int = KEPT) -> None:
        self._kept: deque[EventFrame] = deque(maxlen=keep)
        self._news = asyncio.Event()
        self._awaited = False
        self.newest = 0
        """Number of the newest."""
        self.closed = False
        """True once nothing more will come."""
        self.at_end: set[Callable[[], None]] = set()
        """Called when nothing more will come."""

    def add(self, frame: EventFrame) -> None:
        """``frame`` is the newest now."""
        self.newest = frame.number
        self._kept.append(frame)
        if (
            self._awaited
        ):  # everybody who waits holds this one: a new one is for those who come later
            self._news.set()
            self._news, self._awaited = asyncio.Event(), False

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self._news.set()
        for told in tuple(self.at_end):
            told()

    def since(self, number: int, at_most: int) -> tuple[int, Sequence[EventFrame]]:
        """How many after ``number`` are no longer kept, and the next that are. A number not told
        yet counts as the newest.
        """
        kept = self._kept
        oldest = kept[0].number if kept else self.newest + 1
        skipped = bisect_right(kept, number, key=lambda frame: frame.number)
        return max(0, oldest - number - 1), [
            kept[index] for index in range(skipped, min(skipped + at_most, len(kept)))
        ]

    async def wait(self, number: int, timeout: float) -> None:  # noqa: ASYNC109 - a wait that ends without news is no error here
        """Until there is something after ``number``, nothing more will come, or ``timeout`` seconds
        have passed.
        """
        news = self._news
        if self.newest > number or self.closed:
            return
        self._awaited = True
        try:
            async with asyncio.timeout(timeout):
                await news.wait()
        except TimeoutError:
            return
