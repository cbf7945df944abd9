"""The exchange waits for stragglers with one timer, and not at all while its clock stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.worlds import small_layout
from tianflow.channels.memory import heap_arena
from tianflow.coordinator.counters import ActiveClock
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.errors import TianflowError
from tianflow.exchange.exchange import PAUSED, Exchange
from tianflow.ledger.ledger import Ledger

PATIENCE_S = 0.05


class Stage:
    """One trajectory a batch, bound 1. The learner is at version 1. A ticket of version 0 is open,
    and blocks the batch that a ticket of version 1 would fill.
    """

    def __init__(self) -> None:
        self.clock = ActiveClock(asyncio.get_running_loop().time)
        self.looks = 0
        limits = Limits(batch=1, max_staleness=1, credits=4, patience=PATIENCE_S)
        self.exchange = Exchange(
            ledger=Ledger(limits=limits, slots=4),
            arena=heap_arena(small_layout(), 4),
            clock=self._look,
        )
        self.exchange.open_lineage(Version(1, 0))
        self.batches: list[Batch | None] = []
        first, _ = self._begin(), self._begin()
        self._commit(first)
        self.exchange.request_batch(Version(1, 0), self.batches.append)
        self.exchange.settle(Settlement(Version(1, 1), (first.ticket,), 1, published=True))
        self._commit(self._begin())
        self.batch: asyncio.Future[Batch | None] = asyncio.get_running_loop().create_future()
        self.exchange.request_batch(Version(1, 1), self.batch.set_result)
        assert not self.batch.done()

    def _begin(self) -> Grant:
        grants: list[Grant | None] = []
        self.exchange.request_grant("a", grants.append)
        (grant,) = grants
        assert grant is not None
        self.exchange.begin(grant.ticket, grant.version)
        return grant

    def _commit(self, grant: Grant) -> None:
        self.exchange.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version))

    def _look(self) -> float:
        self.looks += 1
        return self.clock()

    @property
    def stragglers(self) -> int:
        return self.exchange.ledger.snapshot().dropped.get("straggler", 0)


async def test_a_paused_run_does_not_look_at_its_clock_again_and_again() -> None:
    """The patience of a straggler is nearly over when the pause begins."""
    stage = Stage()
    stage.clock.pause()
    stage.exchange.hold_grants(PAUSED)
    looks = stage.looks
    await asyncio.sleep(10 * PATIENCE_S)
    assert stage.looks - looks < 10
    assert 0 == stage.stragglers
    stage.clock.resume()
    stage.exchange.release_grants(PAUSED)
    async with asyncio.timeout(10.0):
        batch = await stage.batch
    assert 1 == stage.stragglers
    assert batch is not None
    stage.exchange.close()


async def test_a_trajectory_that_the_learner_could_not_read_breaks_a_rule() -> None:
    """Without replay, all trajectories have to lie on the head."""
    ledger = Ledger(limits=Limits(batch=1, max_staleness=1, credits=4), slots=4)
    exchange = Exchange(ledger=ledger, arena=heap_arena(small_layout(), 4))
    exchange.open_lineage(Version(1, 0))
    grants: list[Grant | None] = []
    exchange.request_grant("a", grants.append)
    (grant,) = grants
    assert grant is not None
    assert "" == grant.place
    exchange.begin(grant.ticket, grant.version)
    with pytest.raises(TianflowError, match="the learner cannot read a trajectory at 'b'"):
        exchange.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), "b")
    exchange.close()


@pytest.mark.parametrize("paused_first", [True, False])
async def test_a_close_leaves_no_timer(paused_first: bool) -> None:
    stage = Stage()
    if paused_first:
        stage.clock.pause()
    stage.exchange.close()
    looks = stage.looks
    await asyncio.sleep(2 * PATIENCE_S)
    assert looks == stage.looks


class Timers:
    """A clock and timers that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: dict[float, Callable[[], None]] = {}

    def call_later(self, delay: float, act: Callable[[], None]) -> Callable[[], None]:
        at = self.now + delay
        self.due[at] = act

        def cancel() -> None:
            self.due.pop(at, None)

        return cancel

    def pass_until(self, time: float) -> None:
        for at in sorted(at for at in self.due if at <= time):
            self.now = at
            self.due.pop(at)()
        self.now = time


class Rest:
    """Actors on other machines, with credits for all. ``far`` and ``farther`` were late, and rest
    until 20. They, and then ``requests``, ask for a grant at 1.
    """

    def __init__(self, *requests: str) -> None:
        self.timers = Timers()
        limits = Limits(batch=1, max_staleness=7, credits=8, late_share=0.1)
        self.exchange = Exchange(
            ledger=Ledger(limits=limits, slots=8, remote=True),
            arena=heap_arena(small_layout(), 8),
            clock=lambda: self.timers.now,
            call_later=self.timers.call_later,
        )
        lateness = self.exchange.ledger.lateness
        for begin, end in ((-1.0, 0.0), (0.0, 1.0)):
            lateness.waits(["far", "farther"])
            lateness.costs(begin)
            lateness.ends(end, limits.late_share)
        self.timers.now = 1.0
        self.granted: list[str] = []
        self.tickets: dict[str, Grant] = {}
        for holder in ("far", "farther", *requests):
            self.request(holder)
        self.exchange.open_lineage(Version(1, 0))

    def request(self, holder: str) -> None:
        def deliver(grant: Grant | None) -> None:
            if grant is not None:
                self.granted.append(holder)
                self.tickets[holder] = grant

        self.exchange.request_grant(holder, deliver)

    def commit(self, holder: str) -> None:
        grant = self.tickets[holder]
        self.exchange.begin(grant.ticket, grant.version)
        self.exchange.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version))


def test_late_holders_rest_and_then_return_one_after_the_other_in_time() -> None:
    rest = Rest("near")
    assert ["near"] == rest.granted
    rest.timers.pass_until(20.0)
    assert ["near"] == rest.granted
    rest.timers.pass_until(20.1)
    assert ["near", "far"] == rest.granted
    rest.request("far")
    assert ["near", "far"] == rest.granted
    rest.commit("far")
    assert ["near", "far", "farther", "far"] == rest.granted
    rest.exchange.close()


def test_a_resting_holder_does_not_delay_others_and_keeps_its_place() -> None:
    rest = Rest("near")
    rest.request("near")
    rest.request("nearer")
    assert ["near", "near", "nearer"] == rest.granted
    rest.exchange.hold_grants("test")
    rest.request("near")
    rest.timers.now = 20.0
    rest.exchange.release_grants("test")
    assert ["far", "near"] == rest.granted[3:]
    rest.exchange.close()


def test_no_holder_rests_where_no_other_one_is() -> None:
    assert ["far", "farther"] == Rest().granted
    rest = Rest("near")
    rest.exchange.holder_lost("near", "node_lost")
    assert ["near", "far", "farther"] == rest.granted


def test_a_close_leaves_no_timer_of_a_rest() -> None:
    rest = Rest("near")
    assert rest.timers.due
    rest.exchange.close()
    assert {} == rest.timers.due


def test_a_batch_begins_when_a_ticket_turns_out_to_have_begun_with_newer_weights() -> None:
    """One trajectory a batch, bound 1. The batch for version 1 waits for a grant of version 0."""
    exchange = Exchange(
        ledger=Ledger(
            limits=Limits(batch=1, max_staleness=1, credits=2, patience=None), slots=4, remote=True
        ),
        arena=heap_arena(small_layout(), 4),
        clock=lambda: 0.0,
        call_later=Timers().call_later,
    )
    grants: list[Grant | None] = []
    batches: list[Batch | None] = []
    exchange.open_lineage(Version(1, 0))
    for update in range(2):
        for _ in range(2 - update):
            exchange.request_grant("a", grants.append)
        grant = grants[-1]
        assert grant is not None
        exchange.begin(grant.ticket, grant.version)
        exchange.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version))
        exchange.request_batch(Version(1, update), batches.append)
        if not update:
            exchange.settle(Settlement(Version(1, 1), (grant.ticket,), 1, published=True))
    assert 1 == len(batches)
    first = grants[0]
    assert first is not None
    exchange.begin(first.ticket, Version(1, 1))
    assert 2 == len(batches)
    exchange.close()


def test_a_wait_is_a_loss_from_when_another_holder_needs_a_credit() -> None:
    """One trajectory a batch, bound 1: two credits. ``far`` has one, and blocks version 1."""
    timers = Timers()
    exchange = Exchange(
        ledger=Ledger(
            limits=Limits(batch=1, max_staleness=1, credits=2, late_share=0.1),
            slots=4,
            remote=True,
        ),
        arena=heap_arena(small_layout(), 4),
        clock=lambda: timers.now,
        call_later=timers.call_later,
    )
    lateness, grants = exchange.ledger.lateness, dict[str, Grant]()
    exchange.open_lineage(Version(1, 0))
    lateness.waits(["another"])
    lateness.costs(0.0)
    lateness.ends(0.0, 0.1)

    def request(holder: str) -> None:
        def deliver(grant: Grant | None) -> None:
            if grant is not None:
                grants[holder] = grant

        exchange.request_grant(holder, deliver)

    def commit(holder: str) -> None:
        grant = grants.pop(holder)
        exchange.begin(grant.ticket, grant.version)
        exchange.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version))

    batches: list[Batch | None] = []
    request("far")
    request("near")
    commit("near")
    exchange.request_batch(Version(1, 0), batches.append)
    exchange.settle(Settlement(Version(1, 1), (1,), 1, published=True))
    request("near")
    commit("near")
    exchange.request_batch(Version(1, 1), batches.append)
    assert 1 == len(batches)
    assert {"far"} == lateness.blocking
    timers.now = 4.0
    request("near")  # there is no credit
    timers.now = 6.0
    commit("far")
    assert 2 == len(batches)
    assert {"another", "far"} == lateness.late
    assert pytest.approx(2 * 20.0) == lateness.next_end(6.0)
    exchange.close()
