"""Hosts are kept alive, hung ones are ended, and a stop ends, whatever state a host is in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tianflow.coordinator import supervisor as module
from tianflow.coordinator.supervisor import HostTimeouts, Supervisor
from tianflow.core.payloads import Activity
from tianflow.core.program import ComponentSpec, HostSpec
from tianflow.errors import RunError


def host(name: str, *components: str) -> HostSpec:
    role = "actor" if name.startswith("actors") else name
    return HostSpec(
        name, tuple(ComponentSpec(component, role) for component in components or (name,))
    )  # type: ignore[arg-type]  # tests name hosts by roles


Clock = Callable[[Supervisor, float], None]


class FakeHost:
    """A handle whose end the test decides. ``obeys``: it leaves when asked to."""

    def __init__(self, spec: HostSpec, *, obeys: bool = True, started: bool = True) -> None:
        self.spec, self.obeys, self.started, self.silent_for = spec, obeys, started, 0.0
        self.activities: list[Activity] = []
        self.asked, self.killed, self.specs = 0, 0, [spec]
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await self._ended

    def end(self, how: str = "exit status 0") -> None:
        if not self._ended.done():
            self._ended.set_result(how)

    def ask_to_stop(self) -> None:
        self.asked += 1
        if self.obeys:
            self.end()

    def kill(self) -> None:
        self.killed += 1
        self.end("signal 9")

    def reconcile(self, spec: HostSpec) -> None:
        self.specs.append(spec)


class Nursery:
    """Starts `FakeHost`s at once, unless ``hold`` is set; remembers everything that the supervisor
    says.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, FakeHost] = {}
        self.obeys = self.started = True
        self.started_hosts: list[FakeHost] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.error: BaseException | None = None
        self.lost: list[tuple[str, tuple[str, ...], str]] = []
        self.failures: list[RunError] = []
        self.tickets: list[tuple[int, int, str]] = []
        self.steps: dict[int, int] = {}

    async def start(self, spec: HostSpec, incarnation: int) -> FakeHost:
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        self.hosts[spec.name] = FakeHost(spec, obeys=self.obeys, started=self.started)
        self.started_hosts.append(self.hosts[spec.name])
        return self.hosts[spec.name]

    def supervisor(
        self,
        *,
        max_restarts: int = 20,
        step_s: float = 6.0,
        start_s: float = 10.0,
        grace_s: float = 0.05,
    ) -> Supervisor:
        return Supervisor(
            start=self.start,
            lost=lambda spec, reason: self.lost.append(
                (spec.name, tuple(c.name for c in spec.components), reason)
            ),
            failed=self.failures.append,
            written_slots=lambda: self.tickets,
            progress=lambda _slot, ticket: self.steps[ticket],
            timeouts=HostTimeouts(step_s, start_s),
            max_restarts=max_restarts,
            window_s=300.0,
            grace_s=grace_s,
        )


@pytest.fixture(autouse=True)
def _restarts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (0.0,))


@pytest.fixture
def nursery() -> Nursery:
    return Nursery()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def keeping(supervisor: Supervisor, *hosts: HostSpec) -> AsyncIterator[Supervisor]:
    supervisor.reconcile(hosts)
    await settle()
    try:
        yield supervisor
    finally:
        async with asyncio.timeout(5.0):
            await supervisor.abandon()


@pytest.mark.parametrize("how", ["exit status 0", "exit status 1", "signal 9"])
async def test_a_host_that_ends_is_told_as_lost_and_started_again(
    nursery: Nursery, how: str
) -> None:
    async with keeping(nursery.supervisor(), host("actors-0", "actor-0", "actor-1")) as supervisor:
        nursery.hosts["actors-0"].end(how)
        await settle()
        assert [("actors-0", ("actor-0", "actor-1"), "died")] == nursery.lost
        assert 2 == len(nursery.started_hosts)
        assert {("actors-0", "died"): 1} == dict(supervisor.restarts)
        assert [] == nursery.failures


async def test_more_restarts_than_the_budget_end_the_run(nursery: Nursery) -> None:
    async with keeping(nursery.supervisor(max_restarts=2), host("actors-0"), host("actors-1")):
        for name in ("actors-0", "actors-1", "actors-0"):
            assert [] == nursery.failures
            nursery.hosts[name].end()
            await settle()
        assert 4 == len(nursery.started_hosts)
        assert "3 hosts ended within 300 s, the last one by died (exit status 0)" in str(
            nursery.failures[0]
        )


async def test_a_host_that_never_starts_is_given_up_after_three_attempts(nursery: Nursery) -> None:
    nursery.started = False
    async with keeping(nursery.supervisor(), host("learner")):
        for _ in range(3):
            assert [] == nursery.failures
            nursery.hosts["learner"].end("exit status 1")
            await settle()
        assert 3 == len(nursery.started_hosts)
        assert "learner: does not start" in str(nursery.failures[0])


async def test_a_host_that_has_worked_may_be_killed_often_while_it_starts_again(
    nursery: Nursery,
) -> None:
    async with keeping(nursery.supervisor(), host("actors-0")):
        nursery.started = False
        for _ in range(5):
            nursery.hosts["actors-0"].end("signal 9")
            await settle()
        assert [] == nursery.failures
        assert 6 == len(nursery.started_hosts)


async def test_a_host_that_has_worked_and_then_hangs_at_every_start_is_given_up(
    nursery: Nursery, clock: Clock
) -> None:
    async with keeping(nursery.supervisor(start_s=10.0), host("actors-0")) as supervisor:
        nursery.started = False
        nursery.hosts["actors-0"].end()
        for _ in range(3):
            assert [] == nursery.failures
            await settle()
            clock(supervisor, 12.0)
            await settle()
        assert "actors-0: does not start: 3 attempts" in str(nursery.failures[0])


@pytest.mark.parametrize(
    "error",
    [RunError("nursery", "no more processes"), OSError("too many open files"), ValueError("a bug")],
)
async def test_whatever_starting_a_host_raises_ends_the_run(
    nursery: Nursery, error: Exception
) -> None:
    nursery.error = error
    async with keeping(nursery.supervisor(), host("actors-0")):
        assert [str(error).split(": ")[-1]] == [
            str(failure).split(": ")[-1] for failure in nursery.failures
        ]


# Stopping
# --------------------------------------------------------------------------------------------------


async def test_a_stop_asks_waits_the_grace_time_and_then_kills(nursery: Nursery) -> None:
    supervisor = nursery.supervisor(grace_s=0.02)
    async with keeping(supervisor, host("learner"), host("actors-0")):
        nursery.hosts["actors-0"].obeys = False
        async with asyncio.timeout(5.0):
            await supervisor.stop()
        assert (1, 0) == (nursery.hosts["learner"].asked, nursery.hosts["learner"].killed)
        assert (1, 1) == (nursery.hosts["actors-0"].asked, nursery.hosts["actors-0"].killed)
        assert {"stopped"} == {reason for _, _, reason in nursery.lost}
        assert not supervisor.restarts


@pytest.mark.parametrize("how", ["stop", "abandon"])
async def test_a_stop_does_not_wait_for_a_host_that_is_still_being_started(
    nursery: Nursery, how: str
) -> None:
    """Actor hosts wait for the learner's first version, which never comes when the run is stopped
    before it.
    """
    nursery.hold.clear()
    supervisor = nursery.supervisor(grace_s=60.0)
    supervisor.reconcile([host("actors-0")])
    await settle()
    async with asyncio.timeout(5.0):
        await getattr(supervisor, how)()
    assert [] == nursery.started_hosts


@pytest.mark.parametrize("how", ["stop", "abandon"])
async def test_a_host_that_cannot_even_be_killed_keeps_no_run_from_ending(
    nursery: Nursery, how: str
) -> None:
    """Who would kill it is stopped itself; the launcher ends both."""
    supervisor = nursery.supervisor(grace_s=0.02)
    supervisor.reconcile([host("actors-0")])
    await settle()
    nursery.hosts["actors-0"].end = lambda how="": None  # type: ignore[method-assign]
    async with asyncio.timeout(5.0):
        await getattr(supervisor, how)()
    assert 1 == nursery.hosts["actors-0"].killed
    assert [("actors-0", ("actors-0",), "stopped")] == nursery.lost


async def test_a_stop_does_not_wait_for_a_back_off(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", (3600.0,))
    supervisor = nursery.supervisor(grace_s=60.0)
    supervisor.reconcile([host("actors-0")])
    await settle()
    nursery.hosts["actors-0"].end()
    await settle()
    async with asyncio.timeout(5.0):
        await supervisor.stop()
    assert 1 == len(nursery.started_hosts)


# Scaling
# --------------------------------------------------------------------------------------------------


def ranks(count: int = 3) -> list[HostSpec]:
    """Hosts of one group: a learner and its other ranks."""
    names = ["learner", *(f"learner-{rank}" for rank in range(1, count))]
    return [
        HostSpec(name, (ComponentSpec(name, "rank" if rank else "learner", rank),), group="learner")
        for rank, name in enumerate(names)
    ]


@pytest.mark.parametrize("victim", ["learner", "learner-1", "learner-2"])
async def test_hosts_of_a_group_end_together_and_start_again_together(
    nursery: Nursery, victim: str
) -> None:
    supervisor = nursery.supervisor()
    supervisor.reconcile([*ranks(), host("actors-0")])
    await settle()
    before = dict(nursery.hosts)
    nursery.hosts[victim].end("signal 11")
    await settle()
    others = [spec.name for spec in ranks() if spec.name != victim]
    assert {(victim, (victim,), "died"), *((name, (name,), "rank_lost") for name in others)} == set(
        nursery.lost
    )
    assert [1, 1] == [before[name].killed for name in others]
    assert all(nursery.hosts[name] is not before[name] for name in [victim, *others])
    assert nursery.hosts["actors-0"] is before["actors-0"]
    assert {"learner": 2, "learner-1": 2, "learner-2": 2, "actors-0": 1} == supervisor.starts
    await supervisor.stop()


async def test_one_loss_of_a_group_is_one_restart_of_the_budget(nursery: Nursery) -> None:
    supervisor = nursery.supervisor(max_restarts=2)
    supervisor.reconcile(ranks())
    for _ in range(2):
        await settle()
        nursery.hosts["learner-1"].end()
    await settle()
    assert not nursery.failures
    nursery.hosts["learner-2"].end()
    await settle()
    assert ["3 hosts ended within 300 s, the last one by died (exit status 0)"] == [
        failure.summary for failure in nursery.failures
    ]
    await supervisor.stop()


async def test_a_group_that_is_asked_to_stop_is_not_killed(nursery: Nursery) -> None:
    supervisor = nursery.supervisor()
    supervisor.reconcile(ranks())
    await settle()
    await supervisor.stop()
    assert [(1, 0)] * 3 == [(each.asked, each.killed) for each in nursery.started_hosts]
    assert ["stopped"] * 3 == [reason for _, _, reason in nursery.lost]


async def test_a_stop_amid_the_start_of_a_group_leaves_none_of_it(nursery: Nursery) -> None:
    supervisor = nursery.supervisor()
    nursery.hold.clear()
    supervisor.reconcile(ranks())
    await settle()
    stopping = asyncio.create_task(supervisor.stop())
    await settle()
    nursery.hold.set()
    await stopping
    await settle()
    assert not supervisor.handles
    assert all(each.asked or each.killed for each in nursery.started_hosts)


async def test_a_rank_that_cannot_be_started_ends_the_others(nursery: Nursery) -> None:
    supervisor = nursery.supervisor()
    started = nursery.start

    async def start(spec: HostSpec, incarnation: int) -> FakeHost:
        if spec.name == "learner-2":
            raise RunError("launcher", "no more processes")
        return await started(spec, incarnation)

    supervisor._start = start  # type: ignore[assignment]
    supervisor.reconcile(ranks())
    await settle()
    assert ["no more processes"] == [failure.summary for failure in nursery.failures]
    assert [1, 1] == [each.killed for each in nursery.started_hosts]
    assert not supervisor.handles


async def test_a_host_that_is_no_longer_wanted_leaves_and_stays_away(nursery: Nursery) -> None:
    async with keeping(nursery.supervisor(), host("learner"), host("actors-0")) as supervisor:
        supervisor.reconcile([host("learner")])
        await settle()
        assert [("actors-0", ("actors-0",), "stopped")] == nursery.lost
        assert {"learner"} == set(supervisor.handles)
        assert not supervisor.restarts


async def test_a_host_that_is_wanted_again_while_it_leaves_comes_back_and_is_no_restart(
    nursery: Nursery,
) -> None:
    nursery.obeys = False
    async with keeping(nursery.supervisor(), host("actors-0")) as supervisor:
        first = nursery.hosts["actors-0"]
        supervisor.reconcile([])
        supervisor.reconcile([host("actors-0")])
        first.end()
        await settle()
        assert 2 == len(nursery.started_hosts)
        assert [("actors-0", ("actors-0",), "stopped")] == nursery.lost
        assert not supervisor.restarts
        assert [host("actors-0")] == first.specs


async def test_components_added_while_a_host_runs_come_back_with_it_when_it_dies(
    nursery: Nursery,
) -> None:
    """Else their tickets would stay open for ever, and their credits with them."""
    async with keeping(nursery.supervisor(), host("actors-0", "actor-0")) as supervisor:
        supervisor.reconcile([host("actors-0", "actor-0", "actor-2")])
        supervisor.reconcile(
            [host("actors-0", "actor-0")]
        )  # the one retired may still hold a ticket
        nursery.hosts["actors-0"].end()
        await settle()
        assert [("actors-0", ("actor-0", "actor-2"), "died")] == nursery.lost


async def test_components_wanted_while_a_host_is_being_started_are_told_to_it(
    nursery: Nursery,
) -> None:
    nursery.hold.clear()
    async with keeping(nursery.supervisor(), host("actors-0", "actor-0")) as supervisor:
        wanted = host("actors-0", "actor-0", "actor-1")
        supervisor.reconcile([wanted])
        nursery.hold.set()
        await settle()
        assert wanted == nursery.hosts["actors-0"].specs[-1]


# Watching
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    """Makes a supervisor look as often as it would in so many seconds."""
    now = [0.0]

    def look(supervisor: Supervisor, seconds: float) -> None:
        end = now[0] + seconds
        while now[0] < end:
            now[0] += module.TICK_S
            supervisor._watch(now[0])

    return look


async def test_a_host_whose_components_do_not_start_in_time_is_killed_though_it_talks(
    nursery: Nursery, clock: Clock
) -> None:
    """A constructor that hangs does so on the compute thread; the host's loop goes on reporting."""
    nursery.started = False
    async with keeping(nursery.supervisor(start_s=10.0), host("actors-0")) as supervisor:
        clock(supervisor, 9.5)
        assert 0 == nursery.hosts["actors-0"].killed
        clock(supervisor, 1.5)
        await settle()
        assert [("actors-0", ("actors-0",), "start_timeout")] == nursery.lost


async def test_every_start_of_a_host_has_its_own_time(nursery: Nursery, clock: Clock) -> None:
    nursery.started = False
    async with keeping(nursery.supervisor(start_s=10.0), host("actors-0")) as supervisor:
        clock(supervisor, 9.0)
        nursery.hosts["actors-0"].end()
        await settle()
        clock(supervisor, 9.0)
        assert 0 == nursery.hosts["actors-0"].killed


async def test_a_silent_actor_host_is_killed_after_a_step_and_two_heartbeats(
    nursery: Nursery, clock: Clock
) -> None:
    async with keeping(
        nursery.supervisor(step_s=6.0), host("actors-0"), host("evaluator"), host("learner")
    ) as supervisor:
        for handle in nursery.started_hosts:
            handle.silent_for = 60.0
        clock(supervisor, 7.5)
        assert [0, 0, 0] == [handle.killed for handle in nursery.started_hosts]
        clock(supervisor, 1.5)
        await settle()
        assert [
            ("actors-0", ("actors-0",), "silent"),
            ("evaluator", ("evaluator",), "silent"),
        ] == sorted(nursery.lost)


async def test_a_learner_without_heartbeats_is_replaced(nursery: Nursery, clock: Clock) -> None:
    """Whatever the time-out of a step is: a learner takes none."""
    async with keeping(nursery.supervisor(step_s=600.0), host("learner")) as supervisor:
        nursery.hosts["learner"].silent_for = 60.0
        clock(supervisor, module.LEARNER_SILENCE_S - 0.5)
        assert 0 == nursery.hosts["learner"].killed
        clock(supervisor, 1.5)
        await settle()
        assert [("learner", ("learner",), "silent")] == nursery.lost
        assert 2 == supervisor.starts["learner"]


async def test_an_environment_that_takes_no_step_is_hung_and_a_slow_one_is_not(
    nursery: Nursery, clock: Clock
) -> None:
    slow, hung = host("actors-0", "actor-0", "actor-2"), host("actors-1", "actor-1")
    async with keeping(nursery.supervisor(step_s=6.0), slow, hung) as supervisor:
        nursery.tickets = [(0, 0, "actor-0"), (1, 1, "actor-1")]
        nursery.steps = {0: 0, 1: 5, 2: -1}
        for _ in range(6):
            clock(supervisor, 5.5)
            nursery.steps[0] += 1
        await settle()
        assert {("actors-1", ("actor-1",), "env_hang")} == set(nursery.lost)
        assert 0 == nursery.hosts["actors-0"].killed


@pytest.mark.parametrize(
    ("operation", "limit_s"),
    [("constructor", 10.0), ("reset", 10.0), ("close", 10.0), ("step", 6.0)],
)
async def test_one_call_into_an_environment_has_a_limit_without_any_open_ticket(
    nursery: Nursery, clock: Clock, operation: str, limit_s: float
) -> None:
    """A straggler's ticket is given up long before, and a deterministic re-seed begins none."""
    async with keeping(
        nursery.supervisor(step_s=6.0, start_s=10.0), host("actors-0", "actor-0")
    ) as supervisor:
        nursery.hosts["actors-0"].activities = [Activity("actor-0", operation, 1, 0)]
        clock(supervisor, limit_s)
        assert 0 == nursery.hosts["actors-0"].killed
        clock(supervisor, 1.0)
        await settle()
        assert [("actors-0", ("actor-0",), "env_hang")] == nursery.lost


@pytest.mark.parametrize("operation", ["constructor", "reset", "step"])
async def test_a_vector_may_take_longer_than_the_limit_of_one_environment(
    nursery: Nursery, clock: Clock, operation: str
) -> None:
    nursery.started = operation == "step"
    async with keeping(
        nursery.supervisor(step_s=6.0, start_s=6.0), host("actors-0", "actor-0")
    ) as supervisor:
        for environment in range(8):
            nursery.hosts["actors-0"].activities = [Activity("actor-0", operation, 1, environment)]
            clock(supervisor, 5.5)
        assert 0 == nursery.hosts["actors-0"].killed


async def test_an_open_ticket_without_steps_is_not_hung_while_its_vector_resets(
    nursery: Nursery, clock: Clock
) -> None:
    """Its episodes ended together: one row takes as long as all resets."""
    async with keeping(nursery.supervisor(step_s=6.0), host("actors-0", "actor-0")) as supervisor:
        nursery.tickets, nursery.steps = [(0, 0, "actor-0")], {0: 3}
        for environment in range(8):
            nursery.hosts["actors-0"].activities = [Activity("actor-0", "step", 4, environment)]
            clock(supervisor, 5.0)
        assert 0 == nursery.hosts["actors-0"].killed


async def test_a_constructor_that_hangs_in_a_start_is_a_failed_start(
    nursery: Nursery, clock: Clock
) -> None:
    """Else a host that hangs at every start would be restarted for as long as the budget lasts."""
    nursery.started = False
    async with keeping(nursery.supervisor(start_s=10.0), host("actors-0", "actor-0")) as supervisor:
        for _ in range(3):
            nursery.hosts["actors-0"].activities = [Activity("actor-0", "constructor", 1, -1)]
            clock(supervisor, 12.0)
            await settle()
        assert {"start_timeout"} == {reason for _, _, reason in nursery.lost}
        assert "actors-0: does not start: 3 attempts" in str(nursery.failures[0])


async def test_a_start_that_lasts_is_reported_with_the_environment_at_work(
    nursery: Nursery, clock: Clock
) -> None:
    nursery.started = False
    async with keeping(nursery.supervisor(start_s=60.0), host("actors-0", "actor-0")) as supervisor:
        nursery.hosts["actors-0"].activities = [Activity("actor-0", "reset", 1, 3)]
        clock(supervisor, 5.0)
        assert [] == supervisor.slow_starts
        supervisor._watched_s = 12.5
        assert [
            "host 'actors-0' has not started for 12 s (actor-0: reset of environment 3)"
        ] == supervisor.slow_starts


async def test_the_hung_environment_of_a_retired_actor_is_noticed(
    nursery: Nursery, clock: Clock
) -> None:
    async with keeping(
        nursery.supervisor(step_s=6.0), host("actors-0", "actor-0", "actor-2")
    ) as supervisor:
        nursery.tickets, nursery.steps = [(7, 0, "actor-2")], {7: 3}
        supervisor.reconcile([host("actors-0", "actor-0")])
        clock(supervisor, 8.0)
        await settle()
        assert [("actors-0", ("actor-0", "actor-2"), "env_hang")] == nursery.lost


async def test_a_host_that_was_heard_of_is_not_silent_however_long_the_coordinator_stood_still(
    nursery: Nursery, clock: Clock
) -> None:
    """After a minute in which the coordinator was stopped, it may look at hosts before it reads
    what they have sent.
    """
    async with keeping(nursery.supervisor(step_s=6.0), host("actors-0")) as supervisor:
        clock(supervisor, 100.0)
        nursery.hosts["actors-0"].silent_for = 60.0
        clock(supervisor, 1.0)
        nursery.hosts["actors-0"].silent_for = 0.0
        clock(supervisor, 5.5)
        assert 0 == nursery.hosts["actors-0"].killed


async def test_a_gap_in_the_coordinators_own_time_is_nobodys_silence(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator was stopped for a minute: everyone looks silent, and nobody is killed."""
    supervisor = nursery.supervisor(step_s=6.0)
    async with keeping(supervisor, host("actors-0")):
        loop, real = asyncio.get_running_loop(), asyncio.get_running_loop().time
        watching = asyncio.create_task(supervisor.run(lambda: None))
        await asyncio.sleep(0)
        nursery.hosts["actors-0"].silent_for = 60.0
        looks: list[float] = []
        looked = asyncio.Event()
        watch = supervisor._watch
        monkeypatch.setattr(
            supervisor, "_watch", lambda now: (watch(now), looks.append(now), looked.set())
        )
        monkeypatch.setattr(loop, "time", lambda: real() + 60.0)
        async with asyncio.timeout(5.0):
            await looked.wait()
        watching.cancel()
        assert 0.0 < looks[0] <= 2 * module.TICK_S
        assert 0 == nursery.hosts["actors-0"].killed
