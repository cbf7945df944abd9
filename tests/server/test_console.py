"""The console's files as the server gives them: to everyone, with a policy under which no text
becomes script; and the past it shows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from yarl import URL

from tests.server.test_run_server import READ, RUN, Client, client_of, problem
from tests.support.fakes_run import FakeRun
from tianflow.core.statistics import VERDICTS
from tianflow.observability.recorder import Recorder
from tianflow.rundir.history import LIMIT, NAME, HistoryFile, read_rows, thinned
from tianflow.server.common import console
from tianflow.server.common import history as past

FOLDER = Path(console.__file__).parent
SOURCES = {
    path.name: path.read_text(encoding="utf-8")
    for path in FOLDER.iterdir()
    if path.is_file() and path.suffix in console.TYPES
}
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(directory=tmp_path)
    run.train(5)
    return run


@pytest.fixture
async def client(run: FakeRun) -> AsyncIterator[Client]:
    client = await client_of(run)
    yield client
    await client.close()


# The files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loopback", [True, False])
async def test_the_page_and_its_files_need_no_token_from_anywhere(
    run: FakeRun, loopback: bool
) -> None:
    client = await client_of(run, loopback=loopback)
    try:
        for path in sorted(console.PATHS):
            response = await client.get(path)
            name = path.removeprefix(console.FOLDER).strip("/") or console.PAGE
            assert (200, SOURCES[name]) == (response.status, await response.text())
            assert TYPES[Path(name).suffix] == response.content_type
            assert "utf-8" == response.charset
    finally:
        await client.close()


async def test_the_data_of_the_page_needs_a_token(client: Client) -> None:
    assert run_names_in_the_page() == []
    missing = await problem(await client.get("/api/v1/runs"), 401)
    assert missing["detail"].startswith("The token is missing; ")
    other = {"Authorization": "Bearer other"}
    wrong = await problem(await client.get(f"{RUN}/history", headers=other), 401)
    assert wrong["detail"].startswith("The token is wrong; ")
    await problem(await client.post("/"), 401)


def run_names_in_the_page() -> list[str]:
    return [name for name, text in SOURCES.items() if "fake" in text]


async def test_the_policy_lets_only_the_servers_own_files_run(client: Client) -> None:
    for path in console.PATHS:
        headers = (await client.get(path)).headers
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert "'none'" == policy["default-src"]
        assert {"'self'"} == {policy[kind] for kind in ("script-src", "style-src", "connect-src")}
        assert {"'none'"} == {
            policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")
        }
        assert ("nosniff", "no-store", "no-referrer") == tuple(
            headers[name] for name in ("X-Content-Type-Options", "Cache-Control", "Referrer-Policy")
        )


@pytest.mark.parametrize(
    "path",
    [
        "/console/",
        "/console/index.html",
        "/console/__init__.py",
        "/console/nothing.js",
        "/console/../app.py",
        "/console/..%2fapp.py",
        "/console/%2e%2e/app.py",
        "/console/app.js/",
        "/console//app.js",
        "/console/app.js%00.css",
    ],
)
async def test_other_files_do_not_exist(client: Client, path: str) -> None:
    await problem(await client.get(URL(path, encoded=True), headers=READ), 404)


def test_every_file_of_the_page_is_served_and_no_other() -> None:
    assert {console.PAGE, *console.FILES} == set(SOURCES)


def test_every_requested_file_exists_and_every_file_is_requested() -> None:
    asked = {
        name
        for text in SOURCES.values()
        for name in re.findall(r'(?:from "\./|"/console/)([\w.]+)"', text)
    }
    assert set(console.FILES) == asked


def test_the_page_holds_nothing_that_the_policy_forbids() -> None:
    page = SOURCES["index.html"]
    assert [] == re.findall(
        r"<style|style=|\son\w+=|javascript:|<script(?! type=\"module\" src=\"/console/)", page
    )
    for name, text in SOURCES.items():
        assert [] == re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        addresses = set(re.findall(r"https?://[\w./]+", text)) - {"http://www.w3.org/2000/svg"}
        assert set() == addresses, f"{name} names another server"


def test_modules_stay_small() -> None:
    assert [] == [name for name, text in SOURCES.items() if len(text.splitlines()) > 300]


# The past
# --------------------------------------------------------------------------------------------------


def record(run: FakeRun, lines: int) -> None:
    """So many lines of one second each, as a recorder writes them."""
    file = HistoryFile(run.directory / NAME)
    file.open()
    recorder = Recorder(run=run, file=file)
    for _ in range(lines):
        recorder._pending = None
        run.train(1)
        file.append(recorder.sample())


async def history(client: Client, query: str = "") -> dict[str, Any]:
    response = await client.get(f"{RUN}/history{query}", headers=READ)
    assert (200, "application/json") == (response.status, response.content_type)
    found: dict[str, Any] = json.loads(await response.text())
    return found


async def test_a_run_without_history_has_none(client: Client) -> None:
    found = await history(client)
    assert [] == found["history"]
    assert found["time"] > 1.7e9


async def test_the_history_is_as_recorded_and_as_described(client: Client, run: FakeRun) -> None:
    await asyncio.to_thread(record, run, 20)
    found = (await history(client))["history"]
    assert await asyncio.to_thread(read_rows, run.directory / NAME) == found
    whole = await (await client.get("/openapi.json", headers=READ)).json()
    row = {**whole["components"]["schemas"]["HistoryRow"], "components": whole["components"]}
    for line in found:
        Draft202012Validator(row).validate(line)
    assert set(row["properties"]) == set(found[-1])


@pytest.mark.parametrize("points", [2, 7, 20, 100])
async def test_the_history_has_at_most_the_requested_number_of_rows(
    client: Client, run: FakeRun, points: int
) -> None:
    await asyncio.to_thread(record, run, 20)
    found = (await history(client, f"?points={points}"))["history"]
    assert points / 2 < len(found) <= points or len(found) == 20
    lines = await asyncio.to_thread(read_rows, run.directory / NAME)
    assert lines[-1]["t"] == found[-1]["t"]
    assert sum(line["staleness"]["count"] for line in lines) == sum(
        sum(line["staleness"]["counts"].values()) for line in found
    )


@pytest.mark.parametrize("points", ["1", "0", "-3", "2.5", "x", "", "²", str(LIMIT + 1), "9" * 30])
async def test_an_invalid_number_of_rows_is_refused(client: Client, points: str) -> None:
    response = await client.get(f"{RUN}/history?points={points}", headers=READ)
    assert f"from {past.FEWEST} to {LIMIT}" in (await problem(response, 400))["detail"]


async def test_an_unreadable_history_is_503(client: Client, run: FakeRun) -> None:
    await asyncio.to_thread((run.directory / NAME).mkdir)
    assert (
        "history"
        in (await problem(await client.get(f"{RUN}/history", headers=READ), 503))["detail"]
    )


def test_thinning_keeps_short_histories() -> None:
    rows: list[dict[str, Any]] = [{"t": float(t)} for t in range(5)]
    assert rows == thinned(rows, 5)
    assert [1.0, 3.0, 4.0] == [row["t"] for row in thinned(rows, 4)]


def test_each_verdict_has_a_headline() -> None:
    named = SOURCES["words.js"].split("const VERDICTS = {")[1].split("};")[0]
    headlines = set(re.findall(r'^  "?([a-z-]+)"?: "', named, re.MULTILINE))
    assert set(VERDICTS) | {"unknown"} <= headlines
