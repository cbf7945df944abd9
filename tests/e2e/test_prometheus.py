"""A real Prometheus scrapes both servers: every panel and every rule answers with data, and alerts
come and go with their causes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dashboards import make, targets
from tests.server.test_service import opened, until, up
from tests.support.fakes_run import FakeRun
from tianflow.config.model import HttpSettings
from tianflow.core.statistics import SinkStatistics
from tianflow.server.common.auth import Tokens
from tianflow.server.run.server import serve
from tianflow.server.service.run_process import RunOutcome

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus (Debian package of that name) is not installed",
    ),
]
SCRAPES = 6
FOLDER = Path(make.__file__).parent / "prometheus"


class SteadyRun(FakeRun):
    """Goes on, well at first; what a test sets is what goes wrong."""

    def __init__(self) -> None:
        super().__init__(slots=64)
        self.waits, self.stuck, self.bound = 0.01, False, 1

    def step(self) -> None:
        self.now += 0.2
        self.waiting += self.waits
        if not self.stuck:
            self.train(1, seconds=0.0, bound=self.bound)


class TroubledRun(FakeRun):
    """Goes on, and does everything that a rule warns of."""

    def step(self) -> None:
        self.now += 0.2
        self.waiting += 0.15
        self.train(1, seconds=0.0, bound=-1)
        self.commit(1)
        self.ledger.drop_open("straggler")
        self.commit(1)
        self.ledger.drop_open("node_lost")
        self.last_update = time.time() - 1000.0
        self.restarts["actors-0", "died"] = self.restarts.get(("actors-0", "died"), 0) + 1
        self.checkpoint = replace(
            self.checkpoint,
            attempts=self.checkpoint.attempts + 1,
            failures=self.checkpoint.failures + 1,
        )
        lost = self.sinks.get("tensorboard", SinkStatistics())
        self.sinks["tensorboard"] = SinkStatistics(lost.rows + 2, lost.dropped + 1)
        self.generation += 1


async def drive(run: TroubledRun | SteadyRun) -> None:
    while True:
        run.step()
        await asyncio.sleep(0.2)


@asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[str]:
    """Prometheus with the files in ``folder``; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
        "--log.level=warn",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://{listen}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def prepare(folder: Path, runs_dir: Path, *more: str) -> None:
    """The committed files, scraping twice a second the runs in ``runs_dir``, and ``more``
    addresses.
    """
    folder.mkdir()
    text = (FOLDER / "prometheus.yml").read_text()
    assert "scrape_interval: 5s" in text
    text = text.replace("scrape_interval: 5s", "scrape_interval: 500ms").replace(
        "evaluation_interval: 15s", "evaluation_interval: 500ms"
    )
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(FOLDER / "rules.yml", folder)
    (folder / "targets").mkdir()
    assert targets.write(runs_dir, folder / "targets" / "runs.json")
    (folder / "targets" / "more.json").write_text(json.dumps([{"targets": more}]))


def hasten(rules: Path) -> None:
    """Minutes become seconds: how long something must last, and over how long it is looked at."""
    text, count = re.subn(r"\[\d+m\]", "[4s]", rules.read_text())
    assert count >= 8
    text, count = re.subn(r"for: \d+m", "for: 1s", text)
    assert count >= 4
    assert "timestamp_seconds > 300" in text
    rules.write_text(text.replace("timestamp_seconds > 300", "timestamp_seconds > 4"))


async def wait_for_alerts(
    session: aiohttp.ClientSession, condition: Callable[[set[str]], bool]
) -> set[str]:
    """Until the names of the alerts that fire are as wished."""
    firing: set[str] = set()
    try:
        async with asyncio.timeout(120.0):
            while True:
                alerts = (await ask(session, "/api/v1/alerts"))["alerts"]
                firing = {
                    alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"
                }
                if condition(firing):
                    return firing
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"firing in the end: {firing}") from None


async def promtool_accepts(page: str) -> None:
    """What ``promtool check metrics`` says of a scrape."""
    process = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate(page.encode())
    assert (0, "") == (process.returncode, said.decode())


async def scraped(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{address}/metrics") as response:
        assert 200 == response.status
        return await response.text()


async def ask(session: aiohttp.ClientSession, path: str, **parameters: str) -> Any:
    async with session.get(path, params=parameters) as response:
        answer = json.loads(await response.text())
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]


async def wait_for_scrapes(session: aiohttp.ClientSession) -> None:
    """Until the run was scraped often enough for rates, with patience for Prometheus to start."""
    async with asyncio.timeout(120.0):
        while True:
            with contextlib.suppress(
                aiohttp.ClientError, json.JSONDecodeError
            ):  # while it starts, it answers in words
                found = (
                    await ask(
                        session, "/api/v1/query", query="count_over_time(tianflow_run_ready[1m])"
                    )
                )["result"]
                if found and float(found[0]["value"][1]) >= SCRAPES:
                    return
            await asyncio.sleep(0.2)


async def wait_for_failure(session: aiohttp.ClientSession) -> None:
    """Until it was scraped that a run has failed."""
    async with asyncio.timeout(120.0):
        while not (  # noqa: ASYNC110 - asked over HTTP
            await ask(session, "/api/v1/query", query='tianflow_service_runs{state="failed"} > 0')
        )["result"]:
            await asyncio.sleep(0.2)


def boards() -> list[Any]:
    folder = FOLDER.parent / "grafana" / "dashboards"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def filled_in(expression: str, interval: str = "5s") -> str:
    return expression.replace("$run", ".+").replace("$__rate_interval", interval)


def annotation_expressions() -> dict[str, str]:
    """Over two seconds: the run was scraped before them, too."""
    return {
        event["name"]: filled_in(event["expr"], "2s")
        for board in boards()
        for event in board["annotations"]["list"]
    }


def panel_expressions() -> list[str]:
    found = [
        target["expr"]
        for board in boards()
        for panel in board["panels"]
        if panel["type"] != "row"
        for target in panel["targets"]
    ]
    return [filled_in(expression) for expression in found]


async def test_every_panel_and_every_rule_answers_with_data(tmp_path: Path) -> None:
    run = await asyncio.to_thread(
        TroubledRun, slots=64, replay=True
    )  # it reads the installed entry points
    run.servers = 1
    run.ready, run.reasons = False, ("the learner waits",)
    run.evaluation = {"mean_return": 12.0, "version": 1.0, "episodes": 100.0, "success": 0.5}
    directory = tmp_path / "runs" / run.id
    await asyncio.to_thread(directory.mkdir, parents=True)
    async with (
        serve(run, HttpSettings(), Tokens.make(), directory) as server,
        opened(tmp_path / "held") as world,
    ):
        for name in ("a", "b"):
            await world.submit(name)
        await until(up(world, "a", "b"))
        for page in (server.address, str(world.client.make_url(""))):
            await promtool_accepts(await scraped(page.rstrip("/")))
        more = f"127.0.0.1:{world.client.port}"
        await asyncio.to_thread(prepare, tmp_path / "prometheus", tmp_path / "runs", more)
        driving = asyncio.create_task(drive(run))
        async with (
            prometheus(tmp_path / "prometheus") as address,
            aiohttp.ClientSession(address) as session,
        ):
            await wait_for_scrapes(session)
            world.process("b").end(RunOutcome("failed", "on purpose"))
            await wait_for_failure(session)
            empty = [
                query
                for query in panel_expressions()
                if not (await ask(session, "/api/v1/query", query=query))["result"]
            ]
            assert [] == empty
            events = {
                name: bool((await ask(session, "/api/v1/query", query=query))["result"])
                for name, query in annotation_expressions().items()
            }
            # everything but a resume happens to this run all the time
            often = {"Changes": True, "Restarts": True, "Checkpoints": True}
            assert often | {"Resumes": False} == events
            rules = (await ask(session, "/api/v1/rules"))["groups"][0]["rules"]
            assert len(rules) >= 7
            silent = [
                rule["name"]
                for rule in rules
                if not (await ask(session, "/api/v1/query", query=rule["query"]))["result"]
            ]
            assert [] == silent
            assert {""} == {rule.get("lastError", "") for rule in rules}
            unaccounted = await ask(session, "/api/v1/query_range", **window(identity()))
            assert {"0"} == {
                value for series in unaccounted["result"] for _, value in series["values"]
            }
            assert ["", ""] == [
                target["lastError"]
                for target in (await ask(session, "/api/v1/targets"))["activeTargets"]
            ]
        driving.cancel()


async def test_alerts_fire_when_they_should_and_clear_when_all_is_well_again(
    tmp_path: Path,
) -> None:
    run = await asyncio.to_thread(SteadyRun)
    directory = tmp_path / "runs" / run.id
    await asyncio.to_thread(directory.mkdir, parents=True)
    async with opened(tmp_path / "held") as world, AsyncExitStack() as life:
        await life.enter_async_context(serve(run, HttpSettings(), Tokens.make(), directory))
        await asyncio.to_thread(
            prepare, tmp_path / "prometheus", tmp_path / "runs", f"127.0.0.1:{world.client.port}"
        )
        await asyncio.to_thread(hasten, tmp_path / "prometheus" / "rules.yml")
        driving = asyncio.create_task(drive(run))
        async with (
            prometheus(tmp_path / "prometheus") as address,
            aiohttp.ClientSession(address) as session,
        ):
            await wait_for_scrapes(session)
            assert set() == await wait_for_alerts(session, lambda firing: not firing)
            run.waits, run.stuck = 0.18, True
            await wait_for_alerts(session, {"TianflowLearnerStarved", "TianflowNoProgress"}.__le__)
            run.waits, run.stuck = 0.01, False
            await wait_for_alerts(session, lambda firing: not firing)
            await world.submit("a")
            await until(up(world, "a"))
            world.process("a").end(RunOutcome("failed", "on purpose"))
            await wait_for_alerts(session, {"TianflowRunFailed"}.__eq__)
            await wait_for_alerts(session, lambda firing: not firing)
            run.bound = -1
            await wait_for_alerts(session, {"TianflowBoundViolated"}.__eq__)
            run.bound = 1
            # what was trained on beyond the bound stays so, for as long as the run goes on
            await asyncio.sleep(6.0)  # longer than every window
            assert "TianflowBoundViolated" in await wait_for_alerts(session, lambda _: True)
            await life.aclose()
            await wait_for_alerts(session, lambda firing: not firing)
        driving.cancel()


def identity() -> str:
    """begun - trained - dropped - open, as the balance dashboard shows it."""
    return next(
        query for query in panel_expressions() if "trajectories_open" in query and " - " in query
    )


def window(query: str) -> dict[str, str]:
    return {"query": query, "start": str(time.time() - 30.0), "end": str(time.time()), "step": "1"}
