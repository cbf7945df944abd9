"""Files of a run that are damaged or forged cost one sentence and an exit code: no traceback, no
hang, no file that changes.

``TIANFLOW_FUZZ_EXAMPLES`` sets the number of examples of each test, 20 by default.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from typer.main import get_command

import tianflow.cli
from tests.support.paths import ROOT
from tests.support.settings import cartpole
from tianflow.cli import main as cli
from tianflow.config.loading import load_config, to_toml, write_config
from tianflow.core.jsonable import json_ready
from tianflow.core.payloads import Version
from tianflow.errors import ConfigError, printable
from tianflow.rundir.checkpoints import MANIFEST, CheckpointStore, write_state
from tianflow.rundir.control_file import NAME
from tianflow.rundir.history import HistoryFile, read_rows, thinned
from tianflow.server.service import openapi
from tianflow.server.service.on_disk import RunsOnDisk
from tianflow.server.service.store import RunStore, StoreError
from tianflow.simulation.calibration import read_like

EXAMPLES = int(os.environ.get("TIANFLOW_FUZZ_EXAMPLES", "20"))
pytestmark = pytest.mark.timeout(max(60, EXAMPLES // 10))
LONGEST_S = 5.0
MOST_LINES = 40
"""Of a refusal that lists every problem."""
COMMAND = get_command(cli.app)  # to make it takes longer than an example
fuzz = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

RECORDED = ROOT / "tests" / "data" / "before" / "alone" / "ppo"
NUMBERS = st.integers() | st.floats() | st.sampled_from([-1, 2**53 + 1, 10**30, 1e308, -0.0, True])
TEXTS = st.text(max_size=20) | st.sampled_from(["../x", "os:system", "\x1b[2J", "\ud800", "v1-0"])
VALUES = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def dumped(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document, the whole of it first."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inner:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@st.composite
def forged(draw: st.DrawFn, document: Any) -> bytes:
    """``document`` with a few values replaced, or with bytes cut, flipped or put in."""
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(list(places(document))))
        document = replaced(document, where, draw(VALUES))
    return draw(st.just(dumped(document)) | damaged(dumped(document)))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=8)) + data[at + draw(st.integers(0, 40)) :]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def quick() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LONGEST_S


def command(*arguments: str) -> int:
    """Run a command, which must end with a code and, if it refuses, with a sentence."""
    out, err = io.StringIO(), io.StringIO()
    with quick(), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        COMMAND(arguments)
    code, refusal = ended.value.code, err.getvalue()
    assert isinstance(code, int)
    assert code in (0, 1, 2)
    assert "Traceback" not in refusal
    if code:
        assert refusal.strip()
        assert refusal == printable(refusal)
        assert len(refusal.splitlines()) <= MOST_LINES
    return code


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    config = cartpole(run={"max_updates": 400})
    write_config(folder, config, revision=1)
    store = CheckpointStore(folder / "checkpoints", keep=2)
    staged = store.stage()
    state = write_state(staged, {"x": np.zeros(1, np.float32)})
    manifest = {
        "run": "one",
        "revision": 2,
        "config": json.loads(config.model_dump_json()),
        "env_steps": 640,
        "samples": 640,
        "episodes": 3,
        "elapsed_s": 8.0,
        "trained_s": 4.0,
        "recent_returns": [1.0],
        "evaluation": {"mean_return": 1.0},
    }
    store.publish(staged, version=Version(1, 10), state=state, manifest=manifest)
    return folder


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the start of a run is real; the run itself is not."""
    module: Any = SimpleNamespace(run=lambda *_, **__: 0)
    monkeypatch.setitem(sys.modules, "tianflow.cli.train", module)
    monkeypatch.setattr(tianflow.cli, "train", module, raising=False)


@pytest.mark.usefixtures("no_training")
@fuzz
@given(data=st.data())
def test_a_resume_survives_any_manifest(run_folder: Path, data: st.DataObject) -> None:
    path = run_folder / "checkpoints" / "v1-0000000010" / MANIFEST
    original = path.read_bytes()
    try:
        path.write_bytes(data.draw(forged(json.loads(original))))
        before = contents(run_folder)
        command("train", "--resume", "one", "--runs-dir", str(run_folder.parent))
        assert before == contents(run_folder)
    finally:
        path.write_bytes(original)


@pytest.mark.usefixtures("no_training")
@fuzz
@given(data=st.data())
def test_a_resume_survives_any_settings(run_folder: Path, data: st.DataObject) -> None:
    path = run_folder / "config.toml"
    original = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(original)))
        before = contents(run_folder)
        command("train", "--resume", "one", "--runs-dir", str(run_folder.parent))
        assert before == contents(run_folder)
    finally:
        path.write_bytes(original)


@fuzz
@given(data=st.data())
def test_a_config_is_loaded_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "config.toml"
    spoiled = data.draw(damaged(to_toml(cartpole()).encode()))
    path.write_bytes(spoiled)
    command("config", "show", str(path))
    assert {path: spoiled} == contents(tmp_path)


@fuzz
@given(data=st.data())
def test_tables_are_loaded_or_refused(data: st.DataObject) -> None:
    tables = json.loads(cartpole().model_dump_json())
    where = data.draw(st.sampled_from([path for path in places(tables) if path]))
    with quick(), contextlib.suppress(ConfigError):
        load_config(replaced(tables, where, data.draw(VALUES)))


@fuzz
@given(data=st.data())
def test_a_control_file_is_read_or_ignored(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "one"
    folder.mkdir(exist_ok=True)
    document = {
        "run": "one",
        "pid": 2**22 + 1,
        "start_time": 5,
        "address": "http://127.0.0.1:1",
        "token": "a",
        "read_token": "b",
    }
    (folder / NAME).write_bytes(data.draw(forged(document)))
    before = contents(tmp_path)
    for name in ("status", "stop"):
        command(name, "one", "--runs-dir", str(tmp_path))
    assert before == contents(tmp_path)


ROW = {
    "t": 1.0,
    "span_s": 1.0,
    "time": 1.0,
    "state": "running",
    "env_steps": 1,
    "updates": 1,
    "episodes": 1,
    "mean_return": 1.0,
    "steps_per_s": 1.0,
    "updates_per_s": 1.0,
    "staleness": {"count": 1, "min": 0, "mean": 0.5, "p99": 1, "max": 1, "counts": {"0": 1}},
    "queue": 0,
    "credits": {"limit": 1, "in_use": 1},
    "shares": {"learner": {"busy": 1.0}},
    "durations": {"learner": {"count": 1, "mean": 1.0}},
    "dropped": {},
    "violations": 0,
    "replay": None,
    "bottleneck": "",
    "generation": 0,
    "marks": [{"t": 1.0, "kind": "change"}],
    "marks_left_out": 0,
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@fuzz
@given(data=st.data())
def test_a_history_is_read_merged_and_continued(
    run_folder: Path, tmp_path: Path, elsewhere: Path, data: st.DataObject
) -> None:
    shutil.copy(run_folder / "config.toml", tmp_path)
    path = tmp_path / "history.jsonl"
    lines = [data.draw(st.just(dumped(ROW)) | forged(ROW)) for _ in range(4)]
    path.write_bytes(b"\n".join(lines))
    with quick():
        thinned(read_rows(path), 1)
    before = contents(tmp_path)
    command("report", str(tmp_path), "--output", str(elsewhere / "report.html"))
    assert before == contents(tmp_path)
    with quick():
        history = HistoryFile(path, limit=2)
        history.open()
        history.append(ROW)
    assert ROW["t"] == read_rows(path)[-1]["t"]


def steady_rows() -> list[dict[str, Any]]:
    shares = {"learner": {"busy": 0.5}, "actor": {"busy": 0.8, "waiting:turn": 0.1}}
    durations = {
        role: {"count": 9, "mean": 1.0, "spread": 0.5, "skew": 1.0, "apart": 0.1}
        for role in ("learner", "actor")
    }
    steady = {"shares": shares, "durations": durations, "marks": []}
    return [
        ROW | steady | {"t": float(t), "updates": 10 * t, "env_steps": 600 * t, "episodes": 40 * t}
        for t in range(12)
    ]


@fuzz
@given(data=st.data())
def test_a_history_gives_rates_or_is_refused(
    run_folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.copy(run_folder / "config.toml", tmp_path)
    rows = steady_rows()
    lines = [dumped(row) for row in rows]
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(st.just(lines[at]) | forged(rows[at]))
    (tmp_path / "history.jsonl").write_bytes(b"\n".join(lines))
    with quick(), contextlib.suppress(ConfigError):
        read_like(tmp_path, cartpole())


@fuzz
@given(data=st.data())
def test_a_service_reads_a_forged_run_on_disk(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Every document of it is JSON of a bounded size that the schemas describe."""
    runs = tmp_path_factory.mktemp("runs")
    folder = runs / "ppo"
    shutil.copytree(RECORDED, folder, ignore=shutil.ignore_patterns("checkpoints"))
    for name in ("summary.json", "history.jsonl", "audit.jsonl"):
        written = (folder / name).read_text()
        lines = [json.loads(line) for line in ([written], written.splitlines())[name[-1] == "l"]]
        at = data.draw(st.integers(0, len(lines) - 1))
        found = [dumped(line) for line in lines]
        found[at] = data.draw(st.just(found[at]) | forged(lines[at]))
        (folder / name).write_bytes(b"\n".join(found))
    path = folder / "config.toml"
    text = path.read_bytes()
    path.write_bytes(data.draw(st.just(text) | damaged(text)))
    before = contents(runs)
    on_disk = RunsOnDisk(runs)
    with quick():
        audit = on_disk.audit("ppo", before=None, limit=10)
        rows = on_disk.rows("ppo")
        [short] = on_disk.listed(on_disk.names()).runs
        document, settings_ = on_disk.document("ppo"), on_disk.settings("ppo")
        given_ = [short, document, settings_, list(audit.records), rows, thinned(rows, 2)]
        text_ = json.dumps(json_ready(given_), allow_nan=False)
    assert len(text_) < 500_000
    described = Draft202012Validator(openapi._on_disk())
    described.validate(json_ready(short))
    described.validate(json_ready(document))
    assert before == contents(runs)


@fuzz
@given(data=st.data())
def test_a_store_is_opened_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("store") / "runs.sqlite"
    store = RunStore(path)
    store.add("one", config={}, source="test", now=1.0)
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._connection.close()
    original = path.read_bytes()
    spoiled = data.draw(damaged(original) | st.binary(max_size=200))
    path.write_bytes(spoiled)
    with quick():
        try:
            opened = RunStore(path)
        except StoreError:
            assert {path: spoiled} == contents(path.parent)
            return
        try:
            opened.get("one")
            opened.page(before=None, limit=9)
            opened.counts()
            opened.startable(9)
        except StoreError:
            pass
        finally:
            with contextlib.suppress(sqlite3.Error):
                opened._connection.close()


@pytest.mark.usefixtures("no_training")
def test_the_undamaged_files_are_accepted(run_folder: Path, tmp_path: Path) -> None:
    """So that a refusal above is one of the damage."""
    runs = str(run_folder.parent)
    (tmp_path / "history.jsonl").write_bytes(dumped(ROW))
    shutil.copy(run_folder / "config.toml", tmp_path)
    report = str(tmp_path / "report.html")
    (tmp_path / "history.jsonl").write_bytes(b"\n".join(map(dumped, steady_rows())))
    assert 1.0 > float(str(read_like(tmp_path, cartpole())[0]["update_s"])) > 0.0
    assert [0, 0, 0] == [
        command("train", "--resume", "one", "--runs-dir", runs),
        command("config", "show", str(run_folder / "config.toml")),
        command("report", str(tmp_path), "--output", report),
    ]
