"""A replay shard's end: requests wait, answers go out. The same object in memory and at the end of
a link.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from tianflow.core.payloads import (
    DrawPart,
    DropItems,
    Holdings,
    Prioritise,
    SaveItems,
    ShardRequest,
    StateFile,
    StoreTrajectory,
    shard_file,
)
from tianflow.errors import BrokenChannelError, WouldBlock
from tianflow.replay.sharding import shard_probabilities

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena
    from tianflow.exchange.replay_exchange import ReplayExchange
    from tianflow.replay.rate_limiter import Limiter


_REQUESTS: dict[str, type[ShardRequest]] = {
    "store": StoreTrajectory,
    "draw": DrawPart,
    "prioritise": Prioritise,
    "drop": DropItems,
    "keep": SaveItems,
}
_NAMES = {cls: name for name, cls in _REQUESTS.items()}


class ShardEnd:
    """One shard's end: whoever waits for a draw does not wait for what is to be stored.

    Draws and priorities go before trajectories, which stay in order, as do draws and priorities;
    but nothing goes before what is about everything that is there, `DropItems` and `SaveItems`.
    `ask` is called by whoever brings requests; it is `tianflow.exchange.shards.ShardPort` in
    memory.

    Waits: for a request. Unblocked by: `ask`.

    Args:
        slots: of trajectories.
        draws: of draws.
        answer: takes ``stored``, ``drawn``, ``prioritised``, ``dropped`` or ``kept`` and what
            belongs to it, in order.
    """

    def __init__(self, *, slots: Arena, draws: Arena, answer: Callable[..., None]) -> None:
        self._slots, self._draws, self._answer = slots, draws, answer
        # Bounded by slots but for a few: almost every request is about one, and none is asked about
        # twice at a time.
        self._soon: deque[DrawPart | Prioritise] = deque()
        self._in_order: deque[ShardRequest] = deque()
        self._barriers = 0
        self._asked = asyncio.Event()

    def ask(self, request: ShardRequest) -> None:
        """Put it into the queue."""
        if isinstance(request, DrawPart | Prioritise) and not self._barriers:
            self._soon.append(request)
        else:
            self._barriers += isinstance(request, DropItems | SaveItems)
            self._in_order.append(request)
        self._asked.set()

    async def receive(self) -> ShardRequest:
        """The next request."""
        while not (self._soon or self._in_order):
            self._asked.clear()
            await self._asked.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> ShardRequest:
        """The next request, if there is one. WouldBlock if there is none."""
        if self._soon:
            return self._soon.popleft()
        if not self._in_order:
            raise WouldBlock("nobody has asked the shard for anything")
        request = self._in_order.popleft()
        self._barriers -= isinstance(request, DropItems | SaveItems)
        return request

    def receive_soon(self) -> list[DrawPart | Prioritise]:
        """All draws and priorities that wait, in order; perhaps none."""
        waiting = list(self._soon)
        self._soon.clear()
        return waiting

    def trajectory(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a trajectory."""
        return self._slots.views(slot)

    def draw(self, slot: int) -> Mapping[str, NDArray[Any]]:
        """The arrays of a draw."""
        return self._draws.views(slot)

    def stored(self, ticket: int, items: int, holdings: Holdings) -> None:
        """A trajectory was copied and brought so many items."""
        self._answer("stored", ticket, items, list(holdings))

    def drawn(self, draw: int, items: int, holdings: Holdings) -> None:
        """A part of a draw is written; 0 items: there are none."""
        self._answer("drawn", draw, items, list(holdings))

    def prioritised(self, draw: int, holdings: Holdings) -> None:
        """The priorities of a part of a draw were taken."""
        self._answer("prioritised", draw, list(holdings))

    def dropped(self, holdings: Holdings) -> None:
        """Everything was let go."""
        self._answer("dropped", list(holdings))

    def kept(self, file: StateFile | None, holdings: Holdings) -> None:
        """Everything was written, or, None, could not be."""
        self._answer(
            "kept",
            "" if file is None else file.sha256,
            0 if file is None else file.nbytes,
            list(holdings),
        )


class LinkShardPort:
    """The coordinator's way to a shard at the other end of a link. ``send`` sends one message, in
    order.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def ask(self, request: ShardRequest) -> None:
        """By message."""
        self._send("shard", *encode_request(request))


def encode_request(request: ShardRequest) -> list[Any]:
    """Its name, and its fields in order."""
    return [_NAMES[type(request)], *(getattr(request, field.name) for field in fields(request))]


def decode_request(name: str, values: Sequence[Any]) -> ShardRequest:
    """The inverse of `encode_request`. BrokenChannelError if there is no such request, or its
    fields do not fit.
    """
    cls = _REQUESTS.get(name)
    if cls is None or len(values) != len(fields(cls)):
        raise BrokenChannelError(
            f"a message asks a shard for what this version does not know: {name!r}"
        )
    return cls(*values)


def answers(exchange: ReplayExchange, index: int, incarnation: int) -> Callable[..., None]:
    """What takes the answers of shard ``index`` in this life of it: the name, then the arguments,
    `Holdings` last as a list.
    """
    handlers: dict[str, Callable[..., None]] = {
        "stored": exchange.stored,
        "drawn": exchange.drawn,
        "prioritised": exchange.prioritised,
        "dropped": exchange.dropped,
        "kept": exchange.kept,
    }

    def answer(name: str, *arguments: Any) -> None:
        *rest, holdings = arguments
        handlers[name](index, incarnation, *rest, Holdings(*holdings))

    return answer


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
