"""Shipped launchers pass the conformance suite, and a broken launcher fails each of its tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tianflow.channels.memory import HeapSlots
from tianflow.core.program import HostSpec
from tianflow.errors import RunError
from tianflow.interfaces import HostHandle, HostStarter, RunView, SlotOwner
from tianflow.launchers.inline import InlineHost, InlineLauncher
from tianflow.launchers.processes import ProcessLauncher
from tianflow.testing import LauncherConformance

pytestmark = pytest.mark.e2e


class TestInline(LauncherConformance):
    make = InlineLauncher


@pytest.mark.e2e
class TestProcesses(LauncherConformance):
    make = ProcessLauncher


class Broken(InlineLauncher):
    """The inline launcher with hosts of the class ``host``."""

    host: type[InlineHost] = InlineHost

    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        await run.run(self.starter(run, slots))

    def starter(self, run: RunView, slots: SlotOwner) -> HostStarter:
        async def start(host: HostSpec, incarnation: int) -> HostHandle:
            plan = await run.plan_host(host, incarnation)
            return self.host(run=run, plan=plan, slots=slots)

        return start


class NeverStarted(InlineHost):
    started = False  # type: ignore[assignment]  # the mistake


class Deaf(InlineHost):
    def ask_to_stop(self) -> None:
        """Ignore the request."""


class Unchanging(InlineHost):
    def reconcile(self, host: HostSpec) -> None:
        """Ignore the change."""


class Immortal(InlineHost):
    def kill(self) -> None:
        """Ignore the kill."""


class Wordless(InlineHost):
    async def wait(self) -> str:
        await super().wait()
        return ""


class Silent(InlineHost):
    """A host that ends without a report of its failure."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ends.fail = lambda error: None  # type: ignore[method-assign]


class Vague(InlineHost):
    """A host that reports a failure without its reason."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        fail = self._ends.fail
        self._ends.fail = lambda error: fail(RunError(error.component, "failed"))  # type: ignore[method-assign]


class LeavesTask(Broken):
    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        self.left = asyncio.create_task(asyncio.Event().wait(), name="left")
        await super().launch(run, slots)


class LeavesProcess(Broken):
    started: tuple[subprocess.Popen[bytes], ...] = ()

    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        LeavesProcess.started += (await asyncio.to_thread(subprocess.Popen, command),)
        await super().launch(run, slots)


class LeavesDescriptor(Broken):
    opened: tuple[int, ...] = ()

    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        LeavesDescriptor.opened += (os.memfd_create("left"),)
        await super().launch(run, slots)


class EndlessLauncher(Broken):
    """A cancellation does not end it."""

    async def launch(self, run: RunView, slots: SlotOwner) -> None:
        while True:
            try:
                await super().launch(run, slots)
            except asyncio.CancelledError:
                return


class KeepsSlots(InlineLauncher):
    made: tuple[HeapSlots, ...] = ()

    def slots(self, **arguments: Any) -> HeapSlots:
        KeepsSlots.made += (super().slots(**arguments),)
        return KeepsSlots.made[-1]


def with_host(host: type[InlineHost]) -> Callable[[], Broken]:
    def make() -> Broken:
        launcher = Broken()
        launcher.host = host
        return launcher

    return make


STARTS = "test_hosts_start_report_change_and_stop_when_they_are_asked_to"
RESTARTS = "test_a_killed_host_starts_again_and_cancelling_the_launch_ends_every_host"
FAILS = "test_a_host_that_fails_is_reported_with_its_reason"
CANCELLED = "test_cancelling_a_launch_while_hosts_start_ends_every_host"
CLOSES = "test_closing_slots_frees_their_memory"
BROKEN: tuple[tuple[str, Callable[[], InlineLauncher], str], ...] = (
    (STARTS, with_host(NeverStarted), "host processes has started"),
    (STARTS, with_host(Deaf), "these hosts were killed"),
    (STARTS, with_host(Unchanging), "actor-1 works"),
    (RESTARTS, with_host(Immortal), "host processes has ended"),
    (RESTARTS, with_host(Wordless), "wait has to say how the host ended"),
    (RESTARTS, EndlessLauncher, "launch was cancelled, and ended with"),
    (FAILS, with_host(Silent), "the failure of the learner names 'processes'"),
    (FAILS, with_host(Vague), "the reason is missing"),
    (CANCELLED, LeavesTask, "tasks are left: .*left"),
    (CANCELLED, LeavesProcess, "processes are left"),
    (CANCELLED, LeavesDescriptor, "descriptors are left: .*memfd:left"),
    (CLOSES, KeepsSlots, "bytes of slots are left after close"),
)


@pytest.fixture(autouse=True)
def _nothing_stays_of_a_broken_launcher() -> Iterator[None]:
    yield
    for process in LeavesProcess.started:
        process.kill()
        process.wait()
    for descriptor in LeavesDescriptor.opened:
        os.close(descriptor)
    LeavesProcess.started, LeavesDescriptor.opened, KeepsSlots.made = (), (), ()


@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        pytest.param(*case, marks=[pytest.mark.e2e] if case[0] in (STARTS, RESTARTS) else [])
        for case in BROKEN
    ],
)
def test_the_suite_fails_for_a_launcher_that_breaks_the_promise(
    check: str, broken: Callable[[], InlineLauncher], message: str
) -> None:
    class Suite(LauncherConformance):
        make = staticmethod(broken)
        timeout_s = 3.0
        grace_s = 0.5

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), check)()


def test_every_test_of_the_suite_can_fail() -> None:
    checks = {name for name in vars(LauncherConformance) if name.startswith("test_")}
    assert checks == {check for check, _, _ in BROKEN}
