"""A run with hosts that do what the test says: how it starts, loses, keeps, judges and ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refusing import full_disk
from tests.support.settings import cartpole
from tests.support.worlds import turns
from tianflow.config.evaluations import MAIN
from tianflow.config.loading import load_config, read_revision, write_config
from tianflow.config.model import Config, FurtherEvaluationSettings
from tianflow.config.rules import make_controllers
from tianflow.coordinator import Run
from tianflow.coordinator import supervisor as supervising
from tianflow.core.layout import make_layout
from tianflow.core.payloads import (
    Activity,
    Episode,
    Evaluation,
    SavedState,
    Settlement,
    Trajectory,
    Version,
)
from tianflow.core.program import HostSpec, LauncherCapabilities
from tianflow.core.statistics import ComponentStatistics, StateClock, TimeShares
from tianflow.errors import (
    BrokenChannelError,
    CheckpointError,
    EnvironmentFailedError,
    RunError,
    StateConflictError,
)
from tianflow.launchers.inline import InlineLauncher
from tianflow.planning.validation import require_valid
from tianflow.rundir.audit_log import read_page
from tianflow.rundir.checkpoints import CheckpointStore, write_state
from tianflow.rundir.summary import REQUESTED

BASE = cartpole(
    run={"max_updates": None, "grace_s": 0.2},
    placement={"launcher": "processes", "affinity": "none"},
    actors={"count": 2, "hosts": 2},
    evaluation={"timeout_s": 5.0},
)
SPEC = require_valid(BASE).spec
make_controllers(BASE)  # outside a loop: plug-ins are looked for on disk
FIRST = Version(1, 0)


def config(**sections: dict[str, Any]) -> Config:
    """`BASE` with single settings of sections replaced."""
    return BASE.model_copy(
        update={
            name: getattr(BASE, name).model_copy(update=values) for name, values in sections.items()
        }
    )


@dataclass
class FakeHost:
    """A handle. It leaves when asked to, unless it is ``stopped``, as by SIGSTOP."""

    spec: HostSpec
    started: bool = True
    silent_for: float = 0.0
    activities: tuple[Activity, ...] = ()
    stopped: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    ended: str = "exit status 0"

    async def wait(self) -> str:
        await self.gone.wait()
        return self.ended

    def ask_to_stop(self) -> None:
        if not self.stopped:
            self.gone.set()

    def kill(self) -> None:
        self.ended = "signal 9"
        self.gone.set()

    def reconcile(self, spec: HostSpec) -> None:
        self.spec = spec


class FakeLearner:
    """The port to a learner: saves ``version``, rests at it; raises ``error``, stands still while
    ``answers`` is not set.
    """

    def __init__(self) -> None:
        self.version = FIRST
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.saves = 0
        self.held: list[bool] = []
        self.is_held: Callable[[], bool] = lambda: False

    async def save(self, staged: Path) -> SavedState:
        self.saves += 1
        self.held.append(self.is_held())
        version = self.version
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        state = await asyncio.to_thread(write_state, staged, {"w": np.zeros(2)})
        return SavedState(version, 7, state)

    async def rest(self) -> Version:
        await self.answers.wait()
        return self.version


class FakeEvaluator:
    """The port to an evaluator. ``asked``: versions of main evaluations; ``further``: names and
    versions of the others.
    """

    def __init__(self) -> None:
        self.returns = (10.0, 20.0)
        self.metrics: dict[str, float] = {}
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[Version] = []
        self.further: list[tuple[str, Version]] = []
        self.newer = 0
        """By how many updates the version that is played is newer than the one asked for."""

    async def load(self, at_least: Version) -> Version:
        return at_least

    async def evaluate(self, at_least: Version, name: str) -> Evaluation:
        if name == MAIN:
            self.asked.append(at_least)
        else:
            self.further.append((name, at_least))
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        version = Version(at_least.lineage, at_least.number + self.newer)
        return Evaluation(version, self.returns, (1,) * len(self.returns), name, self.metrics)


class World:
    """A run, its hosts and their ports."""

    def __init__(self, directory: Path, config: Config = BASE, **options: Any) -> None:
        assert SPEC is not None
        layout = make_layout(
            SPEC, steps=config.actors.rollout_steps, state_spec={}, return_accumulator=False
        )
        slots = InlineLauncher().slots(config=config, layout=layout)
        self.run = Run(
            run_id="run",
            directory=directory,
            config=config,
            spec=SPEC,
            layout=layout,
            slots=slots,
            capabilities=LauncherCapabilities(),
            **options,
        )
        self.hosts: dict[str, FakeHost] = {}
        self.learner, self.evaluator = FakeLearner(), FakeEvaluator()
        self.learner.is_held = lambda: self.run.settings.value.hold_learner
        self.working = True
        self.starts: list[tuple[Version, int, Path | None]] = []

    async def start(self, spec: HostSpec, incarnation: int) -> FakeHost:
        host = self.hosts[spec.name] = FakeHost(spec)
        if spec.name == "learner":
            plan = await self.run.plan_host(spec, incarnation)
            version = plan.start
            self.starts.append((version, plan.samples, plan.checkpoint))
            self.learner.version = version
            self.run.inbox.register_learner(self.learner)
        elif spec.name == "evaluator":
            self.run.inbox.register_evaluator(self.evaluator)
        if self.working:
            asyncio.get_running_loop().call_soon(self.work, spec)
        return host

    def work(self, spec: HostSpec) -> None:
        """Every component of the host does its work."""
        for component in spec.components:
            if component.name == "learner":
                self.run.exchange.open_lineage(self.learner.version)
            self.run.inbox.component_started(component.name)
            statistics = ComponentStatistics(
                component.name, component.role, spec.name, StateClock("waiting:grant").read()
            )
            self.run.inbox.report([statistics])

    def commit(self) -> None:
        """An actor commits one trajectory of 16 steps, with one episode."""
        given: list[Any] = []
        self.run.exchange.request_grant("actor-0", given.append)
        (grant,) = given
        self.run.exchange.begin(grant.ticket, grant.version)
        self.run.exchange.commit(Trajectory(grant.ticket, grant.slot, 4, 16, grant.version))
        self.run.inbox.episodes_finished("actor-0", [Episode(9.0, 16)])

    @property
    def checkpoints(self) -> list[str]:
        return [str(entry["name"]) for entry in self.run.control.checkpoints()]


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.002)


async def soon(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(10.0):
        return await awaitable


@asynccontextmanager
async def going(world: World, state: str = "running") -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(world.run.run(world.start))
    try:
        await until(lambda: world.run.control.state == state or task.done())
        yield task
    finally:
        for host in world.hosts.values():
            host.stopped = False
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "BACKOFF_S", (0.0,))


# Starting
# --------------------------------------------------------------------------------------------------


async def test_a_run_is_running_once_its_learner_and_an_actor_work(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.working = False
    async with going(world, "starting"):
        await until(lambda: len(world.hosts) == 4)
        assert (
            False,
            ("starting: waiting for learner and an actor",),
        ) == world.run.snapshot.ready()
        world.work(world.hosts["learner"].spec)
        assert (False, ("starting: waiting for an actor",)) == world.run.snapshot.ready()
        world.work(world.hosts["actors-1"].spec)
        assert ("running", (True, ())) == (world.run.control.state, world.run.snapshot.ready())


async def test_a_pause_before_anything_works_holds_from_the_beginning(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.working = False
    async with going(world, "starting"):
        await until(lambda: len(world.hosts) == 4)
        assert "paused" == world.run.control.pause(source="test")
        for name in ("learner", "actors-0"):
            world.work(world.hosts[name].spec)
        assert "paused" == world.run.control.state
        given: list[Any] = []
        world.run.exchange.request_grant("actor-0", given.append)
        assert [] == given
        assert "running" == world.run.control.resume(source="test")
        assert ("running", 1) == (world.run.control.state, len(given))


async def test_a_change_that_comes_while_the_disk_is_looked_at_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    opened = world.run.checkpoints.open

    async def changed_meanwhile() -> None:
        await opened()
        world.run.control.change({"actors": {"count": 1}}, source="test")

    monkeypatch.setattr(world.run.checkpoints, "open", changed_meanwhile)
    async with going(world):
        await until(lambda: len(world.hosts) >= 3)
        await turns(20)
        assert {"learner", "evaluator", "actors-0"} == set(world.hosts)


# Losing
# --------------------------------------------------------------------------------------------------


async def test_a_lost_actor_host_gives_its_tickets_back_and_sums_of_waiting_never_go_down(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        given: list[Any] = []
        world.run.exchange.request_grant("actor-1", given.append)
        world.run.exchange.begin(given[0].ticket, FIRST)
        waiting = TimeShares({"waiting:grant": 1000.0}, "busy", time.monotonic())
        world.run.inbox.report([ComponentStatistics("actor-1", "actor", "actors-1", waiting)])
        assert world.run.registry.waiting_seconds()[1] >= 1000.0
        world.hosts["actors-1"].kill()
        await until(lambda: world.run.control.statistics().restarts)
        assert {"died": 1} == world.run.control.statistics().ledger.dropped
        assert (0, 0) == (
            world.run.exchange.ledger.credits_in_use,
            world.run.control.statistics().ledger.quarantined_slots,
        )
        assert world.run.registry.waiting_seconds()[1] >= 1000.0


async def test_a_lost_learner_is_a_new_lineage_from_the_newest_checkpoint_and_not_ready_until_it_works(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 40)
        assert await soon(world.run.checkpoints.save())
        world.learner.version = Version(1, 55)
        world.working = False
        world.hosts["learner"].kill()
        await until(lambda: len(world.starts) == 2)
        version, samples, path = world.starts[1]
        assert (Version(2, 40), 7) == (version, samples)
        assert path is not None
        assert "v1-0000000040" == path.name
        assert (False, ("the learner is gone and not yet back",)) == world.run.snapshot.ready()
        world.work(world.hosts["actors-0"].spec)
        assert not await soon(world.run.checkpoints.save())  # nothing was learned since
        assert (False, ("the learner is gone and not yet back",)) == world.run.snapshot.ready()
        world.work(world.hosts["learner"].spec)
        assert (True, ()) == world.run.snapshot.ready()


async def test_of_all_tickets_those_are_watched_that_were_begun(tmp_path: Path) -> None:
    """An actor may wait for its turn as long as it has to."""
    world = World(tmp_path)
    async with going(world):
        given: list[Any] = []
        for actor in ("actor-0", "actor-1"):
            world.run.exchange.request_grant(actor, given.append)
        world.run.exchange.begin(given[1].ticket, FIRST)
        assert world.run.hosts._supervisor is not None
        assert [
            (given[1].ticket, given[1].slot, "actor-1")
        ] == world.run.hosts._supervisor._written_slots()


@pytest.mark.parametrize(("silent_for", "ready"), [(2.0, True), (9.0, False)])
async def test_a_silent_host_makes_a_run_unready(
    tmp_path: Path, silent_for: float, ready: bool
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.hosts["learner"].silent_for = silent_for
        assert (
            ready,
            () if ready else ("host 'learner' has said nothing for 9 s",),
        ) == world.run.snapshot.ready()


async def test_a_run_without_a_living_actor_is_not_ready(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        for name in ("actor-0", "actor-1"):
            world.run.inbox.component_ended(name)
        assert (False, ("no actor is alive",)) == world.run.snapshot.ready()
        world.run.control.change({"actors": {"count": 0}}, source="test")
        assert (False, ("there are no actors: actors.count is 0",)) == world.run.snapshot.ready()


async def test_a_change_is_kept_where_a_resumed_run_looks_for_it_before_any_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.run.control.change({"balance": {"max_staleness": 7}}, source="test")
    assert 7 == (await asyncio.to_thread(load_config, tmp_path / "config.toml")).bound


def audited(folder: Path) -> list[str]:
    return [str(record["action"]) for record in read_page(folder / "audit.jsonl").records]


async def test_a_change_on_a_full_disk_is_pending_until_settings_and_audit_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tianflow.rundir.audit_log.RETRY_S", 0.01)
    world = World(tmp_path)
    await asyncio.to_thread(write_config, tmp_path, BASE)
    before = await asyncio.to_thread((tmp_path / "config.toml").read_bytes)
    async with going(world):
        run = world.run
        with full_disk():
            run.control.change({"balance": {"max_staleness": 7}}, source="test")
            await until(lambda: run.control.audit_log._refused)
            assert 2 == run.control.statistics().settings_pending
            assert before == await asyncio.to_thread((tmp_path / "config.toml").read_bytes)
            assert [] == await asyncio.to_thread(audited, tmp_path)
        await until(lambda: not run.control.statistics().settings_pending)
        assert 7 == (await asyncio.to_thread(load_config, tmp_path / "config.toml")).bound
        assert ["change"] == await asyncio.to_thread(audited, tmp_path)
        assert 1 == await asyncio.to_thread(read_revision, tmp_path / "config.toml")


async def test_what_is_pending_at_the_end_of_a_run_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tianflow.rundir.audit_log.RETRY_S", 3600.0)
    world = World(tmp_path)
    async with going(world) as task:
        with full_disk():
            world.run.control.change({"balance": {"max_staleness": 7}}, source="test")
            await until(lambda: world.run.control.audit_log._refused)
        world.run.lifecycle.end("stopped", "test")
        await soon(task)
    assert 7 == (await asyncio.to_thread(load_config, tmp_path / "config.toml")).bound
    assert 0 == world.run.control.statistics().settings_pending


async def test_a_checkpoint_names_the_revision_of_its_settings(tmp_path: Path) -> None:
    world = World(tmp_path, revision=4)
    async with going(world) as task:
        world.run.control.change({"balance": {"max_staleness": 7}}, source="test")
        world.run.control.stop(source="test")
        await soon(task)
    newest = await asyncio.to_thread(CheckpointStore(tmp_path / "checkpoints", keep=1).newest)
    assert newest is not None
    assert (5, 7) == (
        newest.manifest["revision"],
        newest.manifest["config"]["balance"]["max_staleness"],
    )


async def test_settings_of_a_resume_are_written_once_an_update_shows_that_they_fit(
    tmp_path: Path,
) -> None:
    """A learner that cannot load the checkpoint must not leave settings that no resume can use."""
    world = World(tmp_path, revision=2, settings_stored=False)
    async with going(world):
        await soon(world.run.control.audit_log.flush())
        assert not await asyncio.to_thread((tmp_path / "config.toml").exists)
        world.run._settled()
        await soon(world.run.control.audit_log.flush())
        assert 2 == await asyncio.to_thread(read_revision, tmp_path / "config.toml")


async def test_a_pause_and_a_resting_learner_are_no_changes_of_settings(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        world.run.control.pause(source="test")
        world.run.control.resume(source="test")
        before = world.run.control.generation
        await soon(world.run.evaluation.evaluate(hold=True))
        assert 0 == world.run.control.statistics().settings_changes < world.run.control.generation
        # A client that has read the settings before an evaluation may change them after it.
        assert before == world.run.control.generation < world.run.settings.key
        world.run.control.change({"weights": {"publish_interval_updates": 2}}, source="test")
        assert 1 == world.run.control.statistics().settings_changes


# No failure is lost
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a task", "the balancer", "the supervisor", "starting a host"])
async def test_whatever_the_coordinator_itself_raises_ends_the_run_with_it(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    if what == "the supervisor":
        monkeypatch.setattr(supervising.Supervisor, "_watch", lambda *_: 1 / 0)
    elif what == "starting a host":
        world.start = broken  # type: ignore[method-assign, assignment]  # that is the point
    async with going(world, "running" if what != "starting a host" else "failed") as task:
        if what == "a task":
            world.run.lifecycle.run_in_background(broken())
        elif what == "the balancer":
            monkeypatch.setattr(world.run.balancer, "_observe", lambda _config: 1 / 0)
        await soon(task)
    assert "failed" == world.run.control.state
    assert world.run.lifecycle.first_error is not None
    assert "ZeroDivision" in world.run.lifecycle.first_error.details
    assert "failed" == json.loads((tmp_path / "summary.json").read_text())["state"]


async def test_the_first_error_is_the_one_that_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.run.lifecycle.fail(RunError("actor-0", "the first"))
        world.run.lifecycle.fail(RunError("actor-1", "the second"))
        await soon(task)
    assert (
        "actor-0: the first"
        == str(world.run.lifecycle.first_error)
        == world.run.lifecycle.end_reason
    )


async def test_an_error_amid_the_last_things_is_the_end_of_the_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.learner.answers.clear()
        world.run.control.stop(source="test")
        await until(lambda: world.learner.saves)
        world.run.lifecycle.fail(RunError("learner", "out of memory"))
        world.learner.error = BrokenChannelError("gone")
        world.learner.answers.set()
        await soon(task)
    assert ("failed", "learner: out of memory") == (
        world.run.control.state,
        str(world.run.lifecycle.first_error),
    )


# Keeping
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [CheckpointError("the disk is full"), BrokenChannelError("the learner is gone")]
)
async def test_a_checkpoint_that_fails_is_counted_leaves_nothing_and_the_run_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    world = World(tmp_path)
    async with going(world):
        assert await soon(world.run.checkpoints.save())
        world.learner.error, world.learner.version = error, Version(1, 9)
        assert not await soon(world.run.checkpoints.save())
        statistics = world.run.control.statistics().checkpoint
        assert (2, 1) == (statistics.attempts, statistics.failures)
        assert (["v1-0000000000"], "running") == (world.checkpoints, world.run.control.state)
        await until(lambda: not list((tmp_path / "checkpoints").glob(".tmp-*")))


async def test_a_directory_that_cannot_be_written_into_is_a_failed_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    (tmp_path / "checkpoints").touch()
    async with going(world):
        assert not await soon(world.run.checkpoints.save())
        assert 1 == world.run.control.statistics().checkpoint.failures
        assert "running" == world.run.control.state


async def test_a_summary_names_the_newest_checkpoint_on_disk(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        assert world.run.snapshot.summary()["checkpoint"] is None
        world.learner.version = Version(1, 9)
        assert await soon(world.run.checkpoints.save())
        assert 9 == world.run.snapshot.summary()["checkpoint"]


async def test_nothing_that_cannot_be_written_keeps_a_run_from_ending_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("coordinator.snapshot", "rundir.audit_log"):
        monkeypatch.setattr(f"tianflow.{name}.log.warning", lambda text, **_: told.append(text))
    world = World(tmp_path)
    for name in ("summary.json", "audit.jsonl"):
        (tmp_path / name).mkdir()
    async with going(world) as task:
        world.run.control.stop(source="test")
        await soon(task)
    assert ("stopped", None) == (world.run.control.state, world.run.lifecycle.first_error)
    assert [
        "settings and audit cannot be written; they are pending and tried again",
        "the summary cannot be written",
    ] == told


async def test_checkpoints_that_a_slow_learner_keeps_waiting_do_not_pile_up(tmp_path: Path) -> None:
    world = World(tmp_path, config(checkpoint={"every_s": 0.05}))
    async with going(world):
        world.learner.answers.clear()
        await until(lambda: world.learner.saves)
        await until(lambda: world.run.periodic.last_tick)
        for _ in range(5):
            tick = world.run.periodic.last_tick
            await until(lambda tick=tick: world.run.periodic.last_tick != tick)
        assert 1 == len(world.run.lifecycle.background)


# Judging
# --------------------------------------------------------------------------------------------------


async def test_the_learner_rests_while_its_newest_version_is_judged(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 30)
        world.evaluator.answers.clear()
        judging = asyncio.create_task(world.run.evaluation.evaluate(hold=True))
        await until(lambda: world.evaluator.asked)
        assert ([Version(1, 30)], True) == (
            world.evaluator.asked,
            world.run.settings.value.hold_learner,
        )
        world.evaluator.answers.set()
        assert not await soon(judging)
        assert not world.run.settings.value.hold_learner
        assert {"version": 30, "mean_return": 15.0, "episodes": 2} == world.run.evaluation.newest


async def test_metrics_of_an_evaluation_stand_beside_its_return(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        world.evaluator.metrics = {"success": 0.5, "version": -1.0}
        await soon(world.run.evaluation.evaluate())
        await soon(world.run.evaluation.evaluate_further("large"))
        run = world.run.control.statistics()
        numbers = {"success": 0.5, "version": 0, "mean_return": 15.0, "episodes": 2}
        assert (numbers, {"large": numbers}) == (run.evaluation, run.further_evaluations)


@pytest.mark.parametrize(
    "error", [EnvironmentFailedError("step broke"), BrokenChannelError("the evaluator is gone")]
)
async def test_an_evaluation_that_fails_lets_the_learner_go_on(
    tmp_path: Path, error: Exception
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.evaluator.error = error
        assert not await soon(world.run.evaluation.evaluate(hold=True, target=1.0))
        assert (False, "running", {}) == (
            world.run.settings.value.hold_learner,
            world.run.control.state,
            world.run.evaluation.newest,
        )
        assert 1 == world.run.control.statistics().evaluation_failures


async def test_an_evaluation_that_hangs_costs_the_evaluator_and_lets_the_learner_go_on(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(evaluation={"timeout_s": 0.05}))
    async with going(world):
        world.evaluator.answers.clear()
        assert not await soon(world.run.evaluation.evaluate(hold=True))
        assert not world.run.settings.value.hold_learner
        await until(lambda: world.run.control.statistics().restarts)
        assert {("evaluator", "env_hang"): 1} == world.run.control.statistics().restarts


async def test_a_target_is_confirmed_by_an_evaluation_and_the_confirmed_version_is_what_is_saved(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"target_return": 15.0}))
    async with going(world) as task:
        world.learner.version = Version(1, 30)
        world.run.inbox.episodes_finished("actor-0", [Episode(16.0, 16)] * 100)
        await soon(task)
    assert ("done", "target_return", True) == (
        world.run.control.state,
        world.run.lifecycle.end_reason,
        world.run.target.reached,
    )
    assert ([Version(1, 30)], ["v1-0000000030"]) == (world.evaluator.asked, world.checkpoints)
    assert world.run.settings.value.hold_learner


async def test_a_target_that_only_evaluations_reach_ends_the_run_once_the_newest_version_confirms_it(
    tmp_path: Path,
) -> None:
    """Where actors explore, training itself never shows how good the policy is."""
    world = World(tmp_path, config(run={"target_return": 15.0}, evaluation={"every_s": 0.05}))
    async with going(world) as task:
        world.learner.version = Version(1, 30)
        await soon(task)
    assert ("done", "target_return", True) == (
        world.run.control.state,
        world.run.lifecycle.end_reason,
        world.run.target.reached,
    )
    assert (Version(1, 30), 2) == (world.evaluator.asked[-1], len(world.evaluator.asked))
    assert world.run.control.statistics().time_to_target_s is not None
    assert ["v1-0000000030"] == world.checkpoints


async def test_evaluations_short_of_the_target_end_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, config(run={"target_return": 15.5}, evaluation={"every_s": 0.05}))
    async with going(world):
        await until(lambda: len(world.evaluator.asked) > 2)
        assert ("running", False) == (
            world.run.control.state,
            world.run.settings.value.hold_learner,
        )


async def test_evaluations_that_take_longer_than_the_time_between_them_do_not_pile_up(
    tmp_path: Path,
) -> None:
    """Whoever came after all of them would wait, and the last one of the run would never be
    made.
    """
    world = World(tmp_path, config(run={"max_env_steps": 16}, evaluation={"every_s": 0.05}))
    async with going(world) as task:
        world.evaluator.answers.clear()
        await until(lambda: world.evaluator.asked)
        for _ in range(5):
            tick = world.run.periodic.last_tick
            await until(lambda tick=tick: world.run.periodic.last_tick != tick)
        assert 1 == len(world.run.lifecycle.background)
        world.commit()
        world.evaluator.answers.set()
        await soon(task)
    assert 2 == len(world.evaluator.asked)


async def test_a_target_that_is_first_reached_at_the_end_took_all_the_time_of_training(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"target_return": 15.0, "max_env_steps": 16}))
    async with going(world) as task:
        world.commit()
        await soon(task)
    assert ("max_env_steps", True) == (world.run.lifecycle.end_reason, world.run.target.reached)
    assert world.run.snapshot.summary()["training_s"] == pytest.approx(
        world.run.control.statistics().time_to_target_s, abs=0.001
    )


async def test_a_target_that_only_training_reaches_ends_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, config(run={"target_return": 15.5}))
    async with going(world):
        world.run.inbox.episodes_finished("actor-0", [Episode(16.0, 16)] * 100)
        await until(lambda: world.evaluator.asked and not world.run.evaluation.busy)
        assert ("running", False) == (world.run.control.state, world.run.target.reached)


# The best version, and further evaluations
# --------------------------------------------------------------------------------------------------

FURTHER: dict[str, Any] = {"further": {"large": FurtherEvaluationSettings(episodes=2)}}


def best_names(world: World) -> list[str]:
    return [str(entry["name"]) for entry in world.run.control.checkpoints() if entry["best"]]


async def test_the_version_that_was_evaluated_is_saved_although_the_learner_trains_on(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 30)
        world.evaluator.answers.clear()
        evaluating = asyncio.create_task(world.run.evaluation.evaluate())
        await until(lambda: world.evaluator.asked)
        assert ([True], False) == (world.learner.held, world.run.settings.value.hold_learner)
        world.learner.version = Version(1, 35)
        world.evaluator.answers.set()
        await soon(evaluating)
        assert ["v1-0000000030"] == world.checkpoints == best_names(world)
        best = world.run.control.statistics().checkpoint.best
        assert best is not None
        assert (30, 15.0, 2) == (best.version, best.mean_return, best.episodes)


async def test_a_state_of_another_version_than_the_evaluated_one_is_not_saved(
    tmp_path: Path,
) -> None:
    """As where the evaluator was restarted meanwhile, and has loaded a newer version."""
    world = World(tmp_path)
    async with going(world):
        world.evaluator.newer = 1
        await soon(world.run.evaluation.evaluate())
        assert (1, [], None) == (
            world.learner.saves,
            world.checkpoints,
            world.run.control.statistics().checkpoint.best,
        )
        world.learner.version = Version(1, 1)
        assert await soon(world.run.checkpoints.save())
        assert ["v1-0000000001"] == best_names(world), "the evaluated version, which is saved now"


async def test_an_evaluation_that_hangs_leaves_nothing_staged_and_the_learner_trains(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(evaluation={"timeout_s": 0.05}))
    async with going(world):
        world.evaluator.answers.clear()
        assert not await soon(world.run.evaluation.evaluate())
        assert (1, False) == (world.learner.saves, world.run.settings.value.hold_learner)
        assert await soon(world.run.checkpoints.save())  # on the disk's thread, after all before
        staged = await asyncio.to_thread(lambda: list((tmp_path / "checkpoints").glob(".tmp-*")))
        assert [] == staged
        assert [] == best_names(world)


async def test_only_a_better_evaluation_replaces_the_best_version(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world):
        for number, returns in ((10, (5.0,)), (20, (9.0,)), (30, (9.0,)), (40, (7.0,))):
            world.learner.version, world.evaluator.returns = Version(1, number), returns
            await soon(world.run.evaluation.evaluate())
        assert ["v1-0000000020"] == world.checkpoints == best_names(world)
        assert 40 == world.run.evaluation.newest["version"]
    staged = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert ["v1-0000000020"] == staged, "what was not the best one is gone"


async def test_the_best_version_survives_a_resume_and_retention(tmp_path: Path) -> None:
    settings = config(checkpoint={"keep": 1})
    world = World(tmp_path, settings)
    async with going(world):
        world.learner.version = Version(1, 20)
        await soon(world.run.evaluation.evaluate())
        world.learner.version = Version(1, 25)
        assert await soon(world.run.checkpoints.save())
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    resumed = await asyncio.to_thread(store.newest)
    assert resumed is not None
    assert Version(1, 25) == resumed.version
    again = World(tmp_path, settings, resumed=resumed)
    async with going(again):
        best = again.run.control.statistics().checkpoint.best
        assert best is not None
        assert (20, 15.0) == (best.version, best.mean_return)
        again.learner.version, again.evaluator.returns = Version(2, 30), (14.0,)
        await soon(again.run.evaluation.evaluate())
        for number in (31, 32):
            again.learner.version = Version(2, number)
            assert await soon(again.run.checkpoints.save())
        assert ["v2-0000000032", "v1-0000000020"] == again.checkpoints
        assert ["v1-0000000020"] == best_names(again)


async def test_after_a_resume_with_another_evaluation_its_first_result_is_the_best(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 20)
        await soon(world.run.evaluation.evaluate())
        assert await soon(world.run.checkpoints.save())
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    resumed = await asyncio.to_thread(store.newest)
    again = World(tmp_path, config(evaluation={"deterministic": False}), resumed=resumed)
    async with going(again):
        assert ["v1-0000000020"] == best_names(again), "until then"
        again.learner.version, again.evaluator.returns = Version(2, 30), (1.0,)
        await soon(again.run.evaluation.evaluate())
        assert ["v2-0000000030"] == best_names(again)


async def test_the_last_version_of_a_run_is_written_once_also_if_it_is_the_best(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}))
    async with going(world) as task:
        world.commit()
        await soon(task)
    assert (1, ["v1-0000000000"]) == (world.learner.saves, best_names(world))
    (entry,) = world.run.control.checkpoints()
    assert entry["regular"]
    assert {"version": 0, "mean_return": 15.0, "episodes": 2} == world.run.snapshot.summary()[
        "best"
    ]


async def test_a_regular_checkpoint_of_the_best_version_is_still_the_best_one(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 30)
        await soon(world.run.evaluation.evaluate())
        assert await soon(world.run.checkpoints.save())
        (entry,) = world.run.control.checkpoints()
        assert (True, True) == (entry["best"], entry["regular"])


async def test_without_the_setting_no_version_is_saved_for_its_evaluation(tmp_path: Path) -> None:
    world = World(tmp_path, config(checkpoint={"best": False}))
    async with going(world):
        await soon(world.run.evaluation.evaluate())
        assert ([], 0) == (world.checkpoints, world.learner.saves)
        assert await soon(world.run.checkpoints.save())
        assert [] == best_names(world)


async def test_a_full_disk_costs_the_best_checkpoint_and_not_the_evaluation(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.error = CheckpointError("No space left on device")
        await soon(world.run.evaluation.evaluate(hold=True))
        assert (15.0, []) == (world.run.evaluation.newest["mean_return"], world.checkpoints)
        assert not world.run.settings.value.hold_learner
        world.learner.error = None
        world.evaluator.returns = (1.0,)
        world.learner.version = Version(1, 9)
        await soon(world.run.evaluation.evaluate())
        assert ["v1-0000000009"] == best_names(world), "what could not be saved does not count"


async def test_a_lost_learner_continues_from_a_regular_checkpoint_beside_a_newer_best_one(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world):
        world.learner.version = Version(1, 40)
        assert await soon(world.run.checkpoints.save())
        world.learner.version = Version(1, 50)
        await soon(world.run.evaluation.evaluate())
        world.hosts["learner"].kill()
        await until(lambda: len(world.starts) == 2)
        assert Version(2, 40) == world.starts[1][0]
        assert 40 == world.run.checkpoints.newest_updates


async def test_further_evaluations_play_the_version_of_the_main_one_and_decide_nothing(
    tmp_path: Path,
) -> None:
    settings = config(run={"target_return": 15.5}, evaluation={"every_s": 0.05, **FURTHER})
    world = World(tmp_path, settings)
    async with going(world):
        world.learner.version = Version(1, 30)
        await until(lambda: world.evaluator.further)
        assert ("large", Version(1, 30)) == world.evaluator.further[0]
        await until(lambda: world.run.evaluation.further)
        found = {"version": 30, "mean_return": 15.0, "episodes": 2}
        statistics = world.run.control.statistics()
        assert ({"large": found}, found) == (statistics.further_evaluations, statistics.evaluation)
        assert "running" == world.run.control.state


async def test_a_run_that_ends_by_itself_plays_further_evaluations_with_its_last_version(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}, evaluation=FURTHER))
    async with going(world) as task:
        world.commit()
        await soon(task)
    assert ([FIRST], [("large", FIRST)]) == (world.evaluator.asked, world.evaluator.further)
    summary = world.run.snapshot.summary()
    assert {"large": summary["evaluation"]} == summary["further_evaluations"]


async def test_a_further_evaluation_that_takes_all_its_time_costs_no_checkpoint(
    tmp_path: Path,
) -> None:
    settings = config(run={"max_env_steps": 16}, evaluation={"timeout_s": 0.2, **FURTHER})
    world = World(tmp_path, settings)
    async with going(world) as task:
        world.evaluator.answers.clear()
        world.commit()
        await soon(task)
    assert ("done", ["v1-0000000000"]) == (world.run.control.state, world.checkpoints)


async def test_a_second_stop_request_skips_further_evaluations(tmp_path: Path) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}, evaluation=FURTHER))
    async with going(world) as task:
        world.evaluator.answers.clear()
        world.commit()
        await until(lambda: world.evaluator.asked)
        world.run.lifecycle.end("stopped", "SIGTERM")
        await soon(task)
    assert ([], ["v1-0000000000"]) == (world.evaluator.further, world.checkpoints)


async def test_an_evaluation_every_so_many_steps_begins_when_they_are_passed(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(evaluation={"every_steps": 32}))
    async with going(world):
        world.commit()
        tick = world.run.periodic.last_tick
        await until(lambda: world.run.periodic.last_tick != tick)
        assert [] == world.evaluator.asked
        world.commit()
        await until(lambda: world.evaluator.asked)


# Ending
# --------------------------------------------------------------------------------------------------


async def test_a_stop_drops_what_is_open_saves_and_sends_everyone_home(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.commit()
        assert "stopping" == world.run.control.stop(source="test")
        await soon(task)
    assert ("stopped", REQUESTED) == (world.run.control.state, world.run.lifecycle.end_reason)
    assert ({"stopped": 1}, 0) == (
        world.run.control.statistics().ledger.dropped,
        world.run.control.statistics().ledger.open,
    )
    assert (["v1-0000000000"], [], [True]) == (
        world.checkpoints,
        world.evaluator.asked,
        world.learner.held,
    )
    assert all(host.gone.is_set() for host in world.hosts.values())
    with pytest.raises(StateConflictError, match="the run is stopped"):
        world.run.control.stop(source="test")
    with pytest.raises(StateConflictError, match="the run is stopped"):
        world.run.control.change({"balance": {"max_staleness": 3}}, source="test")
    (record,) = world.run.control.audit()
    assert ("test", "stop") == (record["source"], record["action"])


async def test_a_run_that_ends_by_itself_is_judged_and_saved_at_its_last_version(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}))
    async with going(world) as task:
        world.commit()
        await soon(task)
    assert ("done", "max_env_steps") == (world.run.control.state, world.run.lifecycle.end_reason)
    assert ([FIRST], ["v1-0000000000"]) == (world.evaluator.asked, world.checkpoints)
    assert (
        [True] == world.learner.held
    )  # else it could train on what it has pulled ahead, and nobody would keep that


async def test_the_clock_of_training_stands_still_while_the_last_version_is_judged(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}))
    async with going(world) as task:
        world.evaluator.answers.clear()
        world.commit()
        await until(lambda: world.evaluator.asked)
        first = world.run.snapshot.summary()
        assert world.run.control.state == "stopping"
        before = world.run.control.statistics().elapsed_s
        await until(lambda: world.run.control.statistics().elapsed_s > before)
        assert first["training_s"] == world.run.snapshot.summary()["training_s"] > 0
        world.evaluator.answers.set()
        await soon(task)
    assert (first["training_s"], first["steps_per_s"]) == tuple(
        world.run.snapshot.summary()[name] for name in ("training_s", "steps_per_s")
    )


async def test_after_the_last_update_nobody_begins_anything(tmp_path: Path) -> None:
    """What was begun then would be committed, and counted, only if the run is slow to end: a
    deterministic run would not repeat.
    """
    world = World(tmp_path, config(run={"max_updates": 1}))
    async with going(world) as task:
        world.commit()
        pulled: list[Any] = []
        world.run.exchange.request_batch(FIRST, pulled.append)
        (batch,) = pulled
        granted: list[Any] = []
        for actor in range(8):  # more than there are credits
            world.run.exchange.request_grant(f"actor-{actor}", granted.append)
        before = len(granted)
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        world.run.exchange.settle(
            Settlement(Version(FIRST.lineage, FIRST.number + 1), tickets, 1, True)
        )
        assert before == len(granted) < 8
        await soon(task)
    assert ("done", "max_updates") == (world.run.control.state, world.run.lifecycle.end_reason)


async def test_an_evaluator_that_is_gone_at_the_end_costs_the_evaluation_and_not_the_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}))
    async with going(world) as task:
        world.evaluator.error = BrokenChannelError("the evaluator is gone")
        world.commit()
        await soon(task)
    assert ("done", {}, ["v1-0000000000"]) == (
        world.run.control.state,
        world.run.evaluation.newest,
        world.checkpoints,
    )


async def test_a_last_evaluation_that_takes_all_its_time_costs_no_checkpoint(
    tmp_path: Path,
) -> None:
    """An environment may have episodes that never end."""
    world = World(tmp_path, config(run={"max_env_steps": 16}, evaluation={"timeout_s": 0.2}))
    async with going(world) as task:
        world.evaluator.answers.clear()
        world.commit()
        await soon(task)
    assert ("done", {}, ["v1-0000000000"]) == (
        world.run.control.state,
        world.run.evaluation.newest,
        world.checkpoints,
    )


async def test_whoever_stops_a_run_that_is_judged_at_its_end_gets_a_checkpoint_at_once(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config(run={"max_env_steps": 16}))
    async with going(world) as task:
        world.evaluator.answers.clear()
        world.commit()
        assert not world.run.control.statistics().evaluating
        await until(lambda: world.evaluator.asked)
        seen = world.run.control.statistics()
        assert ("stopping", True) == (seen.state, seen.evaluating)
        assert seen.diagnosis.advice.startswith(
            "the run is stopping and evaluates the policy over "
        )
        assert seen.evaluation_left_s is not None
        assert 0.0 < seen.evaluation_left_s <= world.run.control.config.evaluation.timeout_s
        world.run.lifecycle.end("stopped", "SIGTERM")
        await soon(task)
    assert world.run.control.statistics().evaluation_left_s is None
    assert ("done", "max_env_steps", ["v1-0000000000"]) == (
        world.run.control.state,
        world.run.lifecycle.end_reason,
        world.checkpoints,
    )


@pytest.mark.parametrize("how", ["stop", "drain"])
async def test_a_stopped_learner_keeps_no_run_from_ending(tmp_path: Path, how: str) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.commit()
        world.learner.answers.clear()
        world.hosts["learner"].stopped, world.hosts["learner"].silent_for = True, 9.0
        getattr(world.run.control, how)(source="test")
        await soon(task)
    assert ("stopped" if how == "stop" else "done", []) == (
        world.run.control.state,
        world.checkpoints,
    )
    assert "signal 9" == world.hosts["learner"].ended


async def test_a_drain_waits_for_what_was_begun(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        given: list[Any] = []
        world.run.exchange.request_grant("actor-0", given.append)
        world.run.exchange.begin(given[0].ticket, FIRST)
        assert "draining" == world.run.control.drain(source="test")
        await until(lambda: world.run.control.state == "draining")
        await turns(20)
        assert not task.done()
        world.run.exchange.abort(given[0].ticket, given[0].slot, "env_error")
        await soon(task)
    assert ("done", "drained", {"env_error": 1}) == (
        world.run.control.state,
        world.run.lifecycle.end_reason,
        world.run.control.statistics().ledger.dropped,
    )


async def test_a_drain_of_a_paused_run_begins_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.run.control.pause(source="test")
        given: list[Any] = []
        world.run.exchange.request_grant("actor-0", given.append)
        world.run.control.drain(source="test")
        assert [] == given
        await soon(task)
    assert (("done", "drained"), [None]) == (
        (world.run.control.state, world.run.lifecycle.end_reason),
        given,
    )


async def test_a_drain_amid_which_the_run_fails_leaves_no_checkpoint_of_what_failed(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        given: list[Any] = []
        world.run.exchange.request_grant("actor-0", given.append)
        world.run.exchange.begin(given[0].ticket, FIRST)
        world.run.control.drain(source="test")
        await until(lambda: world.run.control.state == "draining")
        await turns(20)
        world.run.lifecycle.fail(RunError("learner", "out of memory"))
        await soon(task)
    assert ("failed", []) == (world.run.control.state, world.checkpoints)


async def test_a_cancelled_run_kills_everyone_and_waits_for_nobodys_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    async with going(world) as task:
        world.learner.answers.clear()
        world.run.control.stop(source="test")
        await until(lambda: world.learner.saves)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(task)
    assert ("stopped", []) == (world.run.control.state, world.checkpoints)
    assert {"signal 9"} == {host.ended for host in world.hosts.values()}


# Resuming
# --------------------------------------------------------------------------------------------------


async def test_a_resumed_run_goes_on_counting_in_a_new_lineage(tmp_path: Path) -> None:
    first = World(tmp_path)
    async with going(first) as task:
        first.learner.version = Version(1, 40)
        first.commit()
        first.run.control.stop(source="test")
        await soon(task)
    checkpoint = await asyncio.to_thread(CheckpointStore(tmp_path / "checkpoints", keep=1).newest)
    assert checkpoint is not None
    second = World(tmp_path, resumed=checkpoint)
    async with going(second):
        assert [(Version(2, 40), 7, checkpoint.path)] == second.starts
        assert (16, 1) == (second.run.snapshot.env_steps, second.run.control.statistics().episodes)
        assert (0, 1) == (first.run._lineage, second.run._lineage)
        second.commit()
        assert (32, 2) == (second.run.snapshot.env_steps, second.run.control.statistics().episodes)


async def test_a_resumed_run_that_is_at_its_limit_ends_where_it_stood_before_a_learner_works(
    tmp_path: Path,
) -> None:
    """Nobody is there to be judged, and that is no failure."""
    first = World(tmp_path)
    async with going(first) as task:
        first.learner.version = Version(1, 40)
        first.commit()
        first.run.control.stop(source="test")
        await soon(task)
    checkpoint = await asyncio.to_thread(CheckpointStore(tmp_path / "checkpoints", keep=1).newest)
    second = World(tmp_path, config(run={"max_env_steps": 16}), resumed=checkpoint)
    second.working = False
    async with going(second) as task:
        await soon(task)
    assert ("done", "max_env_steps") == (second.run.control.state, second.run.lifecycle.end_reason)
    assert (40, 40, 16) == tuple(
        second.run.snapshot.summary()[name] for name in ("updates", "checkpoint", "env_steps")
    )
    assert ([], 0) == (second.evaluator.asked, second.run.control.statistics().evaluation_failures)


@pytest.mark.parametrize(
    ("before", "ends"),
    [
        ({"elapsed_s": 1000.0, "trained_s": 1000.0}, True),
        ({"elapsed_s": 1000.0, "trained_s": 800.0}, False),
        ({"elapsed_s": 1000.0}, True),
    ],
)
async def test_a_limit_of_seconds_counts_those_of_training_before_a_resume(
    tmp_path: Path, before: dict[str, float], ends: bool
) -> None:
    first = World(tmp_path)
    async with going(first) as task:
        first.commit()
        first.run.control.stop(source="test")
        await soon(task)
    checkpoint = await asyncio.to_thread(CheckpointStore(tmp_path / "checkpoints", keep=1).newest)
    assert checkpoint is not None
    assert 0.0 < checkpoint.manifest["trained_s"] <= checkpoint.manifest["elapsed_s"]
    kept = {
        name: value
        for name, value in checkpoint.manifest.items()
        if name not in ("elapsed_s", "trained_s")
    }
    lived = replace(checkpoint, manifest=kept | before)
    config = BASE.model_copy(update={"run": BASE.run.model_copy(update={"max_seconds": 900.0})})
    second = World(tmp_path, config, resumed=lived)
    async with going(second) as task:
        if ends:
            await soon(task)
        assert ("max_seconds" if ends else "") == second.run.lifecycle.end_reason
