"""Conformance suites for plug-ins, for use in test modules. They import no test runner.

A test module needs one class for each plug-in:
``class TestMine(ControllerConformance): make = MyController``, or
``class TestMine(LauncherConformance): make = MyLauncher``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tianflow.channels.arena import arena_nbytes
from tianflow.config.loading import load_config
from tianflow.config.model import BalanceSettings, Config, EnvSettings, PPOSettings
from tianflow.coordinator import Run
from tianflow.coordinator.balancer import ControllerRequests, merge
from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import (
    EpisodesFinished,
    EvaluationFinished,
    Event,
    HostExited,
    Observed,
    SettingsChanged,
    UpdateFinished,
)
from tianflow.core.limits import Limits
from tianflow.core.payloads import (
    Activity,
    Batch,
    Grant,
    Settlement,
    Trajectory,
    Version,
    credits_ceiling,
)
from tianflow.core.process_table import processes
from tianflow.core.statistics import LedgerSnapshot
from tianflow.errors import RunError
from tianflow.interfaces import Controller, Launcher
from tianflow.ledger.ledger import Ledger
from tianflow.planning import placement
from tianflow.planning.layouts import trajectory_layout
from tianflow.planning.validation import require_valid

if TYPE_CHECKING:
    from tianflow.core.program import HostPlan, HostSpec, LauncherCapabilities, Program
    from tianflow.exchange.exchange import Exchange
    from tianflow.interfaces import HostHandle, HostInbox, HostStarter, SettingsReader, SlotOwner

# Balance controllers
# --------------------------------------------------------------------------------------------------

OTHER_EVENTS: tuple[Event, ...] = (
    UpdateFinished(version=1, seconds=1.0, samples=8),
    EpisodesFinished(component="actor-0", returns=(1.0,), lengths=(9,)),
    EvaluationFinished(version=1, episodes=1, mean_return=1.0, returns=(1.0,)),
    HostExited(host="actors-0", reason="died"),
    SettingsChanged(generation=2, paths=("balance.max_staleness",)),
)
"""Events other than `Observed`. A controller may read them, and must work without them."""
MAX_ROUNDS_PER_UPDATE = 50
"""Rounds without an update after which a run has stalled; a trajectory takes at most seven."""


def observations(
    batch: int, bound: int | None, *, actors: int = 4, slots: int = 64
) -> Iterator[Observed]:
    """Observations of a run with one update per second.

    In turn, no component waits, then the actors, then the learner, then both wait half of the time.
    """
    learner = waiting = 0.0
    for version in range(40):
        learner += 0.5 * (version >= 20)
        waiting += 0.5 * actors * (10 <= version < 20 or version >= 30)
        lag = version % 2
        ceiling = slots
        if bound is not None:
            ceiling = credits_ceiling(bound, publish_lag=lag, batch=batch)
        yield Observed(
            now=float(version),
            version=version,
            publish_lag=lag,
            batch=batch,
            max_staleness=bound,
            credits_limit=max(batch, min(ceiling, slots)),
            credits_in_use=batch,
            credits_ceiling=ceiling,
            slots=slots,
            actors=actors,
            learner_waiting_s=learner,
            actors_waiting_s=waiting,
        )


def simulate(
    controller: Controller,
    *,
    batch: int,
    bound: int | None,
    actors: int = 6,
    slots: int = 24,
    updates: int = 60,
) -> LedgerSnapshot:
    """The ledger after ``updates`` updates of a small run that ``controller`` balances.

    A round is a second. The controller's directives are in force from the next round on. Actor
    ``i`` takes ``1 + i`` rounds for a trajectory. The learner makes an update in each round that
    begins with a batch.

    Raises:
        AssertionError: the run stalled.
    """
    config = Config(
        env=EnvSettings(id="none"),
        algorithm=PPOSettings(batch_trajectories=batch),
        balance=BalanceSettings(max_staleness="unbounded" if bound is None else bound),
    )
    ledger, requests = (
        Ledger(limits=Limits(batch=batch, max_staleness=bound, credits=batch), slots=slots),
        ControllerRequests(),
    )
    ledger.open_lineage(Version(1, 0))
    running: dict[int, tuple[Grant, int]] = {}
    learner = waiting = 0.0
    last = now = 0
    while ledger.version.number < updates:
        observed = _observe(
            ledger,
            now=now,
            batch=batch,
            bound=bound,
            actors=actors,
            learner=learner,
            waiting=waiting,
        )
        for directive in controller.handle(observed):
            requests = requests.after(directive)
        ledger.set_limits(merge({"controller": requests}, config, slots=slots)[0])
        if _update(ledger, now):
            last = now
        else:
            learner += 1.0
        _advance_actors(ledger, running, actors, now)
        waiting += actors - len(running)
        now += 1
        assert now - last < MAX_ROUNDS_PER_UPDATE, (
            f"the run stalled: no update for {now - last} rounds after update "
            f"{ledger.version.number}, with {requests}"
        )
    return ledger.snapshot()


def _observe(
    ledger: Ledger,
    *,
    now: int,
    batch: int,
    bound: int | None,
    actors: int,
    learner: float,
    waiting: float,
) -> Observed:
    return Observed(
        now=float(now),
        version=ledger.version.number,
        publish_lag=ledger.publish_lag,
        batch=batch,
        max_staleness=bound,
        credits_limit=ledger.credits_limit,
        credits_in_use=ledger.credits_in_use,
        credits_ceiling=ledger.credits_ceiling,
        slots=ledger.slots,
        actors=actors,
        learner_waiting_s=learner,
        actors_waiting_s=waiting,
    )


def _update(ledger: Ledger, now: int) -> bool:
    """Make one update if the ledger has a batch."""
    taken = ledger.take(ledger.version, float(now))
    if not isinstance(taken, Batch):
        return False
    tickets = tuple(trajectory.ticket for trajectory in taken.trajectories)
    ledger.settle(
        Settlement(
            Version(1, ledger.version.number + 1),
            tickets,
            ledger.limits.max_staleness,
            published=True,
        )
    )
    return True


def _advance_actors(
    ledger: Ledger, running: dict[int, tuple[Grant, int]], actors: int, now: int
) -> None:
    """Actors commit complete trajectories; idle actors begin one if a credit is free."""
    for actor in range(actors):
        if actor in running and running[actor][1] <= now:
            grant, _ = running.pop(actor)
            ledger.commit(
                grant.ticket, Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), float(now)
            )
        if actor not in running and (granted := ledger.grant(f"actor-{actor}")) is not None:
            ledger.begin(granted.ticket, granted.version)
            running[actor] = granted, now + 1 + actor


class ControllerConformance:
    """Base class of a test class. ``make`` is a controller class or a factory function."""

    make: ClassVar[Callable[..., Controller]]
    situations: ClassVar[tuple[tuple[int, int | None], ...]] = tuple(
        product((1, 3, 8), (0, 1, 4, None))
    )
    """(B, max_staleness) of the runs that the suite simulates."""

    def new(self) -> Controller:
        """A new controller, before its first event."""
        return type(self).make()

    def test_every_observation_is_answered_with_valid_directives(self) -> None:
        for situation in self.situations:
            controller, requests = self.new(), ControllerRequests()
            for observed in observations(*situation):
                for directive in controller.handle(observed):
                    requests = requests.after(directive)

    def test_credits_always_feed_the_learner(self) -> None:
        """With fewer credits than one batch, no update could ever begin."""
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                for limit in _credits(controller.handle(observed)):
                    assert isinstance(limit, int), (
                        f"SetCredits({limit!r}): credits are a whole number"
                    )
                    batch = observed.batch
                    assert limit >= batch, (
                        f"SetCredits({limit}) with B = {batch} could never feed the learner"
                    )

    def test_a_bound_is_a_number_of_updates_or_none(self) -> None:
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                for directive in controller.handle(observed):
                    if isinstance(directive, SetBound) and directive.max_staleness is not None:
                        assert directive.max_staleness >= 0, (
                            f"{directive}: a sample cannot be newer than the policy that trains "
                            "on it"
                        )

    def test_a_repeated_observation_changes_nothing(self) -> None:
        """Directives are absolute, and events carry the time. Equal events get equal answers."""
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                assert tuple(controller.handle(observed)) == tuple(controller.handle(observed)), (
                    f"a different answer to the same {observed}"
                )

    def test_answers_depend_on_events_alone(self) -> None:
        """Two controllers of one class share no state, clock or chance, so their answers agree."""
        for situation in self.situations:
            one, other = self.new(), self.new()
            answers = [tuple(one.handle(observed)) for observed in observations(*situation)]
            assert answers == [
                tuple(other.handle(observed)) for observed in observations(*situation)
            ]

    def test_events_that_it_does_not_read_are_accepted(self) -> None:
        controller, requests = self.new(), ControllerRequests()
        for event in OTHER_EVENTS:
            for directive in controller.handle(event):
                requests = requests.after(directive)

    def test_control_continues_after_the_learner_returned_to_a_checkpoint(self) -> None:
        controller = self.new()
        seen = list(observations(3, 4))
        for observed in [
            *seen,
            *(replace(observed, now=observed.now + len(seen)) for observed in seen),
        ]:
            assert all(limit >= observed.batch for limit in _credits(controller.handle(observed)))

    def test_a_run_never_stalls_and_never_exceeds_the_bound(self) -> None:
        for batch, bound in self.situations:
            after = simulate(self.new(), batch=batch, bound=bound)
            assert after.violations == 0
            assert (
                after.begun
                == after.trained + after.inserted + sum(after.dropped.values()) + after.open
            )


def _credits(directives: Iterable[Directive]) -> list[int]:
    return [directive.limit for directive in directives if isinstance(directive, SetCredits)]


# Launchers
# --------------------------------------------------------------------------------------------------

LAUNCHED: Mapping[str, Mapping[str, Any]] = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"name": "ppo", "epochs": 1, "minibatch_size": 16},
    "network": {"hidden": [16]},
    "actors": {"count": 1, "hosts": 1, "rollout_steps": 16},
    "evaluation": {"episodes": 1, "num_envs": 1},
    "metrics": {"interval_s": 0.1},
    "placement": {"affinity": "none"},
    "run": {"max_updates": 1_000_000},
}
"""Settings of the runs that `LauncherConformance` launches. The suite ends each run itself."""
LARGE: Mapping[str, Mapping[str, Any]] = {
    "actors": {"rollout_steps": 2**18},
    "balance": {"memory_limit": 2**28},
}
"""Settings of slots whose memory is visible in the size of the process."""
POLL_S = 0.01
MISSING = "checkpoints/missing"
"""The checkpoint that a host is to load, and cannot, in the test of a failing host."""


def launched_config(*, grace_s: float, **sections: Mapping[str, Any]) -> Config:
    """The config of a small run. ``sections`` add and replace settings of `LAUNCHED`."""
    tables = {
        name: {**LAUNCHED.get(name, {}), **sections.get(name, {})}
        for name in {**LAUNCHED, **sections}
    }
    tables["run"]["grace_s"] = grace_s
    return load_config(tables)


@dataclass(slots=True)
class HostRecord:
    """The life of one host. It refers to no part of the run."""

    name: str
    ended: str | None = None
    """How the host ended; None while it works."""
    kills: int = 0
    processes: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
    """Descendants of this process when the end was awaited first, and after the end."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """An ended launch. It refers to no part of the run, so that the run's memory can be freed."""

    state: str
    error: RunError | None
    hosts: tuple[HostRecord, ...]


class RecordedHost:
    """`tianflow.interfaces.HostHandle` of a launcher, with a record of its life."""

    def __init__(self, handle: HostHandle, name: str) -> None:
        self._handle, self.record = handle, HostRecord(name)

    async def wait(self) -> str:
        before = descendants()
        ended = await self._handle.wait()
        self.record.processes = frozenset(before), frozenset(descendants())
        self.record.ended = ended
        return ended

    def ask_to_stop(self) -> None:
        self._handle.ask_to_stop()

    def kill(self) -> None:
        self.record.kills += 1
        self._handle.kill()

    def reconcile(self, host: HostSpec) -> None:
        self._handle.reconcile(host)

    @property
    def started(self) -> bool:
        return self._handle.started

    @property
    def silent_for(self) -> float:
        return self._handle.silent_for

    @property
    def activities(self) -> Sequence[Activity]:
        return self._handle.activities


class RecordedRun:
    """`tianflow.interfaces.RunView` of a real run, with a record of its hosts.

    Args:
        run: the run.
        capabilities: of the launcher.
        checkpoint: replaces the checkpoint that the learner loads.
        timeout_s: limit of `until`.
    """

    def __init__(
        self,
        run: Run,
        *,
        capabilities: LauncherCapabilities,
        checkpoint: Path | None,
        timeout_s: float,
    ) -> None:
        self.run_parts, self.id, self.capabilities = run, run.id, capabilities
        self.directory, self.spec = run.directory, run.spec
        self._checkpoint, self._timeout_s = checkpoint, timeout_s
        self.hosts: list[RecordedHost] = []
        """Every host that was started, in order."""
        self.processes: set[int] = set()
        """Descendants of this process that were seen while the run was going."""
        self.launch: asyncio.Task[None] | None = None
        """The launcher's task."""

    @property
    def inbox(self) -> HostInbox:
        return self.run_parts.inbox

    @property
    def settings(self) -> SettingsReader:
        return self.run_parts.settings

    @property
    def exchange(self) -> Exchange:
        return self.run_parts.exchange

    async def plan_host(self, host: HostSpec, incarnation: int) -> HostPlan:
        plan = await self.run_parts.plan_host(host, incarnation)
        return plan if self._checkpoint is None else replace(plan, checkpoint=self._checkpoint)

    async def run(self, start_host: HostStarter) -> None:
        async def start(host: HostSpec, incarnation: int) -> HostHandle:
            recorded = RecordedHost(await start_host(host, incarnation), host.name)
            self.hosts.append(recorded)
            self.processes |= descendants()
            return recorded

        await self.run_parts.run(start)

    @property
    def ended(self) -> bool:
        """The launcher has returned."""
        return self.launch is not None and self.launch.done()

    @property
    def program(self) -> Program:
        """Components and hosts of the config in force."""
        return placement.build(self.run_parts.control.config, self.capabilities)

    @property
    def alive(self) -> dict[str, RecordedHost]:
        """Hosts that have not ended, by name."""
        return {host.record.name: host for host in self.hosts if host.record.ended is None}

    def works(self, component: str) -> bool:
        """True if ``component`` has started, and its newest numbers have arrived."""
        registry = self.run_parts.registry
        return registry.was_started(component) and component in {
            report.name for report in registry.reports
        }

    def has_started(self, host: str) -> bool:
        """True if every component of ``host`` works."""
        return host in self.alive and self.alive[host].started

    async def until(self, fact: str, holds: Callable[[], bool]) -> None:
        """Wait until ``fact`` holds. AssertionError if the run ends before, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while not holds():
                    assert not self.ended, (
                        f"the launch ended before: {fact}. {self.launch!r}, "
                        f"{self.run_parts.lifecycle.first_error!r}"
                    )
                    await asyncio.sleep(POLL_S)
                return
        raise AssertionError(f"not true after {self._timeout_s:g} s: {fact}")

    async def trains(self) -> None:
        """Wait until every component works, every host has reported, and two updates were made."""
        run, program = self.run_parts, self.program
        for component in program.components:
            await self.until(f"{component.name} works", partial(self.works, component.name))
        for host in program.hosts:
            await self.until(
                f"host {host.name} has started",
                partial(self.has_started, host.name),
            )
        first = run.exchange.ledger.version.number
        await self.until(
            "the learner has made two updates",
            lambda: run.exchange.ledger.version.number >= first + 2,
        )


def descendants() -> set[int]:
    """Processes that descend from this one, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in processes():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    unseen = list(children.get(os.getpid(), ()))
    while unseen:
        found.add(unseen[-1])
        unseen += children.get(unseen.pop(), ())
    return found


def descriptors() -> dict[str, str]:
    """Open descriptors of this process, and what each one leads to."""
    gc.collect()
    found: dict[str, str] = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found[path.name] = str(path.readlink())
    return found


def address_space() -> int:
    """Bytes of address space of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


class LauncherConformance:
    """Base class of a test class. ``make`` is a launcher class or a factory function.

    Each test launches a real run of PPO on CartPole, which takes a few seconds. Linux only: the
    suite reads /proc.
    """

    make: ClassVar[Callable[[], Launcher]]
    timeout_s: ClassVar[float] = 60.0
    """Seconds in which a host has to start, to answer and to end."""
    grace_s: ClassVar[float] = 10.0
    """Seconds between a request to stop and a kill (``run.grace_s``)."""

    def new(self) -> Launcher:
        """A new launcher, after its imports."""
        launcher = type(self).make()
        launcher.prepare()
        return launcher

    def test_hosts_start_report_change_and_stop_when_they_are_asked_to(self) -> None:
        async def scenario(run: RecordedRun) -> None:
            control = run.run_parts.control
            await run.trains()
            for host in run.alive.values():
                assert 0.0 <= host.silent_for < self.timeout_s
            before = len(run.hosts)
            control.change({"actors": {"count": 2}}, source="suite")
            await run.trains()
            control.change({"actors": {"count": 1}}, source="suite")
            await run.until("actor-1 has ended", lambda: not run.works("actor-1"))
            await run.trains()
            assert before == len(run.hosts), "a change of components restarted a host"
            control.stop(source="suite")
            await run.until("the launch has ended", lambda: run.ended)

        ended = self.launch(scenario)
        assert ended.error is None
        assert ended.state == "stopped"
        assert [] == [host.name for host in ended.hosts if host.kills], "these hosts were killed"
        assert [] == [host.name for host in ended.hosts if host.ended is None], (
            "the run did not see the end of these hosts"
        )

    def test_a_killed_host_starts_again_and_cancelling_the_launch_ends_every_host(self) -> None:
        async def scenario(run: RecordedRun) -> None:
            await run.trains()
            (name,) = (
                host.name
                for host in run.program.hosts
                if any(component.name == "actor-0" for component in host.components)
            )
            killed = run.alive[name]
            killed.kill()
            await run.until(f"host {name} has ended", lambda: killed.record.ended is not None)
            assert killed.record.ended, "wait has to say how the host ended"
            if run.capabilities.processes:
                before, after = killed.record.processes
                assert before - after, f"wait returned while host {name} had its process"
            await run.until(f"host {name} has started again", lambda: name in run.alive)
            await run.trains()

        self.launch(scenario)

    def test_a_host_that_fails_is_reported_with_its_reason(self) -> None:
        async def scenario(run: RecordedRun) -> None:
            lifecycle = run.run_parts.lifecycle
            await run.until("the failure is reported", lambda: lifecycle.first_error is not None)
            await run.until("the run has ended", lambda: run.ended)

        error = self.launch(scenario, checkpoint=Path(MISSING)).error
        assert error is not None
        assert error.component == "learner", f"the failure of the learner names {error.component!r}"
        assert MISSING in error.summary, f"the reason is missing in {error.summary!r}"

    def test_cancelling_a_launch_while_hosts_start_ends_every_host(self) -> None:
        async def scenario(run: RecordedRun) -> None:
            await run.until("a host starts", lambda: bool(run.hosts))

        self.launch(scenario)

    def test_closing_slots_frees_their_memory(self) -> None:
        launcher = self.new()
        config = launched_config(grace_s=self.grace_s, **LARGE)
        spec = require_valid(config).spec
        assert spec is not None
        layout = trajectory_layout(config, spec)
        files, before = descriptors(), address_space()
        slots = launcher.slots(config=config, layout=layout, draws=None)
        slots.add_slots(1)
        nbytes = arena_nbytes(layout, slots.arena.capacity)
        slots.close()
        slots.close()
        del slots
        left = address_space() - before
        assert left < nbytes // 2, f"{left} of {nbytes} bytes of slots are left after close"
        _assert_closed(files)

    def launch(
        self,
        scenario: Callable[[RecordedRun], Awaitable[None]],
        *,
        checkpoint: Path | None = None,
    ) -> LaunchRecord:
        """Launch a run, wait for ``scenario``, cancel the launch unless the run has ended, and
        check that nothing is left.

        Raises:
            AssertionError: a process, task or descriptor is left.
        """
        launcher = self.new()
        config = launched_config(grace_s=self.grace_s)
        spec = require_valid(config).spec
        assert spec is not None
        layout = trajectory_layout(config, spec)
        files = descriptors()

        async def launched(directory: Path) -> LaunchRecord:
            slots = launcher.slots(config=config, layout=layout, draws=None)
            try:
                run = Run(
                    run_id=f"conformance-{os.getpid()}",
                    directory=directory,
                    config=config,
                    spec=spec,
                    layout=layout,
                    slots=slots,
                    capabilities=launcher.capabilities,
                )
                recorded = RecordedRun(
                    run,
                    capabilities=launcher.capabilities,
                    checkpoint=checkpoint,
                    timeout_s=self.timeout_s,
                )
                await self._follow(launcher, recorded, slots, scenario)
                hosts = tuple(host.record for host in recorded.hosts)
                return LaunchRecord(run.control.state, run.lifecycle.first_error, hosts)
            finally:
                slots.close()

        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            ended = asyncio.run(launched(Path(folder)))
        _assert_closed(files)
        return ended

    async def _follow(
        self,
        launcher: Launcher,
        run: RecordedRun,
        slots: SlotOwner,
        scenario: Callable[[RecordedRun], Awaitable[None]],
    ) -> None:
        """Launch ``run``, and end it after ``scenario``."""
        tasks, others = asyncio.all_tasks(), descendants()
        run.launch = launch = asyncio.create_task(launcher.launch(run, slots), name="launch")
        try:
            await scenario(run)
        finally:
            run.processes |= descendants()
            ended = launch.done()
            launch.cancel()
            await asyncio.wait([launch], timeout=self.timeout_s)
        assert launch.done(), f"launch has not ended {self.timeout_s:g} s after it was cancelled"
        if ended:
            launch.result()
        else:
            assert launch.cancelled(), f"launch was cancelled, and ended with {launch!r}"
        left = asyncio.all_tasks() - tasks
        assert not left, f"tasks are left: {sorted(task.get_name() for task in left)}"
        alive = {entry.pid for entry in processes()} & run.processes - others
        assert not alive, f"processes are left: {sorted(alive)}"


def _assert_closed(before: Mapping[str, str]) -> None:
    """Every descriptor that was opened since ``before`` is closed."""
    left = {number: target for number, target in descriptors().items() if number not in before}
    assert not left, f"descriptors are left: {left}"
