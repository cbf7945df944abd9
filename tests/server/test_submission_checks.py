"""A submission whose run would fail at its start is refused, in bounded time, by few processes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_service import CONTROL, JSON, RUNS, World, opened
from tianflow.config.loading import load_config
from tianflow.core.process_table import carries, processes
from tianflow.server.service import submission_checks
from tianflow.server.service.submission_checks import CHILDREN, SubmissionChecks

pytestmark = pytest.mark.e2e

MARK = "TIANFLOW_TEST_SUBMISSIONS"
MODULE = "tests.support.failing_environments"
"""A child imports it for each check, so it imports little."""


def tables(name: str, **more: Any) -> dict[str, Any]:
    return {"env": {"id": name, "num_envs": 1}, "algorithm": {"name": "ppo"}, **more}


def children() -> list[int]:
    """Processes that checks of this test have started."""
    return [
        entry.pid
        for entry in processes()
        if entry.pid != os.getpid() and carries(entry.pid, MARK, str(os.getpid()))
    ]


def interpreters() -> int:
    """Processes of checks, without those that an environment starts."""
    return sum(parent(pid) == os.getpid() for pid in children())


def parent(pid: int) -> int:
    """The process that started ``pid``; 0 once it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setenv(MARK, str(os.getpid()))
    async with (
        SubmissionChecks() as checks,
        opened(tmp_path, allowed=(MODULE,), check=checks.check) as world,
    ):
        yield world
    assert [] == await asyncio.to_thread(children)


async def submit(world: World, config: dict[str, Any], **headers: str) -> tuple[int, Any]:
    data = json.dumps({"config": config})
    async with world.client.post(RUNS, data=data, headers=CONTROL | JSON | headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        (tables("Nope-v1"), "config.env.id", "doesn't exist"),
        (tables(f"{MODULE}:Nope"), "config.env.id", "Nope"),
        (tables(f"{MODULE}:Raising"), "config.env.id", "no licence"),
        (tables(f"{MODULE}:Ending"), "config.env.id", "exit status 3"),
        (tables("CartPole-v1", network={"name": "nope"}), "config.network.name", "nope"),
        (tables("CartPole-v1", metrics={"sinks": ["nope"]}), "config.metrics.sinks", "nope"),
        (
            tables("CartPole-v1", balance={"controller": "nope"}),
            "config.balance.controller",
            "nope",
        ),
        (tables("CartPole-v1", placement={"launcher": "nope"}), "config.placement.launcher", ""),
        (
            tables("CartPole-v1", placement={"launcher": "slurm"}),
            "config.placement.launcher",
            "only `tianflow train` submits",
        ),
        (
            tables("CartPole-v1", learner={"device": "cuda:99"}),
            "config.learner.device",
            "this machine has",
        ),
        (
            tables(
                "CartPole-v1",
                metrics={"sinks": ["tensorboard"], "kwargs": {"tensorboard": {"nope": 1}}},
            ),
            "config.metrics.kwargs.tensorboard.nope",
            "",
        ),
        (
            tables("CartPole-v1", algorithm={"name": "sac"}, replay={"min_size": 10}),
            "config.algorithm.name",
            "",
        ),
    ],
    ids=[
        *("id", "attribute", "raises", "ends", "network", "sink", "controller", "launcher"),
        *("batch", "gpu", "argument", "box"),
    ],
)
async def test_a_run_that_would_fail_at_its_start_is_refused(
    world: World, config: dict[str, Any], path: str, message: str
) -> None:
    status, problem = await submit(world, config)
    assert 422 == status
    (found,) = problem["errors"]
    assert path == found["path"]
    assert message in json.dumps(found)
    assert {} == await world.states()


async def test_a_usable_environment_is_accepted_although_its_processes_live_on(
    world: World,
) -> None:
    began = time.monotonic()
    status, run = await submit(world, tables(f"{MODULE}:Forking"))
    assert (201, "pending") == (status, run["state"])
    assert time.monotonic() - began < submission_checks.ANSWER_S  # it was decided, not accepted


@pytest.mark.e2e
async def test_slow_submissions_are_accepted_in_time_by_few_processes_while_others_are_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_checks, "ANSWER_S", 3.0)
    began = time.monotonic()
    submissions = [
        asyncio.create_task(submit(world, tables(f"{MODULE}:Hanging"))) for _ in range(8)
    ]
    most = 0
    while not all(task.done() for task in submissions):
        most = max(most, await asyncio.to_thread(interpreters))
        before = time.monotonic()
        async with world.client.get("/livez") as answer:
            assert 200 == answer.status
        assert time.monotonic() - before < 1.0
        await asyncio.sleep(0.05)
    assert CHILDREN == most
    assert time.monotonic() - began < 3.0 + 2.0
    assert [201] * 8 == [task.result()[0] for task in submissions]


async def test_a_repeated_submission_gets_its_run_without_another_check(
    tmp_path: Path,
) -> None:
    checked: list[str] = []

    async def check(config: Any) -> None:
        checked.append(config.env.id)

    async with opened(tmp_path, check=check) as world:
        first = await submit(world, tables("CartPole-v1"), **{"Idempotency-Key": "k"})
        again = await submit(world, tables("CartPole-v1"), **{"Idempotency-Key": "k"})
    assert (201, first[1]["id"]) == (again[0], again[1]["id"])
    assert ["CartPole-v1"] == checked


async def test_the_end_of_a_service_ends_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(os.getpid()))
    monkeypatch.setattr(submission_checks, "ANSWER_S", 600.0)
    config = await asyncio.to_thread(load_config, tables(f"{MODULE}:Hanging"))
    async with SubmissionChecks() as checks:
        waiting = asyncio.create_task(checks.check(config))
        async with asyncio.timeout(20.0):
            while not await asyncio.to_thread(children):  # noqa: ASYNC110 - a process tells nobody
                await asyncio.sleep(0.05)
    async with asyncio.timeout(10.0):
        await waiting
        await checks.check(config)  # a submission that was already on its way
    assert [] == await asyncio.to_thread(children)
