"""What a service answers when its disk, a run or a client misbehaves: never an unexpected error,
and never for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_service import CONTROL, JSON, RUNS, SMALL, World, until, with_a_run
from tianflow import plugins
from tianflow.config.loading import load_config
from tianflow.config.model import HttpSettings
from tianflow.errors import ConfigError
from tianflow.server.common import sse as streams
from tianflow.server.service import run_client, run_manager
from tianflow.server.service.service import ServiceSettings, serving
from tianflow.server.service.store import RunStore, StoreError

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


world = pytest.fixture(with_a_run)


@asynccontextmanager
async def played_by(world: World, talk: Talk) -> AsyncIterator[None]:
    """Requests to the run go to ``talk`` instead."""
    left = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking = asyncio.ensure_future(talk(reader, writer))
        leaving = asyncio.ensure_future(left.wait())
        await asyncio.wait([talking, leaving], return_when=asyncio.FIRST_COMPLETED)
        talking.cancel()
        leaving.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await talking
        writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    managed = world.manager.active["a"]
    assert managed.contact is not None
    managed.contact = replace(managed.contact, address=f"http://127.0.0.1:{port}")
    try:
        yield
    finally:
        left.set()
        server.close()
        await server.wait_closed()


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Takes everything and says nothing, as a process that was stopped."""
    while await reader.read(1024):
        pass
    await asyncio.Event().wait()


async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hangs up when it is asked something."""
    await reader.read(1024)
    writer.transport.abort()


LONG = json.dumps({"message": "x" * 1000}).encode()


async def garrulous(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends events without end."""
    asked = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    if b"follow=false" in asked:
        writer.close()
        return
    for first in itertools.count(1, 1000):
        writer.write(
            b"".join(
                b"id: %d\nevent: x\ndata: %s\n\n" % (number, LONG)
                for number in range(first, first + 1000)
            )
        )
        await writer.drain()


@pytest.mark.parametrize("talk", [silent, rude])
async def test_a_run_that_does_not_answer_is_503_and_does_not_affect_others(
    world: World, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_client, "ANSWER_S", 0.2)
    monkeypatch.setattr(run_client, "METRICS_S", 0.2)
    monkeypatch.setattr(run_client, "SILENCE_S", 3600.0)
    monkeypatch.setattr(run_manager, "POLL_S", 3600.0)
    async with run_client.RunClient() as impatient, played_by(world, talk):
        for client in (world.manager._client, impatient):
            client._session._timeout = impatient._session._timeout
        for path in ("", "/balance", "/events", "/components"):
            response = await asyncio.wait_for(
                world.client.get(f"{RUNS}/a{path}", headers=CONTROL), 10.0
            )
            assert (503, "1") == (response.status, response.headers["Retry-After"]), path
            assert "does not answer" in (await response.json())["detail"]
        response = await world.act("a", "pause")
        assert 503 == response.status
        response = await world.client.get("/metrics")
        assert (200, True) == (
            response.status,
            'tianflow_service_runs{state="running"} 1.0' in await response.text(),
        )


async def test_a_silent_run_does_not_cost_the_metrics_of_others() -> None:
    assert run_client.METRICS_S <= 0.5 * 5.0, (
        "half of what prometheus.yml gives a scrape: its interval"
    )


async def test_a_reader_that_does_not_read_is_disconnected(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WRITE_S", 0.2)
    async with played_by(world, garrulous):
        before, port = connections(world), world.client.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(
            f"GET {RUNS}/a/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer "
            "c\r\n\r\n".encode()
        )
        assert b"200 OK" in await reader.readline()
        assert before + 1 == connections(world)
        await until(
            lambda: connections(world) == before
        )  # although nothing of what was written is read
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


def connections(world: World) -> int:
    """How many the service has."""
    server = world.client.server.runner.server
    assert server is not None
    return len(server.connections)


async def test_a_disk_that_refuses_is_503(world: World) -> None:
    await world.manager.query(world.manager._store._execute, "DROP TABLE runs")
    body = json.dumps({"config": SMALL})
    answers = {
        path: await world.client.request(
            method, path, headers=CONTROL | JSON, data=body if method == "POST" else None
        )
        for method, path in (
            ("GET", RUNS),
            ("GET", f"{RUNS}/a"),
            ("GET", "/metrics"),
            ("POST", RUNS),
            ("POST", f"{RUNS}/a/stop"),
        )
    }
    for path, response in answers.items():
        assert (503, "5") == (response.status, response.headers["Retry-After"]), path
        assert "the store of runs cannot be read" in (await response.json())["detail"]
    assert 503 == (await world.client.get("/readyz")).status
    assert 200 == (await world.client.get("/livez")).status


@pytest.mark.parametrize("key", ["", "x" * 256, "ключ"])
async def test_an_invalid_key_is_400(world: World, key: str) -> None:
    response = await world.client.post(
        RUNS, data=json.dumps({"config": SMALL}), headers=CONTROL | JSON | {"Idempotency-Key": key}
    )
    assert (400, "application/problem+json") == (response.status, response.content_type)


async def test_a_key_of_other_bytes_is_400(world: World) -> None:
    port = world.client.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {RUNS} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer "
        "c\r\nContent-Type: application/json\r\n"
    ).encode()
    body = json.dumps({"config": SMALL}).encode()
    writer.write(
        head + b"Idempotency-Key: a\xff\xfe\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    assert b"HTTP/1.1 400 " == (await asyncio.wait_for(reader.readline(), 10.0))[:13]
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("depth", [20, 300, 900, 5000])
@pytest.mark.parametrize("where", ["config", "overrides"])
async def test_a_config_nested_too_deeply_is_refused(world: World, depth: int, where: str) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    other = "" if where == "config" else f'"config": {json.dumps(SMALL)}, '
    response = await world.client.post(
        RUNS, data=f'{{{other}"{where}": {nested}}}', headers=CONTROL | JSON
    )
    assert response.status in {400, 422}
    assert "application/problem+json" == response.content_type


async def test_text_that_a_file_cannot_hold_is_refused(world: World) -> None:
    config = (
        '{"env": {"id": "CartPole-v1", "kwargs": {"a": "\\ud800"}}, "algorithm": {"name": "ppo"}}'
    )
    response = await world.client.post(RUNS, data=f'{{"config": {config}}}', headers=CONTROL | JSON)
    assert 422 == response.status, await response.text()


@pytest.mark.parametrize("section", ["env", "balance", ""])
async def test_a_submission_of_many_unknown_settings_costs_few_searches(
    world: World, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    nearest = plugins.nearest

    def count(word: str, known: tuple[str, ...], **more: float) -> str:
        searched.append(word)
        return nearest(word, known, **more)

    monkeypatch.setattr(plugins, "nearest", count)
    unknown = {f"max_stalenes{number}": 1 for number in range(2200)}
    config = SMALL | ({section: SMALL.get(section, {}) | unknown} if section else unknown)
    response = await world.client.post(
        RUNS, data=json.dumps({"config": config}), headers=CONTROL | JSON
    )
    assert 422 == response.status
    assert 32 == len((await response.json())["errors"])
    assert 1 <= len(searched) <= 64


async def test_a_number_that_overflows_is_refused_by_its_path(world: World) -> None:
    config = '{"env": {"id": "CartPole-v1", "kwargs": {"a": 1e400}}, "algorithm": {"name": "ppo"}}'
    response = await world.client.post(RUNS, data=f'{{"config": {config}}}', headers=CONTROL | JSON)
    assert 422 == response.status
    (problem,) = json.loads(await response.text(), parse_constant=pytest.fail)["errors"]
    assert "config.env.kwargs.a" == problem["path"]
    assert "is not finite" in problem["message"]


async def test_arguments_of_a_users_code_keep_their_types(world: World) -> None:
    body = (
        '{"config": {"env": {"id": "CartPole-v1", "num_envs": 2.0, "kwargs": {"a": [2.0, -0.0]}},'
        ' "algorithm": {"name": "ppo"}, "run": {"name": "kept"}},'
        ' "overrides": {"network.kwargs.b": 3.0, "actors.count": 4.0}}'
    )
    response = await world.client.post(RUNS, data=body, headers=CONTROL | JSON)
    assert 201 == response.status, await response.text()
    record = await world.manager.query(world.manager._store.get, "kept")
    assert record is not None
    config = await asyncio.to_thread(load_config, json.loads(record.config))
    assert "[2.0, -0.0] 3.0" == f"{config.env.kwargs['a']} {config.network.kwargs['b']}"
    assert (2, 4) == (config.env.num_envs, config.actors.count)


async def test_a_locked_store_is_answered_together_and_readiness_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await asyncio.to_thread(
        sqlite3.connect,
        world.files.own / "runs.sqlite",
        check_same_thread=False,
        isolation_level=None,
    )
    execute = RunStore._execute

    def write_first(store: RunStore, statement: str, *values: object) -> list[Any]:
        """Every call becomes one that writes, which a lock refuses."""
        execute(store, "UPDATE runs SET reason = reason")
        return execute(store, statement, *values)

    monkeypatch.setattr(RunStore, "_execute", write_first)
    await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
    began = time.monotonic()
    asked = [world.client.get(RUNS, headers=CONTROL) for _ in range(8)]
    answers = asyncio.gather(*asked)
    await asyncio.sleep(0.05)
    ready = await world.client.get("/readyz")
    assert 503 == ready.status
    assert "did not answer within" in (await ready.json())["detail"]
    assert time.monotonic() - began < 2.0
    assert {503} == {answer.status for answer in await answers}
    assert time.monotonic() - began < 5.0
    await asyncio.to_thread(other.execute, "ROLLBACK")
    await asyncio.to_thread(other.close)
    assert 200 == (await world.client.get("/readyz")).status


async def test_a_store_that_was_removed_is_reported_and_accepts_nothing(world: World) -> None:
    assert 200 == (await world.client.get("/readyz")).status
    await asyncio.to_thread(shutil.rmtree, world.files.own)
    ready = await world.client.get("/readyz")
    assert 503 == ready.status
    assert "was deleted or replaced" in (await ready.json())["detail"]
    response = await world.client.post(
        RUNS, data=json.dumps({"config": SMALL}), headers=CONTROL | JSON
    )
    assert 503 == response.status


@pytest.mark.parametrize("found", [True, False])
async def test_an_empty_store_beside_runs_is_refused(tmp_path: Path, found: bool) -> None:
    def prepare() -> None:
        (tmp_path / ".service").mkdir()
        (tmp_path / ".service" / "runs.sqlite").touch()
        if found:
            (tmp_path / "a").mkdir()
            (tmp_path / "a" / "config.toml").touch()

    await asyncio.to_thread(prepare)
    settings = ServiceSettings(runs_dir=tmp_path, http=HttpSettings(), limit=1)
    with pytest.raises(StoreError, match="holds runs: a;") if found else nullcontext():
        async with serving(settings):
            pass


async def test_a_control_file_that_cannot_be_written_leaves_no_token(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "service.json").mkdir)
    settings = ServiceSettings(runs_dir=tmp_path, http=HttpSettings(), limit=1)
    with pytest.raises(ConfigError, match=r"service\.json.*cannot be written"):
        async with serving(settings):
            pass
    left = await asyncio.to_thread(lambda: [path.name for path in tmp_path.iterdir()])
    assert [".service", "service.json"] == sorted(left)


@pytest.mark.parametrize("name", ["service.json", "Service.JSON"])
def test_a_run_cannot_have_the_name_of_a_file_of_the_service(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name.*is reserved"):
        load_config(SMALL | {"run": {"name": name}})
