"""Hosts as a run sees them: what is asked of one that goes, or is gone, has an answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.settings import cartpole
from tests.support.worlds import turns
from tianflow.coordinator import Run
from tianflow.core.payloads import Version
from tianflow.core.program import ComponentSpec, HostSpec
from tianflow.errors import BrokenChannelError, TianflowError
from tianflow.launchers.host_forker import HostForker
from tianflow.launchers.inline import HeapSlots, InlineHost, InlineLauncher
from tianflow.launchers.processes import ProcessHost, SharedSlots
from tianflow.planning.layouts import trajectory_layout
from tianflow.planning.validation import require_valid

CONFIG = cartpole()
SPEC = require_valid(CONFIG).spec
InlineLauncher().prepare()
HOST = HostSpec(
    "all", (ComponentSpec("learner", "learner"), ComponentSpec("evaluator", "evaluator"))
)

Port = ProcessHost | InlineHost
ASKED: dict[str, Callable[[Port, Path], Coroutine[Any, Any, object]]] = {
    "save": lambda host, directory: host.save(directory),
    "rest": lambda host, _: host.rest(),
    "evaluate": lambda host, _: host.evaluate(Version(1, 0)),
}


class FakeChild:
    """A process that ends when it is killed."""

    pid = 0

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    async def wait(self) -> int:
        await self._gone.wait()
        return -9

    def kill(self) -> None:
        self._gone.set()


class FakeNursery:
    """Its children say nothing."""

    async def spawn(
        self, name: str, target: str, payload: bytes, fds: Sequence[int] = ()
    ) -> FakeChild:
        return FakeChild()


def make_run(directory: Path) -> Run:
    assert SPEC is not None
    layout = trajectory_layout(CONFIG, SPEC)
    return Run(
        run_id="run",
        directory=directory,
        config=CONFIG,
        spec=SPEC,
        layout=layout,
        slots=HeapSlots(config=CONFIG, layout=layout),
    )


async def in_a_process(run: Run) -> ProcessHost:
    host = ProcessHost(run=run, host=HOST, incarnation=0, learner_up=asyncio.Event())
    await host.start(cast("HostForker", FakeNursery()), (), 1)
    return host


async def inline(run: Run) -> InlineHost:
    return InlineHost(run=run, host=HOST, incarnation=0, start=(Version(1, 0), 0, None))


@pytest.fixture(autouse=True)
def _a_learner_that_is_being_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It answers nobody, and an evaluator has no weights."""
    wanted = threading.Event()
    monkeypatch.setattr("tianflow.hosts.factory.Builder._algorithm", lambda _: wanted.wait())
    yield
    wanted.set()


@pytest.mark.parametrize("make", [in_a_process, inline])
@pytest.mark.parametrize("asked", ASKED)
async def test_whoever_waits_for_a_host_that_goes_is_told(
    tmp_path: Path, make: Callable[[Run], Awaitable[Port]], asked: str
) -> None:
    host = await make(make_run(tmp_path))
    waiting = asyncio.create_task(ASKED[asked](host, tmp_path))
    await turns(5)
    assert not waiting.done()
    host.kill()
    async with asyncio.timeout(10.0):
        await host.wait()
        with pytest.raises(BrokenChannelError, match="gone"):
            await waiting


@pytest.mark.parametrize("make", [in_a_process, inline])
@pytest.mark.parametrize("asked", ASKED)
async def test_a_host_that_is_gone_says_so_to_whoever_asks(
    tmp_path: Path, make: Callable[[Run], Awaitable[Port]], asked: str
) -> None:
    """A checkpoint is staged first: meanwhile the learner that was to be asked may die, and another
    must be asked the next time.
    """
    host = await make(make_run(tmp_path))
    host.kill()
    async with asyncio.timeout(10.0):
        await host.wait()
        with pytest.raises(BrokenChannelError):
            await ASKED[asked](host, tmp_path)


def test_slots_for_which_the_machine_has_no_room_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SPEC is not None
    layout = trajectory_layout(CONFIG, SPEC)
    SharedSlots(config=CONFIG, layout=layout, draws=layout).close()

    def full(_fd: int, _start: int, _nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(TianflowError, match="no room for"):
        SharedSlots(config=CONFIG, layout=layout, draws=layout)
    assert before == sorted(Path("/proc/self/fd").iterdir())
