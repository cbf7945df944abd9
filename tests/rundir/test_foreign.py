"""Runs of other programs are read with limits: no links, no large files, no values of other types."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tianflow.config.loading import CONFIG_FILE
from tianflow.rundir import audit_log, foreign, history
from tianflow.rundir.control_file import MACHINE, ControlFile
from tianflow.rundir.foreign import Extent, ForeignRun, bounded, is_run, names_of_runs
from tianflow.rundir.history import read_rows, thinned
from tianflow.rundir.summary import SUMMARY, read_summary

BEFORE = ROOT / "tests" / "data" / "before" / "alone"
FILES = (CONFIG_FILE, SUMMARY, history.NAME, audit_log.NAME)


@pytest.fixture(params=["ppo", "apex"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> ForeignRun:
    """A run of an older version."""
    shutil.copytree(BEFORE / request.param, tmp_path / "runs" / request.param)
    return ForeignRun(tmp_path / "runs" / request.param)


def everything(run: ForeignRun) -> list[object]:
    """All that a run has to read."""
    return [
        run.settings(),
        run.summary(),
        run.rows(),
        run.extent(),
        run.audit(before=None, limit=10).records,
    ]


NOTHING: list[object] = [None, None, [], Extent({}, {}), ()]


def test_a_run_of_another_version_is_read_whole(recorded: ForeignRun) -> None:
    rows = read_rows(recorded.path / history.NAME)
    assert rows == recorded.rows()
    assert (rows[0], rows[-1]) == (recorded.extent().first, recorded.extent().last)
    assert read_summary(recorded.path) == recorded.summary()
    settings = recorded.settings()
    assert settings is not None
    assert "CartPole-v1" == settings["env"]["id"]
    assert audit_log.read_page(recorded.path / audit_log.NAME).records == (
        recorded.audit(before=None, limit=10).records
    )


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_a_file_is_not_followed(recorded: ForeignRun, name: str) -> None:
    before = everything(recorded)
    path = recorded.path / name
    path.rename(recorded.path.parent.parent / "secret")
    path.symlink_to(recorded.path.parent.parent / "secret")
    now = everything(recorded)
    changed = {
        place for place, (old, new) in enumerate(zip(before, now, strict=True)) if old != new
    }
    assert {
        CONFIG_FILE: {0},
        SUMMARY: {1},
        history.NAME: {2, 3},
        audit_log.NAME: {4},
    }[name] == changed
    assert all(now[place] == NOTHING[place] for place in changed)


def test_a_link_to_a_directory_is_no_run(recorded: ForeignRun) -> None:
    runs = recorded.path.parent
    (runs / "link").symlink_to(recorded.path, target_is_directory=True)
    assert NOTHING == everything(ForeignRun(runs / "link"))
    assert [recorded.path.name] == names_of_runs(runs)
    assert not is_run(runs, "link")


def test_only_directories_with_settings_and_a_valid_name_are_runs(tmp_path: Path) -> None:
    for time, name in enumerate(("b", "a", ".hidden", "odd name", "x" * 65, "é", "no-run")):
        (tmp_path / name).mkdir()
        if name != "no-run":
            (tmp_path / name / CONFIG_FILE).touch()
            os.utime(tmp_path / name / CONFIG_FILE, (time, time))
    (tmp_path / "file").touch()
    assert ["a", "b"] == names_of_runs(tmp_path), "the newest first"
    for name in ("..", ".", "a/..", "a/../b", "", "no-run", "file", "odd name"):
        assert not is_run(tmp_path, name), name
    assert is_run(tmp_path, "a")
    assert [] == names_of_runs(tmp_path / "nothing")


@pytest.mark.timeout(10)
def test_files_that_are_not_regular_are_not_read(tmp_path: Path) -> None:
    for name in (*FILES, "control.json"):
        os.mkfifo(tmp_path / name)
    assert NOTHING == everything(ForeignRun(tmp_path))
    assert ForeignRun(tmp_path).contact() is None
    assert NOTHING == everything(ForeignRun(tmp_path / "nothing"))


def test_files_beyond_their_limits_are_not_read(
    recorded: ForeignRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("LARGEST_HISTORY", "LARGEST_SUMMARY", "LARGEST_SETTINGS"):
        monkeypatch.setattr(foreign, limit, 100)
    assert [None, None, []] == everything(recorded)[:3]


def test_settings_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_stranger_too.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(
        '[env]\nid = "of_a_stranger_too:Env"\nkwargs.day = 2026-01-02\n[algorithm]\n'
        'name = "of_a_stranger_too:A"\n[unknown]\nx = 1\n'
    )
    settings = ForeignRun(tmp_path).settings()
    assert {
        "env": {"id": "of_a_stranger_too:Env", "kwargs": {"day": "2026-01-02"}},
        "algorithm": {"name": "of_a_stranger_too:A"},
    } == settings
    assert "of_a_stranger_too" not in sys.modules


@pytest.mark.parametrize(
    "text", [b"\xff", b"[env", b"x = " + b"[" * 5000 + b"]" * 5000, b"env = 3\n"]
)
def test_damaged_settings_are_none_or_empty(tmp_path: Path, text: bytes) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(text)
    assert not ForeignRun(tmp_path).settings()


def line(t: float, **values: Any) -> dict[str, Any]:
    return {"t": t, "span_s": 1.0, "time": 1.79e9 + t, "env_steps": int(t), **values}


HOSTILE: list[dict[str, Any]] = [
    {"learning": {"train/loss": {"count": 10**400, "mean": 1e308}}},
    {"learning": {"x" * 500: {"count": 1, "mean": 1.0}}},
    {"learning": {f"mine/{n}": {"count": 1, "mean": 1.0} for n in range(5000)}},
    {"marks": [{"t": "<b>", "kind": "evaluation", "mean_return": 1.0}]},
    {"marks": [{"t": 1.0, "kind": ["evaluation"]}, {"t": 1.0}, {}]},
    {"marks": [{"t": 1.0, "kind": "evaluation", "name": {"a": 1}, "mean_return": "high"}]},
    {"marks": [{"t": 1.0, "kind": "change", "paths": [1]}]},
    {"state": "x" * 100_000},
    {"more": {"deep": [[[[[[[[[[[[1]]]]]]]]]]]]}},
    {"durations": {"actor": {"count": 1e308, "mean": 1e308, "spread": 1e308, "skew": 1e308}}},
    {"shares": {"actor": {"busy": 1e308, "waiting": -1e308}}},
    {"staleness": {"count": 2**53, "counts": {str(n): 2**53 for n in range(3)}}},
    {"time": -1e300},
    {"steps_per_s": 1e308, "updates_per_s": -1e308},
]


@pytest.mark.parametrize("values", HOSTILE)
def test_hostile_lines_are_bounded_and_merge(tmp_path: Path, values: dict[str, Any]) -> None:
    lines = [line(1.0, **values), line(2.0), line(3.0, **values)]
    text = "".join(json.dumps(found) + "\n" for found in lines)
    (tmp_path / history.NAME).write_text(text)
    run = ForeignRun(tmp_path)
    rows = run.rows()
    assert [1.0, 2.0, 3.0] == [row["t"] for row in rows]
    if len(text) <= foreign.END:
        assert (rows[0], rows[-1]) == (run.extent().first, run.extent().last)
    assert [3.0] == [row["t"] for row in thinned(rows, 1)]
    assert len(json.dumps(rows)) < 500_000
    for row in rows:
        assert not set(row) - set(history.HistoryRow.__dataclass_fields__)
        for mark in row.get("marks", ()):
            assert isinstance(mark["t"], float)
            assert isinstance(mark["kind"], str)
            assert isinstance(mark.get("name", ""), str)


def test_the_last_whole_line_is_found_before_one_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / history.NAME
    many = "".join(json.dumps(line(float(t))) + "\n" for t in range(1, 3000))
    assert len(many) > 3 * foreign.END
    path.write_text(many + '{"t": 3000.0, "sp')
    extent = ForeignRun(tmp_path).extent()
    assert (1.0, 2999.0) == (extent.first["t"], extent.last["t"])


@pytest.mark.parametrize(
    ("values", "gone"),
    [
        ({"env_steps": "many"}, "env_steps"),
        ({"env_steps": -1}, "env_steps"),
        ({"mean_return": 10**400}, "mean_return"),
        ({"staleness": [1]}, "staleness"),
        ({"evaluation": {"mean_return": "<b>"}}, "evaluation"),
        ({"of_another_program": 1}, "of_another_program"),
    ],
)
def test_a_summary_has_no_fields_of_another_type(
    tmp_path: Path, values: dict[str, Any], gone: str
) -> None:
    (tmp_path / SUMMARY).write_text(json.dumps({"state": "done", "seed": 3, **values}))
    found = ForeignRun(tmp_path).summary()
    assert {"state": "done", "seed": 3} == found
    assert gone not in found


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000])
def test_a_summary_of_another_form_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMARY).write_text(text)
    assert ForeignRun(tmp_path).summary() is None


def test_records_of_an_audit_log_have_time_source_and_action(tmp_path: Path) -> None:
    whole = {"time": "2026-01-02T03:04:05", "source": "x", "action": "change", "new": {"a.b": 1}}
    records = [whole | {"more": 1}, {"time": 3, "source": "x", "action": "y"}, {"time": "now"}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / audit_log.NAME).write_text(text)
    assert [whole] == ForeignRun(tmp_path).audit(before=None, limit=10).records


def test_values_are_bounded() -> None:
    assert {"a": [1, "x" * foreign.LONGEST_TEXT, None, True]} == bounded(
        {"a": [1, "x" * 10_000, None, True, 10**400, float("inf")], "y" * 500: 1}
    )
    assert foreign.MOST_ENTRIES == len(bounded(list(range(10_000))))
    assert bounded(10**400) is None
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    assert json.dumps(bounded(deep)).count("[") <= foreign.DEEPEST


def contact(**values: Any) -> ControlFile:
    pid = {"pid": os.getpid(), "start_time": 1, "run": "a", "address": "http://127.0.0.1:9"}
    return ControlFile(**{**pid, "token": "t", "read_token": "r", **values})


def test_a_run_of_another_machine_is_active_by_its_newest_line_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(socket, "create_connection", lambda *args: called.append(args))
    run, last = ForeignRun(tmp_path), {"time": 1000.0, "span_s": 20.0}
    active: Callable[[ControlFile, dict[str, Any], float], bool] = run.is_active
    elsewhere = contact(machine="of another")
    assert active(elsewhere, last, 1090.0)
    assert not active(elsewhere, last, 1091.0)
    assert not active(elsewhere, {}, 1000.0)
    assert not active(contact(machine=MACHINE), last, 1000.0), "the process has another start time"
    assert [] == called
