"""Broadcast → `Feed` → streams: the events of a run, numbered and kept for a while, so that a
reader can go on where it left off.

Updates and episodes happen hundreds of times a second. They are told together, at most once every
`TOGETHER_S` for each of the two kinds; all other events are told one by one.
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
"""Seconds between two looks at what came; the queue of 1,024 in between is enough for 20,000 events
a second.
"""
LONGEST_TEXT = 2000
"""Characters of one text in an event: an environment may say anything when it fails."""
LOST = "lost"


@dataclass(frozen=True)
class EventRecord:
    """An event as readers get it. ``number`` counts from 1 in the life of the server."""

    number: int
    kind: str
    data: Mapping[str, Any]

    @cached_property
    def text(self) -> bytes:
        """As it goes over the wire: made for the first reader, and the same for all others."""
        return (
            f"id: {self.number}\nevent: {self.kind}\ndata: "
            f"{json.dumps(self.data, allow_nan=False)}\n\n"
        ).encode()


def kind_of(event: type[Event]) -> str:
    """``UpdateFinished`` → ``update-finished``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", event.__name__).lower()


class Feed(EventBuffer):
    """Takes the events of a run, and keeps the newest of them.

    Consumes: events of a `Broadcast`. Produces: `EventRecord`, to any number of readers, none of
    which it ever waits for.
    Waits: for an event. Unblocked by: `Broadcast.publish`.

    Args:
        events: where they come from.
        clock: seconds since 1970, told with each event.
        keep: how many are kept.
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
        """Take events until cancelled; then what is there is told at once, and `closed` is True."""
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
        """Take all that came, and tell what is due; with ``last``, everything."""
        while (event := self._queue.receive_nowait()) is not None:
            self._take(event)
        missed, self._dropped = self._queue.dropped - self._dropped, self._queue.dropped
        if missed:
            self._emit(LOST, {"count": missed, "reason": "more came than could be taken"})
        now = self._clock()
        for kind, pending in self._aggregates.items():
            # a clock that was set back must not silence a kind until it has caught up
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
    """Events of one kind that are told as one."""

    def __init__(self) -> None:
        self.count = 0
        self.emitted_at = float("-inf")

    def add(self, event: Any) -> None:
        raise NotImplementedError

    def read(self) -> dict[str, Any]:
        raise NotImplementedError

    def flush(self, now: float) -> dict[str, Any]:
        """What they come to; the next ones begin anew."""
        data = {"count": self.count, **self.read()}
        self.count, self.emitted_at = 0, now
        return data


class _UpdateAggregate(_Aggregate):
    """Updates since the last time: seconds and samples add up, version and statistics are the
    newest.
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
    """Episodes since the last time. ``count`` is that of episodes."""

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
