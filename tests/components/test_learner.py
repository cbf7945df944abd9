"""The learner between batches: the guarantee at use, prefetch, publishing, pausing, states for
checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.settings import cartpole
from tianflow.channels.broadcast import Broadcast
from tianflow.channels.latest import LatestCell
from tianflow.channels.memory import MemoryWeights, heap_arena
from tianflow.components.batch_trainer import BatchTrainer
from tianflow.components.learner import Learner, admissible
from tianflow.components.staging import StagedBatch
from tianflow.config.model import Config
from tianflow.config.schedules import Schedule
from tianflow.core.events import UpdateFinished
from tianflow.core.layout import make_layout
from tianflow.core.limits import Limits
from tianflow.core.payloads import ActionSpec, Batch, EnvironmentSpec, LeafSpec, Trajectory, Version
from tianflow.errors import RunError
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.local import MemoryBatchSource
from tianflow.interfaces import LearnerBatch, LiveSettings, StepResult
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import State

SPEC = EnvironmentSpec(
    "Small-v0",
    (LeafSpec("", (3,), "float32"),),
    ActionSpec("discrete", (), "int64", (2,), (0,)),
    2,
    "next_step",
)
STEPS, FIRST = 4, Version(1, 0)
Settings = LatestCell[LiveSettings, int]
# created outside of a loop, because config loading looks for plug-ins
BASE = cartpole(run={"max_updates": None})


def config(**sections: dict[str, Any]) -> Config:
    """`BASE` with single settings of sections replaced."""
    return BASE.model_copy(
        update={
            name: getattr(BASE, name).model_copy(update=values) for name, values in sections.items()
        }
    )


class FakeCompute:
    """A compute thread on the loop. A test closes ``gate`` to stop in the middle of an update."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.stopping = asyncio.Event()
        self.waiting = 0
        self.others: list[FakeCompute] = []
        self.closed = False

    def beside(self, name: str) -> FakeCompute:
        self.others.append(FakeCompute())
        return self.others[-1]

    def close(self) -> None:
        self.closed = True

    async def run(self, function: Callable[[], Any]) -> Any:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        return function()


class FakeAlgorithm:
    """Its weights are the number of its steps; ``used`` has the version of every row that it
    trained on.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.finite = True
        self.error: Exception | None = None
        self.used: list[int] = []
        self.extra: dict[str, float] = {}
        self.copies = 0

    def flat(self) -> NDArray[np.uint8]:
        self.copies += 1
        return np.array([self.steps], np.int64).view(np.uint8)

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:
        self.rate = learning_rate

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool]) -> StepResult:
        if self.error is not None:
            raise self.error
        self.used += [int(version) for version in batch.arrays["version"][0]]  # type: ignore[union-attr]  # the fake's own arrays
        self.steps += self.finite
        return StepResult(STEPS * 2, self.finite, {"loss": 1.0, **self.extra})

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {"steps": np.array(self.steps)}


class MeasuringAlgorithm(FakeAlgorithm):
    """Each step moves its policy by ``drift`` nats away from where it was."""

    def __init__(self, steps: int, *, drift: float = 0.1) -> None:
        super().__init__(steps)
        self.drift = drift
        self.retained: int | None = None
        self.measured: list[tuple[int, int]] = []

    def retain_policy(self) -> None:
        self.retained = self.steps

    def divergence(self, batch: LearnerBatch, states: int) -> float:
        assert self.retained is not None
        assert "version" in batch.arrays
        self.measured.append((self.steps, states))
        return (self.steps - self.retained) * self.drift


class FakeStacker:
    """Stores the version column of each trajectory. A mismatch with its label fails the test."""

    def __init__(self, trajectories: int) -> None:
        self.trajectories = trajectories
        self._columns = np.zeros((STEPS, trajectories), np.int64)

    def fill(self, index: int, views: Any, length: int) -> None:
        self._columns[:, index] = views["version"]

    def batch(self) -> LearnerBatch:
        return LearnerBatch({"version": self._columns.copy()})  # type: ignore[dict-item]  # arrays will do


class FakeStager:
    """Stages the version columns of trajectories; a batch that was released cannot be used."""

    def __init__(self, view: Callable[[Trajectory], Any]) -> None:
        self._view = view
        self.staged: list[tuple[int, ...]] = []
        self.released: list[tuple[int, ...]] = []

    def follow(self) -> bool:
        return True

    def stage(self, trajectories: tuple[Trajectory, ...]) -> StagedBatch:
        tickets = tuple(each.ticket for each in trajectories)
        columns = np.stack([self._view(each)["version"] for each in trajectories], 1)
        arrays = {"version": columns}
        self.staged.append(tickets)

        def release() -> None:
            assert arrays, "released twice"
            arrays.clear()
            self.released.append(tickets)

        return StagedBatch(trajectories, LearnerBatch(arrays), 0.0, release)  # type: ignore[arg-type]  # arrays will do


class World:
    """A learner with its surroundings in one loop. The test plays the actors."""

    def __init__(
        self,
        *,
        bound: int | None = 1,
        batch: int = 1,
        start: Version = FIRST,
        algorithm: type[FakeAlgorithm] = FakeAlgorithm,
        stages: bool = False,
        **sections: Any,
    ) -> None:
        layout = make_layout(SPEC, steps=STEPS, state_spec={}, return_accumulator=False)
        self.ledger = Ledger(limits=Limits(batch=batch, max_staleness=bound, credits=16), slots=16)
        self.exchange = Exchange(ledger=self.ledger, arena=heap_arena(layout, 16))
        self.settings: Settings = LatestCell(
            LiveSettings(config(algorithm={"batch_trajectories": batch}, **sections), bound), 0
        )
        self.weights = MemoryWeights()
        self.compute = FakeCompute()
        self.algorithm = algorithm(start.number)
        source = MemoryBatchSource(exchange=self.exchange)
        self.stager = FakeStager(source.view)
        self.learner = Learner(
            name="learner",
            host="learner",
            source=source,
            settings=self.settings,
            events=Broadcast(),
            compute=self.compute,  # type: ignore[arg-type]  # a fake
            start=(start, 0),
            make_trainer=lambda: BatchTrainer(
                algorithm=self.algorithm,  # type: ignore[arg-type]  # a fake
                make_stacker=FakeStacker,  # type: ignore[arg-type]  # a fake
                view=source.view,
                stager=self.stager if stages else None,  # type: ignore[arg-type]  # a fake
            ),
            open_weights=lambda nbytes: self.weights,
        )

    def set(self, **live: Any) -> None:
        """Change live settings; a changed bound also applies to the ledger, as with the
        balancer.
        """
        self.settings.put(replace(self.settings.value, **live), self.settings.key + 1)
        self.exchange.set_limits(
            replace(self.ledger.limits, max_staleness=self.settings.value.bound)
        )

    def commit(self, version: int | None = None, *, lineage: int | None = None) -> int:
        """One trajectory of ``version`` (default: the newest published one). Returns its ticket."""
        given = []
        self.exchange.request_grant("actor-0", given.append)
        (grant,) = given
        assert grant is not None, "no credit is left"
        made = Version(
            lineage or grant.version.lineage, grant.version.number if version is None else version
        )
        self.exchange.arena.views(grant.slot)["version"][:] = made.number
        self.exchange.begin(grant.ticket, made)
        self.exchange.commit(Trajectory(grant.ticket, grant.slot, STEPS, 2 * STEPS, made))
        return grant.ticket

    @property
    def trained(self) -> int:
        return self.ledger.snapshot().trained

    @property
    def doing(self) -> str:
        return self.learner.statistics().time.current


async def settle() -> None:
    """Run everything that is ready."""
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    task = asyncio.create_task(world.learner.run(lambda: None))
    try:
        await settle()
        yield world
        await settle()
        assert not task.done() or task.result() is None
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def batch(*versions: tuple[int, int]) -> Batch:
    return Batch(
        Version(1, 10),
        tuple(Trajectory(i, i, STEPS, 8, Version(*version)) for i, version in enumerate(versions)),
    )


# The guarantee
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "bound", "versions"),
    [
        (True, 0, [(1, 10), (1, 10)]),
        (False, 0, [(1, 10), (1, 9)]),
        (True, 3, [(1, 7), (1, 10)]),
        (False, 3, [(1, 10), (1, 6)]),
        (True, None, [(1, 0)]),
        (False, None, [(2, 10)]),
        (False, 3, [(0, 10)]),
    ],
)
def test_a_batch_is_admissible_if_its_oldest_version_is_within_the_bound_and_of_this_lineage(
    expected: bool, bound: int | None, versions: list[tuple[int, int]]
) -> None:
    assert expected == admissible(batch(*versions), Version(1, 10), bound)


async def test_a_prefetched_batch_that_a_lowered_bound_made_too_stale_is_returned_and_never_used() -> (
    None
):
    async with running(World(bound=2)) as world:
        world.compute.gate.clear()
        world.commit()
        await settle()  # in the middle of the first update
        stale = world.commit()
        await settle()
        assert [stale] == [ticket.number for ticket in world.ledger.live(State.TAKEN)][1:]
        world.set(bound=0)
        world.compute.gate.set()
        await settle()
        assert [0] == world.algorithm.used
        assert 1.0 == world.learner.statistics().counters["given_back"]
        assert {"expired": 1} == world.ledger.snapshot().dropped
        world.commit()
        await settle()
        assert [0, 1] == world.algorithm.used
        assert 0 == world.ledger.snapshot().violations


async def test_a_returned_trajectory_that_is_still_fresh_enough_is_used_later() -> None:
    """The whole batch is returned because of its oldest trajectory; the other one is not lost."""
    async with running(World(bound=2, batch=2)) as world:
        world.commit(), world.commit()
        await settle()
        world.compute.gate.clear()
        world.commit(1), world.commit(1)
        await settle()  # in the middle of the second update, at version 1
        world.commit(0), world.commit(1)
        await settle()
        assert 4 == len(world.ledger.live(State.TAKEN))
        world.set(bound=1)
        world.compute.gate.set()
        await settle()
        assert [0, 0, 1, 1] == world.algorithm.used
        world.commit(2)
        await settle()
        assert [0, 0, 1, 1, 1, 2] == world.algorithm.used
        assert {"expired": 1} == world.ledger.snapshot().dropped


# Staging
# --------------------------------------------------------------------------------------------------


async def test_the_next_batch_is_staged_during_an_update() -> None:
    async with running(World(bound=2, stages=True)) as world:
        world.compute.gate.clear()
        first = world.commit()
        await settle()  # in the middle of the first update
        second = world.commit()
        await settle()
        assert [(first,), (second,)] == world.stager.staged
        assert ([], []) == (world.algorithm.used, world.stager.released)
        world.compute.gate.set()
        await settle()
        assert [0, 0] == world.algorithm.used
        assert [(first,), (second,)] == world.stager.released == world.stager.staged
        (staging,) = world.compute.others
    assert staging.closed


async def test_a_learner_without_a_stager_has_no_second_thread() -> None:
    async with running(World()) as world:
        assert [] == world.compute.others


@pytest.mark.parametrize("bound", [0, 1])
async def test_every_batch_is_staged_once(bound: int) -> None:
    async with running(World(bound=bound, stages=True)) as world:
        tickets = []
        for _ in range(4):
            tickets.append((world.commit(),))
            await settle()
        assert tickets == world.stager.staged == world.stager.released
        assert 4 == world.trained


@pytest.mark.parametrize("when", ["staged", "in the middle of staging"])
async def test_a_staged_batch_that_a_lowered_bound_made_too_stale_is_returned_and_never_used(
    when: str,
) -> None:
    """Not before its copy is complete: its slots belong to the next actor then."""
    async with running(World(bound=2, stages=True)) as world:
        world.compute.gate.clear()
        first = world.commit()
        await settle()  # in the middle of the first update
        (staging,) = world.compute.others
        if when != "staged":
            staging.gate.clear()
        stale = world.commit()
        await settle()
        world.set(bound=0)
        world.compute.gate.set()
        await settle()
        if when != "staged":
            assert [stale] == [ticket.number for ticket in world.ledger.live(State.TAKEN)]
            assert [(first,)] == world.stager.staged
            staging.gate.set()
            await settle()
        assert [0] == world.algorithm.used
        assert [(first,), (stale,)] == world.stager.staged == world.stager.released
        assert 1.0 == world.learner.statistics().counters["given_back"]
        assert {"expired": 1} == world.ledger.snapshot().dropped
        world.commit()
        await settle()
        assert [0, 1] == world.algorithm.used
        assert 0 == world.ledger.snapshot().violations


# Agreement
# --------------------------------------------------------------------------------------------------


async def test_the_largest_log_ratio_at_staleness_0_is_a_metric() -> None:
    async with running(World(bound=1)) as world:
        name = "fresh_log_ratio"
        assert name not in world.learner.statistics().gauges
        world.algorithm.extra = {"log_ratio_max": 1e-7}
        world.commit(0)
        await settle()
        assert 1e-7 == world.learner.statistics().gauges[name]
        world.algorithm.extra = {"log_ratio_max": 0.5}
        world.commit(0)  # one update older than the learner
        await settle()
        assert [0, 0] == world.algorithm.used
        assert 1e-7 == world.learner.statistics().gauges[name]


# Prefetch


@pytest.mark.parametrize(
    ("expected", "bound", "sections"),
    [
        (True, 1, {}),
        (True, None, {}),
        (False, 0, {}),
        (False, 1, {"learner": {"prefetch": 0}}),
        (False, 1, {"run": {"max_updates": 1}}),
    ],
)
async def test_the_next_batch_is_pulled_during_an_update_if_the_bound_permits_it(
    expected: bool, bound: int | None, sections: dict[str, Any]
) -> None:
    async with running(World(bound=bound, **sections)) as world:
        world.compute.gate.clear()
        world.commit()
        await settle()
        assert "busy" == world.doing
        assert expected == world.exchange.pulling


async def test_slots_and_credits_return_together_when_the_version_is_settled() -> None:
    async with running(World(bound=1)) as world:
        free = world.ledger.snapshot().free_slots
        world.compute.gate.clear()
        world.commit()
        await settle()
        assert ("busy", free - 1, 1) == (
            world.doing,
            world.ledger.snapshot().free_slots,
            world.ledger.credits_in_use,
        )
        world.compute.gate.set()
        await settle()
        assert (free, 0) == (world.ledger.snapshot().free_slots, world.ledger.credits_in_use)


# Publishing
# --------------------------------------------------------------------------------------------------


async def test_the_first_version_is_published_before_anything_is_granted() -> None:
    world = World(start=Version(3, 70))
    given: list[Any] = []
    world.exchange.request_grant("actor-0", given.append)
    async with running(world):
        assert Version(3, 70) == world.weights.version
        assert [Version(3, 70)] == [grant.version for grant in given]


async def test_every_nth_version_is_published_and_the_others_are_settled_unpublished() -> None:
    async with running(World(bound=4, weights={"publish_interval_updates": 3})) as world:
        published = []
        for _ in range(6):
            world.commit()
            await settle()
            published.append(world.weights.version.number)
        assert [0, 0, 3, 3, 3, 6] == published
        assert (6, 4) == (
            world.ledger.snapshot().updates,
            world.ledger.snapshot().unpublished_updates,
        )
        assert 3 == world.algorithm.copies  # a GPU's weights are not copied for a skipped version


async def test_a_lowered_bound_that_breaks_the_invariant_publishes_at_once_without_an_update() -> (
    None
):
    """Otherwise every trajectory would be too stale, so neither training nor publishing would
    continue.
    """
    async with running(World(bound=4, weights={"publish_interval_updates": 8})) as world:
        for _ in range(2):
            world.commit()
            await settle()
        assert (0, 2) == (world.weights.version.number, world.ledger.publish_lag)
        world.set(bound=1)
        await settle()
        assert (2, 0, 2) == (
            world.weights.version.number,
            world.ledger.publish_lag,
            world.ledger.snapshot().updates,
        )
        world.commit()
        await settle()
        assert 3 == world.trained


# Publishing by divergence
# --------------------------------------------------------------------------------------------------


class Drifting(World):
    """A learner whose policy moves by 0.1 nats an update, with one actor and B = 1 by default."""

    algorithm: MeasuringAlgorithm

    def __init__(self, *, nats: float, bound: int | None = 8, **sections: Any) -> None:
        weights = {
            "publish": "divergence",
            "divergence_nats": nats,
            "divergence_states": 7,
            **sections.pop("weights", {}),
        }
        super().__init__(bound=bound, algorithm=MeasuringAlgorithm, weights=weights, **sections)

    async def updates(self, count: int) -> list[int]:
        """The newest published version after each of ``count`` updates."""
        found = []
        for _ in range(count):
            self.commit()
            await settle()
            found.append(self.weights.version.number)
            self.check()
        return found

    def check(self) -> None:
        """The published weights are those of the retained policy, and the ledger knows them."""
        weights = np.zeros(8, np.uint8)
        assert self.weights.version == self.weights.read_into(weights) == self.ledger.published
        assert self.algorithm.retained == weights.view(np.int64)[0]

    def change(self, **sections: dict[str, Any]) -> None:
        """Change settings of sections."""
        current = self.settings.value.config
        self.set(
            config=current.model_copy(
                update={
                    name: getattr(current, name).model_copy(update=values)
                    for name, values in sections.items()
                }
            )
        )


async def test_a_version_is_published_when_the_policy_has_moved_further_than_the_threshold() -> (
    None
):
    async with running(Drifting(nats=0.25)) as world:
        assert [0, 0, 3, 3, 3, 6] == await world.updates(6)
        assert (6, 4) == (
            world.ledger.snapshot().updates,
            world.ledger.snapshot().unpublished_updates,
        )
        assert [(number, 7) for number in range(1, 7)] == world.algorithm.measured
        assert 3 * 8 == world.learner.statistics().counters["weights_bytes"]


@pytest.mark.parametrize(
    ("bound", "actors", "sections", "published"),
    [
        (0, 1, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, 1, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, 1, {}, [0, 2, 2, 4, 4, 6, 6, 8]),
        (4, 1, {}, [0, 0, 0, 4, 4, 4, 4, 8]),
        (4, 3, {}, [0, 2, 2, 4, 4, 6, 6, 8]),
        (4, 4, {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (4, 4, {"balance": {"credits": 3}}, [0, 0, 3, 3, 3, 6, 6, 6]),
        (4, 4, {"balance": {"controller": "open_loop"}}, [0, 0, 0, 0, 5, 5, 5, 5]),
        (None, 4, {}, [0] * 8),
    ],
)
async def test_a_policy_that_never_moves_far_is_published_when_the_bound_or_the_actors_need_it(
    bound: int | None, actors: int, sections: dict[str, Any], published: list[int]
) -> None:
    world = Drifting(nats=1e6, bound=bound, actors={"count": actors}, **sections)
    async with running(world):
        assert published == await world.updates(8)
        snapshot = world.ledger.snapshot()
        assert 0 == snapshot.violations
        assert 8 - len({number for number in published if number}) == snapshot.unpublished_updates


async def test_the_divergence_is_a_gauge_from_the_first_measured_update_on() -> None:
    async with running(Drifting(nats=0.25)) as world:
        assert "divergence" not in world.learner.statistics().gauges
        await world.updates(2)
        assert 0.2 == world.learner.statistics().gauges["divergence"]


async def test_published_at_intervals_a_policy_is_neither_retained_nor_measured() -> None:
    world = World(bound=4, algorithm=MeasuringAlgorithm, weights={"publish_interval_updates": 2})
    async with running(world):
        for _ in range(4):
            world.commit()
            await settle()
        assert 4 == world.weights.version.number
        assert isinstance(world.algorithm, MeasuringAlgorithm)
        assert (None, []) == (world.algorithm.retained, world.algorithm.measured)
        assert "divergence" not in world.learner.statistics().gauges


async def test_versions_between_intervals_are_not_measured() -> None:
    async with running(Drifting(nats=0.05, weights={"publish_interval_updates": 3})) as world:
        assert [0, 0, 3, 3, 3, 6] == await world.updates(6)
        assert [3, 6] == [number for number, _ in world.algorithm.measured]


async def test_a_bound_lowered_from_8_to_0_publishes_at_once_and_every_version_after_it() -> None:
    async with running(Drifting(nats=1e6)) as world:
        assert [0, 0, 0] == await world.updates(3)
        world.set(bound=0)
        await settle()
        world.check()
        assert (3, 3) == (world.weights.version.number, world.ledger.snapshot().updates)
        assert [4, 5] == await world.updates(2)
        world.set(bound=8)
        await settle()
        assert [5, 5] == await world.updates(2)
        assert 0 == world.ledger.snapshot().violations


async def test_a_bound_lowered_during_an_update_is_met_before_the_next_batch() -> None:
    async with running(Drifting(nats=1e6)) as world:
        await world.updates(2)
        world.compute.gate.clear()
        world.commit()
        await settle()
        world.set(bound=0)
        world.compute.gate.set()
        await settle()
        world.check()
        assert (3, 0) == (world.weights.version.number, world.ledger.publish_lag)


async def test_more_actors_that_would_find_no_credit_publish_at_once() -> None:
    async with running(Drifting(nats=1e6, bound=4)) as world:
        assert [0, 0] == await world.updates(2)
        world.change(actors={"count": 4})
        await settle()
        world.check()
        assert 2 == world.weights.version.number


async def test_a_changed_threshold_and_number_of_states_are_in_force_at_the_next_update() -> None:
    async with running(Drifting(nats=1e6)) as world:
        assert [0, 0] == await world.updates(2)
        world.change(weights={"divergence_nats": 0.25, "divergence_states": 9})
        await settle()
        assert [3, 3, 3, 6] == await world.updates(4)
        assert [7, 7, 9, 9, 9, 9] == [states for _, states in world.algorithm.measured]


async def test_updates_that_are_not_finite_do_not_move_the_policy_but_lag() -> None:
    async with running(Drifting(nats=0.05, bound=4)) as world:
        world.algorithm.finite = False
        assert [0, 0, 0, 4, 4] == await world.updates(5)
        world.algorithm.finite = True
        assert [6] == await world.updates(1)


async def test_a_divergence_that_is_not_a_number_publishes() -> None:
    async with running(Drifting(nats=1e6)) as world:
        world.algorithm.drift = float("nan")
        assert [1, 2] == await world.updates(2)


async def test_a_learner_at_rest_publishes_and_measures_from_there() -> None:
    async with running(Drifting(nats=0.25)) as world:
        assert [0, 0] == await world.updates(2)
        world.set(hold_learner=True)
        assert Version(1, 2) == await asyncio.wait_for(world.learner.rest(), 5.0)
        world.check()
        assert 2 == world.weights.version.number
        world.set(hold_learner=False)
        await settle()
        assert [2, 2, 5] == await world.updates(3)


async def test_a_paused_learner_publishes_nothing_unless_the_bound_is_lowered() -> None:
    async with running(Drifting(nats=1e6)) as world:
        await world.updates(2)
        world.set(paused=True)
        await settle()
        assert 0 == world.weights.version.number
        world.set(bound=1)
        await settle()
        world.check()
        assert (2, "paused") == (world.weights.version.number, world.doing)


async def test_a_new_lineage_publishes_its_first_version_and_measures_from_there() -> None:
    async with running(Drifting(nats=0.25, start=Version(3, 70))) as world:
        world.check()
        assert Version(3, 70) == world.weights.version
        assert [70, 70, 73] == await world.updates(3)


async def test_a_learner_that_cannot_measure_ends_the_run_before_it_grants_anything() -> None:
    world = World(weights={"publish": "divergence"})
    with pytest.raises(RunError, match="learner: weights.publish = divergence is not supported"):
        await asyncio.wait_for(world.learner.run(lambda: None), 5.0)
    assert not world.ledger.grantable


# Not finite
# --------------------------------------------------------------------------------------------------


async def test_an_update_that_is_not_finite_is_settled_as_skipped_and_leaves_the_weights() -> None:
    async with running(World()) as world:
        world.algorithm.finite = False
        world.commit()
        await settle()
        assert (1, 1) == (world.ledger.version.number, world.ledger.snapshot().skipped_updates)
        weights = np.zeros(8, np.uint8)
        assert Version(1, 1) == world.weights.read_into(weights)
        assert 0 == weights.view(np.int64)[0]


async def test_more_consecutive_updates_that_are_not_finite_than_tolerated_end_the_run() -> None:
    world = World(learner={"max_nonfinite_updates": 1})
    living = asyncio.create_task(world.learner.run(lambda: None))
    await settle()
    for finite in (False, True, False, True, False):
        world.algorithm.finite = finite
        world.commit()
        await settle()
    assert (3, False) == (world.ledger.snapshot().skipped_updates, living.done())
    world.commit()
    with pytest.raises(RunError, match="learner: 2 consecutive updates were not finite"):
        await asyncio.wait_for(living, 5.0)


async def test_an_exception_of_an_update_ends_the_learner() -> None:
    world = World()
    world.algorithm.error = AssertionError("a minibatch of 7 does not divide 32")
    living = asyncio.create_task(world.learner.run(lambda: None))
    await settle()
    world.commit()
    with pytest.raises(AssertionError, match="a minibatch of 7"):
        await asyncio.wait_for(living, 5.0)


# Boundaries
# --------------------------------------------------------------------------------------------------


async def test_the_state_for_a_checkpoint_is_taken_while_the_learner_waits_for_a_batch() -> None:
    async with running(World()) as world:
        world.commit()
        await settle()
        state = await asyncio.wait_for(world.learner.state(), 5.0)
        assert (Version(1, 1), 1, 8) == (state.version, int(state.arrays["steps"]), state.samples)
        assert "waiting:batch" == world.doing


async def test_the_state_for_a_checkpoint_never_contains_half_an_update() -> None:
    async with running(World()) as world:
        world.compute.gate.clear()
        world.commit()
        await settle()
        asked = world.learner.state()
        await settle()
        assert not asked.done()
        world.compute.gate.set()
        state = await asyncio.wait_for(asked, 5.0)
        assert state.version.number == int(state.arrays["steps"]) == 1


@pytest.mark.parametrize("rest", ["paused", "hold_learner"])
async def test_a_held_learner_begins_no_update_and_continues_with_its_prefetched_batch(
    rest: str,
) -> None:
    async with running(World(bound=2)) as world:
        world.set(**{rest: True})
        await settle()
        world.commit()
        await settle()
        assert ("paused", 0) == (world.doing, world.trained)
        assert 0 == (await asyncio.wait_for(world.learner.state(), 5.0)).version.number
        world.set(**{rest: False})
        await settle()
        assert ("waiting:batch", 1) == (world.doing, world.trained)


async def test_a_pause_takes_effect_at_the_next_boundary() -> None:
    async with running(World(bound=2)) as world:
        world.compute.gate.clear()
        world.commit()
        await settle()
        world.commit()
        world.set(paused=True)
        world.compute.gate.set()
        await settle()
        assert ("paused", 1) == (world.doing, world.trained)


async def test_a_request_to_rest_is_answered_with_the_newest_version_which_is_published() -> None:
    async with running(World(bound=4, weights={"publish_interval_updates": 8})) as world:
        world.commit()
        await settle()
        assert 0 == world.weights.version.number
        world.set(hold_learner=True)
        assert Version(1, 1) == await asyncio.wait_for(world.learner.rest(), 5.0)
        assert Version(1, 1) == world.weights.version == world.ledger.published


async def test_after_its_last_update_it_pulls_no_batch_and_still_returns_its_state() -> None:
    async with running(World(run={"max_updates": 1})) as world:
        world.commit()
        await settle()
        world.commit()
        await settle()
        assert ("ended", 1, False) == (world.doing, world.trained, world.exchange.pulling)
        assert 1 == (await asyncio.wait_for(world.learner.state(), 5.0)).version.number


async def test_at_the_end_of_the_channel_it_stays_for_the_last_checkpoint() -> None:
    async with running(World()) as world:
        world.exchange.close()
        await settle()
        assert "ended" == world.doing
        assert 0 == (await asyncio.wait_for(world.learner.state(), 5.0)).version.number


async def test_a_changed_batch_size_is_in_force_for_the_pull_that_is_out() -> None:
    async with running(World(bound=4)) as world:
        world.exchange.set_limits(replace(world.ledger.limits, batch=3))
        for _ in range(3):
            world.commit()
        await settle()
        assert (1, 3) == (world.ledger.snapshot().updates, world.trained)
        assert [0, 0, 0] == world.algorithm.used


async def test_cancelled_during_an_update_it_settles_nothing() -> None:
    world = World()
    async with running(world):
        world.compute.gate.clear()
        world.commit()
        await settle()
    assert (0, 1) == (world.ledger.version.number, len(world.ledger.live(State.TAKEN)))


# Learning rate
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({"max_env_steps": 80}, 0.9),
        ({"max_updates": 10}, 0.9),
        ({"max_env_steps": 80, "max_updates": 2}, 0.9),
        ({"max_seconds": 100.0}, 0.75),
        ({"max_seconds": 20.0}, 0.0),
    ],
)
async def test_a_linear_rate_falls_over_the_first_limit_that_is_set_and_is_a_gauge(
    limits: dict[str, Any], share: float
) -> None:
    """The second update begins after one of 8 samples; 25 s were trained before the learner."""
    run = {"max_env_steps": None, "max_updates": None, "max_seconds": None, **limits}
    world = World(bound=2)
    changed = config(
        algorithm={"batch_trajectories": 1, "learning_rate_schedule": "linear"}, run=run
    )
    world.set(config=changed)
    world.learner._trained_before_s = 25.0
    async with running(world):
        world.commit()
        await settle()
        world.learner._version = Version(1, 1)
        world.commit()
        await settle()
        rate = world.learner.statistics().gauges["learning_rate"]
    assert 2 == len(world.algorithm.used)
    assert world.algorithm.rate == rate
    assert rate == pytest.approx(changed.algorithm.learning_rate * share, rel=0.02, abs=1e-12)


async def test_a_constant_rate_is_the_one_of_the_settings() -> None:
    async with running(World(bound=2)) as world:
        world.commit()
        await settle()
        expected = world.settings.value.config.algorithm.learning_rate
        assert expected == world.learner.statistics().gauges["learning_rate"]


def falling(unit: str, over: float, end: float = 0.0) -> Schedule:
    return Schedule.model_validate(
        {"schedule": "linear", "start": 1.0, "end": end, "over": over, "unit": unit}
    )


@pytest.mark.parametrize("bound", [0, 2, None])
async def test_schedules_of_a_learner_that_continues_a_run_go_on_where_the_run_is(
    bound: int | None,
) -> None:
    """A resume and a restart look the same to the learner: versions, samples and seconds."""
    world = World(bound=bound, start=Version(3, 50))
    world.learner._samples, world.learner._trained_before_s = 400, 30.0
    world.set(
        config=config(
            algorithm={
                "batch_trajectories": 1,
                "learning_rate": falling("updates", 100),
                "entropy_cost": falling("steps", 800),
                "clip": falling("seconds", 60.0, 0.5),
            }
        )
    )
    async with running(world):
        world.commit()
        await settle()
        first = dict(world.learner.statistics().gauges)
        world.commit()
        await settle()
        second = world.learner.statistics().gauges
    assert (0.5, 0.5) == (first["learning_rate"], first["entropy_cost"])
    assert 0.75 == pytest.approx(first["clip_range"], rel=0.02)
    assert (0.49, 0.49) == (second["learning_rate"], second["entropy_cost"])
    assert 0.49 == world.algorithm.rate


async def test_a_number_and_another_schedule_replace_a_schedule_during_a_run() -> None:
    world = World(bound=2)

    def change(rate: object) -> None:
        world.set(config=config(algorithm={"batch_trajectories": 1, "learning_rate": rate}))

    rates = []
    change(falling("updates", 10))
    async with running(world):
        for replacement in (None, 0.125, falling("updates", 4)):
            if replacement is not None:
                change(replacement)
            world.commit()
            await settle()
            rates.append(world.algorithm.rate)
    assert [1.0, 0.125, 0.5] == rates


async def test_with_replay_steps_are_those_of_the_run_at_the_draw() -> None:
    world = World(bound=None)
    world.set(
        config=config(algorithm={"batch_trajectories": 1, "learning_rate": falling("steps", 100)})
    )
    taken = world.learner._source.next_batch

    async def drawn(for_version: Version) -> Batch:
        return (await taken(for_version))._replace(env_steps=25, beta=0.6)

    world.learner._source.next_batch = drawn  # type: ignore[method-assign]  # as replay answers
    async with running(world):
        world.commit()
        await settle()
        assert 0.75 == world.algorithm.rate


# Statistics
# --------------------------------------------------------------------------------------------------


def sums(world: World) -> dict[str, tuple[int, float]]:
    """Number of values and mean, by the name of the statistic."""
    found = world.learner.statistics().learning
    return {name: (values.number, values.mean) for name, values in found.items()}


async def train(world: World, *losses: object) -> None:
    """One update each."""
    for loss in losses:
        world.algorithm.extra = {"loss": loss}  # type: ignore[dict-item]  # what a user may return
        world.commit()
        await settle()


async def test_statistics_of_updates_are_summed_with_the_rate_in_force() -> None:
    async with running(World(bound=1)) as world:
        await train(world, 3.0, 1.0)
        rate = world.settings.value.config.algorithm.learning_rate
        found = sums(world)
        assert ((2, 2.0), (2, rate)) == (found["train/loss"], found["train/learning_rate"])
        values = "learning_rate", "entropy_cost", "clip_range"
        assert {"train/loss", *(f"train/{name}" for name in values)} == set(found)


@pytest.mark.parametrize("finite", [True, False])
async def test_statistics_of_an_undone_update_do_not_count_towards_the_means(finite: bool) -> None:
    async with running(World(bound=1)) as world:
        await train(world, 3.0)
        world.algorithm.finite = finite
        await train(world, 5.0)
        assert ((2, 4.0) if finite else (1, 3.0)) == sums(world)["train/loss"]
        assert 5.0 == world.learner.statistics().gauges["loss"]


async def test_a_loss_that_is_not_finite_is_left_out_of_the_mean() -> None:
    async with running(World(bound=1)) as world:
        await train(world, 3.0, float("nan"), float("inf"))
        assert (1, 3.0) == sums(world)["train/loss"]
        assert (3, sums(world)["train/learning_rate"][1]) == sums(world)["train/learning_rate"]


async def test_tensors_of_an_algorithm_become_numbers_in_sums_gauges_and_events() -> None:
    async with running(World(bound=1)) as world:
        heard = world.learner._events
        assert isinstance(heard, Broadcast)
        subscription = heard.subscribe()
        await train(world, torch.tensor(2.5, requires_grad=True))
        assert (1, 2.5) == sums(world)["train/loss"]
        assert 2.5 == world.learner.statistics().gauges["loss"]
        event = await subscription.receive()
        assert isinstance(event, UpdateFinished)
        assert (2.5, float) == (event.statistics["loss"], type(event.statistics["loss"]))


async def test_a_bad_statistic_is_refused_and_counted_and_the_update_counts() -> None:
    async with running(World(bound=1)) as world:
        world.algorithm.extra = {"my loss": 1.0, "vector": np.ones(3)}  # type: ignore[dict-item]
        world.commit()
        await settle()
        values = "loss", "learning_rate", "entropy_cost", "clip_range"
        assert {f"train/{name}" for name in values} == set(sums(world))
        assert 2.0 == world.learner.statistics().counters["refused_statistics"]
        assert 1 == world.trained


async def test_an_update_without_statistics_counts_towards_no_mean() -> None:
    class Silent(FakeAlgorithm):
        def step(self, batch: LearnerBatch, should_stop: Callable[[], bool]) -> StepResult:
            return replace(super().step(batch, should_stop), statistics={})

    async with running(World(bound=1, algorithm=Silent)) as world:
        await train(world, 1.0)
        assert (1, {}) == (world.trained, sums(world))
