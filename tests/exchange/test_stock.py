"""What an actor asks for ahead: as much as it makes in two milliseconds, no more than a grant
allows, and nothing of it is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.worlds import small_layout, turns
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.memory import heap_arena
from tianflow.channels.messages import Abort, Granted, GrantsEnded, RequestGrants
from tianflow.core.limits import Limits
from tianflow.core.payloads import Grant, Settlement, Trajectory, Version
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.exchange import remote as linked
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.remote import LinkTrajectorySender, ServedExchange
from tianflow.ledger.ledger import Ledger

SLOTS, BATCH = 16, 4


class Desk:
    """An actor's end, the exchange behind a real link, and a clock that only tests move."""

    def __init__(self, clock: SimpleNamespace) -> None:
        ours, theirs = socket_pair()
        self.clock = clock
        self.arena = heap_arena(small_layout(), SLOTS)
        limits = Limits(batch=BATCH, max_staleness=SLOTS // BATCH - 1, credits=SLOTS)
        self.exchange = Exchange(ledger=Ledger(limits=limits, slots=SLOTS), arena=self.arena)
        self.exchange.open_lineage(Version(1, 0))
        self.served = Link(end=ours, handle=self._serve, closed=lambda: None)
        self.handlers = ServedExchange(
            exchange=self.exchange, link=self.served, on_episodes=lambda *_: None
        ).handlers
        self.said: list[object] = []
        self.link = Link(end=theirs, handle=self._hear, closed=lambda: None)
        self.sender = LinkTrajectorySender(
            link=self.link, arena=self.arena, holder="a", announce=lambda _: None
        )

    def _serve(self, message: object) -> None:
        self.said.append(message)
        self.handlers[type(message)](message)

    def _hear(self, message: object) -> None:
        assert isinstance(message, Granted | GrantsEnded)
        self.sender.answer(message)

    @property
    def wanted(self) -> list[int]:
        """How many grants each message asked for."""
        return [message.wanted for message in self.said if isinstance(message, RequestGrants)]

    @property
    def in_use(self) -> int:
        return self.exchange.ledger.credits_in_use

    async def quiet(self) -> None:
        await turns(8)

    async def make(self, seconds: float) -> Grant:
        """One trajectory that took so long, and the update that takes it where there is a batch."""
        grant = await self.sender.acquire()
        self.sender.begin(grant, grant.version)
        self.clock.now += seconds
        self.sender.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), ())
        await self.quiet()
        return grant

    async def train(self) -> None:
        """One update of what is there."""
        version = self.exchange.ledger.version
        batches: list[Any] = []
        self.exchange.request_batch(version, batches.append)
        (batch,) = batches
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        made = Version(version.lineage, version.number + 1)
        self.exchange.settle(Settlement(made, tickets, SLOTS, published=True))
        await self.quiet()

    async def make_batches(self, count: int, seconds: float) -> list[int]:
        """Tickets of so many batches, each trained on once it is there."""
        made = []
        for _ in range(count):
            made += [(await self.make(seconds)).ticket for _ in range(BATCH)]
            await self.train()
        return made


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(linked, "time", clock)
    desk = Desk(clock)
    yield desk
    desk.link.close()
    desk.served.close()


async def test_where_trajectories_take_longer_than_an_answer_each_is_asked_for_by_itself(
    desk: Desk,
) -> None:
    await desk.make_batches(6, 0.05)
    assert {1} == set(desk.wanted)
    assert 0 == desk.in_use


async def test_the_shorter_trajectories_are_the_more_are_asked_for_at_once(desk: Desk) -> None:
    made = await desk.make_batches(20, 0.0001)
    assert list(range(len(made))) == made
    later = desk.wanted[len(desk.wanted) // 2 :]
    assert min(later) > 1
    assert sum(desk.wanted) > 2 * len(desk.wanted)
    assert desk.in_use <= desk.exchange.ledger.ahead(1)  # what lies in stock


async def test_half_of_what_lies_in_stock_is_used_before_more_is_asked_for(desk: Desk) -> None:
    await desk.make_batches(20, 0.0001)
    stock = desk.exchange.ledger.ahead(1) - 1
    desk.said.clear()
    for _ in range(stock):
        await desk.sender.acquire()  # nothing is made of them
        desk.clock.now += 0.0001
        await desk.quiet()
    assert len(desk.wanted) <= 2
    assert min(desk.wanted) > stock // 2


async def test_who_gets_slow_asks_for_no_more_than_it_uses(desk: Desk) -> None:
    await desk.make_batches(20, 0.0001)
    await desk.make_batches(6, 0.05)
    desk.said.clear()
    await desk.make_batches(4, 0.05)
    assert {1} == set(desk.wanted)
    assert 0 == desk.in_use


async def test_several_holders_ask_for_no_more_than_a_grant_allows(desk: Desk) -> None:
    desk.exchange.request_grant("b", lambda _: None)
    await desk.make_batches(20, 0.0001)
    assert desk.in_use - 1 <= desk.exchange.ledger.ahead(2)


async def test_closing_gives_back_what_lies_in_stock_and_what_was_still_coming(desk: Desk) -> None:
    await desk.make_batches(20, 0.0001)
    assert desk.in_use > 1
    desk.exchange.hold_grants("test")
    while desk.exchange.waiting_for_grant == 0:
        desk.sender.abort(await desk.sender.acquire(), "stopped")
        await desk.quiet()
    desk.sender.close()
    desk.exchange.release_grants("test")
    await desk.quiet()
    assert (0, 0) == (desk.in_use, desk.exchange.waiting_for_grant)
    with pytest.raises(ClosedChannelError):
        await desk.sender.acquire()


async def test_at_the_end_what_lies_in_stock_goes_back_and_whoever_asks_hears_of_it(
    desk: Desk,
) -> None:
    await desk.make_batches(20, 0.0001)
    assert desk.in_use > 1
    waiting = asyncio.ensure_future(desk.sender.acquire())
    await desk.quiet()
    while waiting.done():  # until more is asked for than there are credits
        waiting = asyncio.ensure_future(desk.sender.acquire())
        await desk.quiet()
    desk.exchange.close()
    with pytest.raises(EndOfChannel):
        await waiting
    with pytest.raises(EndOfChannel):
        await desk.sender.acquire()


async def test_an_end_without_anybody_waiting_empties_the_stock(desk: Desk) -> None:
    await desk.make_batches(20, 0.0001)
    in_stock = desk.in_use
    assert in_stock > 1
    desk.sender.grant(None)
    await desk.quiet()
    assert 0 == desk.in_use
    assert {"cancelled"} == {message.reason for message in desk.said if isinstance(message, Abort)}


async def test_a_grant_for_an_earlier_end_of_its_holder_goes_back(desk: Desk) -> None:
    """An actor that leaves and comes again at once: the old end's grant was on its way."""
    waiting = asyncio.create_task(desk.sender.acquire())
    await turns(1)
    desk.link.push()
    desk.sender.close()
    desk.sender = LinkTrajectorySender(
        link=desk.link, arena=desk.arena, holder="a", announce=lambda _: None, end=1
    )
    await desk.quiet()
    with pytest.raises(EndOfChannel):
        await waiting
    assert 0 == desk.in_use
    grant = await desk.sender.acquire()
    await desk.quiet()
    assert 1 == desk.in_use
    desk.sender.abort(grant, "cancelled")
    desk.sender.close()
    await desk.quiet()
    assert 0 == desk.in_use
