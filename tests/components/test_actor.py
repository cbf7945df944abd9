"""An actor over channels in memory, with a scripted rollout."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from tests.support.settings import cartpole
from tests.support.worlds import FIRST, MemoryWorld, small_layout
from tianflow.channels.latest import LatestCell
from tianflow.components.actor import Actor
from tianflow.components.rollout import RolloutResult
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError, RunError
from tianflow.exchange.local import MemoryTrajectorySender
from tianflow.hosts.compute import Compute
from tianflow.interfaces import LiveSettings
from tianflow.ledger.tickets import State

STEPS = small_layout().steps
CONFIG = cartpole(env={"max_failures": 2})


class StagedRollout:
    """Rolls out, or fails, on request."""

    def __init__(self):
        self.begun = []
        self.rebuilt = 0
        self.closed = False
        self.failures = 0
        self.error = EnvironmentFailedError("it broke", "Traceback: it broke")
        self.rebuild_errors = []
        self.length = STEPS
        self.turn = threading.Semaphore(0)
        self._stopped = False

    def turns(self, slot, grant, min_fragment_steps, begun):
        return self.run(grant, begun)
        yield  # a rollout without inference servers never waits

    def run(self, grant, begun):
        begun(FIRST)
        self.begun.append(grant.ticket)
        self.turn.acquire()
        if self._stopped:
            return RolloutResult(0, 0, FIRST, ())
        if self.failures:
            self.failures -= 1
            raise self.error
        return RolloutResult(self.length, self.length, FIRST, ())

    def rebuild(self):
        self.rebuilt += 1
        error = self.rebuild_errors.pop(0) if self.rebuild_errors else None
        if error is not None:
            raise error

    def stop(self):
        self._stopped = True
        self.turn.release()

    def close(self):
        self.closed = True


class Stage:
    """An actor with its channels and its rollout."""

    def __init__(self, kind, **limits):
        self.world = MemoryWorld(**limits)
        self.settings = LatestCell(LiveSettings(CONFIG, CONFIG.bound), 0)
        self.rollout = StagedRollout()
        self.events = []
        self.compute = Compute(name="compute", on_orphan=self.events.append)
        self.actor = Actor(
            name="actor-0",
            host="host",
            sender=kind(
                exchange=self.world.exchange, holder="actor-0", on_episodes=self.world.heard
            ),
            settings=self.settings,
            events=self,
            compute=self.compute,
            make_rollout=lambda: self.rollout,
        )

    def publish(self, event):
        self.events.append(event)

    @property
    def state(self):
        return self.actor.statistics().time.current


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.001)


@asynccontextmanager
async def acting(kind=MemoryTrajectorySender, **limits):
    stage = Stage(kind, **limits)
    task = asyncio.create_task(stage.actor.run(lambda: None))
    try:
        yield stage, task
    finally:
        stage.rollout.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stage.compute.close()
        stage.world.close()


async def test_trajectories_are_committed_one_after_the_other():
    async with acting(batch=1, bound=1) as (stage, _):
        await until(lambda: stage.rollout.begun == [0])
        stage.rollout.turn.release()
        await until(lambda: stage.world.ledger.snapshot().committed == 1)
        await until(lambda: stage.rollout.begun == [0, 1])
        assert stage.world.ledger.credits_in_use == 2


async def test_the_next_grant_is_requested_before_the_turn_in_which_a_commit_is_sent_ends():
    said = []

    class Telling(MemoryTrajectorySender):
        async def acquire(self):
            said.append("want")
            return await super().acquire()

        def commit(self, trajectory, episodes):
            asyncio.get_running_loop().call_soon(
                said.append, "packet"
            )  # where a link would send its messages
            said.append("commit")
            super().commit(trajectory, episodes)

    async with acting(Telling, batch=1, bound=1) as (stage, _):
        await until(lambda: stage.rollout.begun == [0])
        said.clear()
        stage.rollout.turn.release()
        await until(lambda: "packet" in said)
    assert ["commit", "want", "packet"] == said[:3]


async def test_a_trajectory_is_timed_from_its_first_step_and_a_cut_one_as_if_complete(
    monkeypatch,
):
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("tianflow.components.actor.time", clock)
    async with acting(batch=1, bound=8) as (stage, _):
        for made, parts in enumerate((1, 4)):
            await until(lambda made=made: len(stage.rollout.begun) == made + 1)
            stage.rollout.length = CONFIG.actors.rollout_steps // parts
            clock.now += 2.0
            stage.rollout.turn.release()
            await until(lambda made=made: stage.world.ledger.snapshot().committed == made + 1)
        timed = stage.actor.statistics().distributions["trajectory_seconds"]
    assert (2, 2.0 + 4 * 2.0) == (timed.count, timed.total)


async def test_with_few_credits_one_ticket_is_held_at_a_time():
    async with acting(batch=1, bound=2, opened=False) as (stage, _):
        await until(lambda: stage.state == "waiting:grant")
        other = asyncio.ensure_future(stage.world.sender("other").acquire())
        await asyncio.sleep(0)
        stage.world.exchange.open_lineage(FIRST)
        await other
        await until(lambda: stage.rollout.begun == [0])
        await asyncio.sleep(0.02)
        assert stage.world.ledger.credits_in_use == 2


async def test_a_single_actor_queues_the_next_trajectory_even_with_few_credits():
    """No other actor needs the credit. The trajectory begins, and takes its version, when this one
    ends.
    """
    async with acting(batch=1, bound=1) as (stage, _):
        await until(lambda: stage.world.ledger.credits_in_use == 2 and stage.rollout.begun)
        assert ([0], 1) == (stage.rollout.begun, stage.world.ledger.snapshot().begun)
        stage.rollout.turn.release()
        await until(lambda: stage.rollout.begun == [0, 1])
        assert 2 == stage.world.ledger.credits_in_use


async def test_with_enough_credits_the_next_trajectory_is_queued_before_this_one_ends():
    async with acting(batch=1, bound=4) as (stage, _):
        await until(lambda: stage.world.ledger.credits_in_use == 2)
        await asyncio.sleep(0.02)
        assert stage.world.ledger.credits_in_use == 2
        await until(lambda: stage.rollout.begun == [0])
        stage.rollout.turn.release()
        await until(lambda: stage.rollout.begun == [0, 1])


async def test_time_is_busy_during_a_trajectory_and_waiting_otherwise():
    async with acting(batch=1, bound=0, opened=False) as (stage, _):
        await until(lambda: stage.state == "waiting:grant")
        stage.world.exchange.open_lineage(FIRST)
        await until(lambda: stage.state == "busy")
        stage.world.exchange.hold_grants("paused")
        stage.rollout.turn.release()
        await until(lambda: stage.state == "waiting:grant")
        stage.settings.put(LiveSettings(stage.settings.value.config, 1, paused=True), 1)
        assert stage.state == "paused"


async def test_a_failed_environment_loses_its_ticket_and_is_created_again():
    async with acting(batch=1, bound=0) as (stage, _):
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        await until(lambda: len(stage.rollout.begun) == 2)
        assert stage.world.ledger.snapshot().dropped == {"env_error": 1}
        assert stage.rollout.rebuilt == 1
        assert [event.reason for event in stage.events] == ["env_error"]


async def test_a_trajectory_queued_behind_a_failure_is_aborted_before_it_begins():
    async with acting(batch=1, bound=4) as (stage, _):
        await until(lambda: stage.world.ledger.credits_in_use == 2)
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        await until(lambda: stage.rollout.rebuilt == 1)
        await until(lambda: len(stage.rollout.begun) == 2)
        assert 1 not in stage.rollout.begun
        snapshot = stage.world.ledger.snapshot()
        assert (snapshot.dropped, snapshot.returned) == ({"env_error": 1}, 1)


async def test_too_many_failures_end_it_with_the_message_of_the_environment():
    async with acting(batch=1, bound=1) as (stage, task):
        stage.rollout.failures = 10
        stage.rollout.turn.release(10)
        with pytest.raises(RunError, match="failed 3 times") as caught:
            await task
        assert caught.value.details == "Traceback: it broke"


async def test_on_retirement_it_aborts_its_trajectory_and_closes_its_environments():
    async with acting(batch=1, bound=0) as (stage, task):
        await until(lambda: stage.rollout.begun == [0])
        stage.actor.retire()
        await task
        assert stage.rollout.closed
        assert stage.world.ledger.snapshot().dropped == {"stopped": 1}
        assert stage.world.ledger.credits_in_use == 0


async def test_on_retirement_it_does_not_begin_the_queued_trajectory():
    async with acting(batch=1, bound=4) as (stage, task):
        await until(lambda: stage.rollout.begun == [0] and stage.world.ledger.credits_in_use == 2)
        stage.actor.retire()
        await task
        after = stage.world.ledger.snapshot()
        assert ([0], {"stopped": 1}, 1) == (stage.rollout.begun, after.dropped, after.returned)


async def test_the_end_of_the_run_ends_it():
    async with acting(batch=1, bound=1, opened=False) as (stage, task):
        await until(lambda: stage.state == "waiting:grant")
        stage.world.exchange.close()
        await task
        assert stage.state == "ended"


@pytest.fixture
def soon(monkeypatch):
    """No back-off between two failures."""
    real = asyncio.sleep
    monkeypatch.setattr("tianflow.components.actor.asyncio.sleep", lambda _seconds: real(0))


async def test_creating_environments_is_retried_when_it_fails(soon):
    async with acting(batch=1, bound=0) as (stage, _):
        stage.rollout.rebuild_errors = [EnvironmentFailedError("no display"), None]
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        await until(lambda: len(stage.rollout.begun) == 2)
        assert stage.rollout.rebuilt == 2
        assert stage.actor.statistics().counters["env_failures"] == 2
        assert stage.world.ledger.snapshot().dropped == {"env_error": 1}


async def test_environments_that_cannot_be_created_end_it_with_their_message(soon):
    async with acting(batch=1, bound=1) as (stage, task):
        stage.rollout.rebuild_errors = [
            EnvironmentFailedError("no display", "Traceback: no display")
        ] * 5
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        with pytest.raises(
            RunError, match=r"failed 3 times in 60 s \(env.max_failures = 2\): no display"
        ) as caught:
            await task
        assert caught.value.details == "Traceback: no display"


async def test_a_value_that_is_not_finite_is_dropped_counted_and_reported_with_environment_and_step(
    soon,
):
    async with acting(batch=1, bound=0) as (stage, _):
        stage.rollout.error = PoisonedTrajectoryError(
            "reward of environment 1 is nan after step 3", environment=1, step=3
        )
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        await until(lambda: len(stage.rollout.begun) == 2)
        assert stage.world.ledger.snapshot().dropped == {"poisoned": 1}
        assert stage.actor.statistics().counters["poisoned"] == 1
        assert [event.message for event in stage.events] == [
            "reward of environment 1 is nan after step 3"
        ]


async def test_failures_outside_of_the_window_do_not_count(soon, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tianflow.components.actor.time.monotonic", lambda: now[0])
    async with acting(batch=1, bound=1) as (stage, task):
        stage.rollout.failures = 4
        for count in range(4):
            await until(lambda: len(stage.rollout.begun) == count + 1)  # noqa: B023 - awaited in this very turn
            now[0] += 31.0
            stage.rollout.turn.release()
        await until(lambda: stage.rollout.rebuilt == 4)
        assert not task.done()


async def test_any_other_exception_of_a_rollout_ends_it():
    async with acting(batch=1, bound=4) as (stage, task):
        stage.rollout.error = ZeroDivisionError("a bug")
        stage.rollout.failures = 1
        stage.rollout.turn.release()
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await task


async def test_retired_while_waiting_it_leaves_no_request():
    async with acting(batch=1, bound=1, opened=False) as (stage, task):
        await until(lambda: stage.world.exchange.waiting_for_grant == 1)
        stage.actor.retire()
        await task
        assert stage.world.exchange.waiting_for_grant == 0
        assert stage.rollout.closed


async def test_retired_before_its_environments_exist_it_begins_nothing():
    async with acting(batch=1, bound=1) as (stage, task):
        stage.actor.retire()
        await task
        assert stage.rollout.begun == []
        assert stage.world.ledger.credits_in_use == 0


async def test_a_commit_after_its_ticket_was_given_up_is_refused_and_it_continues():
    async with acting(batch=1, bound=0) as (stage, _):
        await until(lambda: stage.world.ledger.live(State.BEGUN))
        stage.world.exchange.drop_open("straggler")
        assert stage.world.ledger.snapshot().quarantined_slots == 1
        stage.rollout.turn.release()
        await until(lambda: stage.world.ledger.snapshot().late_commits == 1)
        await until(lambda: stage.rollout.begun == [0, 1])
        assert stage.world.ledger.snapshot().quarantined_slots == 0
