"""Replay shards: the end of a shard, and the exchange's records of the shards that are up."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tianflow.channels.messages import Drawn, Dropped, ItemsSaved, Prioritised, Stored
from tianflow.core.payloads import (
    DrawPart,
    DropItems,
    Holdings,
    Prioritise,
    SaveItems,
    ShardRequest,
    StateFile,
    shard_file,
)
from tianflow.errors import WouldBlock
from tianflow.replay.sharding import shard_probabilities

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena
    from tianflow.channels.messages import ShardAnswer
    from tianflow.interfaces import MessageLink, ShardPort
    from tianflow.replay.rate_limiter import Limiter

TRAJECTORIES_IN_A_ROW = 64
"""Trajectories that an actor sends to one shard before the next one, where there are more shards
than actors.
"""


class ShardEnd:
    """One shard's end, the same in memory and at the end of a link. A draw does not wait for
    trajectories to be stored.

    Draws and priorities overtake trajectories. Requests of one kind stay in order. Nothing
    overtakes a request about all items of the shard, `DropItems` or `SaveItems`. In memory it is
    the exchange's `tianflow.interfaces.ShardPort`, too.

    Waits: for a request. Unblocked by: `ask`.

    Attributes:
        place: see `tianflow.interfaces.ShardPort`.

    Args:
        slots: of trajectories.
        draws: of draws.
        answer: receives the answers, in order.
    """

    place = ""

    def __init__(
        self, *, slots: Arena, draws: Arena, answer: Callable[[ShardAnswer], None]
    ) -> None:
        self._slots, self._draws, self._answer = slots, draws, answer
        # Bounded by the slots and a few: almost every request is about one slot, and a slot has one
        # request at a time.
        self._soon: deque[DrawPart | Prioritise] = deque()
        self._in_order: deque[ShardRequest] = deque()
        self._barriers = 0
        self._asked = asyncio.Event()

    def ask(self, request: ShardRequest) -> None:
        """Queue ``request``."""
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
        """The next request. WouldBlock if no request waits."""
        if self._soon:
            return self._soon.popleft()
        if not self._in_order:
            raise WouldBlock("the shard has no request")
        request = self._in_order.popleft()
        self._barriers -= isinstance(request, DropItems | SaveItems)
        return request

    def receive_soon(self) -> list[DrawPart | Prioritise]:
        """All waiting draws and priorities, in order; may be empty."""
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
        """A trajectory was copied and brought ``items`` new items."""
        self._answer(Stored(ticket, items, holdings))

    def drawn(self, draw: int, items: int, holdings: Holdings) -> None:
        """A part of a draw is written; 0 items: nothing could be drawn."""
        self._answer(Drawn(draw, items, holdings))

    def prioritised(self, draw: int, holdings: Holdings) -> None:
        """The priorities of a part of a draw were applied."""
        self._answer(Prioritised(draw, holdings))

    def dropped(self, holdings: Holdings) -> None:
        """Everything was dropped."""
        self._answer(Dropped(holdings))

    def saved(self, file: StateFile | None, holdings: Holdings) -> None:
        """Everything was written into ``file``; None: it could not be written."""
        self._answer(ItemsSaved(file, holdings))


class LinkShardPort:
    """The coordinator's way to a shard at the other end of ``link``, which runs at ``place``."""

    def __init__(self, link: MessageLink, place: str = "") -> None:
        self._link, self.place = link, place

    def ask(self, request: ShardRequest) -> None:
        """By message."""
        self._link.send(request)


@dataclass(slots=True)
class ShardRecord:
    """One incarnation of a shard. Answers of an earlier incarnation are ignored."""

    index: int
    incarnation: int
    port: ShardPort
    holdings: Holdings = field(default_factory=Holdings)
    storing: dict[int, int] = field(default_factory=dict)
    """Tickets that it copies, each with the number of items expected from it."""
    spent: bool = False
    """It holds items, but had fewer draws left than requested. It is not drawn from until a new
    item arrives.
    """
    saves: deque[asyncio.Future[StateFile | None]] = field(default_factory=deque)
    """Futures of the `SaveItems` that it has not answered, in order."""


class Shards(Mapping[int, ShardRecord]):
    """The shards that are up, by index. It updates the limiter's count of items to the items that
    they hold.

    Args:
        limiter: counts inserted and deleted items.
        count: number of shards of the run.
    """

    def __init__(self, *, limiter: Limiter, count: int) -> None:
        self._limiter, self._count = limiter, count
        self._up: dict[int, ShardRecord] = {}
        self._restoring = set(range(count))
        """Shards that have not opened yet, and may restore items that the limiter counts already.
        """
        self._sent: Counter[str] = Counter()
        self.inserted_steps: Counter[int] = Counter()
        """Environment steps that each shard has stored, in all its incarnations."""
        self.ahead = 0
        """Items expected from the trajectories that shards are copying."""

    def __getitem__(self, index: int) -> ShardRecord:
        return self._up[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._up)

    def __len__(self) -> int:
        return len(self._up)

    def open(self, index: int, incarnation: int, port: ShardPort) -> None:
        """An incarnation of a shard works."""
        self._up[index] = ShardRecord(index, incarnation, port)
        self.inserted_steps[index] += 0  # a series that begins before its first step

    def lose(self, index: int) -> ShardRecord | None:
        """A shard is gone, with everything it held. None if it was not up."""
        shard = self._up.pop(index, None)
        if shard is not None:
            self.ahead -= sum(shard.storing.values())
            self._limiter.lost(self._known(shard.holdings.items))
            while shard.saves:
                self.saved(shard, None)
        return shard

    def answering(self, index: int, incarnation: int) -> ShardRecord | None:
        """The shard, if ``incarnation`` is the current one: answers of a reaped process may still
        arrive.
        """
        shard = self._up.get(index)
        return shard if shard is not None and shard.incarnation == incarnation else None

    # Items
    # ----------------------------------------------------------------------------------------------

    def at(self, place: str) -> list[int]:
        """The shards that can store a trajectory whose data lie at ``place``: those there, or, on
        the head, all. In order.
        """
        return sorted(i for i, shard in self._up.items() if place in ("", shard.port.place))

    def place_for(self, holder: str, *, actors: int) -> str:
        """Where the shard runs that is to store the next trajectory of ``holder``. "": on the head,
        or no shard is up.
        """
        if not any(shard.port.place for shard in self._up.values()):
            return ""  # as in every run on one machine
        return self._chosen(holder, self.at(""), actors).port.place

    def send(
        self, holder: str, ticket: int, *, items: int, actors: int, place: str = ""
    ) -> ShardRecord:
        """Choose the shard that stores a trajectory of ``holder``, which lies at ``place`` and will
        bring ``items`` items. At least one shard can (`at`).
        """
        shard = self._chosen(holder, self.at(place), actors)
        self._sent[holder] += 1
        shard.storing[ticket] = items
        self.ahead += items
        return shard

    def _chosen(self, holder: str, able: Sequence[int], actors: int) -> ShardRecord:
        """The one of the shards ``able`` that stores a trajectory of ``holder``.

        An actor's trajectories go to one shard, so that windows may span them, and to another while
        that one is down. With fewer actors than shards an actor changes its shard from time to
        time, or some shards would stay empty; a window ends there.
        """
        turn = int(holder.rpartition("-")[2])
        if actors < self._count:
            turn += self._sent[holder] // TRAJECTORIES_IN_A_ROW
        home = turn % self._count
        return self._up[home if home in able else able[turn % len(able)]]

    def stored(self, shard: ShardRecord, ticket: int, items: int, holdings: Holdings) -> bool:
        """A trajectory brought ``items`` items. False if the shard was not asked to store it."""
        expected = shard.storing.pop(ticket, None)
        if expected is None:
            return False
        self.ahead -= expected
        self._limiter.inserted(items)
        shard.spent &= not items
        self.holds(shard, holdings)
        return True

    def holds(self, shard: ShardRecord, holdings: Holdings) -> None:
        """A shard reported its holdings."""
        removed = self._known(holdings.removed_items - shard.holdings.removed_items)
        self._limiter.deleted(removed)
        stored = holdings.inserted_steps - shard.holdings.inserted_steps
        self.inserted_steps[shard.index] += max(0, stored)
        shard.holdings = holdings

    def starts_with(self, index: int, shard: ShardRecord, holdings: Holdings) -> None:
        """A shard has dropped all its items, or, at the start of a run, reports the restored ones.

        Once every shard has reported, the limiter counts the items that exist.
        """
        if index not in self._restoring:
            removed = self._known(holdings.removed_items - shard.holdings.removed_items)
            self._limiter.lost(removed)
            shard.holdings = holdings
            return
        shard.holdings = holdings
        self._restoring.discard(index)
        if not self._restoring:
            held, size = self.size, self._limiter.statistics().size
            self._limiter.lost(max(0, size - held))
            self._limiter.inserted(max(0, held - size))

    def _known(self, items: int) -> int:
        """``items``, as far as the limiter counts them.

        It may count fewer than the shards hold until all of them have reported restored items.
        """
        return min(items, self._limiter.statistics().size) if self._restoring else items

    # Drawing
    # ----------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Items of all shards that are up."""
        return sum(shard.holdings.items for shard in self._up.values())

    @property
    def drained(self) -> bool:
        """True if nothing can be drawn from what the shards hold."""
        return all(shard.spent or not shard.holdings.items for shard in self._up.values())

    def shares(self) -> dict[int, float]:
        """Each shard's probability of being drawn from, in proportion to its mass, or to its number
        of items if no shard has mass. Shards of probability 0 are omitted.
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

    # Saving
    # ----------------------------------------------------------------------------------------------

    async def save(self, directory: Path) -> dict[str, StateFile]:
        """Have every shard write what it holds into ``directory``. The files by name; a shard that
        is lost meanwhile leaves no file.
        """
        waiting: dict[str, asyncio.Future[StateFile | None]] = {}
        for index, shard in self._up.items():
            waiting[shard_file(index)] = future = asyncio.get_running_loop().create_future()
            shard.saves.append(future)
            shard.port.ask(SaveItems(str(directory / shard_file(index))))
        files = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        return {name: file for name, file in files.items() if file is not None}

    @staticmethod
    def saved(shard: ShardRecord, file: StateFile | None) -> None:
        """Resolve the oldest future of ``shard.saves``."""
        future = shard.saves.popleft()
        if not future.done():
            future.set_result(file)


class Stopwatch:
    """Seconds for which a condition held."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds, self._since, self._on = 0.0, clock(), False

    def set(self, on: bool) -> None:
        """The condition begins to hold, or ends."""
        now = self._clock()
        if self._on:
            self._seconds += now - self._since
        self._on, self._since = on, now

    def read(self) -> float:
        """Until now."""
        return self._seconds + (self._clock() - self._since if self._on else 0.0)
