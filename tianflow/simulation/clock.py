"""Virtual time: a heap of scheduled events, with queues for immediate events and for delays that
recur.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")
AT_MOST = 2**16
"""Events after which `Clock.advance` returns, so that its caller can check for progress."""


class Clock:
    """Calls events in order of time; events of equal time in order of scheduling. ``now`` is in
    seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._immediate: deque[tuple[int, Callable[..., object], tuple[object, ...]]] = deque()
        self._lanes: dict[
            float, deque[tuple[float, int, Callable[..., object], tuple[object, ...]]]
        ] = {}
        self._sequence = 0
        self._interrupted = False

    def expect(self, delay: float) -> None:
        """Give ``delay`` a queue of its own: events of exactly this delay then cost no search."""
        if delay > 0.0:
            self._lanes.setdefault(delay, deque())

    def at(self, delay: float, act: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Call ``act`` after ``delay`` seconds."""
        self._sequence += 1
        lane = self._lanes.get(delay)
        if lane is not None:
            lane.append((self.now + delay, self._sequence, act, arguments))
        elif delay > 0.0:
            heapq.heappush(self._heap, (self.now + delay, self._sequence, act, arguments))
        else:
            self._immediate.append((self._sequence, act, arguments))

    def call_later(self, delay: float, act: Callable[[], None]) -> Callable[[], None]:
        """Call ``act`` after ``delay`` seconds; the returned function cancels the call."""
        pending = [act]

        def fire() -> None:
            for call in pending:
                call()

        self.at(delay, fire)
        return pending.clear

    @property
    def next(self) -> float | None:
        """Time of the next event; None if nothing is scheduled."""
        if self._immediate:
            return self.now
        return min(
            (waiting[0][0] for waiting in (self._heap, *self._lanes.values()) if waiting),
            default=None,
        )

    @property
    def events(self) -> int:
        """Number of events scheduled so far."""
        return self._sequence

    def interrupt(self) -> None:
        """Make `advance` return after the current event."""
        self._interrupted = True

    def advance(self, until: float) -> bool:
        """Call the events up to ``until``, each at its time.

        Returns True if it stopped early, because of `interrupt` or after `AT_MOST` new events.
        """
        heap, lanes, immediate, pop = (
            self._heap,
            tuple(self._lanes.values()),
            self._immediate,
            heapq.heappop,
        )
        never = (math.inf, 0)
        self._interrupted, limit = False, self._sequence + AT_MOST
        while not self._interrupted and self._sequence < limit:
            first, of_lane = heap[0] if heap else never, None
            for lane in lanes:
                if lane and lane[0] < first:
                    first, of_lane = lane[0], lane
            if immediate and (first[0] > self.now or first[1] > immediate[0][0]):
                _, act, arguments = immediate.popleft()
            elif first[0] > until or first is never:
                return False
            else:
                self.now, _, act, arguments = (
                    of_lane.popleft() if of_lane is not None else pop(heap)
                )
            act(*arguments)
        return True


class StateTimes:
    """Total seconds that one or many components spend in each state.

    Each state holds the number of components in it and the seconds of all stays. A stay that
    continues counts as if it had begun at 0, so a reading costs nothing per component.
    """

    __slots__ = ("_clock", "_states")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[str, list[float]] = {}

    def join(self, state: str) -> list[float]:
        """Add one component in ``state``. `move` takes the returned record."""
        record = self._states.get(state)
        if record is None:
            record = self._states[state] = [0.0, 0.0]
        record[0] += 1.0
        record[1] -= self._clock.now
        return record

    def move(self, old: list[float], state: str) -> list[float]:
        """Move one component from ``old``, the record of its last move, to ``state``."""
        now = self._clock.now
        old[0] -= 1.0
        old[1] += now
        record = self._states.get(state)
        if record is None:
            record = self._states[state] = [0.0, 0.0]
        record[0] += 1.0
        record[1] -= now
        return record

    def seconds(self, state: str) -> float:
        """Seconds that all components have spent in ``state``, up to now."""
        count, seconds = self._states.get(state, (0.0, 0.0))
        return seconds + count * self._clock.now

    def read(self) -> dict[str, float]:
        """Seconds by state."""
        return {state: self.seconds(state) for state in self._states}
