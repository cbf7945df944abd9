"""Virtual time: a heap of what is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


class Clock:
    """Calls what is due, in order of time, and of asking at equal times. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._sequence = 0

    def at(self, delay: float, act: Callable[[*Ts], None], *arguments: *Ts) -> None:
        """Call ``act`` after ``delay`` seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, act, arguments))

    @property
    def next(self) -> float | None:
        """When something is due next; None: nothing ever will be."""
        return self._heap[0][0] if self._heap else None

    @property
    def events(self) -> int:
        """How many have been asked for so far."""
        return self._sequence

    def advance(self) -> None:
        """Go to the next thing that is due, and do it."""
        self.now, _, act, arguments = heapq.heappop(self._heap)
        act(*arguments)


class Times:
    """Where the time of one or many goes, in total, without visiting each: how many are in a state, and since when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done: dict[str, float] = {}
        self._now: dict[str, tuple[int, float]] = {}

    def join(self, state: str) -> None:
        """One more is in ``state`` from now on."""
        count, since = self._now.get(state, (0, 0.0))
        self._now[state] = count + 1, since + self._clock.now

    def move(self, old: str, new: str, since: float) -> None:
        """One that has been in ``old`` since ``since`` is in ``new`` now."""
        count, sum_since = self._now[old]
        self._now[old] = count - 1, sum_since - since
        self._done[old] = self._done.get(old, 0.0) + self._clock.now - since
        self.join(new)

    def seconds(self, state: str) -> float:
        """Seconds spent in ``state`` by all, up to now."""
        count, since = self._now.get(state, (0, 0.0))
        return self._done.get(state, 0.0) + count * self._clock.now - since

    def read(self) -> dict[str, float]:
        """Seconds by state."""
        return {state: self.seconds(state) for state in self._now}
