"""What every form of a channel promises, as suites that each form runs: subclass one and name the
form.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.worlds import (
    FIRST,
    NUM_ENVS,
    STEPS,
    WEIGHTS_NBYTES,
    EventsLink,
    WeightsLink,
    World,
    tickets,
    turns,
)
from tianflow.core.events import EnvironmentFailed, Event, SettingsChanged
from tianflow.core.payloads import NO_VERSION, Batch, Episode, Settlement, Trajectory, Version
from tianflow.errors import BrokenChannelError, ClosedChannelError, EndOfChannel
from tianflow.interfaces import BatchSource, TrajectorySender
from tianflow.ledger.tickets import State

OpenWorld = Callable[..., World]
EVERY_AWAIT = range(12)
"""Turns of the loop after which something is cancelled or closed: from before it began to after it
ended, in either form.
"""


class Opens:
    """Opens worlds of one form; what goes wrong on the loop fails the test."""

    form: ClassVar[type[World]]

    @pytest.fixture
    async def open_world(self) -> AsyncIterator[OpenWorld]:
        mishaps: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
        opened: list[World] = []

        def open_(**limits: Any) -> World:
            opened.append(self.form(**limits))
            return opened[-1]

        yield open_
        for world in opened:
            world.close()
        await turns(2)
        assert [] == mishaps


class GrantsConform(Opens):
    """Grants are leased: each needs a credit and a slot, and comes back when its holder dies."""

    async def test_a_grant_names_the_newest_published_version(self, open_world: OpenWorld) -> None:
        world = open_world(bound=3)
        sender, source = world.sender("a"), world.source()
        assert FIRST == (await world.committed(sender)).version
        await world.committed(sender)
        await world.update(source)
        assert Version(1, 1) == (await sender.acquire()).version

    async def test_a_grant_says_how_many_more_everyone_could_hold(
        self, open_world: OpenWorld
    ) -> None:
        """Beside the batch that is trained on; a second holder halves what there is for each, a
        single one takes from nobody.
        """
        world = open_world(bound=4, batch=1)
        assert [3, 1, 0] == [(await world.sender(name).acquire()).ahead for name in "abc"]

    async def test_a_single_holder_may_hold_two_wherever_there_are_as_many(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(bound=1, batch=1)
        assert [1, 0] == [(await world.sender(name).acquire()).ahead for name in "ab"]

    async def test_a_grant_carries_the_seed_epoch(self, open_world: OpenWorld) -> None:
        world = open_world()
        world.exchange.seed_epoch = 7
        assert 7 == (await world.sender("a").acquire()).seed_epoch

    async def test_nothing_is_granted_before_a_learner_has_published(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(opened=False)
        waiting = asyncio.ensure_future(world.sender("a").acquire())
        source = world.source()
        await world.quiet()
        assert not waiting.done()
        source.opened(Version(2, 30))
        assert Version(2, 30) == (await waiting).version

    async def test_nobody_is_granted_more_than_there_are_credits(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(bound=1, slots=16)
        waiting = [
            asyncio.ensure_future(world.sender(f"actor-{number}").acquire()) for number in range(9)
        ]
        await world.quiet()
        assert (4, 4) == (sum(task.done() for task in waiting), world.seen.in_use)
        world.exchange.close()
        assert 5 == sum(
            isinstance(result, EndOfChannel)
            for result in await asyncio.gather(*waiting, return_exceptions=True)
        )

    async def test_who_asked_first_is_granted_first(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=0)
        holder, order = world.sender("holder"), list[str]()
        grant = await holder.acquire()

        async def ask(name: str) -> None:
            sender = world.sender(name)
            got = await sender.acquire()
            order.append(name)
            sender.abort(got, "done")

        asking = []
        for name in "cab":
            asking.append(asyncio.ensure_future(ask(name)))
            await world.quiet()
        holder.abort(grant, "done")
        await asyncio.gather(*asking)
        assert ["c", "a", "b"] == order

    async def test_a_settled_update_returns_its_credits(self, open_world: OpenWorld) -> None:
        world = open_world(batch=2, bound=0)
        sender, source = world.sender("a"), world.source()
        for _ in range(2):
            await world.committed(sender)
        waiting = asyncio.ensure_future(sender.acquire())
        batch = await source.next_batch(FIRST)
        await world.quiet()
        assert not waiting.done()
        world.settle(source, batch)
        assert Version(1, 1) == (await waiting).version

    async def test_a_settled_slot_is_free_for_the_next_grant(self, open_world: OpenWorld) -> None:
        world = open_world(batch=2, bound=0, slots=2)
        sender, source = world.sender("a"), world.source()
        for _ in range(2):
            await world.committed(sender)
        batch = await source.next_batch(FIRST)
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        assert not waiting.done()
        world.settle(source, batch)
        assert (await waiting).slot in {trajectory.slot for trajectory in batch.trajectories}

    async def test_a_dropped_ticket_returns_its_credit(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=0)
        sender = world.sender("a")
        grant = await world.begun(sender)
        waiting = asyncio.ensure_future(world.sender("b").acquire())
        await world.quiet()
        assert not waiting.done()
        world.exchange.drop_open("test")
        assert grant.slot != (await waiting).slot

    async def test_a_published_version_between_updates_makes_room(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=1, slots=4)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        await world.update(source, published=False)
        await sender.acquire()
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        assert not waiting.done()
        source.published(Version(1, 1))
        assert Version(1, 1) == (await waiting).version

    async def test_a_ticket_that_comes_back_unused_is_counted_as_returned(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        sender.abort(await sender.acquire(), "stopped")
        await world.quiet()
        world.all_returned()
        assert (1, 0, {}) == (world.seen.returned, world.seen.begun, world.seen.dropped)

    async def test_an_aborted_ticket_is_dropped_with_its_reason(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        sender.abort(await world.begun(sender), "env_error")
        await world.quiet()
        world.all_returned()
        assert {"env_error": 1} == world.seen.dropped

    async def test_beginning_a_ticket_that_was_given_up_changes_nothing(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        grant = await sender.acquire()
        world.exchange.drop_open("test")
        sender.begin(grant, grant.version)
        world.commit(sender, grant)
        await world.quiet()
        world.all_returned()
        assert (0, 0, 1) == (world.seen.begun, world.seen.committed, world.seen.late_commits)

    async def test_a_late_commit_is_refused_and_its_slot_is_not_used_before(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=2, bound=0, slots=2)
        late, next_ = world.sender("late"), world.sender("next")
        dropped = await world.begun(late)
        world.exchange.drop_open("test")
        grants = [await next_.acquire()]
        waiting = asyncio.ensure_future(next_.acquire())
        await world.quiet()
        assert (False, 1, 0) == (
            waiting.done(),
            world.seen.quarantined_slots,
            world.seen.free_slots,
        )
        world.commit(late, dropped)
        grants.append(await waiting)
        assert (dropped.slot, 1, 0) == (
            grants[1].slot,
            world.seen.late_commits,
            world.seen.committed,
        )
        assert grants[0].slot != dropped.slot
        world.sound()

    async def test_a_late_abort_frees_the_slot(self, open_world: OpenWorld) -> None:
        world = open_world()
        sender = world.sender("a")
        grant = await world.begun(sender)
        world.exchange.drop_open("test")
        await world.quiet()
        assert 1 == world.seen.quarantined_slots
        sender.abort(grant, "stopped")
        await world.quiet()
        world.all_returned()

    async def test_grants_of_a_lost_holder_come_back_and_what_it_committed_stays(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=3)
        lost, other = world.sender("lost"), world.sender("other")
        good = await world.committed(lost)
        await world.begun(lost)
        await lost.acquire()
        kept = await world.begun(other)
        await world.quiet()
        world.cut_off("lost")
        assert 2 == world.exchange.holder_lost("lost", "host_lost")
        assert (2, {"host_lost": 1}, 1) == (
            world.seen.in_use,
            world.seen.dropped,
            world.seen.returned,
        )
        assert (0, 6) == (world.seen.quarantined_slots, world.seen.free_slots)
        assert {good.ticket, kept.ticket} == {ticket.number for ticket in world.ledger.live()}
        assert (good.ticket,) == tickets(await world.source().next_batch(FIRST))
        world.sound()

    async def test_a_lost_holder_waits_for_nothing_any_more(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=0)
        sender, lost = world.sender("a"), world.sender("lost")
        grant = await sender.acquire()
        waiting = asyncio.ensure_future(lost.acquire())
        await world.quiet()
        assert 1 == world.exchange.waiting_for_grant
        world.cut_off("lost")
        world.exchange.holder_lost("lost", "host_lost")
        assert 0 == world.exchange.waiting_for_grant
        sender.abort(grant, "stopped")
        waiting.cancel()
        await asyncio.wait([waiting])
        await world.quiet()
        world.all_returned()

    async def test_the_end_of_the_run_reaches_who_waits_and_who_asks_later(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=0)
        first, second = world.sender("a"), world.sender("b")
        await first.acquire()
        waiting = asyncio.ensure_future(second.acquire())
        await world.quiet()
        world.exchange.close()
        with pytest.raises(EndOfChannel):
            await waiting
        for sender in (first, second):
            with pytest.raises(EndOfChannel):
                await sender.acquire()

    async def test_after_the_end_what_is_out_may_still_be_committed(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        grant = await world.begun(sender)
        world.exchange.close()
        world.commit(sender, grant)
        await world.quiet()
        assert 1 == world.seen.committed

    async def test_a_closed_end_is_not_used_again(self, open_world: OpenWorld) -> None:
        world = open_world()
        sender = world.sender("a")
        sender.close()
        sender.close()
        with pytest.raises(ClosedChannelError, match="closed its end"):
            await sender.acquire()

    async def test_closing_an_end_wakes_who_waits_in_it(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=0)
        held, sender = world.sender("holder"), world.sender("a")
        grant = await held.acquire()
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        sender.close()
        with pytest.raises(EndOfChannel):
            await asyncio.wait_for(waiting, 10)
        held.abort(grant, "done")
        await world.quiet()
        assert (0, 1) == (world.exchange.waiting_for_grant, world.seen.granted)
        world.all_returned()

    async def test_an_end_that_was_cancelled_is_closed_and_asks_for_nothing(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=0)
        held, sender = world.sender("holder"), world.sender("a")
        grant = await held.acquire()
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        waiting.cancel()
        await asyncio.wait([waiting])
        await world.quiet()
        assert 0 == world.exchange.waiting_for_grant
        with pytest.raises(ClosedChannelError):
            await sender.acquire()
        held.abort(grant, "done")
        await world.quiet()
        assert 1 == world.seen.granted

    async def test_a_grant_that_comes_while_its_cancelled_asker_has_not_run_yet_goes_back(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=0)
        held, sender = world.sender("holder"), world.sender("a")
        grant = await held.acquire()
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        waiting.cancel()
        world.exchange.abort(grant.ticket, grant.slot, "freed")
        await asyncio.wait([waiting])
        await world.quiet()
        world.all_returned()

    async def test_a_lost_holder_makes_room_for_who_waits(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=0)
        lost, sender = world.sender("lost"), world.sender("a")
        await world.begun(lost)
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        world.cut_off("lost")
        world.exchange.holder_lost("lost", "host_lost")
        assert 1 == (await asyncio.wait_for(waiting, 10)).ticket

    async def test_who_closes_its_end_may_commit_and_abort_what_is_out(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        committed, aborted = await world.begun(sender), await world.begun(sender)
        sender.close()
        world.commit(sender, committed)
        sender.abort(aborted, "stopped")
        await world.quiet()
        assert (1, {"stopped": 1}) == (world.seen.committed, world.seen.dropped)

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_a_cancelled_acquire_loses_nothing(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        asking = asyncio.ensure_future(sender.acquire())
        await turns(after)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            sender.abort(await asking, "too late to cancel")
        await world.quiet()
        world.all_returned()
        assert 0 == world.exchange.waiting_for_grant

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_a_cancelled_acquire_loses_nothing_when_its_grant_is_under_way(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world(batch=1, bound=0, slots=1)
        holder, sender, next_ = world.sender("holder"), world.sender("a"), world.sender("next")
        held = await holder.acquire()
        asking = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        waiting = asyncio.ensure_future(next_.acquire())
        await world.quiet()
        world.exchange.abort(held.ticket, held.slot, "freed")
        await turns(after)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            sender.abort(await asking, "too late to cancel")
        next_.abort(await asyncio.wait_for(waiting, 10), "done")
        await world.quiet()
        world.all_returned()

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_closing_at_any_moment_loses_nothing(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        asking = asyncio.ensure_future(sender.acquire())
        await turns(after)
        sender.close()
        with contextlib.suppress(EndOfChannel, ClosedChannelError):
            sender.abort(await asyncio.wait_for(asking, 10), "granted before")
        await world.quiet()
        world.all_returned()
        assert 0 == world.exchange.waiting_for_grant

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_losing_a_holder_at_any_moment_loses_nothing(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        asking = asyncio.ensure_future(world.begun(sender))
        await turns(after)
        world.cut_off("a")
        asking.cancel()
        await asyncio.wait([asking])
        world.exchange.holder_lost("a", "host_lost")
        await world.quiet()
        world.all_returned()


class TrajectoriesConform(Opens):
    """Trajectories wait: pulled by the learner, oldest version first, in ticket order, and their
    data are what was written.
    """

    async def test_the_learner_reads_what_the_actor_wrote(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        grant = await world.begun(sender)
        view = sender.view(grant)
        written = {}
        for number, (name, array) in enumerate(view.arrays.items()):
            array[...] = number % 2 if array.dtype == bool else number
            written[name] = array.copy()
        sender.commit(Trajectory(grant.ticket, grant.slot, 3, 5, FIRST), [])
        batch = await source.next_batch(FIRST)
        assert (Trajectory(grant.ticket, grant.slot, 3, 5, FIRST),) == batch.trajectories
        read = source.view(batch.trajectories[0])
        assert written.keys() == read.keys()
        for name, array in read.items():
            assert (array == written[name]).all(), name

    async def test_a_batch_is_the_oldest_versions_in_ticket_order(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=2, bound=3, slots=16)
        sender, source = world.sender("a"), world.source()
        grants = [await world.begun(sender) for _ in range(6)]
        for index in (4, 1):
            world.commit(sender, grants[index])
        assert [1, 4] == list(tickets(await world.update(source)))
        newer = await world.begun(sender)
        world.commit(sender, newer)
        await world.quiet()
        for index in (5, 3):
            world.commit(sender, grants[index])
        await world.quiet()  # a pull goes at once, and by another way
        assert [3, 5] == list(tickets(await world.update(source)))

    async def test_a_pull_waits_for_a_whole_batch(self, open_world: OpenWorld) -> None:
        world = open_world(batch=3, bound=0)
        sender, source = world.sender("a"), world.source()
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        for _ in range(2):
            await world.committed(sender)
        await world.quiet()
        assert (False, True) == (pulling.done(), world.exchange.pulling)
        await world.committed(sender)
        assert ((0, 1, 2), FIRST) == (tickets(batch := await pulling), batch.for_version)

    async def test_a_batch_may_be_pulled_for_a_version_ahead(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=1)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        await world.committed(sender)
        first = await source.next_batch(FIRST)
        ahead = await source.next_batch(Version(1, 1))
        world.settle(source, first)
        world.settle(source, ahead)
        await world.quiet()
        assert {0: 1, 1: 1} == world.seen.staleness
        world.all_returned()

    async def test_what_is_given_back_is_taken_again(self, open_world: OpenWorld) -> None:
        world = open_world(batch=2)
        sender, source = world.sender("a"), world.source()
        for _ in range(2):
            await world.committed(sender)
        batch = await source.next_batch(FIRST)
        source.give_back(batch)
        assert batch == await source.next_batch(FIRST)

    async def test_what_is_given_back_goes_to_the_pull_that_waits(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=1)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        batch = await source.next_batch(FIRST)
        ahead = asyncio.ensure_future(source.next_batch(Version(1, 1)))
        await world.quiet()
        source.give_back(batch)
        assert batch.trajectories == (await asyncio.wait_for(ahead, 10)).trajectories

    async def test_a_pull_for_a_lineage_that_is_not_open_waits_for_it(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        pulling = asyncio.ensure_future(source.next_batch(Version(2, 0)))
        await world.committed(sender)
        await world.quiet()
        assert not pulling.done()
        source.opened(Version(2, 0))
        await world.quiet()
        await world.committed(sender)
        assert (1,) == tickets(await asyncio.wait_for(pulling, 10))
        assert {"lineage": 1} == world.seen.dropped

    async def test_a_batch_that_comes_while_its_cancelled_puller_has_not_run_yet_goes_back(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        grant = await world.begun(sender)
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await world.quiet()
        pulling.cancel()
        world.exchange.commit(Trajectory(grant.ticket, grant.slot, STEPS, 1, FIRST))
        await asyncio.wait([pulling])
        await world.quiet()
        assert [State.COMMITTED] == [ticket.state for ticket in world.ledger.live()]

    async def test_a_learner_that_was_lost_while_it_pulled_does_not_stand_in_the_way(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await world.quiet()
        world.cut_off("learner")
        world.exchange.learner_lost()
        successor = world.source()
        successor.opened(Version(2, 0))
        pull = asyncio.ensure_future(successor.next_batch(Version(2, 0)))
        await world.committed(sender)
        assert (0,) == tickets(await asyncio.wait_for(pull, 10))
        pulling.cancel()

    async def test_a_settlement_arrives_whole(self, open_world: OpenWorld) -> None:
        world = open_world(batch=1, bound=None, slots=4)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        batch = await source.next_batch(FIRST)
        source.settle(
            Settlement(Version(1, 1), tickets(batch), None, published=False, skipped=True)
        )
        await world.quiet()
        seen = world.seen
        assert (Version(1, 1), FIRST, 1, 1, 1) == (
            seen.version,
            seen.published,
            seen.updates,
            seen.skipped_updates,
            seen.unpublished_updates,
        )

    async def test_a_cut_reaches_the_writer_that_stands_in_the_way(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=1, slots=4)
        slow, fast, source = world.sender("slow"), world.sender("fast"), world.source()
        wanted = await world.begun(slow)
        await world.committed(fast)
        assert not slow.view(wanted).cut_requested()
        await world.update(source)
        await world.committed(fast)
        pulling = asyncio.ensure_future(source.next_batch(Version(1, 1)))
        await world.quiet()
        assert (True, False) == (slow.view(wanted).cut_requested(), pulling.done())
        world.commit(slow, wanted, length=1)
        assert (Trajectory(wanted.ticket, wanted.slot, 1, NUM_ENVS, FIRST),) == (
            await pulling
        ).trajectories

    async def test_a_writer_that_does_not_answer_a_cut_is_waited_for_until_patience_ends(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=1, slots=4, patience=0.002)
        slow, fast, source = world.sender("slow"), world.sender("fast"), world.source()
        lost = await world.begun(slow)
        await world.committed(fast)
        await world.update(source)
        await world.committed(fast)
        pulling = asyncio.ensure_future(source.next_batch(Version(1, 1)))
        await world.quiet()
        assert {} == world.seen.dropped
        world.now += 0.002
        assert (2,) == tickets(await asyncio.wait_for(pulling, 10))
        assert {"straggler": 1} == world.seen.dropped
        world.commit(slow, lost)
        await world.quiet()
        assert 1 == world.seen.late_commits

    async def test_progress_is_seen_from_outside(self, open_world: OpenWorld) -> None:
        world = open_world()
        sender = world.sender("a")
        grant = await world.begun(sender)
        view = sender.view(grant)
        assert -1 == world.exchange.arena.progress(grant.slot, grant.ticket)
        for step in range(3):
            view.progress(step)
            assert step == world.exchange.arena.progress(grant.slot, grant.ticket)

    async def test_episodes_are_heard_with_accepted_trajectories_only(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world()
        sender = world.sender("a")
        good, empty, late = (
            await world.begun(sender),
            await world.begun(sender),
            await world.begun(sender),
        )
        sender.commit(
            Trajectory(good.ticket, good.slot, 1, 1, FIRST), [Episode(1.5, 20), Episode(-3.0, 7)]
        )
        sender.commit(Trajectory(empty.ticket, empty.slot, 1, 1, FIRST), [])
        await world.quiet()
        world.exchange.drop_open("test")
        sender.commit(Trajectory(late.ticket, late.slot, 1, 1, FIRST), [Episode(99.0, 1)])
        await world.quiet()
        assert [("a", [Episode(1.5, 20), Episode(-3.0, 7)])] == world.episodes

    async def test_the_end_of_the_run_reaches_the_learner(self, open_world: OpenWorld) -> None:
        world = open_world()
        source = world.source()
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await world.quiet()
        world.exchange.close()
        with pytest.raises(EndOfChannel):
            await pulling

    async def test_after_the_end_there_is_no_batch_although_one_is_there(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        await world.quiet()
        world.exchange.close()
        with pytest.raises(EndOfChannel):
            await asyncio.wait_for(source.next_batch(FIRST), 10)

    async def test_a_lost_learner_loses_what_was_made_for_it_and_its_successor_is_served(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(batch=1, bound=1)
        sender, source = world.sender("a"), world.source()
        await world.committed(sender)
        await source.next_batch(FIRST)
        open_ = await world.begun(sender)
        await world.quiet()
        world.cut_off("learner")
        world.exchange.learner_lost()
        waiting = asyncio.ensure_future(sender.acquire())
        await world.quiet()
        assert (False, {"learner_lost": 2}) == (waiting.done(), world.seen.dropped)
        successor = world.source()
        successor.opened(Version(2, 0))
        grant = await waiting
        sender.begin(grant, grant.version)
        world.commit(sender, open_)
        world.commit(sender, grant)
        assert (grant.ticket,) == tickets(await successor.next_batch(Version(2, 0)))
        assert (1, Version(2, 0)) == (world.seen.late_commits, grant.version)
        world.sound()

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_a_cancelled_pull_loses_nothing(self, open_world: OpenWorld, after: int) -> None:
        world = open_world(batch=2)
        sender, source = world.sender("a"), world.source()
        for _ in range(2):
            await world.committed(sender)
        await world.quiet()
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await turns(after)
        pulling.cancel()
        await self._give_back(source, pulling)
        await world.quiet()
        assert ([State.COMMITTED] * 2, False) == (
            [ticket.state for ticket in world.ledger.live()],
            world.exchange.pulling,
        )
        assert (0, 1) == tickets(await world.update(source))
        world.all_returned()

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_a_cancelled_pull_loses_nothing_when_its_batch_is_under_way(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world(batch=1)
        sender, source = world.sender("a"), world.source()
        grant = await world.begun(sender)
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await world.quiet()
        world.exchange.commit(Trajectory(grant.ticket, grant.slot, STEPS, 1, FIRST))
        await turns(after)
        pulling.cancel()
        await self._give_back(source, pulling)
        await world.quiet()
        assert (0,) == tickets(await world.update(source))
        world.all_returned()

    @pytest.mark.parametrize("after", EVERY_AWAIT)
    async def test_an_answer_to_a_cancelled_pull_is_not_taken_for_an_answer_to_the_next(
        self, open_world: OpenWorld, after: int
    ) -> None:
        world = open_world(batch=1, bound=1)
        sender, source = world.sender("a"), world.source()
        for _ in range(2):
            await world.committed(sender)
        await world.quiet()
        pulling = asyncio.ensure_future(source.next_batch(FIRST))
        await turns(after)
        pulling.cancel()
        await self._give_back(source, pulling)
        batch = await asyncio.wait_for(source.next_batch(Version(1, 1)), 10)
        assert Version(1, 1) == batch.for_version
        await world.quiet()
        states = [ticket.state for ticket in world.ledger.live()]
        assert {State.TAKEN: 1, State.COMMITTED: 1} == {
            state: states.count(state) for state in states
        }

    @staticmethod
    async def _give_back(source: BatchSource, pulling: asyncio.Future[Batch]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            source.give_back(await pulling)


class Soak(Opens):
    """Actors, a learner and deaths at random moments; the data prove whose they are and how old."""

    @pytest.mark.parametrize("bound", [0, 1, 4, None])
    async def test_everything_adds_up_whatever_happens(
        self, open_world: OpenWorld, bound: int | None
    ) -> None:
        world = open_world(batch=2, bound=bound, slots=9, patience=0.0)
        draw = random.Random(f"soak {bound}")
        actors = {
            name: asyncio.ensure_future(_actor(world, name, world.sender(name), draw))
            for name in ("a", "b", "c", "d")
        }
        learning = asyncio.ensure_future(_learner(world, world.source(), draw, updates=60))
        while not learning.done():
            await turns(draw.randrange(40))
            name = draw.choice(list(actors))
            if draw.random() < 0.3:
                world.cut_off(name)
                actors[name].cancel()
                await asyncio.wait([actors[name]])
                world.exchange.holder_lost(name, "host_lost")
                actors[name] = asyncio.ensure_future(_actor(world, name, world.sender(name), draw))
            assert world.seen.in_use <= 9
            world.sound()
        await learning
        world.exchange.close()
        await asyncio.wait_for(asyncio.gather(*actors.values()), 10)
        await world.quiet()
        world.exchange.drop_open("stopped")
        world.all_returned()
        seen = world.seen
        assert (120, 0) == (seen.trained, seen.violations)
        assert seen.begun == seen.trained + sum(seen.dropped.values())


async def _actor(world: World, name: str, sender: TrajectorySender, draw: random.Random) -> None:
    while True:
        try:
            grant = await sender.acquire()
        except EndOfChannel:
            return
        view = sender.view(grant)
        sender.begin(grant, grant.version)
        length = 0
        while length < STEPS and not view.cut_requested():
            view.arrays["reward"][length] = grant.ticket
            view.arrays["version"][length] = grant.version.number
            length += 1
            view.progress(length)
            await turns(draw.randrange(4))
        if draw.random() < 0.1:
            sender.abort(grant, "env_error")
        elif length:
            sender.commit(Trajectory(grant.ticket, grant.slot, length, length, grant.version), [])
        else:
            sender.abort(grant, "cut")


async def _learner(world: World, source: BatchSource, draw: random.Random, *, updates: int) -> None:
    bound = world.ledger.limits.max_staleness
    for number in range(updates):
        while True:
            pulling = asyncio.ensure_future(source.next_batch(Version(1, number)))
            if draw.random() < 0.2:
                await turns(draw.randrange(8))
                pulling.cancel()
            try:
                batch = await asyncio.wait_for(pulling, 10)
            except asyncio.CancelledError:
                continue
            if draw.random() < 0.8:
                break
            source.give_back(batch)
        await turns(draw.randrange(6))
        for trajectory in batch.trajectories:
            arrays = source.view(trajectory)
            assert {float(trajectory.ticket)} == set(
                arrays["reward"][: trajectory.length].ravel().tolist()
            ), "a slot was used again too early"
            assert {trajectory.version.number} == set(
                arrays["version"][: trajectory.length].tolist()
            )
            assert bound is None or number - trajectory.version.number <= bound
        source.settle(Settlement(Version(1, number + 1), tickets(batch), bound, published=True))


# Weights
# --------------------------------------------------------------------------------------------------


def flat(value: int, nbytes: int = WEIGHTS_NBYTES) -> NDArray[np.uint8]:
    """Weights that say in every word which version they are."""
    return np.full(nbytes // 8, value, np.int64).view(np.uint8)


def said(weights: NDArray[np.uint8]) -> set[int]:
    """What the words of ``weights`` say; more than one thing if they were torn."""
    words = weights.view(np.int64)
    return {int(words.min()), int(words.max())}


class WeightsConform:
    """Latest is overwritten: never older after newer, never torn, label and bytes always agree."""

    form: ClassVar[Callable[[], WeightsLink]]

    @pytest.fixture
    async def weights(self) -> AsyncIterator[WeightsLink]:
        link = type(self).form()
        yield link
        link.close()

    def publish(self, weights: WeightsLink, *numbers: int, lineage: int = 1) -> None:
        for number in numbers:
            weights.writer.publish(Version(lineage, number), flat(number))
            weights.deliver(Version(lineage, number))

    def read(self, weights: WeightsLink) -> tuple[Version, set[int]]:
        into = flat(-1)
        return weights.reader.read_into(into), said(into)

    async def test_before_anything_was_published_there_is_nothing_to_read(
        self, weights: WeightsLink
    ) -> None:
        assert weights.reader.version == NO_VERSION
        with pytest.raises(BrokenChannelError, match="weights"):
            self.read(weights)

    async def test_the_newest_is_read_with_its_own_label(self, weights: WeightsLink) -> None:
        for number in range(10):
            self.publish(weights, number)
            assert (Version(1, number), {number}) == self.read(weights)
            assert Version(1, number) == weights.reader.version

    async def test_a_slow_reader_skips(self, weights: WeightsLink) -> None:
        self.publish(weights, *range(100))
        assert (Version(1, 99), {99}) == self.read(weights)

    async def test_an_older_version_that_comes_late_replaces_nothing(
        self, weights: WeightsLink
    ) -> None:
        self.publish(weights, 5, 7, 6)
        assert (Version(1, 7), {7}, Version(1, 7)) == (*self.read(weights), weights.reader.version)
        self.publish(weights, 6, 5, 4, 3, 2, 1)
        assert (Version(1, 7), {7}, Version(1, 7)) == (*self.read(weights), weights.reader.version)

    async def test_a_new_lineage_replaces_a_higher_number_of_the_old_one(
        self, weights: WeightsLink
    ) -> None:
        self.publish(weights, 136, 137)
        self.publish(weights, 100, lineage=2)
        assert (Version(2, 100), {100}) == self.read(weights)

    async def test_what_was_published_is_a_copy(self, weights: WeightsLink) -> None:
        mine = flat(1)
        weights.writer.publish(Version(1, 1), mine)
        weights.deliver(Version(1, 1))
        mine[:] = 99
        assert (Version(1, 1), {1}) == self.read(weights)

    async def test_who_waits_for_newer_weights_is_woken_by_them_only(
        self, weights: WeightsLink
    ) -> None:
        self.publish(weights, 5)
        waiting = asyncio.ensure_future(weights.reader.wait_newer_than(Version(1, 5)))
        await turns(3)
        self.publish(weights, 4)
        self.publish(weights, 5)
        await turns(3)
        assert not waiting.done()
        self.publish(weights, 6, 7)
        assert Version(1, 7) == await asyncio.wait_for(waiting, 10)
        assert Version(1, 7) == await weights.reader.wait_newer_than(Version(1, 6))

    async def test_waiting_that_is_cancelled_leaves_the_others_waiting(
        self, weights: WeightsLink
    ) -> None:
        first, second = (
            asyncio.ensure_future(weights.reader.wait_newer_than(NO_VERSION)) for _ in range(2)
        )
        await turns(3)
        first.cancel()
        await asyncio.wait([first])
        self.publish(weights, 1)
        assert Version(1, 1) == await asyncio.wait_for(second, 10)

    async def test_a_thread_that_reads_while_versions_are_published_sees_none_torn_and_none_twice(
        self, weights: WeightsLink
    ) -> None:
        self.publish(weights, 0)
        done = threading.Event()
        wrong: list[tuple[Version, set[int]]] = []
        reads = [0]

        def read_on() -> None:
            into, newest = flat(-1), NO_VERSION
            while not done.is_set():
                version = weights.reader.read_into(into)
                if said(into) != {version.number} or version < newest:
                    wrong.append((version, said(into)))
                newest = version
                reads[0] += 1

        reader = threading.Thread(target=read_on)
        reader.start()
        number = 0
        while reads[0] < 2_000:
            number += 1
            self.publish(weights, number)
            await turns(1)
        done.set()
        reader.join()
        assert ([], True) == (wrong, number > 100)


# Events
# --------------------------------------------------------------------------------------------------


class EventsConform:
    """Events are dropped and counted: publishing never waits, and what arrives plus what was lost
    is what was published.
    """

    form: ClassVar[Callable[[], EventsLink]]

    @pytest.fixture
    async def link(self) -> AsyncIterator[EventsLink]:
        link = type(self).form()
        yield link
        link.close()

    @staticmethod
    def received(link: EventsLink) -> list[Event]:
        return list(iter(link.subscription.receive_nowait, None))

    async def test_a_reader_that_keeps_up_gets_every_event_in_order(self, link: EventsLink) -> None:
        sent: list[Event] = [
            SettingsChanged(number, ("balance.max_staleness",)) for number in range(50)
        ]
        for event in sent:
            link.publisher.publish(event)
        await link.go_on()
        assert (sent, 0) == (self.received(link), link.broadcast.dropped)

    async def test_what_a_stopped_reader_misses_is_counted_exactly(self, link: EventsLink) -> None:
        link.stop()
        for number in range(3_000):
            link.publisher.publish(
                EnvironmentFailed("actor-0", "env_error", f"{number} " + "x" * 10_000)
            )
            if number % 10 == 0:
                await turns(1)
        await link.go_on()
        received = self.received(link)
        assert 0 < link.broadcast.dropped
        assert 3_000 == len(received) + link.broadcast.dropped
        numbers = [
            int(event.message.split()[0])
            for event in received
            if isinstance(event, EnvironmentFailed)
        ]
        assert sorted(numbers) == numbers

    async def test_after_a_gap_events_arrive_again(self, link: EventsLink) -> None:
        link.stop()
        for _ in range(3_000):
            link.publisher.publish(EnvironmentFailed("actor-0", "env_error", "x" * 10_000))
        await link.go_on()
        self.received(link)
        link.publisher.publish(SettingsChanged(1, ()))
        await link.go_on()
        assert [SettingsChanged(1, ())] == self.received(link)
