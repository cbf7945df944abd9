"""A service and runs that it did not start: they can be read, and nothing asks or changes them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from yarl import URL

from tests.server.test_service import CONTROL, World, opened
from tests.support.paths import ROOT
from tianflow.rundir.control_file import ControlFile, process_start_time
from tianflow.rundir.history import read_rows
from tianflow.server.service import on_disk, routes
from tianflow.server.service.on_disk import RunsOnDisk

RUNS = "/api/v1/runs"
BEFORE = ROOT / "tests" / "data" / "before" / "alone"
SUMMARY = json.loads((BEFORE / "ppo" / "summary.json").read_text())
ROWS = {name: read_rows(BEFORE / name / "history.jsonl") for name in ("ppo", "apex")}
EVIL = "<script>alert(1)</script>"


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A service beside a run that ended, and one that was killed."""
    monkeypatch.setattr(routes, "DISK_S", 0.0)
    async with opened(tmp_path) as found:
        await asyncio.to_thread(prepare, found.files.runs)
        yield found


def prepare(runs: Path) -> None:
    for name in ("ppo", "apex"):
        shutil.copytree(BEFORE / name, runs / name)
    (runs / "apex" / "summary.json").unlink()
    for age, name in enumerate(("ppo", "apex")):
        os.utime(runs / name / "config.toml", (1e9 - age, 1e9 - age))


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def send(
    world: World, method: str, path: str, body: object = None
) -> tuple[int, dict[str, Any]]:
    headers = CONTROL | {"Content-Type": "application/merge-patch+json"}
    url = URL(path, encoded=True)
    data = None if body is None else json.dumps(body)
    response = await world.client.request(method, url, headers=headers, data=data)
    return response.status, await response.json()


async def test_a_list_has_the_results_of_runs_on_disk(world: World) -> None:
    listed = (await world.get(RUNS))["on_disk"]
    assert [("ppo", "stopped", True), ("apex", "interrupted", True)] == [
        (run["id"], run["state"], run["on_disk"]) for run in listed
    ]
    ended, killed = listed
    rows = ROWS["apex"]
    assert ("CartPole-v1", "ppo", f"{RUNS}/ppo") == (
        ended["environment"],
        ended["algorithm"],
        ended["href"],
    )
    assert SUMMARY["env_steps"] == ended["progress"]["env_steps"]
    assert SUMMARY["evaluation"] == ended["evaluation"]
    assert (SUMMARY["reason"], None) == (ended["end_reason"], killed["end_reason"])
    assert rows[-1]["env_steps"] == killed["progress"]["env_steps"]
    assert rows[-1]["time"] == killed["ended"], "it was last seen then"
    assert rows[-1]["t"] == killed["elapsed_s"]
    assert rows[0]["time"] - rows[0]["span_s"] == killed["started"]


async def test_a_list_is_read_again_only_where_a_file_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.get(RUNS)
    read: list[str] = []
    extent = on_disk.ForeignRun.extent

    def counted(run: Any) -> Any:
        read.append(run.path.name)
        return extent(run)

    monkeypatch.setattr(on_disk.ForeignRun, "extent", counted)
    await world.get(RUNS)
    assert [] == read
    path = world.files.run("apex") / "history.jsonl"
    text = await asyncio.to_thread(path.read_text)
    more = json.dumps(json.loads(text.splitlines()[-1]) | {"t": 999.0}) + "\n"
    await asyncio.to_thread(path.write_text, text + more)
    assert 999.0 == (await world.get(RUNS))["on_disk"][1]["elapsed_s"]
    assert ["apex"] == read


async def test_a_long_list_says_how_many_are_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "MOST", 1)
    listed = await world.get(RUNS)
    assert (["ppo"], 1) == ([run["id"] for run in listed["on_disk"]], listed["on_disk_more"])
    assert "apex" == (await world.get(f"{RUNS}/apex"))["id"], "it opens all the same"


async def test_a_run_on_disk_opens_with_curves_settings_summary_and_changes(world: World) -> None:
    document = await world.get(f"{RUNS}/ppo")
    assert ("stopped", True, None) == (
        document["state"],
        document["on_disk"],
        document["submitted"],
    )
    assert "progress" not in document, "it is no active run"
    assert SUMMARY == document["summary"]
    assert (await world.get(f"{RUNS}/apex"))["summary"] is None
    past = await world.get(f"{RUNS}/ppo/history?points=500")
    assert ROWS["ppo"] == past["history"]
    assert 5 >= len((await world.get(f"{RUNS}/ppo/history?points=5"))["history"])
    settings = (await world.get(f"{RUNS}/ppo/config"))["config"]
    assert "CartPole-v1" == settings["env"]["id"]
    assert "http" not in settings
    actions = [record["action"] for record in (await world.get(f"{RUNS}/ppo/audit"))["audit"]]
    assert ["change", "stop"] == actions


async def test_answers_about_runs_on_disk_are_as_described(world: World) -> None:
    whole = await world.get("/openapi.json")
    components = {"components": whole["components"]}
    for path, template in (
        (RUNS, RUNS),
        (f"{RUNS}/ppo", f"{RUNS}/{{run}}"),
        (f"{RUNS}/apex", f"{RUNS}/{{run}}"),
        (f"{RUNS}/ppo/history", f"{RUNS}/{{run}}/history"),
        (f"{RUNS}/ppo/config", f"{RUNS}/{{run}}/config"),
        (f"{RUNS}/ppo/audit", f"{RUNS}/{{run}}/audit"),
    ):
        described = whole["paths"][template]["get"]["responses"]["200"]
        schema = described["content"]["application/json"]["schema"]
        Draft202012Validator({**schema, **components}).validate(await world.get(path))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "", None),
        ("POST", "/stop", None),
        ("POST", "/resume", None),
        ("POST", "/pause", None),
        ("POST", "/checkpoint", None),
        ("PATCH", "/balance", {"max_staleness": 4}),
        ("GET", "/balance", None),
        ("GET", "/components", None),
        ("GET", "/diagnosis", None),
        ("GET", "/checkpoints", None),
        ("GET", "/log", None),
        ("GET", "/events", None),
    ],
)
async def test_nothing_steers_a_run_on_disk(
    world: World, method: str, path: str, body: object
) -> None:
    before = await asyncio.to_thread(digests, world.files.run("ppo"))
    status, answer = await send(world, method, f"{RUNS}/ppo{path}", body)
    assert 409 == status
    said = "run 'ppo' has ended (stopped) and can only be read: it is on disk and not in the store"
    assert answer["detail"].startswith(said)
    assert "`tianflow train --resume ppo` continues it" in answer["detail"]
    assert before == await asyncio.to_thread(digests, world.files.run("ppo"))


async def test_an_active_run_on_disk_is_not_asked_and_its_tokens_stay_where_they_are(
    world: World,
) -> None:
    asked: list[object] = []
    server = await asyncio.start_server(lambda *_: asked.append(1), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pid = os.getpid()
    control = ControlFile(
        run="apex",
        pid=pid,
        start_time=await asyncio.to_thread(process_start_time, pid),
        address=f"http://127.0.0.1:{port}",
        token="secret-of-apex",
        read_token="secret-to-read",
    )
    await asyncio.to_thread(control.write, world.files.run("apex"))
    texts = [str(await world.get(path)) for path in (RUNS, f"{RUNS}/apex", f"{RUNS}/apex/config")]
    assert "running" == (await world.get(f"{RUNS}/apex"))["state"]
    for method, path in (("POST", "/stop"), ("GET", "/events"), ("GET", "/diagnosis")):
        status, answer = await send(world, method, f"{RUNS}/apex{path}")
        texts.append(str(answer))
        assert 409 == status
        assert f"it answers at http://127.0.0.1:{port}" in answer["detail"]
    assert not any("secret" in text for text in texts)
    server.close()
    await server.wait_closed()
    assert [] == asked


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2fppo", "ppo%2f..%2fppo", "link", ".service", "odd%20name", "%00"]
)
async def test_no_name_leads_out_of_the_directory(world: World, tmp_path: Path, name: str) -> None:
    def links() -> None:
        shutil.copytree(BEFORE / "ppo", tmp_path / "elsewhere")
        shutil.copytree(BEFORE / "ppo", world.files.runs / "odd name")
        (world.files.runs / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    await asyncio.to_thread(links)
    assert {"ppo", "apex"} <= {run["id"] for run in (await world.get(RUNS))["on_disk"]}
    assert "link" not in {run["id"] for run in (await world.get(RUNS))["on_disk"]}
    for part in ("", "/history", "/config", "/audit"):
        response = await world.client.get(
            URL(f"{RUNS}/{name}{part}", encoded=True), headers=CONTROL
        )
        assert response.status in {400, 404}, name


async def test_texts_of_others_are_data(world: World) -> None:
    def write() -> None:
        folder = world.files.run("ppo")
        (folder / "config.toml").write_text(
            f'[env]\nid = "{EVIL}"\n[algorithm]\nname = "{"x" * 1000}"\n'
        )
        summary = {"state": EVIL, "error": EVIL, "env_steps": EVIL, "seed": 1}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "history.jsonl").write_text("not json\n")

    await asyncio.to_thread(write)
    document = await world.get(f"{RUNS}/ppo")
    assert (EVIL, "x" * 200) == (document["environment"], document["algorithm"])
    assert "stopped" == document["state"], "another state is not shown"
    assert {"error": EVIL, "seed": 1, "state": EVIL} == document["summary"]
    assert [] == (await world.get(f"{RUNS}/ppo/history"))["history"]
    response = await world.client.get(f"{RUNS}/ppo", headers=CONTROL)
    assert "application/json" == response.content_type


async def test_a_run_of_the_store_is_never_read_as_one_on_disk(world: World) -> None:
    await world.submit("mine")
    await asyncio.to_thread(
        lambda: shutil.copytree(BEFORE / "ppo", world.files.run("mine"), dirs_exist_ok=True)
    )
    assert "mine" not in {run["id"] for run in (await world.get(RUNS))["on_disk"]}
    assert "on_disk" not in await world.get(f"{RUNS}/mine")


def test_directories_that_vanish_cost_nothing(tmp_path: Path) -> None:
    runs = RunsOnDisk(tmp_path)
    assert [] == list(runs.names())
    assert not runs.has("a")
    document = runs.document("a")
    assert ("interrupted", None, None) == (
        document["state"],
        document["summary"],
        document["started"],
    )
    assert ([], {}, ()) == (
        runs.rows("a"),
        runs.settings("a"),
        runs.audit("a", before=None, limit=5).records,
    )
