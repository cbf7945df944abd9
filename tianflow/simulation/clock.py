"""Virtual time: a heap of what is due, and queues of what is due at once or after a delay that
recurs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")
AT_MOST = 2**16
"""Events after which `Clock.work` comes back, so that somebody may see whether anything comes of
them.
"""


class Clock:
    """Calls what is due, in order of time, and of asking at equal times. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._at_once: deque[tuple[int, Callable[..., None], tuple[object, ...]]] = deque()
        self._lanes: dict[
            float, deque[tuple[float, int, Callable[..., None], tuple[object, ...]]]
        ] = {}
        self._sequence = 0
        self._interrupted = False

    def expect(self, delay: float) -> None:
        """`at` will often be asked for exactly this delay: what waits for so long stands in a
        queue, in which nothing is searched.
        """
        if delay > 0.0:
            self._lanes.setdefault(delay, deque())

    def at(self, delay: float, act: Callable[[*Ts], None], *arguments: *Ts) -> None:
        """Call ``act`` after ``delay`` seconds."""
        self._sequence += 1
        lane = self._lanes.get(delay)
        if lane is not None:
            lane.append((self.now + delay, self._sequence, act, arguments))
        elif delay > 0.0:
            heapq.heappush(self._heap, (self.now + delay, self._sequence, act, arguments))
        else:
            self._at_once.append((self._sequence, act, arguments))

    @property
    def next(self) -> float | None:
        """When something is due next; None: nothing ever will be."""
        if self._at_once:
            return self.now
        return min(
            (waiting[0][0] for waiting in (self._heap, *self._lanes.values()) if waiting),
            default=None,
        )

    @property
    def events(self) -> int:
        """How many have been asked for so far."""
        return self._sequence

    def interrupt(self) -> None:
        """`work` comes back after what it is doing now."""
        self._interrupted = True

    def work(self, until: float) -> bool:
        """Do what is due up to ``until``, each at its time. True: more may be due, since somebody
        interrupts or `AT_MOST` are asked for.
        """
        heap, lanes, at_once, pop = (
            self._heap,
            tuple(self._lanes.values()),
            self._at_once,
            heapq.heappop,
        )
        never = (math.inf, 0)
        self._interrupted, limit = False, self._sequence + AT_MOST
        while not self._interrupted and self._sequence < limit:
            first, of_lane = heap[0] if heap else never, None
            for lane in lanes:
                if lane and lane[0] < first:
                    first, of_lane = lane[0], lane
            if at_once and (first[0] > self.now or first[1] > at_once[0][0]):
                _, act, arguments = at_once.popleft()
            elif first[0] > until or first is never:
                return False
            else:
                self.now, _, act, arguments = (
                    of_lane.popleft() if of_lane is not None else pop(heap)
                )
            act(*arguments)
        return True


class Times:
    """Where the time of one or many goes, in total, without visiting each.

    By state: how many are in it now, and the seconds of all stays so far, each that goes on counted
    as if it had begun at 0.
    """

    __slots__ = ("_clock", "_states")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: dict[str, list[float]] = {}

    def join(self, state: str) -> list[float]:
        """One more is in ``state`` from now on. What comes back is for `move`."""
        of_state = self._states.get(state)
        if of_state is None:
            of_state = self._states[state] = [0.0, 0.0]
        of_state[0] += 1.0
        of_state[1] -= self._clock.now
        return of_state

    def move(self, old: list[float], state: str) -> list[float]:
        """One that has been in ``old``, which its last move gave, is in ``state`` now."""
        now = self._clock.now
        old[0] -= 1.0
        old[1] += now
        of_state = self._states.get(state)
        if of_state is None:
            of_state = self._states[state] = [0.0, 0.0]
        of_state[0] += 1.0
        of_state[1] -= now
        return of_state

    def seconds(self, state: str) -> float:
        """Seconds spent in ``state`` by all, up to now."""
        count, seconds = self._states.get(state, (0.0, 0.0))
        return seconds + count * self._clock.now

    def read(self) -> dict[str, float]:
        """Seconds by state."""
        return {state: self.seconds(state) for state in self._states}
