"""The exchange waits for stragglers with one timer, and not at all while its clock stands still."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.worlds import small_layout
from tianflow.channels.memory import heap_arena
from tianflow.coordinator.counters import ActiveClock
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
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


@pytest.mark.parametrize("paused_first", [True, False])
async def test_a_close_leaves_no_timer(paused_first: bool) -> None:
    stage = Stage()
    if paused_first:
        stage.clock.pause()
    stage.exchange.close()
    looks = stage.looks
    await asyncio.sleep(2 * PATIENCE_S)
    assert looks == stage.looks
