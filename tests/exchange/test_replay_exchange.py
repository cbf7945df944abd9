"""Trajectories into shards and draws out of them, among shards that answer when told to, and
whatever may be lost on the way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import some
from tests.support.replay_exchange_worlds import DRAWN, NUM_ENVS, OPEN, STEPS, FakeShard, World
from tianflow.channels.messages import Drawn, Dropped, ItemsSaved, Prioritised, Stored
from tianflow.core.limits import RateLimits
from tianflow.core.payloads import (
    Batch,
    DrawPart,
    DropItems,
    Grant,
    Holdings,
    Prioritise,
    SaveItems,
    StateFile,
    StoreTrajectory,
    Version,
)
from tianflow.exchange.shards import TRAJECTORIES_IN_A_ROW as STAY
from tianflow.ledger.ledger import LedgerError
from tianflow.ledger.tickets import State, Ticket

ITEMS = STEPS * NUM_ENVS
"""That one trajectory brings."""
TIGHT = RateLimits.around(
    samples_per_insert=1.0,
    min_size=8,
    error_buffer=20.0,
    capacity=1000,
    insert_size=ITEMS,
    draw_size=DRAWN,
)


def kinds(shard: FakeShard) -> list[str]:
    return [type(request).__name__ for request in shard.asked]


# Into replay
# --------------------------------------------------------------------------------------------------


def test_a_committed_trajectory_goes_to_the_shard_of_its_actor_and_credit_and_slot_return_when_it_is_stored() -> (
    None
):
    world = World(shards=2)
    grant = world.committed(actor=1)
    assert [] == kinds(world.shards[0])
    assert [StoreTrajectory(grant.ticket, grant.slot, STEPS)] == list(world.shards[1].asked)
    assert (1, 0) == (world.ledger.snapshot().in_use, world.ledger.snapshot().inserted)
    world.shards[1].work()
    assert (0, 1) == (world.ledger.snapshot().in_use, world.ledger.snapshot().inserted)
    assert ITEMS == world.exchange.limiter.statistics().inserts
    world.sound()


def test_an_actor_keeps_its_shard_while_another_one_comes_and_goes() -> None:
    world = World(shards=3)
    world.lose(1)
    for actor in range(6):
        world.committed(actor)
    assert [0, 2] == sorted(world.shards)
    homes = {
        index: [request.ticket for request in shard.asked if isinstance(request, StoreTrajectory)]
        for index, shard in world.shards.items()
    }
    assert {0, 3} <= set(homes[0])  # tickets have the numbers of their actors here
    assert {2, 5} <= set(homes[2])
    assert {1, 4} == (set(homes[0]) | set(homes[2])) - {0, 2, 3, 5}
    world.open(1)
    assert "StoreTrajectory" not in kinds(world.shards[1])
    world.committed(actor=1)
    assert "StoreTrajectory" in kinds(world.shards[1])
    world.work()
    world.sound()


def test_fewer_actors_than_shards_go_round_so_that_no_shard_stays_empty() -> None:
    world = World(shards=3)
    for _ in range(3 * STAY):
        world.filled(actor=1)
    stored = {
        index: sum(isinstance(request, StoreTrajectory) for request in shard.seen)
        for index, shard in world.shards.items()
    }
    assert {0: STAY, 1: STAY, 2: STAY} == stored


def test_what_the_limiter_has_no_room_for_waits_and_goes_on_when_draws_are_made() -> None:
    world = World(shards=1, limits=TIGHT, slots=4)
    world.filled(3)
    for _ in range(4):
        world.committed()
    assert [] == kinds(
        world.shards[0]
    )  # a fourth trajectory would make a difference of 32, and 28 are allowed
    assert world.granted() is None
    world.work()
    assert 4 == len(world.ledger.live(State.COMMITTED))
    assert world.exchange.replay_statistics().diff <= TIGHT.max_diff
    world.now = 5.0
    assert 5.0 == world.exchange.replay_statistics().blocked_s["insert"]
    for _ in range(6):
        world.settle(world.pulled())
        world.work()
    assert [] == world.ledger.live(State.COMMITTED)
    assert world.granted() is not None
    world.now = 9.0
    assert 5.0 == world.exchange.replay_statistics().blocked_s["insert"]
    world.sound()


def test_the_limiter_counts_what_is_on_its_way() -> None:
    world = World(shards=1, limits=replace(TIGHT, min_size=1), slots=8)
    for _ in range(6):
        world.committed()
    assert 3 == len(
        world.shards[0].asked
    )  # 24 items on their way; a fourth trajectory would make 32 of the 28 there may be
    world.work()
    world.sound()
    assert world.exchange.limiter.statistics().diff <= TIGHT.max_diff


def test_nothing_is_stored_while_all_shards_are_down_and_all_of_it_once_one_is_back() -> None:
    world = World(shards=2, slots=4)
    world.lose(0)
    world.lose(1)
    for actor in range(4):
        world.committed(actor)
    assert world.granted() is None
    world.pull()
    world.sound()
    shard = world.open(1)
    world.work()
    assert 4 * ITEMS == len(shard.items)
    assert 1 == len(world.batches)
    world.sound()


def test_a_message_looks_at_one_waiting_trajectory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(shards=1, limits=TIGHT, slots=64)
    for _ in range(40):
        world.committed()
    world.work()
    looked: list[int] = []
    insertable = world.ledger.insertable

    def look(number: int) -> Ticket | None:
        looked.append(number)
        return insertable(number)

    monkeypatch.setattr(world.ledger, "insertable", look)
    world.pull()
    world.work()
    assert 0 < len(looked) <= 4
    assert len(world.exchange._committed) == len(world.ledger.live(State.COMMITTED))


def test_dropped_trajectories_are_passed_over() -> None:
    world = World(shards=1, limits=TIGHT)
    for _ in range(8):
        world.committed()
    world.exchange.drop_open("stopped")
    world.work()
    assert 0 == len(world.exchange._committed)
    assert {"stopped": 5} == world.dropped
    world.sound()


# Out of replay
# --------------------------------------------------------------------------------------------------


def test_a_draw_is_split_over_the_shards_and_delivered_when_all_parts_are_there() -> None:
    world = World(shards=2)
    world.filled(actor=0)
    world.filled(actor=1)
    world.pull()
    parts = [request for shard in world.shards.values() for request in shard.asked]
    assert all(isinstance(part, DrawPart) for part in parts)
    assert DRAWN == sum(part.items for part in parts if isinstance(part, DrawPart))
    columns = sorted(
        column
        for part in parts
        if isinstance(part, DrawPart)
        for column in range(part.first, part.first + part.items)
    )
    assert list(range(DRAWN)) == columns
    world.shards[0].work()
    assert [] == world.batches
    world.shards[1].work()
    assert 1 == len(world.batches)
    world.sound()


def test_only_one_draw_is_in_the_making() -> None:
    world = World(shards=1)
    world.filled()
    world.pull()
    world.filled()
    assert 1 == sum(isinstance(request, DrawPart) for request in world.shards[0].seen)


def test_priorities_go_back_to_those_who_drew_and_the_slot_is_free_after_that() -> None:
    world = World(shards=2)
    world.filled(actor=0)
    world.filled(actor=1)
    batch = world.pulled()
    (draw,) = batch.trajectories
    world.settle(batch)
    returned = [request for shard in world.shards.values() for request in shard.asked]
    assert all(
        isinstance(request, Prioritise) and (request.draw, request.slot) == (draw.ticket, draw.slot)
        for request in returned
    )
    assert draw.slot not in world.exchange._draws.free_slots
    world.work()
    assert draw.slot in world.exchange._draws.free_slots
    assert DRAWN == world.exchange.replay_statistics().trained
    world.sound()


@pytest.mark.parametrize(("prioritised", "skipped"), [(False, False), (True, True)])
def test_nothing_goes_back_without_priorities_or_after_a_skipped_update(
    prioritised: bool, skipped: bool
) -> None:
    world = World(shards=1, prioritised=prioritised)
    world.filled()
    world.settle(world.pulled(), skipped=skipped)
    assert [] == kinds(world.shards[0])
    assert 4 == len(world.exchange._draws.free_slots)
    world.sound()


def test_the_next_draw_is_made_before_it_is_asked_for_and_handed_over_at_once() -> None:
    world = World(shards=1, ahead=True)
    world.filled(2)
    assert [] == [request for request in world.shards[0].seen if isinstance(request, DrawPart)], (
        "nobody has asked for a first one"
    )
    batch = world.pulled()
    assert 2 == world.exchange.replay_statistics().held // DRAWN
    world.pull(ahead=1)
    (next_one,) = world.batches
    assert next_one is not None
    assert Version(1, 1) == next_one.for_version
    assert batch.trajectories[0].slot != next_one.trajectories[0].slot
    world.work()
    world.settle(batch)
    world.work()
    world.settle(next_one)
    world.work()
    assert ({}, DRAWN) == (world.discarded, world.exchange.replay_statistics().held)
    world.sound()


def test_a_draw_ahead_that_is_not_what_is_asked_for_is_made_anew() -> None:
    world = World(shards=1, ahead=True)
    world.filled(2)
    world.pulled()
    world.pull()
    assert [] == world.batches
    world.work()
    assert [world.version] == [batch.for_version for batch in world.batches if batch is not None]
    assert {"unwanted": DRAWN} == world.discarded
    world.sound()


def test_what_is_drawn_ahead_counts_for_the_limiter_and_stops_where_it_says() -> None:
    world = World(shards=1, limits=replace(TIGHT, min_size=1, min_diff=-2.0 * DRAWN), ahead=True)
    world.filled(1)
    world.pulled()
    drawn = [request for request in world.shards[0].seen if isinstance(request, DrawPart)]
    assert len(drawn) == int(world.exchange.limiter.statistics().samples / DRAWN)
    assert world.exchange.limiter.statistics().diff >= world.exchange.limiter.limits.min_diff
    assert 0.0 == world.exchange.replay_statistics().blocked_s["draw"], "nobody waits"
    world.sound()


def test_under_a_bound_nothing_is_drawn_ahead() -> None:
    world = World(shards=1, bound=5, ahead=True)
    world.filled(2)
    world.pulled()
    assert DRAWN == world.exchange.replay_statistics().held
    world.ledger.set_limits(replace(world.ledger.limits, max_staleness=None))
    world.filled(1)
    assert 2 * DRAWN == world.exchange.replay_statistics().held
    world.sound()


@pytest.mark.parametrize("worked", [False, True])
def test_a_draw_ahead_goes_with_its_learner_and_with_what_is_too_old(worked: bool) -> None:
    world = World(shards=1, ahead=True)
    world.filled(2)
    batch = world.pulled_without_work()
    assert batch is not None
    if worked:
        world.work()
    world.lose_learner()
    world.work()
    assert {"learner_lost": 2 * DRAWN} == world.discarded
    world.learner()
    world.pulled()
    if worked:
        world.work()
    world.exchange.set_limits(replace(world.ledger.limits, max_staleness=3))
    world.work()
    assert {"learner_lost": 2 * DRAWN, "expired": DRAWN} == world.discarded
    assert DRAWN == world.exchange.replay_statistics().held
    world.sound()


def test_a_settled_draw_that_the_learner_does_not_have_breaks_a_rule() -> None:
    world = World(shards=1)
    world.filled()
    batch = world.pulled()
    world.settle(batch)
    with pytest.raises(
        LedgerError, match="draw 0 was trained on, but the learner does not have it"
    ):
        world.settle(batch)


def test_the_staleness_of_every_item_is_counted_at_its_use() -> None:
    world = World(shards=1)
    world.filled()
    for _ in range(3):
        world.settle(world.pulled())
        world.work()
    assert {0: DRAWN, 1: DRAWN, 2: DRAWN} == world.ledger.snapshot().staleness


def test_no_weight_is_infinite_and_the_learner_goes_on_when_no_priority_is_above_zero() -> None:
    world = World(shards=2)
    for shard in world.shards.values():
        shard.weight = 0.0
    world.filled(actor=0)
    world.filled(actor=1)
    assert {0.0} == {told.mass for told in world.exchange.replay_statistics().shards.values()}
    batch = world.pulled()
    assert [1.0] * DRAWN == world.views(batch)["weight"].tolist()


def test_a_shard_without_mass_is_not_drawn_from_while_others_have_some() -> None:
    world = World(shards=2)
    world.shards[1].weight = 0.0
    world.filled(actor=0)
    world.filled(actor=1)
    for _ in range(20):
        world.settle(world.pulled())
        world.work()
    assert not any(isinstance(request, DrawPart) for request in world.shards[1].seen)


def test_a_draw_that_a_shard_has_nothing_for_is_discarded_and_the_next_one_made_of_the_others() -> (
    None
):
    world = World(shards=2)
    world.filled(actor=0)
    world.filled(actor=1)
    world.pull()
    world.shards[1].items.clear()
    world.shards[1].removed += ITEMS
    world.work()
    assert {"expired": DRAWN} == world.discarded
    assert 1 == len(world.batches)
    world.sound()


class Spent(FakeShard):
    """Holds items, but never enough draws of them."""

    def reply(self, request: Any) -> None:
        if isinstance(request, DrawPart):
            self.answer(Drawn(request.draw, 0, self.holdings))
        else:
            super().reply(request)


def spent_world(limits: RateLimits) -> tuple[World, Spent]:
    world = World(shards=1, opened=False, limits=limits)
    world.learner()
    shard = Spent(world, 0, 0)
    world.shards[0] = shard
    world.exchange.shard_opened(0, 0, shard)
    shard.work()
    return world, shard


def test_a_shard_with_too_few_draws_left_is_not_asked_again_before_something_new_is_in_it() -> None:
    world, shard = spent_world(OPEN)
    world.filled()
    world.pull()
    world.work()
    assert 1 == sum(isinstance(request, DrawPart) for request in shard.seen)
    world.filled()
    assert 2 == sum(isinstance(request, DrawPart) for request in shard.seen)
    world.sound()


def test_inserting_goes_on_when_nothing_that_is_there_can_be_drawn_any_more() -> None:
    """Else the limiter would wait for draws, and draws for inserts."""
    world, shard = spent_world(
        replace(TIGHT, samples_per_insert=3.0, min_diff=-30.0, max_diff=30.0)
    )
    world.pull()
    for _ in range(12):
        world.filled()
    assert [] == world.ledger.live(State.COMMITTED)
    assert 64 == len(shard.items)
    world.sound()


def test_giving_back_what_the_learner_does_not_have_changes_nothing() -> None:
    world = World(shards=1)
    world.filled()
    world.pull()
    world.exchange.give_back([0, 17])
    world.work()
    assert 1 == len(world.batches)
    assert {} == world.discarded
    world.sound()


def test_a_cancelled_pull_discards_the_draw_that_was_made_for_it() -> None:
    world = World(shards=1)
    world.filled()
    world.pull()
    world.exchange.cancel_pull()
    world.work()
    assert {"unwanted": DRAWN} == world.discarded
    world.sound()
    assert 1 == len(world.pulled().trajectories)
    world.sound()


def test_a_pull_for_another_version_does_not_get_the_draw_of_the_cancelled_one() -> None:
    world = World(shards=1)
    world.filled()
    world.pull()
    world.exchange.cancel_pull()
    world.pull(ahead=1)
    world.work()
    (batch,) = world.batches
    assert batch is not None
    assert Version(1, 1) == batch.for_version
    assert {"unwanted": DRAWN} == world.discarded
    world.sound()


@pytest.mark.parametrize("gone", [World.lose_learner, lambda world: world.exchange.cancel_pull()])
def test_the_time_in_which_nobody_pulls_is_not_one_in_which_drawing_is_held_back(
    gone: Callable[[World], None],
) -> None:
    world = World(shards=1)
    world.pull()
    world.now = 3.0
    gone(world)
    world.exchange.drop_open("stopped")
    world.now = 10.0
    assert 3.0 == world.exchange.replay_statistics().blocked_s["draw"]


# Bounds
# --------------------------------------------------------------------------------------------------


def test_a_draw_that_is_given_back_because_the_bound_was_lowered_is_expired_and_the_next_one_is_younger() -> (
    None
):
    world = World(shards=1, bound=8)
    world.filled()
    for _ in range(3):
        world.settle(world.pulled())
    world.filled()
    batch = world.pulled()
    world.exchange.set_limits(replace(world.ledger.limits, max_staleness=1))
    world.exchange.give_back([batch.trajectories[0].ticket])
    assert {"expired": DRAWN} == world.discarded
    again = world.pulled()
    assert again.trajectories[0].version.number >= 2
    world.exchange.give_back([again.trajectories[0].ticket])
    world.exchange.give_back([again.trajectories[0].ticket])  # said twice, counted once
    assert {"expired": 2 * DRAWN} == world.discarded
    world.sound()


def test_the_oldest_version_that_may_be_drawn_is_that_of_the_use_less_the_bound() -> None:
    world = World(shards=1, bound=3)
    world.learner(10)
    world.filled()
    world.pull(ahead=1)
    assert [8] == [
        request.oldest for request in world.shards[0].asked if isinstance(request, DrawPart)
    ]


def test_a_new_lineage_under_a_bound_lets_everything_older_go_wherever_it_is() -> None:
    world = World(shards=1, bound=100, slots=8, limits=TIGHT)
    world.filled(2)
    stored, late = world.begun(), world.begun()
    for _ in range(3):
        world.commit(world.begun())  # one is being stored, two wait for room
    world.lose_learner()
    world.commit(stored)
    world.learner()
    world.commit(late)
    world.work()
    shard = world.shards[0]
    assert [] == shard.items
    assert isinstance(shard.seen[-1], DropItems)
    assert 4 == world.dropped["lineage"]
    world.sound()
    world.filled()
    assert {0} == set(shard.items)
    assert 1 == len(world.pulled().trajectories)
    world.sound()


def test_without_a_bound_what_an_older_lineage_made_stays_good() -> None:
    world = World(shards=1)
    world.filled()
    grant = world.begun()
    world.lose_learner()
    world.learner()
    world.commit(grant)
    world.work()
    assert 2 * ITEMS == len(world.shards[0].items)
    assert {} == world.dropped
    world.settle(world.pulled())
    world.sound()


def test_items_of_versions_that_a_later_lineage_has_not_reached_count_as_fresh() -> None:
    world = World(shards=1)
    world.learner(50)
    world.filled()
    world.lose_learner()
    world.learner(10)
    world.settle(world.pulled())
    assert {0: DRAWN} == world.ledger.snapshot().staleness
    world.sound()


def test_the_first_bound_after_a_second_lineage_lets_everything_go_because_no_shard_knows_lineages() -> (
    None
):
    world = World(shards=1)
    world.filled()
    world.exchange.set_limits(replace(world.ledger.limits, max_staleness=5))
    assert [] == kinds(world.shards[0])  # one lineage only: numbers say all
    world.exchange.set_limits(replace(world.ledger.limits, max_staleness=None))
    world.lose_learner()
    world.learner()
    world.exchange.set_limits(replace(world.ledger.limits, max_staleness=5))
    assert [DropItems("lineage")] == list(world.shards[0].asked)
    world.work()
    assert 0 == world.exchange.limiter.statistics().size
    world.sound()


@pytest.mark.parametrize(("bound", "reason"), [(3, "lineage"), (None, "")])
def test_a_shard_that_brings_back_what_was_kept_lets_it_go_if_it_may_be_of_an_older_lineage_and_there_is_a_bound(
    bound: int | None, reason: str
) -> None:
    world = World(shards=1, bound=bound, opened=False)
    world.version = Version(1, 0)
    world.learner()
    shard = world.open(0)
    assert [DropItems(reason)] == list(shard.asked)


# Losses
# --------------------------------------------------------------------------------------------------


def test_a_shard_lost_while_it_stores_costs_those_trajectories_and_its_items() -> None:
    world = World(shards=2)
    world.filled(2, actor=0)
    world.filled(1, actor=1)
    world.committed(actor=0)
    world.committed(actor=1)
    world.lose(0)
    assert {"shard_lost": 1} == world.dropped
    assert ITEMS == world.exchange.limiter.statistics().size
    world.sound()
    world.work()
    assert 2 * ITEMS == world.exchange.limiter.statistics().size
    world.sound()


# Shards on other machines
# --------------------------------------------------------------------------------------------------


def placed(*places: str) -> World:
    """A world with a shard at each of ``places``."""
    world = World(shards=len(places), opened=False, remote=True)
    world.learner()
    for index, place in enumerate(places):
        world.open(index, place=place).work()
    return world


def stores(shard: FakeShard) -> list[tuple[int, str]]:
    """(ticket, place) of the trajectories that a shard was asked to store."""
    return [
        (request.ticket, request.place)
        for request in shard.seen
        if isinstance(request, StoreTrajectory)
    ]


def test_a_grant_names_the_machine_of_the_shard_and_the_shard_hears_where_the_data_lie() -> None:
    world = placed("a", "")
    assert ["a", ""] == [world.begun(actor).place for actor in range(2)]
    first, second = world.committed(actor=0), world.committed(actor=1)
    assert [(first.ticket, "a")] == stores(world.shards[0])
    assert [(second.ticket, "")] == stores(world.shards[1])
    world.work()
    assert 2 == world.ledger.snapshot().inserted
    world.sound()


def test_what_lies_on_the_head_goes_to_a_shard_anywhere() -> None:
    world = placed("a", "b")
    grant = world.begun(actor=1)
    assert "b" == grant.place
    world.commit(grant, place="")
    assert [(grant.ticket, "")] == stores(world.shards[1])


def test_what_lies_on_a_machine_goes_to_another_shard_of_it_when_its_own_is_down() -> None:
    world = placed("a", "a", "b")
    grant = world.begun(actor=0)
    world.lose(0)
    world.commit(grant)
    assert [(grant.ticket, "a")] == stores(world.shards[1])
    assert "a" == world.begun(actor=0).place


def test_what_lies_on_a_machine_without_shards_is_dropped() -> None:
    """Its shard has another machine now, and nothing reads those data."""
    world = placed("a", "b")
    grant = world.begun(actor=0)
    world.lose(0)
    world.open(0, place="b").work()
    world.commit(grant)
    assert {"shard_lost": 1} == world.dropped
    assert [[], []] == [stores(shard) for shard in world.shards.values()]
    world.sound()


def test_what_lies_on_the_head_waits_for_a_shard_and_what_lies_elsewhere_does_not() -> None:
    world = placed("a")
    there, here = world.begun(), world.begun()
    world.lose(0)
    world.commit(there)
    world.commit(here, place="")
    assert {"shard_lost": 1} == world.dropped
    assert 1 == world.ledger.snapshot().queue
    world.open(0)
    world.work()
    assert 1 == world.ledger.snapshot().inserted
    world.sound()


def test_a_lost_machine_costs_what_its_shards_store_and_what_waits_for_them() -> None:
    """The limiter had no room for the second one."""
    world = World(shards=1, limits=TIGHT, opened=False, remote=True)
    world.learner()
    world.open(0, place="a").work()
    grants = [world.committed() for _ in range(4)]
    asked = len(stores(world.shards[0]))
    assert 0 < asked < len(grants)
    world.lose(0)
    assert {"shard_lost": len(grants)} == world.dropped
    world.sound()


def test_without_a_shard_the_head_is_the_place() -> None:
    world = placed("a")
    world.lose(0)
    assert "" == world.begun().place


def test_steps_stored_by_a_lost_shard_still_count() -> None:
    world = World(shards=2)
    exchange = world.exchange
    before = dict(exchange.replay_statistics().inserted_steps)
    record = exchange._shards[0]
    exchange._shards.holds(record, Holdings(steps=40, inserted_steps=40))
    exchange._shards.holds(record, Holdings(steps=50, inserted_steps=60))
    assert before[0] + 60 == exchange.replay_statistics().inserted_steps[0]
    world.lose(0)
    assert before[0] + 60 == exchange.replay_statistics().inserted_steps[0]
    world.open(0)
    exchange._shards.holds(exchange._shards[0], Holdings(steps=5, inserted_steps=5))
    assert before[0] + 65 == exchange.replay_statistics().inserted_steps[0]


def test_a_shard_lost_while_it_draws_costs_the_draw_and_the_next_one_is_made_of_the_others() -> (
    None
):
    world = World(shards=2)
    world.filled(actor=0)
    world.filled(actor=1)
    world.pull()
    world.lose(1)
    world.sound()
    assert ["DrawPart"] == kinds(world.shards[0])[:1]
    world.work()
    assert {"shard_lost": DRAWN} == world.discarded
    (batch,) = world.batches
    assert batch is not None
    assert {0} == set(world.views(batch)["key"].tolist())
    world.sound()


def test_a_shard_lost_while_the_learner_has_its_items_changes_nothing_for_the_learner() -> None:
    world = World(shards=2)
    world.filled(actor=0)
    world.filled(actor=1)
    batch = world.pulled()
    world.lose(1)
    world.settle(batch)
    assert ["Prioritise"] == kinds(world.shards[0])
    world.work()
    assert DRAWN == world.exchange.replay_statistics().trained
    world.sound()


def test_priorities_are_not_given_to_the_next_life_of_the_shard_that_drew() -> None:
    """Its items have the same keys, and are other items."""
    world = World(shards=1)
    world.filled()
    batch = world.pulled()
    world.lose(0)
    world.open(0)
    world.filled()
    world.settle(batch)
    assert [] == kinds(world.shards[0])
    assert 4 == len(world.exchange._draws.free_slots)
    world.sound()


def test_a_shard_lost_while_it_takes_priorities_frees_the_slot() -> None:
    world = World(shards=1)
    world.filled()
    world.settle(world.pulled())
    assert 3 == len(world.exchange._draws.free_slots)
    world.lose(0)
    assert 4 == len(world.exchange._draws.free_slots)
    assert {} == world.discarded
    world.sound()


def test_what_an_earlier_life_of_a_shard_had_said_changes_nothing() -> None:
    world = World(shards=1)
    world.filled()
    old = world.shards[0]
    world.committed()
    world.pull()
    world.lose(0)
    new = world.open(0)
    new.work()
    stored = world.committed()
    before = world.exchange.replay_statistics()
    old.work(2)
    old.answer(Stored(stored.ticket, ITEMS, old.holdings))
    old.answer(Prioritised(0, old.holdings))
    old.answer(Dropped(old.holdings))
    old.answer(ItemsSaved(StateFile("hash", 1), old.holdings))
    assert before == world.exchange.replay_statistics()
    world.sound()
    world.work()
    assert ITEMS == len(new.items)
    assert 1 == len(world.batches)
    world.sound()


def test_an_answer_to_a_draw_that_the_learner_has_already_does_not_free_it() -> None:
    world = World(shards=1)
    world.filled()
    batch = world.pulled()
    shard = world.shards[0]
    shard.answer(Drawn(batch.trajectories[0].ticket, DRAWN, shard.holdings))
    shard.answer(Prioritised(batch.trajectories[0].ticket, shard.holdings))
    assert 3 == len(world.exchange._draws.free_slots)
    world.settle(batch)
    world.work()
    world.sound()


def test_a_shard_that_ends_with_the_run_is_not_called_lost() -> None:
    world = World(shards=1)
    world.committed()
    world.exchange.shard_lost(0, "stopped")
    assert {"stopped": 1} == world.dropped
    world.sound()


def test_the_learner_waits_for_a_full_start_again_when_shards_were_lost_below_it() -> None:
    world = World(shards=2, limits=TIGHT)
    world.filled(1, actor=0)
    world.filled(1, actor=1)
    world.lose(0)
    world.shards[1].items.clear()
    world.shards[1].removed += ITEMS
    world.pull()
    world.filled(actor=1)
    world.filled(actor=0)
    assert 1 == len(world.batches)
    world.sound()


def test_a_learner_lost_in_any_state_of_its_draws_loses_those_and_nothing_of_replay() -> None:
    world = World(shards=2, slots=8)
    world.filled(actor=0)
    world.filled(actor=1)
    first = world.pulled()
    world.settle(first)  # returning
    held = world.pulled_without_work()
    world.pull(ahead=1)  # drawing
    storing = world.committed(actor=0)
    begun = world.begun(actor=1)
    world.lose_learner()
    world.sound()
    assert world.granted() is None  # nobody is granted anything without a learner
    world.work()
    assert {"learner_lost": 2 * DRAWN} == world.discarded
    assert [] == world.batches
    assert held is not None
    world.commit(begun)
    world.work()
    world.learner()
    assert 4 * ITEMS == world.exchange.limiter.statistics().size
    assert storing.ticket not in {ticket.number for ticket in world.ledger.live()}
    world.settle(world.pulled())
    world.work()
    assert {} == world.dropped
    assert 4 == len(world.exchange._draws.free_slots)
    world.sound()


def test_what_a_lost_learner_had_said_changes_nothing() -> None:
    world = World(shards=1)
    world.filled()
    batch = world.pulled()
    world.lose_learner()
    world.settle(batch)
    assert 0 == world.exchange.replay_statistics().trained
    assert Version(1, 0) == world.ledger.version
    world.exchange.give_back([batch.trajectories[0].ticket])
    world.sound()


def test_the_end_reaches_everyone_who_waits_and_leaves_nothing_behind() -> None:
    world = World(shards=1, slots=2)
    world.filled()
    held = world.pulled()
    world.pull(ahead=1)
    storing = world.committed()
    ended: list[Grant | None] = []
    world.begun()
    world.exchange.request_grant("actor-5", ended.append)
    world.exchange.hold_grants("ending")
    world.exchange.drop_open("stopped")
    world.exchange.close()
    assert [None] == world.batches
    assert [None] == ended
    world.work()
    assert world.ledger.snapshot().inserted == 2
    assert storing is not None
    world.lose_learner()
    world.exchange.shard_lost(0, "stopped")
    told = world.exchange.replay_statistics()
    assert (0, 4) == (told.held, len(world.exchange._draws.free_slots))
    assert 0 == world.ledger.snapshot().open
    world.settle(held)
    world.sound()


# Live changes
# --------------------------------------------------------------------------------------------------


def test_another_ratio_is_in_force_at_once_and_lets_whoever_waits_go_on() -> None:
    world = World(shards=1, limits=TIGHT)
    for _ in range(6):
        world.committed()
    world.work()
    assert 3 == len(world.ledger.live(State.COMMITTED))
    world.exchange.set_rate(replace(TIGHT, max_diff=1000.0))
    assert [] == world.ledger.live(State.COMMITTED)
    world.work()
    assert 48 == world.exchange.limiter.statistics().diff
    world.exchange.set_rate(replace(TIGHT, min_diff=-100.0, max_diff=20.0))
    assert 20 == world.exchange.limiter.statistics().diff
    world.sound()


def test_a_ratio_where_there_was_none_begins_inside_its_band() -> None:
    world = World(shards=1, limits=OPEN)
    for _ in range(9):
        world.filled()
    assert 9 * ITEMS == world.exchange.limiter.statistics().diff
    world.exchange.set_rate(TIGHT)
    assert TIGHT.max_diff == world.exchange.limiter.statistics().diff
    world.committed()
    assert 1 == len(world.ledger.live(State.COMMITTED))
    for _ in range(2):
        world.settle(world.pulled())
        world.work()
    assert [] == world.ledger.live(State.COMMITTED)
    world.sound()


def test_a_learner_that_is_held_back_goes_on_with_a_wider_band() -> None:
    world = World(shards=1, limits=TIGHT)
    world.filled()
    for _ in range(3):
        world.settle(world.pulled())
        world.work()
    world.pull()
    world.work()
    assert [] == world.batches
    world.exchange.set_rate(replace(TIGHT, min_diff=-100.0))
    world.work()
    assert 1 == len(world.batches)
    world.sound()


# Keeping
# --------------------------------------------------------------------------------------------------


async def keeping(world: World) -> asyncio.Task[dict[str, StateFile]]:
    task = asyncio.create_task(world.exchange.save(Path("there")))
    await asyncio.sleep(0)
    return task


@pytest.mark.asyncio
async def test_every_shard_is_kept_and_one_that_is_lost_meanwhile_leaves_nothing() -> None:
    world = World(shards=3)
    task = await keeping(world)
    assert [[SaveItems(f"there/replay-{index}.safetensors")] for index in range(3)] == [
        list(s.asked) for s in world.shards.values()
    ]
    world.shards[0].work()
    world.lose(1)
    world.shards[2].answer(ItemsSaved(None, world.shards[2].holdings))
    assert {
        "replay-0.safetensors": StateFile("hash of there/replay-0.safetensors", 1)
    } == await task


@pytest.mark.asyncio
async def test_the_answer_to_a_keep_that_was_given_up_is_not_taken_for_that_to_the_next_one() -> (
    None
):
    world = World(shards=1)
    first = await keeping(world)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(world.exchange.save(Path("elsewhere")))
    await asyncio.sleep(0)
    world.shards[0].work()
    await asyncio.sleep(0)
    assert not second.done()
    world.shards[0].work()
    assert {
        "replay-0.safetensors": StateFile("hash of elsewhere/replay-0.safetensors", 1)
    } == await second


def test_the_limiter_counts_what_shards_bring_back_once_all_are_there() -> None:
    world = World(shards=2, restoring=True)
    world.exchange.limiter.inserted(3)
    for index, items in {0: 12, 1: 5}.items():
        world.shards[index].items = [0] * items
    world.shards[0].work()
    world.committed(actor=0)
    world.shards[0].work()
    world.lose(0)  # the limiter may have known of fewer
    world.shards[1].work()
    world.open(0).work()
    assert 5 == world.exchange.limiter.statistics().size
    world.sound()


def draws_without_insert(world: World) -> int:
    """Draws that the learner gets until it waits for actors."""
    count = 0
    while True:
        world.pull()
        world.work()
        if not world.batches:
            world.exchange.cancel_pull()
            return count
        batch = world.batches.pop()
        assert batch is not None
        world.settle(batch)
        world.work()
        count += 1


NARROW = RateLimits.around(
    samples_per_insert=8.0,
    min_size=4 * ITEMS,
    error_buffer=70.0,
    capacity=1000,
    insert_size=ITEMS,
    draw_size=DRAWN,
)


def test_a_run_resumed_with_empty_replay_draws_as_a_new_one() -> None:
    new = World(shards=2, limits=NARROW)
    new.filled(2, actor=0)
    new.filled(2, actor=1)
    expected = draws_without_insert(new)
    new.filled(2, actor=1)
    resumed = World(shards=2, limits=NARROW, restoring=True)
    resumed.exchange.limiter.restore(new.exchange.limiter.snapshot())
    resumed.work()
    assert 0 == resumed.exchange.limiter.statistics().size
    resumed.filled(2, actor=0)
    resumed.filled(2, actor=1)
    assert expected == draws_without_insert(resumed) > 0
    resumed.sound()


@pytest.mark.parametrize("cause", ["shards", "lineage"])
def test_a_table_that_is_emptied_in_a_run_draws_as_a_new_one(cause: str) -> None:
    world = World(shards=2, limits=NARROW, bound=1000)
    for actor in (0, 1, 0, 1):
        world.filled(actor=actor)
    expected = draws_without_insert(world)
    if cause == "lineage":
        world.lose_learner()
        world.learner()
        world.work()
    else:
        for index in (0, 1):
            world.lose(index)
            world.open(index).work()
    assert 0 == world.exchange.limiter.statistics().size
    for actor in (0, 1, 0, 1):
        world.filled(actor=actor)
    assert expected == draws_without_insert(world) > 0
    world.sound()


# Everything at once
# --------------------------------------------------------------------------------------------------


class Chaos:
    """Random steps of everyone, in any order; shards answer in the order in which they were asked,
    or draws before the rest.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bound = self.random.choice([None, 0, 3])
        self.world = World(
            shards=3,
            slots=10,
            bound=self.bound,
            limits=self.limits(),
            seed=seed,
            prioritised=self.random.random() < 0.7,
            ahead=seed % 2 == 0,
            remote=seed % 4 >= 2,
        )
        self.begun: list[Any] = []
        self.held: list[Batch] = []
        self.pulling = self.alive = False
        self.ahead = 0
        self.alive = True
        self.done = 0
        self.places = ("",) if seed % 4 < 2 else ("", "a", "b")

    def limits(self) -> RateLimits:
        spi, buffer = self.random.choice([0.25, 1.0, 4.0]), self.random.choice([0.0, 50.0])
        least = max(2.0 * max(1.0, spi), spi * ITEMS + DRAWN)
        return RateLimits.around(samples_per_insert=spi, min_size=self.random.choice([1, 20]), error_buffer=least + buffer, capacity=64,
                                 insert_size=ITEMS, draw_size=DRAWN)  # fmt: skip

    def got(self, batch: Batch | None) -> None:
        self.pulling = False
        if batch is not None:
            self.held.append(batch)

    def step(self) -> None:
        world, odds = self.world, self.random.random()
        if odds < 0.25:
            actor = self.random.randrange(5)
            grant = world.granted(actor)
            if grant is not None:
                world.exchange.begin(grant.ticket, grant.version)
                self.begun.append(grant)
        elif odds < 0.45 and self.begun:
            grant = self.begun.pop(self.random.randrange(len(self.begun)))
            place = "" if self.random.random() < 0.2 else grant.place
            world.commit(grant, self.random.randint(1, STEPS), place)
        elif odds < 0.75 and world.shards:
            shard = self.random.choice(list(world.shards.values()))
            if self.random.random() < 0.5:
                shard.hurry()
            elif shard.asked:
                shard.work()
        elif odds < 0.95:
            self.learn()
        else:
            self.fault()

    def learn(self) -> None:
        world = self.world
        if not self.alive:
            world.learner(self.random.choice([0, world.version.number]))
            self.alive = True
        elif self.held and self.random.random() < 0.8:
            batch = self.held.pop(0)
            limits = world.ledger.limits
            age = world.version.number - batch.trajectories[0].version.number
            if batch.for_version.number != world.version.number or (
                limits.max_staleness is not None and age > limits.max_staleness
            ):
                world.exchange.give_back([batch.trajectories[0].ticket])
            else:
                world.settle(batch, skipped=self.random.random() < 0.1)
                self.done += 1
        elif not self.pulling and len(self.held) < 2:
            self.pulling = True
            world.pull(ahead=len(self.held) if self.bound != 0 else 0, deliver=self.got)
        elif self.pulling and self.random.random() < 0.1:
            world.exchange.cancel_pull()
            self.pulling = False

    def fault(self) -> None:
        world, index = self.world, self.random.randrange(3)
        kind = self.random.choice(["shard", "shard", "learner", "rate", "abort", "zero"])
        if kind == "shard" and index in world.shards:
            old = world.lose(index)
            old.work(min(1, len(old.asked)))  # too late
        elif kind == "shard":
            world.open(index, place=self.random.choice(self.places))
        elif kind == "learner" and self.alive and self.random.random() < 0.3:
            world.lose_learner()
            self.alive, self.pulling, self.held = False, False, []
        elif kind == "rate":
            world.exchange.set_rate(self.limits())
        elif kind == "abort" and self.begun:
            grant = self.begun.pop()
            world.exchange.abort(grant.ticket, grant.slot, "env_error")
        elif kind == "zero" and index in world.shards:
            world.shards[index].weight = self.random.choice([0.0, 1.0])

    def drain(self) -> int:
        """With all shards and a learner there, updates go on and everything that was begun arrives.
        How many updates were made.
        """
        world = self.world
        for index in range(3):
            if index not in world.shards:
                world.open(index)
        before = self.done
        for _ in range(400):
            while self.begun:
                world.commit(self.begun.pop())
            world.work()
            self.learn()
            world.sound()
            if self.done - before < 10:
                for actor in range(3):
                    grant = world.granted(actor)
                    if grant is not None:
                        world.exchange.begin(grant.ticket, grant.version)
                        self.begun.append(grant)
        return self.done - before


@pytest.mark.parametrize("seed", some(range(40)))
def test_whatever_happens_in_any_order_the_identities_hold_and_nothing_is_stuck(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(600):
        chaos.step()
        chaos.world.sound()
    assert chaos.drain() >= 10
    world = chaos.world
    world.exchange.close()
    world.exchange.drop_open("stopped")
    world.lose_learner()
    world.work()
    assert 0 == world.exchange.replay_statistics().held
    assert 4 == len(world.exchange._draws.free_slots)
    assert 0 == world.ledger.snapshot().open
    world.sound()


def test_holdings_start_with_nothing() -> None:
    assert Holdings() == World(shards=1).exchange.replay_statistics().shards[0]
