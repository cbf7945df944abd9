"""The study of presets: what it trains, when it stops, and the tables that it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib import child
from benchmarks.lib.harness import BenchmarkError
from benchmarks.peers.sb3_presets import ZOO
from benchmarks.studies import presets
from benchmarks.studies.presets import LONG, PRESETS, Queue, Record, Trial
from tianflow.config.loading import shipped

TRIAL = Trial("preset", "acrobot_ppo", "ppo", "Acrobot-v1", 150_000, 60.0)


def record(seed: int = 1, score: float = -80.0, **changed: object) -> Record:
    settings = presets.settings_of(TRIAL)
    made = Record("preset", TRIAL.name, seed, settings, score, -90.0, 150_100, 20.0, 25.0)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_every_shipped_config_is_measured_or_has_a_reason() -> None:
    assert set(shipped()) == {*PRESETS, *LONG, *presets.ELSEWHERE}


def test_the_page_shows_the_stored_results() -> None:
    written = presets.PAGE.read_text(encoding="utf-8")
    assert presets.table(presets.read(presets.OUT)) in written


def test_settings_of_the_peer_are_those_of_environments_that_are_measured() -> None:
    places = {(trial.algorithm, trial.env) for trial in presets.trials(peer=True)}
    assert set() == set(ZOO) - places


def test_the_table_has_median_and_range_of_the_seeds() -> None:
    records = [record(seed, score) for seed, score in ((1, -90.0), (2, -80.0), (3, -84.25))]
    line = next(each for each in presets.table(records).splitlines() if "`acrobot_ppo`" in each)
    assert "| `acrobot_ppo` | Acrobot-v1 | 150,000 | 3 | -84.2 (-90 to -80) |  | 20 |" == line


def test_a_score_of_other_settings_is_not_shown() -> None:
    assert presets.table([]) == presets.table([record(settings="other settings")])


def test_a_page_is_rendered_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{presets.BEGIN}old{presets.END}after\n")
    for _ in range(2):
        presets.render([record()], page)
    middle = f"{presets.BEGIN}\n{presets.table([record()])}\n{presets.END}"
    assert f"before\n{middle}after\n" == page.read_text()


def test_no_run_is_started_that_cannot_end_in_time() -> None:
    now, quick, slow = [0.0], replace(TRIAL, name="quick", seconds=40.0), TRIAL
    todo = Queue([(slow, 1), (quick, 1)], ends=60.0, records=[], now=lambda: now[0])
    assert (quick, 1, 60.0) == todo.take()
    assert (None, 1) == (todo.take(), todo.left)


def test_recorded_runs_show_how_long_another_takes() -> None:
    records: list[Record] = []
    todo = Queue([(TRIAL, 2)], ends=50.0, records=records, now=lambda: 0.0)
    assert todo.take() is None
    records.append(record(wall_s=30.0))
    assert (TRIAL, 2, 50.0) == todo.take()


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs that were trained, with results instead of training."""
    found = []

    def train(trial: Trial, seed: int, limit_s: float) -> Record:
        assert limit_s > 0.0
        found.append((trial.name, seed))
        if seed == 13:
            raise BenchmarkError("it failed")
        return record(seed, name=trial.name)

    monkeypatch.setattr(presets, "train", train)
    return found


def call(tmp_path: Path, *words: str) -> int:
    page = tmp_path / "page.md"
    page.write_text(presets.BEGIN + presets.END)
    files = ("--out", str(tmp_path / "out.json"), "--page", str(page))
    return presets.main(["--only", "acrobot_ppo", *files, *words])


def test_a_recorded_run_is_not_repeated(tmp_path: Path, trained: list[tuple[str, int]]) -> None:
    assert 0 == call(tmp_path, "--seeds", "1,2")
    assert 0 == call(tmp_path, "--seeds", "2,3")
    assert [("acrobot_ppo", seed) for seed in (1, 2, 3)] == trained
    stored = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [1, 2, 3] == [each["seed"] for each in stored]
    assert "| 3 | -80 (-80 to -80)" in (tmp_path / "page.md").read_text()


def test_a_run_with_other_settings_is_repeated(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    presets.write(tmp_path / "out.json", [record(settings="other settings")])
    assert 0 == call(tmp_path, "--seeds", "1")
    assert [("acrobot_ppo", 1)] == trained


def test_one_failure_does_not_lose_the_other_runs(
    tmp_path: Path, trained: list[tuple[str, int]]
) -> None:
    assert 1 == call(tmp_path, "--seeds", "13,2")
    assert [2] == [each.seed for each in presets.read(tmp_path / "out.json")]


def test_a_preset_without_its_package_is_skipped(
    tmp_path: Path,
    trained: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(presets, "NEEDED", (("Acrobot", "no_such_module", "acrobots"),))
    assert 0 == call(tmp_path, "--seeds", "1")
    assert [] == trained
    assert "skipped: preset acrobot_ppo needs acrobots" in capsys.readouterr().out


def test_a_run_is_the_command_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {
        "evaluation": {"mean_return": -81.0},
        "mean_return": -85.0,
        "env_steps": 150_016,
        "training_s": 20.0,
    }
    calls = []

    def run(module: str, *arguments: object, timeout_s: float) -> child.Finished:
        calls.append((module, arguments[0], *arguments[2:4], timeout_s))
        assert presets.settings_of(TRIAL) == Path(str(arguments[1])).read_text()
        return child.Finished(answer, 25.0, 30.0, None)

    monkeypatch.setattr(child, "run", run)
    found = presets.train(TRIAL, 7, 99.0)
    assert [("tianflow", "train", "run.seed=7", "placement.affinity=none", 99.0)] == calls
    assert (-81.0, -85.0, 7, 25.0) == (found.score, found.training, found.seed, found.wall_s)
