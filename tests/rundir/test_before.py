"""Files of earlier versions still load: checkpoints, histories, summaries and the store of a service.

``tests/data/before`` holds them as they were written before the packages of today. Each run changed its bound while it
trained, so its checkpoint holds another bound than its config did at first.
"""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tianflow
from tests.support.paths import ROOT
from tianflow.cli import main as cli
from tianflow.cli.screen import summary_text
from tianflow.config.model import Config
from tianflow.report.page import facts, page
from tianflow.report.records import read
from tianflow.rundir.checkpoints import CheckpointStore
from tianflow.rundir.history import NAME, read_rows
from tianflow.rundir.summary import partial_document, read_summary
from tianflow.server.service.rows import short
from tianflow.server.service.store import RunStore

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")

BEFORE = ROOT / "tests" / "data" / "before"
BOUNDS = {"ppo": 3, "apex": 40}
UPDATES = {"ppo": 2069, "apex": 3110}
NOW = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of the runs, to be written to."""
    return Path(shutil.copytree(BEFORE / "alone", tmp_path / "runs"))


def resume(runs: Path, name: str) -> dict[str, Any]:
    """Train ``name`` for five more updates; its summary."""
    arguments = [
        f"run.max_updates={UPDATES[name] + 5}",
        "placement.launcher=inline",
        "evaluation.episodes=1",
    ]
    done = CliRunner().invoke(
        cli.app,
        ["train", "--resume", name, "--runs-dir", str(runs), "--no-http", "--json", *arguments],
    )
    assert 0 == done.exit_code, done.output
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.parametrize("name", BOUNDS)
def test_a_checkpoint_loads_with_the_bound_that_was_in_force(name: str) -> None:
    found = CheckpointStore(BEFORE / "alone" / name / "checkpoints", keep=1).newest()
    assert found is not None
    assert UPDATES[name] == found.version.number
    assert BOUNDS[name] == Config.model_validate(found.manifest["config"]).bound
    assert found.read()
    policy = tianflow.load_policy(BEFORE / "alone" / name)
    assert "CartPole-v1" == policy.config.env.id


@pytest.mark.parametrize("name", BOUNDS)
def test_a_run_resumes_with_its_bound_and_continues_its_history(runs: Path, name: str) -> None:
    before = read_rows(runs / name / NAME)
    summary = resume(runs, name)
    assert (UPDATES[name] + 5, BOUNDS[name], 0) == (
        summary["updates"],
        summary["staleness"]["bound"],
        summary["staleness"]["violations"],
    )
    after = read_rows(runs / name / NAME)
    assert before == after[: len(before)]
    assert before[-1]["t"] <= after[len(before)]["t"]
    assert "resumed" in [mark["kind"] for mark in after[len(before)]["marks"]]
    assert {BOUNDS[name]} == {row["staleness"]["bound"] for row in after[len(before) :]}


@pytest.mark.parametrize("name", BOUNDS)
def test_no_field_of_a_line_is_lost(name: str) -> None:
    path = BEFORE / "alone" / name / NAME
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert written == read_rows(path)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_report_shows_the_run(name: str) -> None:
    run = read(BEFORE / "alone" / name)
    text = page(run, now=NOW)
    assert "balance.max_staleness" in text
    assert f"bound {BOUNDS[name]}" in facts(run)["staleness"]
    assert f"{UPDATES[name]:,}" == facts(run)["updates"]


@pytest.mark.parametrize("name", BOUNDS)
def test_a_summary_is_read_by_every_reader(name: str) -> None:
    summary = read_summary(BEFORE / "alone" / name)
    assert summary is not None
    assert BOUNDS[name] == partial_document(summary)["staleness"]["bound"]
    assert f"bound {BOUNDS[name]} at the end, 0 violations" in summary_text(summary)


def test_the_store_of_a_service_opens_and_lists_its_runs(tmp_path: Path) -> None:
    runs = Path(shutil.copytree(BEFORE / "service", tmp_path / "runs"))
    store = RunStore(runs / ".service" / "runs.sqlite")
    try:
        records = store.page(before=None, limit=10)
        assert [("queued", "pending"), ("long", "running"), ("short", "done")] == [
            (record.id, record.state) for record in records
        ]
        assert ["long", "queued"] == [record.id for record in store.startable(2)]
        for record in records:
            assert record.id == Config.model_validate_json(record.config).run.name
        ended = short(records[-1], None, read_summary(runs / "short"))
        assert (200, 1) == (ended["progress"]["updates"], ended["staleness"]["bound"])
    finally:
        store.close()


def test_a_run_of_a_service_resumes_with_its_bound(tmp_path: Path) -> None:
    runs = Path(shutil.copytree(BEFORE / "service", tmp_path / "runs"))
    found = CheckpointStore(runs / "long" / "checkpoints", keep=1).newest()
    assert found is not None
    assert 4 == Config.model_validate(found.manifest["config"]).bound
