"""`Feed`: the events of a run, numbered and retained for a while, so that a reader can resume.

Updates and episodes happen hundreds of times a second. They are aggregated, with at most one event
of each kind every `AGGREGATE_S`. All other events are published one by one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tianflow.core.events import EpisodesFinished, Event, UpdateFinished
from tianflow.core.jsonable import json_ready
from tianflow.server.common.event_buffer import CAPACITY, EventBuffer

if TYPE_CHECKING:
    from tianflow.channels.broadcast import Broadcast

AGGREGATE_S = 0.25
POLL_S = 0.05
"""Seconds between two polls; the queue of 1,024 is enough for 20,000 events a second."""
LONGEST_TEXT = 2000
"""Maximum characters of a text in an event, because an environment's error message may be long."""
LOST = "lost"


@dataclass(frozen=True)
class EventRecord:
    """An event as readers receive it. ``number`` counts from 1 in each server process."""

    number: int
    kind: str
    data: Mapping[str, Any]

    @cached_property
    def text(self) -> bytes:
        """The encoded event, made for the first reader and shared by all."""
        return (
            f"id: {self.number}\nevent: {self.kind}\ndata: "
            f"{json.dumps(self.data, allow_nan=False)}\n\n"
        ).encode()


def kind_of(event: type[Event]) -> str:
    """``UpdateFinished`` → ``update-finished``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", event.__name__).lower()


class Feed(EventBuffer):
    """Receives the events of a run, and retains the newest.

    Consumes: events of a `Broadcast`. Produces: `EventRecord`, for any number of readers. Waits:
    for an event, never for a reader. Unblocked by: `Broadcast.publish`.

    Args:
        events: their source.
        clock: seconds since 1970, added to each event.
        capacity: number of retained events.
    """

    def __init__(
        self, *, events: Broadcast, clock: Callable[[], float], capacity: int = CAPACITY
    ) -> None:
        super().__init__(capacity=capacity)
        self._events, self._clock = events, clock
        self._queue = events.subscribe()
        self._aggregates: dict[str, _Aggregate] = {
            kind_of(UpdateFinished): _UpdateAggregate(),
            kind_of(EpisodesFinished): _EpisodeAggregate(),
        }
        self._dropped = 0

    async def run(self, started: Callable[[], None]) -> None:
        """Receive events until cancelled; then publish the remaining ones and close."""
        started()
        try:
            while True:
                if not any(pending.count for pending in self._aggregates.values()):
                    self._take(await self._queue.receive())
                self.poll()
                await asyncio.sleep(POLL_S)
        finally:
            self.poll(last=True)
            self._events.unsubscribe(self._queue)
            self.close()

    def poll(self, *, last: bool = False) -> None:
        """Receive all queued events, and publish what is due; with ``last``, everything."""
        while (event := self._queue.receive_nowait()) is not None:
            self._take(event)
        missed, self._dropped = self._queue.dropped - self._dropped, self._queue.dropped
        if missed:
            self._emit(
                LOST, {"count": missed, "reason": "events arrived faster than they were read"}
            )
        now = self._clock()
        for kind, pending in self._aggregates.items():
            # a clock that was set back must not stop the events of a kind
            if pending.count and (last or not 0.0 <= now - pending.emitted_at < AGGREGATE_S):
                self._emit(kind, pending.flush(now))

    def _take(self, event: Event) -> None:
        kind = kind_of(type(event))
        if kind in self._aggregates:
            self._aggregates[kind].add(event)
        else:
            self._emit(kind, asdict(event))

    def _emit(self, kind: str, data: Mapping[str, Any]) -> None:
        self.add(
            EventRecord(
                self.newest + 1, kind, _shortened(json_ready({"at": self._clock(), **data}))
            )
        )


class _Aggregate:
    """Events of one kind that are published as one."""

    def __init__(self) -> None:
        self.count = 0
        self.emitted_at = float("-inf")

    def add(self, event: Any) -> None:
        raise NotImplementedError

    def read(self) -> dict[str, Any]:
        raise NotImplementedError

    def flush(self, now: float) -> dict[str, Any]:
        """Return the aggregate and start the next one."""
        data = {"count": self.count, **self.read()}
        self.count, self.emitted_at = 0, now
        return data


class _UpdateAggregate(_Aggregate):
    """Updates since the last event: sums of seconds and samples; the newest version and
    statistics.
    """

    def add(self, event: UpdateFinished) -> None:
        if not self.count:
            self._seconds, self._samples = 0.0, 0
        self._seconds, self._samples, self._newest = (
            self._seconds + event.seconds,
            self._samples + event.samples,
            event,
        )
        self.count += 1

    def read(self) -> dict[str, Any]:
        newest = self._newest
        return {
            "version": newest.version,
            "seconds": self._seconds,
            "samples": self._samples,
            "statistics": newest.statistics,
        }


class _EpisodeAggregate(_Aggregate):
    """Episodes since the last event. ``count`` is the number of episodes."""

    def add(self, event: EpisodesFinished) -> None:
        if not self.count:
            self._returns: list[float] = []
            self._steps = 0
        self._returns += event.returns
        self._steps += sum(event.lengths)
        self.count = len(self._returns)

    def read(self) -> dict[str, Any]:
        returns = self._returns
        return {
            "mean_return": sum(returns) / len(returns),
            "min_return": min(returns),
            "max_return": max(returns),
            "mean_length": self._steps / len(returns),
        }


def _shortened(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for key, value in data.items()
    }
