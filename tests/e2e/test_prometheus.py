"""A real Prometheus scrapes a server: every panel and every rule answers with data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dashboards import make, targets
from tests.fakes_run import FakeRun
from tianflow.config import HttpSettings
from tianflow.service.auth import Tokens
from tianflow.service.server import serve

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian package of that name) is not installed"),
]
SCRAPES = 6
FOLDER = Path(make.__file__).parent / "prometheus"


class TroubledRun(FakeRun):
    """Goes on, and does everything that a rule warns of."""

    def step(self) -> None:
        self.now += 0.2
        self.waiting += 0.15
        self.train(1, seconds=0.0, bound=-1)
        self.commit(1)
        self.ledger.drop_open("straggler")
        self.last_update = time.time() - 1000.0
        self.restarts["actors-0", "died"] = self.restarts.get(("actors-0", "died"), 0) + 1
        self.checkpoint = replace(self.checkpoint, attempts=self.checkpoint.attempts + 1, failures=self.checkpoint.failures + 1)
        self.generation += 1


async def drive(run: TroubledRun) -> None:
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


def prepare(folder: Path, runs_dir: Path) -> None:
    """The committed files, scraping every second the runs in ``runs_dir``."""
    folder.mkdir()
    text = (FOLDER / "prometheus.yml").read_text()
    assert "scrape_interval: 5s" in text
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(FOLDER / "rules.yml", folder)
    (folder / "targets").mkdir()
    assert targets.write(runs_dir, folder / "targets" / "runs.json")


async def ask(session: aiohttp.ClientSession, path: str, **parameters: str) -> Any:
    async with session.get(path, params=parameters) as response:
        answer = json.loads(await response.text())
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]


async def wait_for_scrapes(session: aiohttp.ClientSession) -> None:
    """Until the run was scraped often enough for rates, with patience for Prometheus to start."""
    async with asyncio.timeout(45.0):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                found = (await ask(session, "/api/v1/query", query="count_over_time(tianflow_run_ready[1m])"))["result"]
                if found and float(found[0]["value"][1]) >= SCRAPES:
                    return
            await asyncio.sleep(0.2)


def panel_expressions() -> list[str]:
    boards = [json.loads(path.read_text()) for path in sorted((FOLDER.parent / "grafana" / "dashboards").glob("*.json"))]
    found = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    return [expression.replace("$run", ".+").replace("$__rate_interval", "10s") for expression in found]


async def test_every_panel_and_every_rule_answers_with_data(tmp_path: Path) -> None:
    run = await asyncio.to_thread(TroubledRun, slots=64, replay=True)  # it reads the installed entry points
    run.ready, run.reasons = False, ("the learner waits",)
    run.evaluation = {"mean_return": 12.0, "version": 1.0, "episodes": 100.0}
    directory = tmp_path / "runs" / run.id
    await asyncio.to_thread(directory.mkdir, parents=True)
    async with serve(run, HttpSettings(), Tokens.make(), directory):
        await asyncio.to_thread(prepare, tmp_path / "prometheus", tmp_path / "runs")
        driving = asyncio.create_task(drive(run))
        async with prometheus(tmp_path / "prometheus") as address, aiohttp.ClientSession(address) as session:
            await wait_for_scrapes(session)
            empty = [query for query in panel_expressions() if not (await ask(session, "/api/v1/query", query=query))["result"]]
            assert [] == empty
            rules = (await ask(session, "/api/v1/rules"))["groups"][0]["rules"]
            assert len(rules) >= 7
            silent = [rule["name"] for rule in rules if not (await ask(session, "/api/v1/query", query=rule["query"]))["result"]]
            assert [] == silent
            assert {""} == {rule.get("lastError", "") for rule in rules}
            unaccounted = await ask(session, "/api/v1/query_range", **window(identity()))
            assert {"0"} == {value for series in unaccounted["result"] for _, value in series["values"]}
            assert (await ask(session, "/api/v1/targets"))["activeTargets"][0]["lastError"] == ""
        driving.cancel()


def identity() -> str:
    """begun - trained - dropped - open, as the balance dashboard shows it."""
    return next(query for query in panel_expressions() if "trajectories_open" in query and " - " in query)


def window(query: str) -> dict[str, str]:
    return {"query": query, "start": str(time.time() - 30.0), "end": str(time.time()), "step": "1"}
