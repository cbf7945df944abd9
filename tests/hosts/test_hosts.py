"""Hosts as a run sees them: what is asked of one that goes, or is gone, has an answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.settings import cartpole
from tests.support.worlds import turns
from tianflow.channels.shm import SharedTransport
from tianflow.config.model import Config
from tianflow.coordinator import Run
from tianflow.core.payloads import EnvironmentSpec, Version
from tianflow.core.program import ComponentSpec, HostSpec
from tianflow.errors import BrokenChannelError, ConfigError, TianflowError
from tianflow.hosts import component_host
from tianflow.hosts.component_host import ComponentHost, as_run_error
from tianflow.interfaces import HostHandle
from tianflow.launchers.inline import InlineHost, InlineLauncher, MemoryEnds
from tianflow.launchers.remote import RemoteHost, shared_slots
from tianflow.planning.layouts import trajectory_layout
from tianflow.planning.validation import require_valid

CONFIG = cartpole()
SPEC = require_valid(CONFIG).spec
InlineLauncher().prepare()
HOST = HostSpec(
    "all", (ComponentSpec("learner", "learner"), ComponentSpec("evaluator", "evaluator"))
)

Port = RemoteHost | ComponentHost
ASKED: dict[str, Callable[[Port, Path], Coroutine[Any, Any, object]]] = {
    "save": lambda port, directory: port.save(directory),
    "rest": lambda port, _: port.rest(),
    "load": lambda port, _: port.load(Version(1, 0)),
    "evaluate": lambda port, _: port.evaluate(Version(1, 0), "main"),
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


async def start_nothing(name: str, payload: bytes, descriptors: Sequence[int]) -> FakeChild:
    """A process that sends nothing."""
    return FakeChild()


def spec() -> EnvironmentSpec:
    assert SPEC is not None
    return SPEC


def make_run(directory: Path, config: Config = CONFIG) -> Run:
    layout = trajectory_layout(config, spec())
    return Run(
        run_id="run",
        directory=directory,
        config=config,
        spec=spec(),
        layout=layout,
        slots=InlineLauncher().slots(config=config, layout=layout),
        capabilities=InlineLauncher.capabilities,
    )


async def in_a_process(run: Run) -> tuple[HostHandle, Port]:
    plan = await run.plan_host(HOST, 0)
    host = RemoteHost(run=run, plan=plan, learner_started=asyncio.Event())
    transport = SharedTransport(layout=plan.layout, capacity=1)
    await host.start(transport, start_nothing)
    transport.close()
    return host, host


async def inline(run: Run) -> tuple[HostHandle, Port]:
    slots = InlineLauncher().slots(config=CONFIG, layout=trajectory_layout(CONFIG, spec()))
    host = InlineHost(run=run, plan=await run.plan_host(HOST, 0), slots=slots)
    assert isinstance(run.inbox.learner, ComponentHost)
    return host, run.inbox.learner


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """It answers nobody, and an evaluator has no weights."""
    wanted = threading.Event()
    monkeypatch.setattr("tianflow.hosts.factory.Builder._algorithm", lambda *_: wanted.wait())
    yield wanted
    wanted.set()


@pytest.mark.parametrize("make", [in_a_process, inline])
@pytest.mark.parametrize("asked", ASKED)
async def test_whoever_waits_for_a_host_that_goes_is_told(
    tmp_path: Path, make: Callable[[Run], Awaitable[tuple[HostHandle, Port]]], asked: str
) -> None:
    host, port = await make(make_run(tmp_path))
    waiting = asyncio.create_task(ASKED[asked](port, tmp_path))
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
    tmp_path: Path, make: Callable[[Run], Awaitable[tuple[HostHandle, Port]]], asked: str
) -> None:
    """A checkpoint is staged first: meanwhile the learner that was to be asked may die, and another
    must be asked the next time.
    """
    host, port = await make(make_run(tmp_path))
    host.kill()
    async with asyncio.timeout(10.0):
        await host.wait()
        with pytest.raises(BrokenChannelError):
            await ASKED[asked](port, tmp_path)


def test_slots_for_which_the_machine_has_no_room_leave_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = trajectory_layout(CONFIG, spec())
    shared_slots(config=CONFIG, layout=layout, draws=layout).close()

    def full(_fd: int, _start: int, _nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(TianflowError, match="no room for"):
        shared_slots(config=CONFIG, layout=layout, draws=layout)
    assert before == sorted(Path("/proc/self/fd").iterdir())


async def test_a_slot_of_an_inline_host_stays_in_quarantine_while_its_thread_hangs(
    tmp_path: Path, wanted: threading.Event
) -> None:
    """A thread cannot be killed, so it may write to the slot when it wakes."""
    run = make_run(tmp_path)
    host = HostSpec("all", (ComponentSpec("learner", "learner"), ComponentSpec("actor-0", "actor")))
    slots = InlineLauncher().slots(config=CONFIG, layout=trajectory_layout(CONFIG, spec()))
    first = InlineHost(run=run, plan=await run.plan_host(host, 0), slots=slots)
    exchange, grants = run.exchange, list[Any]()
    exchange.open_lineage(Version(1, 0))
    await turns(5)
    exchange.request_grant("actor-0", grants.append)
    exchange.begin(grants[0].ticket, Version(1, 0))
    first.kill()
    await first.wait()
    run.inbox.host_lost(host, "env_hang")
    seen = exchange.ledger.snapshot()
    assert ({"env_hang": 1}, 1) == (seen.dropped, seen.quarantined_slots)
    exchange.holder_lost("actor-0", "died")  # the next incarnation, which never had the slot
    assert 1 == exchange.ledger.snapshot().quarantined_slots
    assert [] == exchange.ledger.written_slots()
    wanted.set()
    async with asyncio.timeout(10.0):
        await first._host.thread_ended
    await turns(2)
    assert 0 == exchange.ledger.snapshot().quarantined_slots


async def test_heartbeats_do_not_depend_on_the_interval_of_metrics(
    tmp_path: Path, wanted: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, reports = list[object](), list[object]()
    monkeypatch.setattr(component_host, "HEARTBEAT_S", 0.001)
    monkeypatch.setattr(MemoryEnds, "heartbeat", lambda _, activities: beats.append(activities))
    monkeypatch.setattr(MemoryEnds, "report", lambda _, statistics: reports.append(statistics))
    metrics = CONFIG.metrics.model_copy(update={"interval_s": 600.0})
    host, _ = await inline(make_run(tmp_path, CONFIG.model_copy(update={"metrics": metrics})))
    async with asyncio.timeout(10.0):
        while len(beats) < 5:  # noqa: ASYNC110 - a heartbeat tells nobody
            await asyncio.sleep(0.001)
    assert 1 == len(reports)
    wanted.set()
    host.kill()
    await host.wait()


async def test_a_batch_beyond_the_arena_of_an_inline_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    batch = run.exchange.arena.capacity + 1
    accepted = f"at most {run.exchange.arena.capacity}"
    with pytest.raises(ConfigError, match="the arena of this run holds") as refused:
        run.control.change({"algorithm": {"batch_trajectories": batch}}, source="test")
    assert [("algorithm.batch_trajectories", accepted)] == [
        (problem.path, problem.accepted) for problem in refused.value.problems
    ]


def test_a_gpu_without_memory_is_an_error_with_the_size_and_the_setting_to_lower() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB"
    )
    found = as_run_error("learner", error)
    assert (
        "the GPU has no memory left: Tried to allocate 20.00 GiB; lower algorithm.batch_trajectories"
    ) in found.summary
    assert "OutOfMemoryError" in found.details
