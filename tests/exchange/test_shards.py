"""Requests to shards and their answers, in memory and over a link: the same, whole, and in
order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

import pytest

from tests.support.replay_exchange_worlds import DRAWS, LAYOUT, World
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.memory import heap_arena
from tianflow.channels.messages import (
    Drawn,
    Dropped,
    ItemsSaved,
    Prioritised,
    ShardAnswer,
    Stored,
)
from tianflow.core.payloads import (
    DrawPart,
    DropItems,
    Holdings,
    Prioritise,
    SaveItems,
    ShardRequest,
    StateFile,
    StoreTrajectory,
)
from tianflow.errors import WouldBlock
from tianflow.exchange.shards import LinkShardPort, ShardEnd

HELD = Holdings(3, 1.5, 7, 9, 4, 100)


# Both forms
# --------------------------------------------------------------------------------------------------


class Form(Protocol):
    """A coordinator's way to a shard, the shard's end, and how what was said arrives."""

    end: ShardEnd
    place: str

    def ask(self, request: ShardRequest) -> None: ...
    async def quiet(self) -> None: ...
    def close(self) -> None: ...


class InMemory:
    place = ""

    def __init__(self, answer: Callable[[ShardAnswer], None]) -> None:
        self.end = ShardEnd(slots=heap_arena(LAYOUT, 2), draws=heap_arena(DRAWS, 2), answer=answer)
        self.ask = self.end.ask

    async def quiet(self) -> None: ...

    def close(self) -> None: ...


class OverLink:
    place = ""

    def __init__(self, answer: Callable[[ShardAnswer], None]) -> None:
        ours, theirs = socket_pair()
        self.link = Link(end=ours, handle=answer, closed=lambda: None)  # type: ignore[arg-type]  # a shard sends answers
        self.other = Link(end=theirs, handle=self._asked, closed=lambda: None)
        self.end = ShardEnd(
            slots=heap_arena(LAYOUT, 2), draws=heap_arena(DRAWS, 2), answer=self.other.send
        )
        self.ask = LinkShardPort(self.link).ask

    def _asked(self, message: object) -> None:
        assert isinstance(message, ShardRequest)
        self.end.ask(message)

    async def quiet(self) -> None:
        await self.link.flush()
        await self.other.flush()
        for _ in range(5):
            await asyncio.sleep(0)

    def close(self) -> None:
        self.link.close()
        self.other.close()


@pytest.fixture(params=[InMemory, OverLink])
def form(request: pytest.FixtureRequest) -> type[InMemory | OverLink]:
    return request.param  # type: ignore[no-any-return]  # one of the two above


@pytest.mark.asyncio
async def test_requests_wait_and_answers_go_out_in_order(
    form: Callable[[Callable[[ShardAnswer], None]], Form],
) -> None:
    said: list[ShardAnswer] = []
    opened = form(said.append)
    asked: list[ShardRequest] = [
        StoreTrajectory(1, 0, 4),
        DrawPart(2, 1, 0, 3, -(2**62)),
        Prioritise(2, 1, 0, 3),
        DropItems("lineage"),
        SaveItems("/there"),
    ]
    for request in asked:
        opened.ask(request)
    await opened.quiet()
    draws = [asked[1], asked[2]]
    assert [*draws, asked[0], *asked[3:]] == [await opened.end.receive() for _ in asked]
    opened.end.stored(1, 2, HELD)
    opened.end.drawn(2, 3, HELD)
    opened.end.prioritised(2, HELD)
    opened.end.dropped(HELD)
    opened.end.saved(StateFile("abc", 8), HELD)
    opened.end.saved(None, HELD)
    await opened.quiet()
    expected: list[ShardAnswer] = [
        Stored(1, 2, HELD),
        Drawn(2, 3, HELD),
        Prioritised(2, HELD),
        Dropped(HELD),
        ItemsSaved(StateFile("abc", 8), HELD),
        ItemsSaved(None, HELD),
    ]
    assert expected == said
    assert [type(answer) for answer in expected] == [type(answer) for answer in said]
    opened.close()


@pytest.mark.asyncio
async def test_a_shard_that_waits_is_woken_by_a_request(
    form: Callable[[Callable[[ShardAnswer], None]], Form],
) -> None:
    opened = form(lambda *_: None)
    waiting = asyncio.create_task(opened.end.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    opened.ask(DropItems(""))
    await opened.quiet()
    assert DropItems("") == await waiting
    opened.close()


@pytest.mark.asyncio
async def test_the_exchange_hears_a_shard_alike_in_both_forms(
    form: Callable[[Callable[[ShardAnswer], None]], Form],
) -> None:
    world = World(shards=1, opened=False)
    world.learner()
    opened = form(partial(world.exchange.shard_answered, 0, 5))
    world.exchange.shard_opened(0, 5, opened)
    grant = world.committed()
    await opened.quiet()
    assert [DropItems(""), StoreTrajectory(grant.ticket, grant.slot, 4)] == [
        await opened.end.receive(),
        await opened.end.receive(),
    ]
    opened.end.dropped(Holdings())
    opened.end.stored(grant.ticket, 8, Holdings(8, 8.0))
    await opened.quiet()
    assert {0: Holdings(8, 8.0)} == world.exchange.replay_statistics().shards
    assert 1 == world.ledger.snapshot().inserted
    world.sound()
    opened.close()


def end() -> ShardEnd:
    return ShardEnd(slots=heap_arena(LAYOUT, 2), draws=heap_arena(DRAWS, 2), answer=lambda *_: None)


def order(*asked: ShardRequest) -> list[ShardRequest]:
    """In which a shard gets them."""
    waiting = end()
    for request in asked:
        waiting.ask(request)
    return [waiting.receive_nowait() for _ in asked]


def test_draws_and_priorities_go_before_what_is_to_be_stored() -> None:
    stores, draw, back, later = (
        [StoreTrajectory(n, n, 4) for n in range(3)],
        DrawPart(0, 0, 0, 3, 0),
        Prioritise(1, 1, 0, 3),
        DrawPart(2, 2, 0, 3, 0),
    )
    assert [draw, back, later, *stores] == order(stores[0], draw, stores[1], back, stores[2], later)


def test_draws_and_priorities_that_wait_come_together_and_nothing_else_does() -> None:
    waiting, store, draw, back = (
        end(),
        StoreTrajectory(0, 0, 4),
        DrawPart(0, 0, 0, 3, 0),
        Prioritise(1, 1, 0, 3),
    )
    for request in (store, draw, back):
        waiting.ask(request)
    assert [draw, back] == waiting.receive_soon()
    assert [] == waiting.receive_soon()
    assert store == waiting.receive_nowait()


@pytest.mark.parametrize("barrier", [DropItems("lineage"), SaveItems("/there")])
def test_nothing_goes_before_what_is_about_everything_that_is_there(barrier: ShardRequest) -> None:
    store, early, late = StoreTrajectory(0, 0, 4), DrawPart(0, 0, 0, 3, 0), DrawPart(1, 1, 0, 3, 0)
    assert [early, store, barrier, late] == order(store, early, barrier, late)
    assert [barrier, store, late, barrier, late] == order(barrier, store, late, barrier, late)


def test_after_a_barrier_draws_go_first_again() -> None:
    waiting = end()
    waiting.ask(DropItems(""))
    assert DropItems("") == waiting.receive_nowait()
    waiting.ask(StoreTrajectory(0, 0, 4))
    waiting.ask(DrawPart(0, 0, 0, 3, 0))
    assert DrawPart(0, 0, 0, 3, 0) == waiting.receive_nowait()


def test_an_end_that_nobody_has_asked_anything_would_block() -> None:
    with pytest.raises(WouldBlock, match="no request"):
        end().receive_nowait()


def test_an_end_shows_the_arrays_of_slots_and_draws() -> None:
    slots, draws = heap_arena(LAYOUT, 2), heap_arena(DRAWS, 2)
    shown = ShardEnd(slots=slots, draws=draws, answer=lambda *_: None)
    slots.views(1)["reward"][:] = 3.0
    assert 3.0 == shown.trajectory(1)["reward"].min()
    shown.draw(1)["weight"][:] = 2.0
    assert 2.0 == draws.views(1)["weight"].min()
    assert 0.0 == draws.views(0)["weight"].max()
