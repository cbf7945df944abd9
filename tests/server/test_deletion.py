"""Deletion of ended runs: what is deleted, what stays, and which requests are refused."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_service import CONTROL, READ, RUNS, World, opened, until, up
from tianflow.config.loading import CONFIG_FILE, load_config, write_toml
from tianflow.logs import details_of
from tianflow.rundir.lock import lock_directory
from tianflow.server.service import run_manager, run_process
from tianflow.server.service.run_process import RunFiles, RunOutcome
from tianflow.server.service.store import RunStore, StoreError

CONFIG: dict[str, Any] = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_manager, "POLL_S", 0.02)
    monkeypatch.setattr(run_manager, "BACKOFF_S", 0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(tmp_path) as world:
        yield world


def leave_files(files: RunFiles, name: str) -> None:
    """Files of a run that a service started."""
    config = load_config(CONFIG | {"run": {"name": name}})
    write_toml(files.config(name), config)
    files.log(name).write_text("it said this")
    files.process(name).write_text("{}")
    files.run(name).mkdir(exist_ok=True)
    write_toml(files.run(name) / CONFIG_FILE, config)
    (files.run(name) / "checkpoints" / "v1").mkdir(parents=True)
    (files.run(name) / "checkpoints" / "v1" / "weights").write_bytes(b"0" * 100)


async def end(world: World, name: str, outcome: RunOutcome | None = None) -> None:
    """Submit a run, and end it with files on the disk."""
    await world.submit(name)
    await until(up(world, name))
    await asyncio.to_thread(leave_files, world.files, name)
    world.process(name).end(outcome or RunOutcome("done", "target"))
    await until(lambda: name not in world.manager.active)


async def delete(
    world: World, name: str, headers: dict[str, str] = CONTROL
) -> tuple[int, dict[str, Any]]:
    response = await world.client.delete(f"{RUNS}/{name}", headers=headers)
    return response.status, await response.json()


def left(world: World) -> set[str]:
    """Names of files and directories that remain, without the store."""
    return {
        str(path.relative_to(world.files.runs))
        for path in world.files.runs.rglob("*")
        if not path.name.startswith("runs.sqlite")
    } - {".service"}


async def test_an_ended_run_is_deleted_with_everything_that_a_service_made_of_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        await end(world, name)
    before = await asyncio.to_thread(left, world)
    with caplog.at_level(logging.INFO):
        assert (200, {"id": "a", "action": "delete", "state": "deleted"}) == await delete(
            world, "a"
        )
    gone = before - await asyncio.to_thread(left, world)
    assert {path for path in before if path.split("/")[0] == "a"} <= gone
    assert {f".service/a{end}" for end in (".config.toml", ".log", ".process.json")} <= gone
    assert {"b"} == {path.replace(".service/", "")[0] for path in before - gone}
    assert {"b": "done"} == await world.states()
    (record,) = [found for found in caplog.records if "a run was deleted" == found.message]
    assert {"run": "a", "source": "http:127.0.0.1"} == details_of(record)


async def test_deleting_a_run_again_is_not_an_error_and_its_address_says_who_deleted_it(
    world: World,
) -> None:
    await end(world, "a")
    answers = [await delete(world, "a") for _ in range(3)]
    assert [200, 200, 200] == [status for status, _ in answers]
    response = await world.client.get(f"{RUNS}/a", headers=CONTROL)
    assert 404 == response.status
    assert "It was deleted by http:127.0.0.1 at 2" in (await response.json())["detail"]
    assert 404 == (await delete(world, "never"))[0]


async def test_several_deletions_at_once_are_one(world: World) -> None:
    await end(world, "a")
    answers = await asyncio.gather(*(delete(world, "a") for _ in range(5)))
    assert [200] * 5 == [status for status, _ in answers]


@pytest.mark.parametrize("state", ["running", "pending"])
async def test_a_run_that_has_not_ended_is_refused_and_goes_on(tmp_path: Path, state: str) -> None:
    async with opened(tmp_path, limit=1) as world:
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a"))
        name = "a" if state == "running" else "b"
        status, answer = await delete(world, name)
        assert 409 == status
        assert f"run '{name}' is {state}; only a run that has ended" in answer["detail"]
        assert {"a": "running", "b": "pending"} == await world.states()


async def test_the_read_token_deletes_nothing(world: World) -> None:
    await end(world, "a")
    assert 403 == (await delete(world, "a", READ))[0]
    assert {"a": "done"} == await world.states()


async def test_a_run_stopped_before_its_start_is_deleted_and_a_directory_of_its_name_stays(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, limit=1) as world:
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a"))
        await world.act("b", "stop")
        thesis = world.files.run("b") / "thesis.txt"
        await asyncio.to_thread(thesis.parent.mkdir)
        await asyncio.to_thread(thesis.write_text, "years of work")
        assert 200 == (await delete(world, "b"))[0]
        assert "years of work" == await asyncio.to_thread(thesis.read_text)
        assert {"a": "running"} == await world.states()


def replace_by_a_users(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")


def replace_by_a_link(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))
    directory.symlink_to(directory.with_name("moved"))


@pytest.mark.parametrize("replace", [replace_by_a_users, replace_by_a_link])
async def test_a_directory_that_a_service_did_not_make_is_refused(
    world: World, replace: Any
) -> None:
    await end(world, "a")
    await asyncio.to_thread(replace, world.files.run("a"))
    before = await asyncio.to_thread(left, world)
    status, answer = await delete(world, "a")
    assert (409, True) == (status, "was not made by this service" in answer["detail"])
    assert before == await asyncio.to_thread(left, world)
    assert {"a": "done"} == await world.states()


async def test_a_directory_in_use_is_refused(world: World) -> None:
    """As by `tianflow train --resume`, which a person started."""
    await end(world, "a")
    lock = await asyncio.to_thread(lock_directory, world.files.run("a"))
    try:
        status, answer = await delete(world, "a")
        assert (409, True) == (status, "is active" in answer["detail"])
        assert await asyncio.to_thread(world.files.run("a").is_dir)
    finally:
        os.close(lock)
    assert 200 == (await delete(world, "a"))[0]


async def test_a_run_is_not_resumed_while_it_is_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        await end(world, name, RunOutcome("failed", "on purpose"))
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    remove = RunFiles.remove

    def slowly(files: RunFiles, name: str) -> None:
        if name == "a":
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(10.0)
        remove(files, name)

    monkeypatch.setattr(RunFiles, "remove", slowly)
    deleting = asyncio.create_task(delete(world, "a"))
    await entered.wait()
    another = asyncio.create_task(delete(world, "b"))  # it must not lift the refusal
    await asyncio.wait({another}, timeout=0.3)
    response = await world.act("a", "resume")
    assert 409 == response.status
    assert "is being deleted" in (await response.json())["detail"]
    leave.set()
    assert [200, 200] == [(await task)[0] for task in (deleting, another)]
    assert {} == await world.states()


async def test_a_run_resumed_before_its_deletion_stays(world: World) -> None:
    """The request to delete it was sent while it was stopped."""
    await end(world, "a", RunOutcome("stopped", "on purpose"))
    resumed, deleted = await asyncio.gather(world.act("a", "resume"), delete(world, "a"))
    assert {(202, 409), (409, 200), (404, 200)} >= {(resumed.status, deleted[0])}
    assert await asyncio.to_thread(world.files.run("a").exists) == (deleted[0] == 409)


async def test_the_name_of_a_deleted_run_is_free(world: World) -> None:
    await end(world, "a")
    assert 200 == (await delete(world, "a"))[0]
    await world.submit("a")
    await until(up(world, "a"))
    assert 409 == (await delete(world, "a"))[0]


async def test_a_store_that_fails_leaves_a_run_that_can_be_deleted_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await end(world, "a")

    def refuse(*_: object, **__: object) -> bool:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "delete", refuse)
        assert 503 == (await delete(world, "a"))[0]
    assert {"a": "done"} == await world.states()
    assert 200 == (await delete(world, "a"))[0]


async def test_what_a_killed_service_did_not_delete_is_deleted_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(RunFiles, "discard", lambda _: None)
        async with opened(tmp_path) as world:
            await end(world, "a")
            assert 200 == (await delete(world, "a"))[0]
            aside = await asyncio.to_thread(lambda: list(world.files.discarded.iterdir()))
            assert 1 == len(aside)
            assert [] == await asyncio.to_thread(world.files.found)
    async with opened(tmp_path):
        await until(lambda: not aside[0].exists())


async def test_a_refusal_of_the_disk_is_a_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await end(world, "a")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_process.Path, "rename", refuse)
    status, answer = await delete(world, "a")
    assert 409 == status
    assert "the files of run 'a' cannot be deleted: Permission denied" in answer["detail"]
    assert {"a": "done"} == await world.states()


def test_only_an_ended_run_leaves_the_store_and_its_deletion_survives_reopening(
    tmp_path: Path,
) -> None:
    store = RunStore(tmp_path / "runs.sqlite")
    store.add("a", config={}, source="test", now=1.0, key="k", body="b")
    assert not store.delete("a", source="me", now=2.0)
    assert store.deletion("a") is None
    store.end("a", state="done", reason="", now=3.0)
    assert store.delete("a", source="me", now=4.0)
    assert not store.delete("a", source="you", now=5.0)
    again = RunStore(tmp_path / "runs.sqlite")
    assert again.get("a") is None
    found = again.deletion("a")
    assert found is not None
    assert ("a", "me", 4.0) == (found.id, found.source, found.time)
    record, new = again.add("a", config={}, source="test", now=6.0, key="k", body="b")
    assert (True, 2) == (new, record.number)
