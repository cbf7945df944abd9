"""What is told to readers, kept for a while: numbered, encoded once, and the same for all of
them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

CAPACITY = 1024
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

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._frames: deque[EventFrame] = deque(maxlen=capacity)
        self._arrival = asyncio.Event()
        self._has_waiters = False
        self.newest = 0
        """Number of the newest."""
        self.closed = False
        """True once nothing more will come."""
        self.on_close: set[Callable[[], None]] = set()
        """Called when nothing more will come."""

    def add(self, frame: EventFrame) -> None:
        """``frame`` is the newest now."""
        self.newest = frame.number
        self._frames.append(frame)
        if (
            self._has_waiters
        ):  # everybody who waits holds this one: a new one is for those who come later
            self._arrival.set()
            self._arrival, self._has_waiters = asyncio.Event(), False

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self._arrival.set()
        for callback in tuple(self.on_close):
            callback()

    def since(self, number: int, at_most: int) -> tuple[int, Sequence[EventFrame]]:
        """How many after ``number`` are no longer kept, and the next that are. A number not told
        yet counts as the newest.
        """
        frames = self._frames
        oldest = frames[0].number if frames else self.newest + 1
        skipped = bisect_right(frames, number, key=lambda frame: frame.number)
        return max(0, oldest - number - 1), [
            frames[index] for index in range(skipped, min(skipped + at_most, len(frames)))
        ]

    async def wait(self, number: int, timeout: float) -> None:  # noqa: ASYNC109 - a wait that ends without news is no error here
        """Until there is something after ``number``, nothing more will come, or ``timeout`` seconds
        have passed.
        """
        arrival = self._arrival
        if self.newest > number or self.closed:
            return
        self._has_waiters = True
        try:
            async with asyncio.timeout(timeout):
                await arrival.wait()
        except TimeoutError:
            return
