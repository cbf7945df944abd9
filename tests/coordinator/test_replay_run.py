"""A run with replay, and hosts that do what the test says: shards that come and go, restarts,
settings, readiness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.test_run import (
    SPEC,
    FakeEvaluator,
    FakeHost,
    FakeLearner,
    config,
    going,
    soon,
    until,
)
from tests.coordinator.test_run import World as PlainWorld
from tianflow.channels.messages import Dropped, ShardAnswer, Stored
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.coordinator import Run, slot_manager
from tianflow.coordinator import supervisor as supervising
from tianflow.core.payloads import (
    DropItems,
    Holdings,
    ShardRequest,
    StoreTrajectory,
    Version,
)
from tianflow.core.program import HostSpec, LauncherCapabilities
from tianflow.errors import ConfigError
from tianflow.exchange.replay_exchange import ReplayExchange
from tianflow.launchers.inline import InlineLauncher
from tianflow.planning.layouts import draw_layout, trajectory_layout
from tianflow.replay.rate_limiter import Limiter
from tianflow.rundir.checkpoints import Checkpoint

REPLAY: Mapping[str, Any] = {
    "shards": 2,
    "capacity": 4000,
    "min_size": 50,
    "samples_per_insert": 2.0,
}


def apex(**replay: Any) -> Config:
    """The run of `tests.coordinator.test_run`, with DQN."""
    from_plain = {
        name: getattr(config(), name).model_dump(exclude_defaults=True)
        for name in ("env", "actors", "evaluation", "placement")
    }
    given = {
        "algorithm": {"name": "dqn", "batch_size": 8},
        "network": {"hidden": [16]},
        "replay": {**REPLAY, **replay},
    }
    return load_config(
        {
            **from_plain,
            **given,
            "run": {"max_updates": None, "grace_s": 0.2, "seed": 1} | {"max_env_steps": None},
        }
    )


class ReplayWorld(PlainWorld):
    """`answers[name]` are those of each life of a shard; ``asked[name]`` is what its newest life
    was asked.
    """

    def __init__(self, directory: Path, settings: Config) -> None:
        assert SPEC is not None
        layout = trajectory_layout(settings, SPEC)
        draws = draw_layout(settings, SPEC)
        slots = InlineLauncher().slots(config=settings, layout=layout, draws=draws)
        self.run = Run(
            run_id="run",
            directory=directory,
            config=settings,
            spec=SPEC,
            layout=layout,
            slots=slots,
            capabilities=LauncherCapabilities(),
        )
        self.hosts: dict[str, FakeHost] = {}
        self.learner, self.evaluator = FakeLearner(), FakeEvaluator()
        self.learner.is_held = lambda: self.run.settings.value.hold_learner
        self.working = True
        self.starts = []
        self.answers: dict[str, list[Callable[[ShardAnswer], None]]] = {
            "replay-0": [],
            "replay-1": [],
        }
        self.asked: dict[str, list[ShardRequest]] = {}

    async def start(self, spec: HostSpec, incarnation: int) -> FakeHost:
        if spec.name in self.answers:
            (shard,) = spec.components
            asked: list[ShardRequest] = []
            self.asked[spec.name] = asked
            self.answers[spec.name].append(
                partial(self.run.inbox.shard_answered, shard.index, incarnation)
            )
            self.run.inbox.shard_opened(shard.index, incarnation, Port(asked))
            self.answers[spec.name][-1](Dropped(Holdings()))
        return await super().start(spec, incarnation)

    @property
    def replay(self) -> ReplayExchange:
        assert isinstance(self.run.exchange, ReplayExchange)
        return self.run.exchange

    def stored(self, name: str, items: int) -> None:
        """The newest life of a shard stores what it was asked to, which brings so many items."""
        for request in [
            request for request in self.asked[name] if isinstance(request, StoreTrajectory)
        ]:
            self.asked[name].remove(request)
            self.answers[name][-1](Stored(request.ticket, items, Holdings(items, float(items))))


class Port:
    def __init__(self, asked: list[ShardRequest]) -> None:
        self.ask, self.place = asked.append, ""


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))


APEX = apex()


@pytest.mark.asyncio
async def test_a_shard_that_dies_loses_what_it_held_and_its_next_life_hears_nothing_of_the_last(
    tmp_path: Path,
) -> None:
    world = ReplayWorld(tmp_path, APEX)
    async with going(world):
        world.commit()
        world.stored("replay-0", 64)
        world.commit()
        assert 64 == world.replay.limiter.statistics().size
        world.hosts["replay-0"].kill()
        await until(lambda: len(world.answers["replay-0"]) == 2)
        statistics = world.run.control.statistics()
        assert {"shard_lost": 1} == statistics.ledger.dropped
        assert {("replay-0", "died"): 1} == statistics.restarts
        assert 0 == world.replay.limiter.statistics().size
        assert [DropItems("")] == world.asked["replay-0"]
        world.commit()
        before = world.replay.replay_statistics()
        ticket = next(
            request.ticket
            for request in world.asked["replay-0"]
            if isinstance(request, StoreTrajectory)
        )
        world.answers["replay-0"][0](Stored(ticket, 64, Holdings(64, 64.0)))
        assert before == world.replay.replay_statistics()
        world.stored("replay-0", 64)
        assert 64 == world.replay.limiter.statistics().size


@pytest.mark.asyncio
@pytest.mark.parametrize("samples_per_insert", [None, 2.0])
async def test_a_run_with_replay_leaves_checkpoints_with_and_without_a_ratio(
    tmp_path: Path, samples_per_insert: float | None
) -> None:
    world = ReplayWorld(tmp_path, apex(samples_per_insert=samples_per_insert))
    async with going(world):
        assert await soon(world.run.checkpoints.save())
        assert 0 == world.run.control.statistics().checkpoint.failures


@pytest.mark.asyncio
async def test_a_run_without_a_shard_that_works_is_not_ready(tmp_path: Path) -> None:
    world = ReplayWorld(tmp_path, APEX)
    async with going(world):
        assert (True, ()) == world.run.snapshot.ready()
        world.replay.shard_lost(0)
        assert (True, ()) == world.run.snapshot.ready()
        world.replay.shard_lost(1)
        assert (
            False,
            ("no replay shard is up: nothing is stored or drawn",),
        ) == world.run.snapshot.ready()


@pytest.mark.asyncio
async def test_what_a_lost_learner_leaves_behind_stays_in_replay(tmp_path: Path) -> None:
    world = ReplayWorld(tmp_path, APEX)
    async with going(world):
        world.commit()
        world.hosts["learner"].kill()
        await until(lambda: world.run.exchange.ledger.version.lineage == 2)
        world.stored("replay-0", 64)
        assert (1, {}) == (
            world.run.control.statistics().ledger.inserted,
            world.run.control.statistics().ledger.dropped,
        )
        assert 64 == world.replay.limiter.statistics().size


@pytest.mark.asyncio
def draws_until_an_insert(limiter: Limiter) -> int:
    """Draws that a table of ``min_size`` items permits after it was filled."""
    limits, count = limiter.limits, 0
    while limiter.statistics().size < limits.min_size:
        assert limiter.may_insert(limits.insert_size)
        limiter.inserted(limits.insert_size)
    while limiter.may_draw(limits.draw_size):
        limiter.drawn(limits.draw_size)
        count += limits.draw_size
    return count


def test_a_run_that_resumes_without_its_items_draws_as_a_new_one(tmp_path: Path) -> None:
    """Replay is not saved by default."""
    settings = apex()
    before = slot_manager._limiter(settings, None)
    expected = draws_until_an_insert(before)
    resumed = Checkpoint(tmp_path, Version(1, 5), {"replay": before.snapshot()})
    found = slot_manager._limiter(settings, resumed)
    assert (0, 0.0) == (found.statistics().size, found.statistics().diff)
    assert expected == draws_until_an_insert(found) > 0


async def test_a_changed_ratio_is_in_force_at_once_and_one_that_cannot_work_changes_nothing(
    tmp_path: Path,
) -> None:
    world = ReplayWorld(tmp_path, APEX)
    async with going(world):
        world.run.control.change(
            {"replay": {"samples_per_insert": 1.0, "error_buffer": 300.0}}, source="test"
        )
        limits = world.replay.limiter.limits
        assert (1.0, 50.0 - 300.0, 50.0 + 300.0) == (
            limits.samples_per_insert,
            limits.min_diff,
            limits.max_diff,
        )
        with pytest.raises(ConfigError, match="wait for each other for ever"):
            world.run.control.change({"replay": {"error_buffer": 1.0}}, source="test")
        assert limits == world.replay.limiter.limits
        world.run.control.change({"balance": {"max_staleness": 9}}, source="test")
        await until(lambda: world.run.exchange.ledger.limits.max_staleness == 9)
        assert limits == world.replay.limiter.limits


@pytest.mark.asyncio
async def test_a_stop_leaves_nothing_open_and_calls_no_shard_lost(tmp_path: Path) -> None:
    world = ReplayWorld(tmp_path, APEX)
    async with going(world) as task:
        world.commit()
        world.run.control.stop(source="test")
        await task
        ledger = world.run.control.statistics().ledger
        assert (0, {"stopped": 1}) == (ledger.open, ledger.dropped)


GROWING = {"schedule": "linear", "start": 0.2, "end": 1.0, "over": 10, "unit": "updates"}


@pytest.mark.parametrize(
    ("replay", "beta"), [({}, 0.4), ({"beta": 0.7}, 0.7), ({"beta": GROWING}, 0.6)]
)
async def test_importance_weights_have_the_exponent_in_force(
    tmp_path: Path, replay: dict[str, Any], beta: float
) -> None:
    world = ReplayWorld(tmp_path, apex(**replay))
    assert isinstance(world.run.exchange, ReplayExchange)
    assert (0, pytest.approx(beta)) == world.run.exchange._draws._schedule(5)


def failing(progress: float) -> float:
    """Fails at a progress at which no check calls it."""
    return 1.0 if progress != 0.1 else 1.0 / 0.0


async def test_a_schedule_of_beta_that_fails_ends_the_run(tmp_path: Path) -> None:
    beta = {"schedule": f"{__name__}:failing", "over": 10, "unit": "updates"}
    world = ReplayWorld(tmp_path, apex(beta=beta))
    assert (0, 1.0) == world.run._replay_schedule(1)
    error = world.run.lifecycle.first_error
    assert error is not None
    assert "replay.beta" == error.component
