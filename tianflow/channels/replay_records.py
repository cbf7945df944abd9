"""What a `tianflow.channels.replay_exchange.ReplayExchange` remembers of its shards and of the draws that are under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tianflow.payloads import Holdings, ShardRequest, StateFile, Version


class ShardPort(Protocol):
    """The way to a shard, wherever it lives. Requests arrive in the order in which they were sent."""

    def ask(self, request: ShardRequest) -> None: ...


@dataclass(slots=True)
class ShardRecord:
    """One life of a shard. What an earlier one says is not taken for its own."""

    incarnation: int
    port: ShardPort
    holdings: Holdings = field(default_factory=Holdings)
    storing: dict[int, int] = field(default_factory=dict)
    """Tickets it reads, each with the items that were expected of it."""
    spent: bool = False
    """It holds items, but had fewer draws left than were asked of it; nothing more is asked before something new is in it."""
    keeping: deque[asyncio.Future[StateFile | None]] = field(default_factory=deque)
    """Who waits for it to have written what it holds, in order."""


@dataclass(slots=True)
class DrawRecord:
    """One draw. ``state``: drawing (shards write), held (the learner has it), returning (shards read priorities)."""

    slot: int
    for_version: Version
    shares: dict[int, float]
    waiting_for: set[int]
    parts: dict[int, tuple[ShardRecord, int, int]]
    """Shard -> (the life that wrote it, first, count): keys mean nothing to a later one."""
    state: Literal["drawing", "held", "returning"] = "drawing"
    void: str = ""
    """Why nobody will train on it; its slot is free once no shard writes into it."""


class Stopwatch:
    """Seconds for which something was so."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds, self._since, self._on = 0.0, clock(), False

    def set(self, on: bool) -> None:
        """From now on it is so, or not."""
        now = self._clock()
        if self._on:
            self._seconds += now - self._since
        self._on, self._since = on, now

    def read(self) -> float:
        """Until now."""
        return self._seconds + (self._clock() - self._since if self._on else 0.0)
