"""What a `tianflow.exchange.replay_exchange.ReplayExchange` knows of its shards."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tianflow.core.payloads import Holdings, SaveItems, ShardRequest, StateFile, shard_file
from tianflow.replay.sharding import shard_probabilities

if TYPE_CHECKING:
    from pathlib import Path

    from tianflow.replay.rate_limiter import Limiter

STAY = 64
"""Trajectories that an actor sends to one shard before it goes on to the next, where there are more
shards than actors.
"""


class ShardPort(Protocol):
    """The way to a shard, wherever it lives. Requests arrive in the order in which they were
    sent.
    """

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
    """It holds items, but had fewer draws left than were asked of it; nothing more is asked before
    something new is in it.
    """
    keeping: deque[asyncio.Future[StateFile | None]] = field(default_factory=deque)
    """Who waits for it to have written what it holds, in order."""


class Shards(Mapping[int, ShardRecord]):
    """The shards that are up, by index. It keeps the limiter's count of items at what they hold.

    Args:
        limiter: told of what comes and goes.
        count: how many shards there are to be.
    """

    def __init__(self, *, limiter: Limiter, count: int) -> None:
        self._limiter, self._count = limiter, count
        self._up: dict[int, ShardRecord] = {}
        self._restoring = set(range(count))
        """Shards that have not opened yet, and may bring items back that the limiter knows of."""
        self._sent: Counter[str] = Counter()
        self.ahead = 0
        """Items expected of what shards are reading."""

    def __getitem__(self, index: int) -> ShardRecord:
        return self._up[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._up)

    def __len__(self) -> int:
        return len(self._up)

    def open(self, index: int, incarnation: int, port: ShardPort) -> None:
        """A life of a shard begins."""
        self._up[index] = ShardRecord(incarnation, port)

    def lose(self, index: int) -> ShardRecord | None:
        """It is over, and what the shard held is gone."""
        shard = self._up.pop(index, None)
        if shard is not None:
            self.ahead -= sum(shard.storing.values())
            self._removed(shard.holdings.items)
            while shard.keeping:
                self.kept(shard, None)
        return shard

    def answering(self, index: int, incarnation: int) -> ShardRecord | None:
        """The shard, if it is this life of it that speaks: what a reaped one had said may still be
        read.
        """
        shard = self._up.get(index)
        return shard if shard is not None and shard.incarnation == incarnation else None

    # What comes and goes
    # ----------------------------------------------------------------------------------------------

    def send(self, holder: str, ticket: int, *, items: int, actors: int) -> ShardRecord:
        """The shard that is to store a trajectory of ``holder``, of which so many items are
        expected. One is up.

        An actor's trajectories go to one shard, so that windows may span them; to another while
        that one is down. Fewer actors than shards go round, or some shards would stay empty; a
        window ends there.
        """
        place = int(holder.rpartition("-")[2])
        if actors < self._count:
            place += self._sent[holder] // STAY
        self._sent[holder] += 1
        up = sorted(self._up)
        home = place % self._count
        shard = self._up[home if home in self._up else up[place % len(up)]]
        shard.storing[ticket] = items
        self.ahead += items
        return shard

    def stored(self, shard: ShardRecord, ticket: int, items: int, holdings: Holdings) -> bool:
        """A trajectory brought so many items. False if the shard was not asked to store it."""
        expected = shard.storing.pop(ticket, None)
        if expected is None:
            return False
        self.ahead -= expected
        self._limiter.inserted(items)
        shard.spent &= not items
        self.holds(shard, holdings)
        return True

    def holds(self, shard: ShardRecord, holdings: Holdings) -> None:
        """What a shard said last."""
        self._removed(holdings.removed_items - shard.holdings.removed_items)
        shard.holdings = holdings

    def begins_with(self, index: int, shard: ShardRecord, holdings: Holdings) -> None:
        """`holds`; or, at the start of a run, what is left of what was kept. Once all have said it,
        the limiter counts what is there.
        """
        if index not in self._restoring:
            self.holds(shard, holdings)
            return
        shard.holdings = holdings
        self._restoring.discard(index)
        if not self._restoring:
            held, size = self.size, self._limiter.statistics().size
            self._limiter.deleted(max(0, size - held))
            self._limiter.inserted(max(0, held - size))

    def _removed(self, items: int) -> None:
        """Until all shards have said what they bring back, the limiter may know of fewer than they
        hold.
        """
        self._limiter.deleted(
            min(items, self._limiter.statistics().size) if self._restoring else items
        )

    # Drawing
    # ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Items of all that are up."""
        return sum(shard.holdings.items for shard in self._up.values())

    @property
    def drained(self) -> bool:
        """True if of what is there nothing can be drawn any more."""
        return all(shard.spent or not shard.holdings.items for shard in self._up.values())

    def shares(self) -> dict[int, float]:
        """Each shard's probability of being drawn from: in proportion to mass; by number of items
        if nothing has mass. None is 0.
        """
        drawable = {
            index: shard.holdings
            for index, shard in self._up.items()
            if shard.holdings.items and not shard.spent
        }
        chances = shard_probabilities(
            [held.mass for held in drawable.values()], [held.items for held in drawable.values()]
        )
        return {
            index: chance
            for index, chance in zip(drawable, chances.tolist(), strict=True)
            if chance > 0.0
        }

    # Keeping
    # ----------------------------------------------------------------------------------------------

    async def keep(self, directory: Path) -> dict[str, StateFile]:
        """Have every shard write what it holds into ``directory``: the files, by name. A shard that
        is lost meanwhile leaves none.
        """
        waiting: dict[str, asyncio.Future[StateFile | None]] = {}
        for index, shard in self._up.items():
            waiting[shard_file(index)] = future = asyncio.get_running_loop().create_future()
            shard.keeping.append(future)
            shard.port.ask(SaveItems(str(directory / shard_file(index))))
        files = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        return {name: file for name, file in files.items() if file is not None}

    @staticmethod
    def kept(shard: ShardRecord, file: StateFile | None) -> None:
        """Tell whoever has waited longest."""
        future = shard.keeping.popleft()
        if not future.done():
            future.set_result(file)


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
