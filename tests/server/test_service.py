"""A service with runs that are played: its queue, what it routes, what it answers for runs that do
not, and what it goes on with.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.support.checkpoints import checkpoint
from tests.support.fakes_run import FakeRun
from tianflow.config.loading import shipped
from tianflow.config.model import Config, HttpSettings
from tianflow.errors import ConfigError, Problem
from tianflow.rundir.control_file import (
    SERVICE,
    ControlFile,
    ProcessIdentity,
    process_start_time,
)
from tianflow.rundir.summary import REQUESTED
from tianflow.server.common import console
from tianflow.server.common.auth import NO_TOKENS, Guard, Tokens
from tianflow.server.run.server import serve
from tianflow.server.service import routes, run_manager, run_process
from tianflow.server.service.routes import make_app
from tianflow.server.service.run_client import RunClient
from tianflow.server.service.run_manager import RunManager
from tianflow.server.service.run_process import RunFiles, RunOutcome, RunProcess
from tianflow.server.service.service import ServiceSettings, serving
from tianflow.server.service.store import RunStore, StoreError

Client = TestClient[Any, Any]
RUNS = "/api/v1/runs"
JSON = {"Content-Type": "application/json"}
CONTROL = {"Authorization": "Bearer c"}
READ = {"Authorization": "Bearer r"}
SMALL = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}


class FakeProcess:
    """Stands in for a run's process: a fake run behind the real server of a run."""

    def __init__(self, name: str, files: RunFiles) -> None:
        self._name, self._files = name, files
        self.run = FakeRun(name=name, directory=files.run(name))
        self.outcome: asyncio.Future[RunOutcome | None] = asyncio.get_running_loop().create_future()
        self.killed = False
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await asyncio.to_thread(self.run.directory.mkdir, parents=True, exist_ok=True)
        server = serve(
            self.run, HttpSettings(max_requests_per_s=10_000.0), Tokens.make(), self.run.directory
        )
        await self._stack.enter_async_context(server)

    @property
    def control(self) -> ControlFile | None:
        return ControlFile.read(self._files.run(self._name))

    def release(self) -> None:
        self.end(None)

    def kill(self) -> None:
        self.killed = True
        self.end(None)

    def end(self, outcome: RunOutcome | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    async def ended(self) -> RunOutcome | None:
        try:
            return await self.outcome
        finally:
            await self._stack.aclose()


@dataclass
class World:
    """A service with fake processes."""

    files: RunFiles
    manager: RunManager
    client: Client
    processes: dict[str, list[FakeProcess]] = field(default_factory=dict)

    async def submit(self, name: str, **more: Any) -> None:
        body = {"config": SMALL | {"run": {"name": name}}, **more}
        response = await self.client.post(RUNS, data=json.dumps(body), headers=CONTROL | JSON)
        assert 201 == response.status, await response.text()

    async def get(self, path: str) -> Any:
        response = await self.client.get(path, headers=CONTROL)
        assert 200 == response.status, await response.text()
        return await response.json()

    async def act(self, name: str, action: str) -> aiohttp.ClientResponse:
        return await self.client.post(f"{RUNS}/{name}/{action}", headers=CONTROL)

    async def states(self) -> dict[str, str]:
        return {run["id"]: run["state"] for run in (await self.get(RUNS))["runs"]}

    def process(self, name: str) -> FakeProcess:
        return self.processes[name][-1]


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def accept(_: Config) -> None:
    """The check of submissions where environments do not matter: a child takes a second."""


@asynccontextmanager
async def opened(
    directory: Path,
    *,
    limit: int = 2,
    allowed: tuple[str, ...] = (),
    max_streams: int = 4,
    check: Callable[[Config], Awaitable[None]] = accept,
) -> AsyncIterator[World]:
    """A service over ``directory``; its end is that of SIGTERM."""
    files = RunFiles(directory)
    await asyncio.to_thread(files.own.mkdir, parents=True, exist_ok=True)
    store = await asyncio.to_thread(RunStore, files.own / "runs.sqlite")
    processes: dict[str, list[FakeProcess]] = {}

    async def start(
        name: str, config: Mapping[str, Any], files: RunFiles, overrides: Mapping[str, object]
    ) -> RunProcess:
        assert name == config["run"]["name"]
        process = FakeProcess(name, files)
        await process.open()
        processes.setdefault(name, []).append(process)
        return cast("RunProcess", process)

    async with RunClient() as run_client:
        manager = RunManager(
            store=store, files=files, limit=limit, client=run_client, overrides={}, start=start
        )
        guard = Guard(tokens=Tokens("c", "r"), loopback=True)
        http = HttpSettings(max_requests_per_s=10_000.0, max_streams=max_streams)
        app = make_app(
            manager=manager,
            store=store,
            client=run_client,
            guard=guard,
            http=http,
            allowed=allowed,
            check=check,
        )
        client: Client = TestClient(TestServer(app))
        await client.start_server()
        task = asyncio.create_task(manager.run(lambda: None))
        await asyncio.sleep(0)
        try:
            yield World(files, manager, client, processes)
        finally:
            task.cancel()
            await asyncio.wait([task])
            await client.close()
            await asyncio.to_thread(manager.close)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between looks and after deaths, shortened."""
    monkeypatch.setattr(run_manager, "POLL_S", 0.02)
    monkeypatch.setattr(run_manager, "BACKOFF_S", 0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(tmp_path) as world:
        yield world


async def with_a_run(tmp_path: Path) -> AsyncIterator[World]:
    """A fixture of others: a service that holds run ``a``, which is up."""
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(up(world, "a"))
        yield world


def up(world: World, *names: str) -> Callable[[], bool]:
    return lambda: all(
        name in world.manager.active and world.manager.active[name].document is not None
        for name in names
    )


# The queue
# --------------------------------------------------------------------------------------------------


async def test_the_limit_of_active_runs_holds_and_the_next_starts_when_one_ends(
    world: World,
) -> None:
    for name in ("a", "b", "d"):
        await world.submit(name)
    await until(up(world, "a", "b"))
    assert {"a": "running", "b": "running", "d": "pending"} == await world.states()
    world.process("a").end(RunOutcome("done", "target"))
    await until(up(world, "d"))
    assert {"a": "done", "b": "running", "d": "running"} == await world.states()


async def test_a_pending_run_can_be_stopped_and_queued_again(world: World) -> None:
    for name in ("a", "b", "d"):
        await world.submit(name)
    await until(up(world, "a", "b"))
    assert 409 == (await world.act("d", "pause")).status
    response = await world.act("d", "stop")
    assert (202, "stopped") == (response.status, (await response.json())["state"])
    assert 202 == (await world.act("d", "stop")).status  # repeating one is not an error
    assert "stopped" == (await world.states())["d"]
    assert [REQUESTED] == (await world.get(f"{RUNS}/d"))["reasons"]
    assert "pending" == (await (await world.act("d", "resume")).json())["state"]
    world.process("b").end(RunOutcome("done", "target"))
    await until(up(world, "d"))


async def test_a_done_run_is_not_queued_again(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    world.process("a").end(RunOutcome("done", "target"))
    await until(lambda: "a" not in world.manager.active)
    response = await world.act("a", "resume")
    assert 409 == response.status
    assert "submit a new one" in (await response.json())["detail"]


async def test_a_killed_process_is_restarted_and_too_many_deaths_are_a_failure(
    world: World,
) -> None:
    await world.submit("a")
    for managed in range(1 + run_manager.MAX_DEATHS):
        await until(lambda managed=managed: len(world.processes.get("a", ())) == managed + 1)  # type: ignore[misc]  # bound now
        world.process("a").kill()
    await until(lambda: "a" not in world.manager.active)
    (run,) = (await world.get(RUNS))["runs"]
    assert "failed" == run["state"]
    assert "was killed 4 times" in run["reasons"][0]
    assert 1 + run_manager.MAX_DEATHS == world.manager.restarts
    assert 1 + run_manager.MAX_DEATHS == len(world.processes["a"])


async def test_a_run_that_cannot_start_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: FakeProcess) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(FakeProcess, "open", refuse)
        await world.submit("a")

        async def failed() -> bool:
            return (await world.states())["a"] == "failed"

        await until(failed)
    await world.submit("b")
    await until(up(world, "b"))
    assert {"a": "failed", "b": "running"} == await world.states()
    assert ["OSError: no more processes"] == (await world.get(f"{RUNS}/a"))["reasons"]


async def test_the_number_of_free_places_limits_the_pending_runs_that_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world has two places."""
    looked: list[tuple[int, int]] = []
    wanted = RunStore.startable

    def count(store: RunStore, most: int) -> Any:
        looked.append((len(world.manager.active), most))
        return wanted(store, most)

    monkeypatch.setattr(RunStore, "startable", count)
    for name in "abcdefgh":
        await world.submit(name)
    await until(up(world, "b"))
    world.process("a").end(RunOutcome("done", "target"))
    await until(up(world, "c"))
    assert all(active < 2 and most <= 2 + active for active, most in looked)


async def test_a_run_stopped_during_its_start_does_not_begin(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = RunStore.begin

    def stop_first(store: RunStore, name: str, *, now: float) -> bool:
        store.end(name, state="stopped", reason="somebody", now=now)
        return began(store, name, now=now)

    monkeypatch.setattr(RunStore, "begin", stop_first)
    await world.submit("a")

    async def stopped() -> bool:
        return await world.states() == {"a": "stopped"}

    await until(stopped)
    await until(lambda: not world.manager.active)
    assert not world.processes


class BusyDisk:
    """Refuses ``method`` while it is busy."""

    def __init__(self, patched: pytest.MonkeyPatch, method: str) -> None:
        self.busy, self.asked = True, 0
        taken = getattr(RunStore, method)

        def ask(store: RunStore, *args: object, **kwargs: object) -> object:
            self.asked += 1
            if self.busy:
                raise StoreError("busy")
            return taken(store, *args, **kwargs)

        patched.setattr(RunStore, method, ask)


async def test_a_run_whose_end_cannot_be_stored_is_not_restarted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = BusyDisk(monkeypatch, "end")
    monkeypatch.setattr(run_manager, "RETRY_S", 0.01)
    await world.submit("a")
    await until(up(world, "a"))
    world.process("a").end(RunOutcome("stopped", "somebody"))
    await until(lambda: disk.asked >= 3)
    assert "a" in world.manager.active  # it still counts as active: no other run is started
    assert ["busy"] == (await world.get(f"{RUNS}/a"))["reasons"]
    disk.busy = False
    await until(lambda: not world.manager.active)
    assert {"a": "stopped"} == await world.states()
    assert 1 == len(world.processes["a"])


async def test_a_start_that_cannot_be_stored_does_not_fail_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = BusyDisk(monkeypatch, "begin")
    monkeypatch.setattr(run_manager, "RETRY_S", 0.01)
    await world.submit("a")
    await until(lambda: disk.asked >= 3)
    assert {"a": "pending"} == await world.states()
    disk.busy = False
    await until(up(world, "a"))
    assert {"a": "running"} == await world.states()


@pytest.mark.parametrize("method", ["begin", "end"])
async def test_a_service_stops_while_its_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It asks once more, and waits no longer. The next one goes on with the run."""
    with monkeypatch.context() as patched:
        disk = BusyDisk(patched, method)
        async with opened(tmp_path) as world:
            await world.submit("a")
            if method == "end":
                await until(up(world, "a"))
                world.process("a").end(RunOutcome("done", "target"))
            await until(
                lambda: "a" in world.manager.active and "busy" == world.manager.active["a"].problem
            )
        assert 2 == disk.asked
    async with opened(tmp_path) as restarted:
        await until(up(restarted, "a"))


# Going on afterwards
# --------------------------------------------------------------------------------------------------


async def test_active_runs_resume_with_the_next_service_and_stay_paused(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as world:
        for name in ("a", "b", "d"):
            await world.submit(name)
        await until(up(world, "a", "b"))
        world.files.run("b").joinpath("audit.jsonl").write_text(
            '{"action": "pause"}\n'
        )  # a real run writes it
    assert all(
        child.outcome.result() is None
        for processes in world.processes.values()
        for child in processes
    )
    async with opened(tmp_path) as restarted:
        await until(up(restarted, "a", "b"))
        await until(lambda: restarted.process("b").run.state == "paused")
        assert "running" == restarted.process("a").run.state
        assert "pending" == (await restarted.states())["d"]
        restarted.process("b").kill()
        await until(lambda: len(restarted.processes["b"]) == 2)
        await until(lambda: restarted.process("b").run.state == "paused")
        restarted.process("b").end(RunOutcome("stopped", "somebody"))
        await until(up(restarted, "d"))
        restarted.process("d").end(RunOutcome("stopped", "somebody"))
        assert (
            202 == (await restarted.act("b", "resume")).status
        )  # resuming it from the queue ends the pause
        await until(lambda: len(restarted.processes["b"]) == 3)
        await until(up(restarted, "b"))
        assert "running" == restarted.process("b").run.state


async def test_a_pending_run_is_not_started_while_the_service_stops(tmp_path: Path) -> None:
    async with opened(tmp_path, limit=1) as world:
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a"))
    assert "b" not in world.processes


async def test_a_service_waits_for_a_process_of_a_killed_one(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(up(world, "a"))
    left = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=-1)
    await asyncio.to_thread(lambda: world.files.record_process("a", ProcessIdentity.of(left.pid)))
    async with opened(tmp_path) as restarted:
        await until(lambda: "a" in restarted.manager.active)
        await asyncio.sleep(0.3)
        assert "a" not in restarted.processes
        await left.communicate(b"\n")
        await until(up(restarted, "a"))


# Submission
# --------------------------------------------------------------------------------------------------


async def post(
    world: World, body: object, **headers: str
) -> tuple[int, dict[str, Any], aiohttp.ClientResponse]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await world.client.post(RUNS, data=data, headers=CONTROL | JSON | headers)
    return response.status, await response.json(), response


async def test_a_submission_returns_the_location_of_the_run(world: World) -> None:
    status, answer, response = await post(
        world, {"config": SMALL, "overrides": {"balance.max_staleness": 3, "run.name": "mine"}}
    )
    assert (201, "mine", f"{RUNS}/mine") == (status, answer["id"], response.headers["Location"])
    await until(up(world, "mine"))
    record = world.manager.active["mine"].record
    assert 3 == json.loads(record.config)["balance"]["max_staleness"]
    assert "http:127.0.0.1" == record.source


async def test_a_shipped_config_is_submitted_by_name_and_gets_a_name(world: World) -> None:
    status, answer, _ = await post(world, {"config": "cartpole_ppo"})
    assert 201 == status
    assert answer["id"].startswith("ppo-")
    await until(up(world, answer["id"]))


async def test_a_path_is_not_a_name(world: World, tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text("[env]\nid = 'CartPole-v1'\n")
    status, answer, _ = await post(world, {"config": str(tmp_path / "secret.toml")})
    assert 422 == status
    assert "is not a config" == answer["errors"][0]["message"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "config"),
        ([], "config"),
        ({"config": 3}, "config"),
        ({"config": SMALL, "more": 1}, "more"),
        ({"config": SMALL, "overrides": []}, "overrides"),
        ({"config": SMALL, "overrides": {"env": {"id": "os:system"}}}, "config.env"),
        ({"config": SMALL, "overrides": {"env.id": "os:system"}}, "config.env.id"),
        ({"config": SMALL | {"env": {"id": "os:system"}}}, "config.env.id"),
        ({"config": SMALL | {"algorithm": {"name": "os:system"}}}, "config.algorithm.name"),
        ({"config": SMALL | {"balance": {"max_stalenes": 3}}}, "config.balance.max_stalenes"),
        ({"config": SMALL | {"run": {"name": "../up"}}}, "config.run.name"),
        ({"config": SMALL | {"run": {"name": ".service"}}}, "config.run.name"),
        (
            {"config": "cartpole_ppo", "overrides": {"network.name": "os:system"}},
            "config.network.name",
        ),
    ],
)
async def test_an_invalid_submission_is_refused_with_its_path_and_starts_nothing(
    world: World, body: object, path: str
) -> None:
    status, answer, _ = await post(world, body)
    assert 422 == status
    assert path in [error["path"] for error in answer["errors"]]
    assert {} == await world.states()
    assert not world.processes


async def test_a_body_that_is_not_json_is_refused(world: World) -> None:
    assert 400 == (await post(world, b"{"))[0]
    assert 400 == (await post(world, b'{"config": 1, "config": 2}'))[0]
    assert (
        415
        == (await post(world, b"a=1", **{"Content-Type": "application/x-www-form-urlencoded"}))[0]
    )


async def test_the_same_key_starts_one_run_and_another_body_is_refused(world: World) -> None:
    body = {"config": SMALL}
    first = await post(world, body, **{"Idempotency-Key": "k"})
    again = await post(world, body, **{"Idempotency-Key": "k"})
    assert (201, 201) == (first[0], again[0])
    assert first[1]["id"] == again[1]["id"]
    assert 1 == len(await world.states())
    assert 422 == (await post(world, {"config": "cartpole_ppo"}, **{"Idempotency-Key": "k"}))[0]
    assert 400 == (await post(world, body, **{"Idempotency-Key": "k" * 256}))[0]


async def test_a_named_run_sent_twice_with_one_key_is_the_same(world: World) -> None:
    body = {"config": SMALL | {"run": {"name": "a"}}}
    assert 201 == (await post(world, body, **{"Idempotency-Key": "k"}))[0]
    await until(up(world, "a"))
    assert 201 == (await post(world, body, **{"Idempotency-Key": "k"}))[0]
    assert 409 == (await post(world, body))[0]
    assert {"a": "running"} == await world.states()


async def test_a_name_of_another_run_is_refused(world: World) -> None:
    world.files.run("a").mkdir()
    status, answer, _ = await post(world, {"config": SMALL | {"run": {"name": "a"}}})
    assert 409 == status
    assert "'a'" in answer["detail"]


async def test_the_read_token_submits_nothing(world: World) -> None:
    response = await world.client.post(
        RUNS, data=json.dumps({"config": SMALL}), headers=READ | JSON
    )
    assert 403 == response.status
    response = await world.client.post(RUNS, data=json.dumps({"config": SMALL}), headers=JSON)
    assert 401 == response.status
    assert {} == await world.states()


async def test_allowed_modules_may_be_named(tmp_path: Path) -> None:
    async with opened(tmp_path, allowed=("tests.support.environments",)) as world:
        status, answer, _ = await post(
            world, {"config": SMALL | {"env": {"id": "tests.support.environments:CounterEnv"}}}
        )
        assert 201 == status, answer


@pytest.mark.parametrize(
    "overrides",
    [
        {"env.kwargs.a": "colorsys:x", "env.kwargs": {"b": 1}},
        {"env.kwargs": {"a": {"b": "colorsys:x"}}},
    ],
)
async def test_an_override_cannot_hide_the_name_in_another_one(
    world: World, overrides: dict[str, Any]
) -> None:
    status, answer, _ = await post(world, {"config": SMALL, "overrides": overrides})
    assert 422 == status
    assert all("a module that is not allowed" in error["message"] for error in answer["errors"])


async def test_a_submission_may_start_with_the_parameters_of_a_run_of_the_service(
    tmp_path: Path,
) -> None:
    small = {**SMALL, "network": {"hidden": [8]}}
    await asyncio.to_thread(checkpoint, tmp_path, small)
    async with opened(tmp_path) as world:
        for source, message in (
            ("b-run", "'b-run' does not exist"),
            (str(tmp_path / "a-run"), "is a path, which HTTP may not choose"),
            ("../a-run", "is a path"),
        ):
            body = {"config": small | {"run": {"init_from": source}}}
            status, answer, _ = await post(world, body)
            assert (422, "config.run.init_from") == (status, answer["errors"][0]["path"])
            assert message in answer["errors"][0]["message"]
        body = {"config": small, "overrides": {"run.init_from": "a-run"}}
        status, answer, _ = await post(world, body)
        assert 201 == status, answer


async def test_overrides_that_are_a_value_and_a_table_at_once_are_refused(world: World) -> None:
    status, answer, _ = await post(
        world, {"config": SMALL, "overrides": {"env.num_envs": 1, "env.num_envs.x": 2}}
    )
    assert (422, "config.env.num_envs.x") == (status, answer["errors"][0]["path"])


async def test_a_change_may_name_the_same_modules_as_a_submission(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_stranger.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    await world.submit("a")
    await until(up(world, "a"))
    merge = CONTROL | {"Content-Type": "application/merge-patch+json"}
    for controller in ("of_a_stranger:Controller", ["staleness", "of_a_stranger:Controller"]):
        refused = await world.client.patch(
            f"{RUNS}/a/balance", data=json.dumps({"controller": controller}), headers=merge
        )
        assert 422 == refused.status
        assert ["balance.controller"] == [
            error["path"] for error in (await refused.json())["errors"]
        ]
    assert "of_a_stranger" not in sys.modules
    accepted = await world.client.patch(
        f"{RUNS}/a/balance", data='{"controller": "open_loop"}', headers=merge
    )
    assert (200, "open_loop") == (accepted.status, (await accepted.json())["controller"])


async def checked(world: World, body: object, what: str = "settings") -> tuple[int, dict[str, Any]]:
    response = await world.client.post(
        f"{RUNS}?check={what}", data=json.dumps(body), headers=CONTROL | JSON
    )
    return response.status, await response.json()


async def test_a_check_answers_as_a_submission_and_stores_nothing(tmp_path: Path) -> None:
    made: list[Config] = []

    async def make(config: Config) -> None:
        made.append(config)
        raise ConfigError([Problem("env.id", config.env.id, "does not exist")])

    async with opened(tmp_path, check=make) as world:
        status, answer = await checked(world, {"config": "cartpole_ppo"})
        assert (200, True, "CartPole-v1", "ppo", []) == (
            status,
            *(answer[name] for name in ("valid", "environment", "algorithm", "advice")),
        )
        assert [] == made, "the environment is not made"
        status, answer = await checked(world, {"config": "cartpole_ppo"}, "environment")
        assert (422, "config.env.id") == (status, answer["errors"][0]["path"])
        body = {"config": "cartpole_ppo", "overrides": {"actors.count": -1}}
        status, answer = await checked(world, body)
        assert (422, "config.actors.count") == (status, answer["errors"][0]["path"])
        assert 400 == (await checked(world, body, "everything"))[0]
        assert {} == await world.states()


async def test_the_text_of_a_config_file_is_submitted(world: World) -> None:
    text = '[env]\nid = "CartPole-v1"\n[algorithm]\nname = "ppo"\nclip = 0.3\n'
    body = {"toml": text, "overrides": {"run.name": "a"}}
    response = await world.client.post(RUNS, data=json.dumps(body), headers=CONTROL | JSON)
    assert 201 == response.status, await response.text()
    assert 0.3 == (await world.get(f"{RUNS}/a/config"))["config"]["algorithm"]["clip"]
    for wrong, path, message in (
        ({"toml": "[env]\nid = \n[run]"}, "toml", "line 2"),
        ({"toml": "x = [" + "[" * 5000}, "toml", ""),
        ({"toml": f"[env]\nkwargs = {'[' * 99}{']' * 99}"}, "toml", "nested too deeply"),
        ({"toml": 3}, "toml", "is not a text"),
        ({"toml": text, "config": "cartpole_ppo"}, "toml", "beside config"),
        ({}, "config", "is missing"),
        ({"toml": text.replace("0.3", "-1")}, "config.algorithm.clip", ""),
        ({"toml": '[env]\nid = "os:system"\n' + text[25:]}, "config.env.id", ""),
        ({"toml": text + "[env.kwargs]\nday = 2026-01-31\n"}, "config.env.kwargs.day", "date"),
    ):
        status, answer = await checked(world, wrong)
        assert (422, path) == (status, answer["errors"][0]["path"]), wrong
        assert message in answer["errors"][0]["message"]


async def test_the_shipped_configs_are_listed_as_text(world: World) -> None:
    """A text that names a module is of a user, even if it is that of a shipped config."""
    configs = (await world.get("/api/v1/configs"))["configs"]
    assert [found["name"] for found in configs] == sorted(await asyncio.to_thread(shipped))
    refused = set()
    for found in configs:
        assert found["summary"]
        assert "\n" not in found["summary"]
        assert 200 == (await checked(world, {"config": found["name"]}))[0]
        status, answer = await checked(world, {"toml": found["toml"]})
        refused |= {found["name"]} if status == 422 else set()
        assert status == 200 or "--allow-import" in str(answer)
    assert {"memory_r2d2"} == refused


# Lists and looks
# --------------------------------------------------------------------------------------------------


async def test_a_list_is_read_page_by_page(world: World) -> None:
    for name in ("a", "b", "d"):
        await world.submit(name)
    first = await world.get(f"{RUNS}?limit=2")
    assert ["d", "b"] == [run["id"] for run in first["runs"]]
    second = await world.get(first["next"])
    assert (["a"], None) == ([run["id"] for run in second["runs"]], second["next"])
    assert first["can_submit"]
    for query in ("limit=0", "limit=501", "limit=x", "before=0", "before=-1"):
        assert 400 == (await world.client.get(f"{RUNS}?{query}", headers=CONTROL)).status


def summary_of(name: str) -> dict[str, Any]:
    """The file that an ended run leaves."""
    return {
        "run": name,
        "state": "failed",
        "env_steps": 640,
        "updates": 20,
        "mean_return": 11.0,
        "evaluation": {"version": 20.0, "mean_return": 12.5, "episodes": 10.0},
        "target_return": 475.0,
        "time_to_target_s": None,
        "staleness": {"mean": 0.5, "max": 1, "bound": 1},
        "error": "ValueError: on purpose",
    }


async def test_an_ended_run_keeps_what_it_trained_and_what_it_reached_in_lists_and_alone(
    world: World,
) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    text = json.dumps(summary_of("a"))
    await asyncio.to_thread((world.files.run("a") / "summary.json").write_text, text)
    world.process("a").end(RunOutcome("failed", "ValueError: on purpose"))
    await until(lambda: "a" not in world.manager.active)
    (listed,) = (await world.get(RUNS))["runs"]
    assert ("CartPole-v1", "ppo", "failed") == (
        listed["environment"],
        listed["algorithm"],
        listed["state"],
    )
    assert listed["started"] <= listed["ended"]
    assert (640, 11.0, 12.5) == (
        listed["progress"]["env_steps"],
        listed["returns"]["mean"],
        listed["evaluation"]["mean_return"],
    )
    assert {"return": 475.0, "reached_after_s": None} == listed["target"]
    alone = await world.get(f"{RUNS}/a")
    assert ("CartPole-v1", "ppo") == (alone["environment"], alone["algorithm"])
    assert "ValueError: on purpose" == alone["summary"]["error"]


async def test_the_settings_of_a_run_are_those_with_an_effect_whether_it_trains_or_has_ended(
    world: World,
) -> None:
    sections = {"env", "algorithm", "network", "actors", "balance", "learner", "weights"}
    sections |= {"placement", "run", "evaluation", "checkpoint"}
    await world.submit("a")
    await until(up(world, "a"))
    active = (await world.get(f"{RUNS}/a/config"))["config"]
    assert sections == set(active), "no replay, inference servers, addresses or sinks"
    world.process("a").end(RunOutcome("done", "target"))
    await until(lambda: "a" not in world.manager.active)
    submitted = (await world.get(f"{RUNS}/a/config"))["config"]
    assert sections == set(submitted)
    assert "CartPole-v1" == submitted["env"]["id"]
    file = world.files.run("a") / "config.toml"
    changed = "[balance]\nmax_staleness = 7\n[replay]\nbeta = 1.0\n[unknown]\nx = 1\n"
    await asyncio.to_thread(file.write_text, changed)
    in_force = (await world.get(f"{RUNS}/a/config"))["config"]
    assert sections == set(in_force)
    assert (7, None) == (in_force["balance"]["max_staleness"], in_force["balance"]["credits"])
    await asyncio.to_thread(file.write_text, "[balance")
    assert submitted == (await world.get(f"{RUNS}/a/config"))["config"], "a torn file is not used"


async def test_runs_on_disk_that_the_store_does_not_know_are_listed_as_such(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> None:
        for name in ("broken", "over", "by-hand", "no-run", "known"):
            world.files.run(name).mkdir(exist_ok=True)
            if name != "no-run":
                (world.files.run(name) / "config.toml").touch()
        summary = json.dumps({"state": "done", "reason": "target"})
        (world.files.run("over") / "summary.json").write_text(summary)
        pid = os.getpid()
        ControlFile(
            run="by-hand",
            pid=pid,
            start_time=process_start_time(pid),
            address="http://127.0.0.1:9",
            token="t",
            read_token="r",
        ).write(world.files.run("by-hand"))

    await world.submit("known")
    await until(up(world, "known"))
    await asyncio.to_thread(prepare)
    listed = await world.get(RUNS)
    assert ["known"] == [run["id"] for run in listed["runs"]]
    assert {"broken": "interrupted", "over": "done", "by-hand": "running"} == {
        run["id"]: run["state"] for run in listed["on_disk"]
    }
    reasons = {run["id"]: run["reasons"][0] for run in listed["on_disk"]}
    assert "`tianflow train --resume broken` continues it" in reasons["broken"]
    assert "it answers at http://127.0.0.1:9" in reasons["by-hand"]
    assert {"over"} == {run["id"] for run in listed["on_disk"] if run["ended"] is not None}
    for missing in ("no-run", "nothing"):
        refused = await world.client.get(f"{RUNS}/{missing}", headers=CONTROL)
        assert f"Run '{missing}' does not exist." == (await refused.json())["detail"]
    await asyncio.to_thread(world.files.run("later").mkdir)
    await asyncio.to_thread((world.files.run("later") / "config.toml").touch)
    assert "later" not in {run["id"] for run in (await world.get(RUNS))["on_disk"]}
    monkeypatch.setattr(routes, "DISK_S", 0.0)
    assert "later" in {run["id"] for run in (await world.get(RUNS))["on_disk"]}
    assert [] == (await world.get(f"{RUNS}?before=1"))["on_disk"]


async def test_a_run_answers_for_itself(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    world.process("a").run.train(4)
    document = await world.get(f"{RUNS}/a")
    assert 4 == document["progress"]["updates"]
    settings = await world.client.get(f"{RUNS}/a/balance", headers=CONTROL)
    assert 1 == (await settings.json())["max_staleness"]
    merge = CONTROL | {"Content-Type": "application/merge-patch+json"}
    changed = await world.client.patch(
        f"{RUNS}/a/balance",
        data='{"max_staleness": 4}',
        headers=merge | {"If-Match": settings.headers["ETag"]},
    )
    assert 200 == changed.status
    assert changed.headers["ETag"] != settings.headers["ETag"]
    assert "application/merge-patch+json" == changed.headers["Accept-Patch"]
    assert 4 == world.process("a").run.config.balance.max_staleness
    stale = await world.client.patch(
        f"{RUNS}/a/balance",
        data='{"max_staleness": 5}',
        headers=merge | {"If-Match": settings.headers["ETag"]},
    )
    assert 412 == stale.status
    refused = await world.client.patch(
        f"{RUNS}/a/balance", data='{"max_staleness": -1}', headers=merge
    )
    assert (422, "application/problem+json") == (refused.status, refused.content_type)
    assert "balance.max_staleness" == (await refused.json())["errors"][0]["path"]
    assert (
        415
        == (await world.client.patch(f"{RUNS}/a/balance", data="{}", headers=CONTROL | JSON)).status
    )


async def test_the_read_token_changes_nothing(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    assert 200 == (await world.client.get(f"{RUNS}/a/balance", headers=READ)).status
    headers = READ | {"Content-Type": "application/merge-patch+json"}
    assert (
        403
        == (
            await world.client.patch(
                f"{RUNS}/a/balance", data='{"max_staleness": 4}', headers=headers
            )
        ).status
    )
    assert 403 == (await world.client.post(f"{RUNS}/a/stop", headers=READ)).status
    assert 1 == world.process("a").run.config.balance.max_staleness


async def test_a_finished_run_has_its_summary_and_files(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    directory = world.files.run("a")
    (directory / "summary.json").write_text('{"state": "done", "env_steps": 7}')
    (directory / "history.jsonl").write_text('{"t": 1.0}\n')
    (directory / "audit.jsonl").write_text('{"action": "pause"}\n{"torn')
    world.process("a").end(RunOutcome("done", "target"))
    await until(lambda: "a" not in world.manager.active)
    document = await world.get(f"{RUNS}/a")
    assert ("done", False, ["target"], {"state": "done", "env_steps": 7}) == tuple(
        document[key] for key in ("state", "ready", "reasons", "summary")
    )
    assert {"audit": [{"action": "pause"}], "next": None} == await world.get(f"{RUNS}/a/audit")
    assert [] == (await world.get(f"{RUNS}/a/checkpoints"))["checkpoints"]
    assert [{"t": 1.0}] == (await world.get(f"{RUNS}/a/history?points=2"))["history"]
    for path in ("balance", "diagnosis", "events"):
        assert 409 == (await world.client.get(f"{RUNS}/a/{path}", headers=CONTROL)).status


async def test_a_list_shows_the_results_of_finished_runs(world: World) -> None:
    for name in ("torn", "a"):
        await world.submit(name)
        await until(up(world, name))
        staleness = {"mean": 0.5, "p99": 1, "max": 1, "bound": 2, "violations": 0}
        summary = {
            "state": "done",
            "env_steps": 640,
            "updates": 5,
            "mean_return": 9.5,
            "staleness": staleness,
        }
        (world.files.run(name) / "summary.json").write_text(
            json.dumps(summary) if name == "a" else '{"env_steps": 7}'
        )
        world.process(name).end(RunOutcome("done", "target"))
        await until(lambda name=name: name not in world.manager.active)
    told, torn = (await world.get(RUNS))["runs"]
    assert ("done", {"env_steps": 640, "updates": 5}, {"mean": 9.5}) == (
        told["state"],
        told["progress"],
        told["returns"],
    )
    assert {"mean": 0.5, "max": 1, "bound": 2} == told["staleness"]
    assert ("done", False) == (torn["state"], "progress" in torn)


async def test_a_run_that_does_not_answer_is_not_ready_but_the_service_is(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    await world.process("a")._stack.aclose()  # its server has ended, its process has not
    await until(lambda: bool(world.manager.active["a"].problem))
    (run,) = (await world.get(RUNS))["runs"]
    assert ("running", False) == (run["state"], run["ready"])
    assert "does not answer" in run["reasons"][0]
    response = await world.client.get(f"{RUNS}/a", headers=CONTROL)
    assert (503, "1") == (response.status, response.headers["Retry-After"])
    assert 200 == (await world.client.get("/readyz")).status


async def test_a_problem_of_the_disk_is_cleared_by_the_next_success(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = BusyDisk(monkeypatch, "begin")
    problems: list[str] = []

    async def live(_: RunManager, managed: run_manager.ManagedRun) -> RunOutcome:
        problems.append(managed.problem)
        return RunOutcome("done", "target")

    monkeypatch.setattr(run_manager, "RETRY_S", 0.01)
    monkeypatch.setattr(RunManager, "_run_until_ended", live)
    await world.submit("a")
    await until(lambda: disk.asked >= 2)
    disk.busy = False
    await until(lambda: problems == [run_manager.STARTING])


async def test_a_log_that_is_too_long_is_trimmed_during_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "LONGEST_LOG", 1000)
    monkeypatch.setattr(run_manager, "POLLS_PER_TRIM", 1)
    await world.submit("a")
    await until(up(world, "a"))
    log = world.files.log("a")
    log.write_text("a line\n" * 1000)
    await until(lambda: len(log.read_text()) <= 1000)
    assert {"a line"} == set(log.read_text().splitlines())


async def test_a_failed_poll_is_reported_and_polling_continues(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    managed, ask = world.manager.active["a"], RunClient.status

    async def broken(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(RunClient, "status", broken)
    await until(lambda: managed.problem == "RuntimeError: nobody thought of this")
    assert not (await world.get(RUNS))["runs"][0]["ready"]
    monkeypatch.setattr(RunClient, "status", ask)
    await until(lambda: not managed.problem)


async def test_a_hanging_run_is_killed_after_the_grace_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_manager, "GRACE_S", 0.2)
    monkeypatch.setattr(FakeProcess, "release", lambda _: None)  # it hears nothing
    await world.submit("a")
    await until(up(world, "a"))
    await world.process("a")._stack.aclose()
    response = await world.act("a", "pause")
    assert 503 == response.status
    response = await world.act("a", "stop")
    assert (202, "stopped") == (response.status, (await response.json())["state"])
    await until(lambda: not world.manager.active)
    assert world.process("a").killed
    assert {"a": "stopped"} == await world.states()
    assert [REQUESTED] == (await world.get(f"{RUNS}/a"))["reasons"]


async def test_a_run_stopped_while_its_process_starts_and_hangs_is_killed_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open, opening = asyncio.Event(), asyncio.Event()

    async def held(_: FakeProcess) -> None:
        opening.set()
        await may_open.wait()

    monkeypatch.setattr(run_manager, "GRACE_S", 0.2)
    monkeypatch.setattr(FakeProcess, "release", lambda _: None)  # it hears nothing
    monkeypatch.setattr(FakeProcess, "open", held)
    await world.submit("a")
    await opening.wait()
    assert 202 == (await world.act("a", "stop")).status
    may_open.set()
    await until(lambda: not world.manager.active)
    assert world.process("a").killed
    assert {"a": "stopped"} == await world.states()


async def test_readiness_of_a_run_is_its_own(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    world.process("a").run.ready, world.process("a").run.reasons = False, ("the learner is silent",)
    await until(lambda: not (world.manager.active["a"].document or {"ready": True})["ready"])
    (run,) = (await world.get(RUNS))["runs"]
    assert (False, ["the learner is silent"]) == (run["ready"], run["reasons"])


async def test_an_unknown_path_is_not_found(world: World) -> None:
    for path in ("zzz", "zzz/balance", "zzz/events", "zzz/log", "..%2Fa"):
        response = await world.client.get(f"{RUNS}/{path}", headers=CONTROL)
        assert (404, "application/problem+json") == (response.status, response.content_type), path


async def test_the_end_of_a_log_is_shown(world: World) -> None:
    await world.submit("a")
    world.files.log("a").write_text("x" * 100_000 + "\nthe end\n")
    response = await world.client.get(f"{RUNS}/a/log", headers=CONTROL)
    assert "text/plain" == response.content_type
    text = await response.text()
    assert text.endswith("the end")
    assert 60_000 < len(text) < 70_000


# Streams
# --------------------------------------------------------------------------------------------------


async def test_events_are_forwarded_and_end_with_the_run(world: World) -> None:
    await world.submit("a")
    await until(up(world, "a"))
    stream = await world.client.get(f"{RUNS}/a/events", headers=CONTROL | {"Last-Event-ID": "0"})
    assert "text/event-stream" == stream.content_type
    assert b"retry: 1000\n" == await stream.content.readline()
    assert 202 == (await world.act("a", "pause")).status
    world.process("a").end(RunOutcome("done", "target"))
    await asyncio.wait_for(stream.content.read(), 10.0)


async def test_streams_above_the_limit_are_refused_and_a_released_place_is_reused(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, max_streams=1) as world:
        await world.submit("a")
        await until(up(world, "a"))
        first = await world.client.get(f"{RUNS}/a/events", headers=CONTROL)
        second = await world.client.get(f"{RUNS}/a/events", headers=CONTROL)
        assert (503, "5") == (second.status, second.headers["Retry-After"])
        assert "/problems/too-many-streams" == (await second.json())["type"]
        first.close()

        async def free() -> bool:
            third = await world.client.get(f"{RUNS}/a/events", headers=CONTROL)
            third.close()
            return third.status == 200

        await until(free)


# The service as a whole
# --------------------------------------------------------------------------------------------------


async def test_metrics_are_those_of_every_run(world: World) -> None:
    await world.submit("a")
    await world.submit("b")
    await until(up(world, "a", "b"))
    text = await (
        await world.client.get("/metrics")
    ).text()  # no token: this client is on the same machine
    assert 'tianflow_run_ready{run="a"} 1.0' in text
    assert 'tianflow_run_ready{run="b"} 1.0' in text
    assert 'tianflow_service_runs{state="running"} 2.0' in text


async def test_the_console_is_served_with_its_data(world: World) -> None:
    response = await world.client.get("/")
    assert ("text/html", console.POLICY) == (
        response.content_type,
        response.headers["Content-Security-Policy"],
    )
    await world.submit("a")
    await until(up(world, "a"))
    assert [] == (await world.get(f"{RUNS}/a/history"))["history"]


async def test_settings_are_described_for_every_known_algorithm_and_for_others(
    world: World,
) -> None:
    learner = (await world.get("/openapi.json"))["paths"][f"{RUNS}/{{run}}/learner"]["patch"][
        "requestBody"
    ]["content"]
    alternatives = learner["application/merge-patch+json"]["schema"]["anyOf"]
    assert {"type": "object"} == alternatives[-1]
    assert any("entropy_cost" in schema["properties"] for schema in alternatives[:-1])


async def test_the_description_names_every_route(world: World) -> None:
    document = await world.get("/openapi.json")
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in world.client.app.router.routes()  # type: ignore[union-attr]  # the test server runs an application
        if route.resource is not None and route.resource.canonical not in console.PATHS - {"/"}
    }
    described = {
        (method, path)
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    for method, path in routes:
        parts = [path] if "{" not in path.removeprefix("/api/v1/runs/{run}") else []
        assert all((method, part) in described for part in parts), (method, path)
    assert {"get", "head", "post", "parameters"} >= set(document["paths"][RUNS]) >= {"get", "post"}
    assert {"201", "409", "415", "422"} <= set(document["paths"][RUNS]["post"]["responses"])


async def test_a_service_writes_its_address_and_locks_its_directory(tmp_path: Path) -> None:
    settings = ServiceSettings(runs_dir=tmp_path, http=HttpSettings(), limit=1)
    async with serving(settings) as service:
        found = await asyncio.to_thread(ControlFile.read, tmp_path, SERVICE)
        assert found is not None
        assert (service.server.address, service.tokens.control) == (found.address, found.token)
        assert await asyncio.to_thread(lambda: found.alive)
        with pytest.raises(ConfigError, match="another service"):
            async with serving(settings):
                pass
        taken = ServiceSettings(
            runs_dir=tmp_path / "other", http=HttpSettings(port=service.server.port), limit=1
        )
        with pytest.raises(ConfigError, match=f"{service.server.port}.*is in use"):
            async with serving(taken):
                pass
    assert await asyncio.to_thread(ControlFile.read, tmp_path, SERVICE) is None
    async with serving(settings) as restarted:
        assert service.tokens == restarted.tokens  # bookmarks survive a restart


async def test_without_tokens_only_this_machine_is_served(tmp_path: Path) -> None:
    open_to_all = ServiceSettings(
        runs_dir=tmp_path, http=HttpSettings(host="0.0.0.0"), limit=1, tokens=False
    )
    with pytest.raises(
        ConfigError, match="would let every machine that reaches this address control the run"
    ):
        async with serving(open_to_all):
            pass
    async with serving(
        ServiceSettings(runs_dir=tmp_path, http=HttpSettings(), limit=1, tokens=False)
    ) as service:
        assert NO_TOKENS == service.tokens
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{service.server.address}{RUNS}") as answer,
        ):
            assert 200 == answer.status
