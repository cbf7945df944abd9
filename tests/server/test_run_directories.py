"""Directories of the runs of a service: a service uses only its own, and deletes none by itself."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_service import World, opened, until, up
from tianflow.config.loading import load_config, read_tables
from tianflow.errors import CheckpointError
from tianflow.rundir import lock
from tianflow.rundir.control_file import ControlFile, process_start_time
from tianflow.server.service import run_manager, run_process
from tianflow.server.service.run_process import (
    DirectoryTakenError,
    RunFiles,
    RunOutcome,
    _arguments,
)

CONFIG: dict[str, Any] = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "run": {"name": "a", "seed": 1},
}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_manager, "POLL_S", 0.02)
    monkeypatch.setattr(run_manager, "BACKOFF_S", 0.01)
    monkeypatch.setattr(run_manager, "SPACE_S", 0.01)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    found = RunFiles(tmp_path)
    found.own.mkdir()
    return found


async def ended(world: World, name: str) -> tuple[str, str]:
    """State and reason of a run, once it has ended."""

    async def over() -> bool:
        return (await world.states())[name] not in {"pending", "running"}

    await until(over)
    run = next(run for run in (await world.get("/api/v1/runs"))["runs"] if run["id"] == name)
    return run["state"], run["reasons"][0]


def of_a_user(directory: Path) -> Path:
    """A directory with a file of a user."""
    directory.mkdir()
    (directory / "thesis.txt").write_text("years of work")
    return directory / "thesis.txt"


async def test_a_directory_that_appears_before_the_start_is_refused_and_unchanged(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, limit=1) as world:
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a"))
        file = await asyncio.to_thread(of_a_user, world.files.run("b"))
        world.process("a").end(RunOutcome("done", "target"))
        state, reason = await ended(world, "b")
        assert "failed" == state
        assert str(file.parent) in reason
        assert "was not made by this service" in reason
        assert "b" not in world.processes
        assert "years of work" == await asyncio.to_thread(file.read_text)


async def test_a_run_that_was_started_by_hand_continues_and_the_submission_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_manager, "GRACE_S", 0.0)
    async with opened(tmp_path, limit=1) as world:
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a"))
        directory = world.files.run("b")
        by_hand = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from tianflow.rundir.lock import *\n"
            "path = Path(sys.argv[1]); path.mkdir(); lock_directory(path)\n"
            "print('locked', flush=True); input()",
            str(directory),
            stdin=-1,
            stdout=-1,
        )
        assert by_hand.stdout is not None
        assert b"locked\n" == await by_hand.stdout.readline()
        control = ControlFile(
            run="b",
            pid=by_hand.pid,
            start_time=await asyncio.to_thread(process_start_time, by_hand.pid),
            address="http://127.0.0.1:1",
            token="",
            read_token="",
        )
        await asyncio.to_thread(control.write, directory)
        world.process("a").end(RunOutcome("done", "target"))
        state, reason = await ended(world, "b")
        assert "failed" == state
        assert "run 'b' is active at http://127.0.0.1:1" in reason
        assert by_hand.returncode is None
        assert await asyncio.to_thread(lambda: control.alive)
        assert control == await asyncio.to_thread(ControlFile.read, directory)
        await by_hand.communicate(b"\n")


def test_a_directory_without_checkpoints_is_moved_aside_and_named(files: RunFiles) -> None:
    assert [str(files.config("a"))] == _arguments("a", CONFIG, files)
    for number in (1, 2):
        file = of_a_user(files.run("a"))
        (files.run("a") / "checkpoints").mkdir()
        (files.run("a") / "config.toml").write_text(
            files.config("a").read_text().replace("seed = 1", "seed = 7")
        )
        assert [str(files.config("a"))] == _arguments("a", CONFIG, files)
        assert not files.run("a").exists()
        aside = files.run(f"a.before-{number}")
        assert "years of work" == (aside / file.name).read_text()
        assert repr(str(aside)) in files.tail("a")
    assert 7 == read_tables(files.config("a"))["run"]["seed"]  # the last settings continue
    assert load_config(CONFIG | {"run": {"name": aside.name}})  # reports and `eval` accept it


def test_a_directory_without_a_start_by_a_service_is_refused(files: RunFiles) -> None:
    file = of_a_user(files.run("a"))
    with pytest.raises(DirectoryTakenError, match="was not made by this service"):
        _arguments("a", CONFIG, files)
    assert "years of work" == file.read_text()


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("missing")])
def test_a_name_that_is_not_a_directory_is_refused(files: RunFiles, make: Any) -> None:
    make(files.run("a"))
    with pytest.raises(DirectoryTakenError, match="cannot be used"):
        files.require_free("a", first=True)
    assert os.path.lexists(files.run("a"))


def test_settings_of_an_earlier_run_of_the_name_are_not_used(files: RunFiles) -> None:
    _arguments("a", CONFIG, files)
    files.forget("a")
    _arguments("a", CONFIG | {"run": {"name": "a", "seed": 2}}, files)
    assert 2 == read_tables(files.config("a"))["run"]["seed"]


async def test_a_new_submission_forgets_an_earlier_run_of_the_name(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    await asyncio.to_thread(files.own.mkdir)
    await asyncio.to_thread(_arguments, "a", CONFIG, files)
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(up(world, "a"))
        assert not files.config("a").exists()


def test_a_lock_on_a_replaced_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a"
    directory.mkdir()

    def replace(*_: object) -> None:
        directory.rename(tmp_path / "b")
        directory.mkdir()

    monkeypatch.setattr(lock.fcntl, "flock", replace)
    with pytest.raises(CheckpointError, match="was moved or deleted"):
        lock.lock_directory(directory)


async def test_a_run_waits_for_space_and_starts_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    monkeypatch.setattr(RunFiles, "space_problem", lambda _: "no space" if full else "")
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(
            lambda: "a" in world.manager.active and world.manager.active["a"].problem == "no space"
        )
        assert "a" not in world.processes
        full = False
        await until(up(world, "a"))


async def test_a_run_that_waits_for_space_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFiles, "space_problem", lambda _: "no space")
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(lambda: "a" in world.manager.active)
        assert 202 == (await world.act("a", "stop")).status
        assert "stopped" == (await ended(world, "a"))[0]
        assert "a" not in world.processes


async def test_a_start_that_fails_on_a_full_disk_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False
    monkeypatch.setattr(RunFiles, "space_problem", lambda _: "no space" if full else "")
    async with opened(tmp_path) as world:
        await world.submit("a")
        await until(up(world, "a"))
        full = True
        world.process("a").end(RunOutcome("failed", "its process ended with code 1"))
        await until(lambda: world.manager.active["a"].problem == "no space")
        full = False
        await until(lambda: len(world.processes["a"]) == 2)
        await until(up(world, "a"))
        assert 0 == world.manager.restarts


@pytest.mark.parametrize("code", sorted(run_process.FULL))
def test_a_full_disk_is_named(files: RunFiles, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    assert "" == files.space_problem()
    monkeypatch.setattr(run_process.os, "fsync", refuse)
    found = files.space_problem()
    assert os.strerror(code) in found
    assert str(files.runs) in found
    assert not (files.own / ".space").exists()
