"""`EventBuffer`: the newest events of a stream, numbered and encoded once for all readers."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

CAPACITY = 1024
"""Number of retained events: minutes of a busy run, a few hundred kilobytes."""


class EventFrame(Protocol):
    """One event of a stream."""

    @property
    def number(self) -> int:
        """Rises from event to event."""

    @property
    def text(self) -> bytes:
        """The encoded event."""


class EventBuffer:
    """The newest frames, for any number of readers; it never waits for a reader.

    Args:
        capacity: maximum number of frames.
    """

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._frames: deque[EventFrame] = deque(maxlen=capacity)
        self._arrival = asyncio.Event()
        self._has_waiters = False
        self.newest = 0
        """Number of the newest frame."""
        self.closed = False
        """True after the last frame."""
        self.on_close: set[Callable[[], None]] = set()
        """Called when the buffer closes."""

    def add(self, frame: EventFrame) -> None:
        """Append ``frame``."""
        self.newest = frame.number
        self._frames.append(frame)
        if self._has_waiters:  # all current waiters hold this event; later ones get a new one
            self._arrival.set()
            self._arrival, self._has_waiters = asyncio.Event(), False

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self._arrival.set()
        for callback in tuple(self.on_close):
            callback()

    def since(self, number: int, at_most: int) -> tuple[int, Sequence[EventFrame]]:
        """Return how many frames after ``number`` are lost, and the next frames. A number above the
        newest counts as the newest.
        """
        frames = self._frames
        oldest = frames[0].number if frames else self.newest + 1
        skipped = bisect_right(frames, number, key=lambda frame: frame.number)
        return max(0, oldest - number - 1), [
            frames[index] for index in range(skipped, min(skipped + at_most, len(frames)))
        ]

    async def wait(self, number: int, timeout: float) -> None:  # noqa: ASYNC109 - a timeout is not an error here
        """Wait until there is a frame after ``number``, the buffer closes, or ``timeout`` seconds
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
