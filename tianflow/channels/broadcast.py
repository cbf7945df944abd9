"""Broadcast: events for many readers. Publishing never waits; an event that finds the queue of a
reader full is dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tianflow.core.events import Event


class Subscription:
    """A reader's bounded queue.

    Waits: for an event. Unblocked by: `Broadcast.publish`.
    """

    def __init__(self, capacity: int, kind: type[Event]) -> None:
        self._queue: deque[Event] = deque()
        self._capacity, self._kind = capacity, kind
        self._waiter: asyncio.Future[None] | None = None
        self.dropped = 0
        """Events this reader was too slow for."""

    def offer(self, event: Event) -> None:
        """Queue ``event``, or count it as dropped. The oldest events stay, so that the first error
        is never lost.
        """
        if not isinstance(event, self._kind):
            return
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        self._queue.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def receive_nowait(self) -> Event | None:
        """The next event, or None."""
        return self._queue.popleft() if self._queue else None

    async def receive(self) -> Event:
        """Wait for the next event."""
        while not self._queue:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._queue.popleft()


class Broadcast:
    """Every subscriber gets every event that it is fast enough for.

    Gaps that happened before events got here (a full socket of a host) are added with `count_lost`.
    """

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []
        self.published = 0
        self._lost_upstream = 0

    @property
    def dropped(self) -> int:
        """Events lost anywhere: on their way here, and by slow subscribers."""
        return self._lost_upstream + sum(
            subscription.dropped for subscription in self._subscriptions
        )

    def publish(self, event: Event) -> None:
        """Hand ``event`` to every subscriber. Never waits."""
        self.published += 1
        for subscription in self._subscriptions:
            subscription.offer(event)

    def count_lost(self, count: int) -> None:
        """``count`` events were lost before they got here."""
        self._lost_upstream += count

    def subscribe(self, capacity: int = 1024, *, kind: type[Event] = Event) -> Subscription:
        """A new reader of events of a ``kind``. 1,024 covers a few seconds of a busy run; a screen
        or stream that is slower than that should skip.
        """
        subscription = Subscription(capacity, kind)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """``subscription`` gets no more events; those that it lost stay counted."""
        self._subscriptions.remove(subscription)
        self._lost_upstream += subscription.dropped


class GapCounter:
    """Counts missing sequence numbers of one publisher; a new incarnation has a new counter."""

    def __init__(self) -> None:
        self._next = 0

    def lost(self, sequence: int) -> int:
        """Count of numbers that are missing before ``sequence``."""
        missing = max(0, sequence - self._next)
        self._next = sequence + 1
        return missing
