"""Evaluations of real runs: their own environments, what is reported of them, the best version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tianflow
from tests.support.settings import cartpole
from tianflow.api import FinishedRun
from tianflow.cli.main import app
from tianflow.coordinator.evaluation import EvaluationScheduler
from tianflow.core.payloads import Evaluation
from tianflow.errors import CheckpointError, ConfigError
from tianflow.policy import evaluate
from tianflow.rundir.checkpoints import CheckpointStore, resolve
from tianflow.rundir.history import NAME, read_rows

LENGTH = "tests.support.environments:LengthEnv"
WIDE = "tests.support.environments:WideEnv"
FURTHER = {"large": {"env": {"kwargs": {"length": 10}}, "episodes": 3}, "like": {}}


def run(
    folder: Path, name: str = "A", *, resume: str | None = None, **sections: Any
) -> FinishedRun:
    sections = {"env": {"id": LENGTH}, **sections}
    settings = {**sections, "run": {"name": name, **sections.get("run", {})}}
    return tianflow.train(cartpole(**settings), runs_dir=folder, resume=resume)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with A, whose evaluations have environments of their own."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, evaluation={"env": {"kwargs": {"length": 7}}, "further": FURTHER})
    return folder


def test_every_evaluation_plays_its_own_environment(runs: Path) -> None:
    summary = json.loads((runs / "A" / "summary.json").read_text())
    assert {"version": 4, "mean_return": 7.0, "episodes": 4} == summary["evaluation"]
    assert {
        "large": {"version": 4, "mean_return": 10.0, "episodes": 3},
        "like": {"version": 4, "mean_return": 5.0, "episodes": 4},
    } == summary["further_evaluations"]
    assert {"version": 4, "mean_return": 7.0, "episodes": 4} == summary["best"]


def test_history_has_a_mark_for_each_evaluation(runs: Path) -> None:
    rows = read_rows(runs / "A" / NAME)
    marks = [mark for row in rows for mark in row["marks"] if mark["kind"] == "evaluation"]
    assert [(None, 7.0), ("large", 10.0), ("like", 5.0)] == [
        (mark.get("name"), mark["mean_return"]) for mark in marks
    ]


@pytest.mark.parametrize(
    ("env", "path", "sides"),
    [
        (
            {"kwargs": {"size": 6}},
            r"evaluation\.env\.kwargs\.size = 6",
            r"training has observations observation float32\[4\], the evaluation .*float32\[6\]",
        ),
        (
            {"kwargs": {"actions": 3}},
            r"evaluation\.env\.kwargs\.actions = 3",
            r"training has actions discrete.* of 2, the evaluation .* of 3",
        ),
        (
            {"id": "Pendulum-v1"},
            r"evaluation\.env\.id = 'Pendulum-v1'",
            r"training has observations .*\[4\], the evaluation .*\[3\]",
        ),
        ({"id": "Nothing-v0"}, r"evaluation\.env\.id = 'Nothing-v0'", "doesn't exist"),
        ({"kwargs": {"seize": 6}}, r"evaluation\.env\.kwargs = ", "unexpected keyword"),
        ({"kwargs": {"size": -1}}, r"evaluation\.env\.kwargs\.size = '?-1", "in its constructor"),
    ],
)
def test_an_environment_with_other_spaces_is_refused_by_path_with_both_sides(
    tmp_path: Path, env: dict[str, Any], path: str, sides: str
) -> None:
    for evaluation in ({"env": env}, {"further": {"large": {"env": env}}}):
        place = path if "env" in evaluation else path.replace("env", r"further\.large\.env", 1)
        with pytest.raises(ConfigError, match=f"{place}.*{sides}"):
            run(tmp_path, env={"id": WIDE}, evaluation=evaluation)
    assert not (tmp_path / "A").exists()


def test_the_seed_of_evaluations_is_their_own(tmp_path: Path) -> None:
    env = {"id": LENGTH, "kwargs": {"spread": 1.0}}
    found = [
        run(tmp_path, name, env=env, evaluation={"seed": seed}, run={"seed": own}).summary
        for name, seed, own in (("A", 5, 1), ("B", 5, 2), ("C", 6, 1))
    ]
    returns = [summary["evaluation"]["mean_return"] for summary in found]
    assert returns[0] == returns[1] != returns[2]


def test_the_command_plays_and_exports_the_best_version(runs: Path, tmp_path: Path) -> None:
    arguments = ["--runs-dir", str(runs), "--episodes", "2", "--trust", "--json"]
    for source in (["A", "--best"], ["A@best"], ["A@best", "--best"]):
        result = CliRunner().invoke(app, ["eval", *source, *arguments])
        assert 0 == result.exit_code, result.output
        assert 5.0 == json.loads(result.stdout)["mean_return"]
    checkpoint = str(resolve("A", runs))
    result = CliRunner().invoke(app, ["eval", checkpoint, "--best", *arguments])
    assert (2, True) == (result.exit_code, "is a checkpoint" in result.output)
    result = CliRunner().invoke(
        app, ["export", "A", "--best", "-o", str(tmp_path / "a.pt3"), "--runs-dir", str(runs)]
    )
    assert (2, True) == (result.exit_code, "unknown suffix" in result.output)


@pytest.mark.parametrize(
    ("options", "mean_return", "episodes"),
    [
        ([], 5.0, 100),
        (["--evaluation", "main"], 7.0, 4),
        (["--evaluation", "large"], 10.0, 3),
        (["--evaluation", "like"], 5.0, 4),
        (["--evaluation", "large", "--episodes", "2"], 10.0, 2),
        (["env.kwargs.length=3", "--evaluation", "large", "--sampled"], 3.0, 3),
    ],
)
def test_the_command_plays_the_environment_of_a_named_evaluation(
    runs: Path, options: list[str], mean_return: float, episodes: int
) -> None:
    arguments = ["eval", "A", *options, "--runs-dir", str(runs), "--trust", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert 0 == result.exit_code, result.output
    found = json.loads(result.stdout)
    assert (mean_return, episodes) == (found["mean_return"], found["episodes"])
    assert ("--sampled" in options) == found["sampled"]
    path = resolve("A", runs)
    environment = found["environment"]
    assert (4, str(path), LENGTH) == (found["version"], found["checkpoint"], environment["id"])
    assert mean_return == environment["kwargs"].get("length", 5)


def test_the_command_says_what_it_has_played(runs: Path) -> None:
    options = ["--best", "--evaluation", "large", "--runs-dir", str(runs), "--trust"]
    result = CliRunner().invoke(app, ["eval", "A", *options])
    path = resolve("A@best", runs)
    said = f'  version {int(path.name[-10:])}, {path}, in {LENGTH}, kwargs {{"length": 10}}'
    assert ["mean return 10.00 over 3 episodes", said] == result.stdout.splitlines()


def test_an_evaluation_that_a_run_lacks_is_refused_with_those_that_it_has(runs: Path) -> None:
    arguments = ["eval", "A", "--evaluation", "larg", "--runs-dir", str(runs), "--trust"]
    result = CliRunner().invoke(app, arguments)
    assert 2 == result.exit_code
    assert "evaluation = 'larg'" in result.output
    assert "main, large, like" in result.output


def test_a_named_evaluation_has_its_own_seed_and_choice_of_actions(tmp_path: Path) -> None:
    env = {"id": LENGTH, "kwargs": {"spread": 1.0}}
    further = {"other": {"seed": 9, "deterministic": False}, "same": {}}
    run(tmp_path, env=env, evaluation={"seed": 5, "further": further})
    policy = tianflow.load_policy("A", runs_dir=tmp_path, trust=True)
    found = {
        name: evaluate(policy.for_evaluation(evaluation=name), episodes=3)
        for name in (None, "main", "same", "other")
    }
    assert found[None] == found["main"] == found["same"] != found["other"]
    assert (5, False, 9, True) == (
        found["main"]["seed"],
        found["main"]["sampled"],
        found["other"]["seed"],
        found["other"]["sampled"],
    )
    assert 4 == evaluate(policy.for_evaluation(evaluation="other", seed=4), episodes=3)["seed"]


def test_the_environment_of_an_evaluation_needs_the_consent_that_its_module_needs(
    runs: Path,
) -> None:
    policy = tianflow.load_policy("A", runs_dir=runs)
    with pytest.raises(ConfigError, match=r"env\.id.*--trust"):
        policy.for_evaluation(evaluation="large")


def test_python_loads_the_best_version_by_its_name(runs: Path) -> None:
    policy = tianflow.load_policy("A@best", runs_dir=runs, trust=True)
    assert 5.0 == evaluate(policy, episodes=2)["mean_return"]


def test_a_deterministic_run_repeats_its_evaluations_and_its_best_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It evaluates at its barriers, and at the end."""
    options: dict[str, Any] = {
        "env": {"id": WIDE, "num_envs": 4},
        "balance": {"max_staleness": 0},
        "evaluation": {"every_steps": 64, "deterministic": False, "episodes": 8},
        "checkpoint": {"keep": 1},
        "algorithm": {"name": "ppo", "learning_rate": 0.05, "epochs": 4, "minibatch_size": 16},
        "run": {"deterministic": True, "barrier_updates": 2, "max_updates": 12},
    }
    evaluations: list[Evaluation] = []
    record = EvaluationScheduler._record

    def noted(scheduler: EvaluationScheduler, evaluation: Evaluation) -> None:
        evaluations.append(evaluation)
        record(scheduler, evaluation)

    monkeypatch.setattr(EvaluationScheduler, "_record", noted)
    found = []
    for name in ("A", "B"):
        evaluations.clear()
        finished = run(tmp_path, name, **options)
        versions = [played.version.number for played in evaluations]
        assert len(versions) > 3
        assert [0] * len(versions) == [version % 2 for version in versions]
        best = CheckpointStore(finished.directory / "checkpoints", keep=1).best()
        assert best is not None
        highest = max(evaluations, key=lambda played: played.mean_return)
        assert (highest.version, highest.mean_return) == (
            best.version,
            finished.summary["best"]["mean_return"],
        )
        returns = [played.returns for played in evaluations]
        found.append((versions, returns, best.manifest["best"], best.read()["flat"].tobytes()))
    assert found[0] == found[1]


def test_a_deterministic_run_with_evaluations_is_the_same_as_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "balance": {"max_staleness": 0},
        "run": {"deterministic": True, "barrier_updates": 2, "max_updates": 5},
    }
    run(tmp_path, "without", **options)
    run(tmp_path, "with", evaluation={"every_steps": 1, "further": FURTHER}, **options)
    states = [CheckpointStore.load(resolve(name, tmp_path)).read() for name in ("without", "with")]
    assert sorted(states[0]) == sorted(states[1])
    for name, array in states[0].items():
        assert np.array_equal(array, states[1][name]), name


@pytest.mark.e2e
def test_a_new_run_starts_with_the_best_version_of_another(runs: Path, tmp_path: Path) -> None:
    best = CheckpointStore.load(resolve("A@best", runs))
    finished = run(runs, "B", run={"init_from": "A@best", "max_updates": 1})
    first = CheckpointStore.load(finished.directory / "checkpoints" / "v0-0000000000")
    assert str(best.path) == first.manifest["init_from"]["source"]
    assert first.manifest.get("best") is None
    run(tmp_path, "C", checkpoint={"best": False})
    with pytest.raises(ConfigError, match=r"run\.init_from.*has no best checkpoint"):
        run(tmp_path, "D", run={"init_from": "C@best"})


def test_a_resume_remembers_the_best_version(tmp_path: Path) -> None:
    run(tmp_path, evaluation={"env": {"kwargs": {"length": 7}}})
    again = run(
        tmp_path,
        resume="A",
        evaluation={"env": {"kwargs": {"length": 7}}},
        run={"max_updates": 6},
        checkpoint={"keep": 1},
    )
    assert {"version": 4, "mean_return": 7.0, "episodes": 4} == again.summary["best"]
    names = sorted(path.name for path in (again.directory / "checkpoints").iterdir())
    assert ["v1-0000000004", "v2-0000000006"] == names


def test_a_run_and_a_branch_continue_from_the_best_version(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, resume="A", evaluation={"deterministic": False}, run={"max_updates": 6})
    run(tmp_path, "B", resume="A", run={"max_updates": 8})
    assert 6 == CheckpointStore.load(resolve("A@best", tmp_path)).version.number
    branch = run(tmp_path, "C", resume="A@best", run={"max_updates": 7})
    assert (7, 7) == (branch.summary["updates"], branch.summary["checkpoint"])
    assert (
        6
        == CheckpointStore.load(
            branch.directory / "checkpoints" / resolve("A@best", tmp_path).name
        ).version.number
    )
    again = run(tmp_path, resume="A@best", run={"max_updates": 8})
    assert 8 == again.summary["updates"]


def test_a_run_without_the_setting_has_no_best_version(tmp_path: Path) -> None:
    assert run(tmp_path, checkpoint={"best": False}).summary["best"] is None
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        tianflow.load_policy("A@best", runs_dir=tmp_path)
