"""A run starts with the parameters of another one, branches from it, or plays elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import tianflow
from tests.support.settings import cartpole
from tianflow.api import FinishedRun
from tianflow.cli.main import app
from tianflow.config.loading import load_config
from tianflow.errors import CheckpointError, ConfigError
from tianflow.policy import evaluate
from tianflow.rundir.checkpoints import Checkpoint, CheckpointStore, resolve

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")

started = pytest.mark.e2e
"""Tests with a child process that imports PyTorch."""

WIDE = "tests.support.environments:WideEnv"
CENTRAL = {
    "actors": {"count": 1, "rollout_steps": 16, "inference": "central"},
    "inference": {"device": "cpu"},
}
EXACT = {"balance": {"max_staleness": 0}}
REPLAY: dict[str, dict[str, Any]] = {
    "algorithm": {"name": "dqn", "batch_size": 16, "epochs": None, "minibatch_size": None},
    "replay": {"min_size": 32, "capacity": 1000},
}


def run(folder: Path, name: str, *, resume: str | None = None, **sections: Any) -> FinishedRun:
    settings = {**sections, "run": {"name": name, **sections.get("run", {})}}
    return tianflow.train(cartpole(**settings), runs_dir=folder, resume=resume)


def checkpoint(folder: Path, name: str, version: str = "") -> Checkpoint:
    path = folder / name / "checkpoints" / version if version else resolve(name, folder)
    return CheckpointStore.load(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same(expected: dict[str, NDArray[Any]], found: dict[str, NDArray[Any]]) -> None:
    assert sorted(expected) == sorted(found)
    for name, array in expected.items():
        assert array.tobytes() == found[name].tobytes(), name


# run.init_from
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with A, 4 updates."""
    runs = tmp_path_factory.mktemp("runs")
    run(runs, "A")
    return runs


@pytest.fixture
def runs(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "runs"))


@started
@pytest.mark.parametrize("sections", [{}, CENTRAL], ids=["local", "central"])
def test_a_new_run_starts_at_the_parameters_of_its_source(
    runs: Path, sections: dict[str, Any]
) -> None:
    """With a learning rate of nearly 0 they also stay there."""
    still = {"algorithm": {"name": "ppo", "learning_rate": 1e-30, "minibatch_size": 16}}
    found = run(runs, "B", run={"init_from": "A", "max_updates": 3}, **still, **sections)
    theirs, first, last = (
        checkpoint(runs, *place).parameters()
        for place in (("A",), ("B", "v0-0000000000"), ("B", "v1-0000000003"))
    )
    for name, array in theirs.items():
        assert np.array_equal(array, first[name]), name
        assert np.array_equal(array, last[name]), name
    assert (3, 0) == (found.summary["updates"], found.summary["staleness"]["violations"])
    assert found.summary["env_steps"] < 4 * 16 * 6  # its own, not those of the source, too


@started
def test_the_audit_log_and_the_first_checkpoint_name_what_was_not_taken(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(runs, "B", run={"init_from": "A", "max_updates": 1}, network={"hidden": [8]})
    (record,) = (json.loads(line) for line in (runs / "B" / "audit.jsonl").read_text().splitlines())
    assert ("config", "init_from") == (record["source"], record["action"])
    assert str(resolve("A", runs)) == record["checkpoint"]
    names = [name for name, *_ in record["fit"]["differing"]]
    assert "network/policy_head.weight" in names
    manifest = checkpoint(runs, "B", "v0-0000000000").manifest
    assert record["fit"] == manifest["init_from"]["fit"]
    text = " ".join(entry.getMessage() for entry in caplog.records)
    assert "network.hidden [16] -> [8]" in text
    assert all(name in text for name in names)


@started
def test_a_run_with_a_source_resumes_without_it(runs: Path) -> None:
    run(runs, "B", run={"init_from": "A", "max_updates": 2})
    shutil.rmtree(runs / "A")
    again = run(runs, "B", resume="B", run={"init_from": "A", "max_updates": 4})
    assert 4 == again.summary["updates"]
    stored = load_config(runs / "B" / "config.toml")
    assert ("A", 4) == (stored.run.init_from, stored.run.max_updates)


@started
def test_a_run_that_ended_before_its_first_own_checkpoint_resumes_at_its_source(
    runs: Path,
) -> None:
    run(runs, "B", run={"init_from": "A", "max_updates": 1})
    shutil.rmtree(runs / "B" / "checkpoints" / "v1-0000000001")
    shutil.rmtree(runs / "A")
    assert 2 == run(runs, "B", resume="B", run={"max_updates": 2}).summary["updates"]


def run_command(command: str, runs: Path, *overrides: str) -> Any:
    arguments = [command, "cartpole_ppo", *overrides, "--runs-dir", str(runs)]
    return CliRunner().invoke(app, arguments)


def test_validate_refuses_a_source_in_the_words_of_train(runs: Path) -> None:
    torn = runs / "torn" / "checkpoints" / "v1-0000000004"
    shutil.copytree(resolve("A", runs), torn)
    (torn / "state.safetensors").write_bytes(b"torn")
    for source in ("AA", "torn/checkpoints/v1-0000000004"):
        one, other = (
            run_command(command, runs, f"run.init_from={source}")
            for command in ("validate", "train")
        )
        assert (2, 2, one.stderr) == (one.exit_code, other.exit_code, other.stderr)
        assert one.stderr.startswith(f"run.init_from = '{source}'"), one.stderr


def test_validate_reports_a_missing_source_beside_other_mistakes(runs: Path) -> None:
    done = run_command("validate", runs, "run.init_from=AA", "network.name=nature_cnn")
    assert ["network.name", "run.init_from"] == [
        line.partition(" = ")[0] for line in done.stderr.splitlines()
    ]


@started
def test_validate_compares_the_source_with_the_run(runs: Path) -> None:
    done = run_command("validate", runs, "run.init_from=A", "network.hidden=[16]")
    assert 0 == done.exit_code, done.output
    assert "note: run.init_from: differences from the source: " in done.stdout
    assert "only in this run: return/mean" in done.stdout
    done = run_command(
        "validate", runs, "run.init_from=A", "network.name=tests.support.networks:Fitting"
    )
    assert 2 == done.exit_code, done.output
    assert "no parameter of the network fits this run" in done.stderr


def test_a_source_beside_a_resume_is_refused(runs: Path) -> None:
    before = contents(runs)
    with pytest.raises(ConfigError, match=r"run\.init_from.*--resume.*one of the two"):
        run(runs, "A", resume="A", run={"init_from": "A", "max_updates": 6})
    assert before == contents(runs)


@started
def test_a_refused_source_leaves_no_directory(runs: Path) -> None:
    for wrong in ("nothing", str(runs)):
        with pytest.raises(ConfigError, match=r"run\.init_from"):
            run(runs, "B", run={"init_from": wrong})
    with pytest.raises(ConfigError, match=r"run\.init_from"):
        run(runs, "B", run={"init_from": "A"}, network={"name": "tests.support.networks:Fitting"})
    assert not (runs / "B").exists()


@started
def test_a_deterministic_run_with_a_source_resumes_bit_for_bit(runs: Path) -> None:
    options: dict[str, Any] = {"init_from": "A", "deterministic": True, "barrier_updates": 2}
    for name in ("whole", "again"):
        run(runs, name, run={**options, "max_updates": 4}, **EXACT)
    run(runs, "halves", run={**options, "max_updates": 2}, **EXACT)
    run(runs, "halves", resume="halves", run={**options, "max_updates": 4}, **EXACT)
    whole = checkpoint(runs, "whole").read()
    assert_same(whole, checkpoint(runs, "again").read())
    assert_same(whole, checkpoint(runs, "halves").read())
    run(runs, "without", run={**options, "init_from": None, "max_updates": 4}, **EXACT)
    assert checkpoint(runs, "without").read()["flat"].tobytes() != whole["flat"].tobytes()


@started
def test_a_replay_run_starts_with_an_empty_table_and_targets_like_its_networks(
    tmp_path: Path,
) -> None:
    run(tmp_path, "A", **REPLAY)
    found = run(tmp_path, "B", run={"init_from": "A", "max_updates": 2}, **REPLAY)
    theirs = checkpoint(tmp_path, "A").parameters()
    first = checkpoint(tmp_path, "B", "v0-0000000000")
    for name, array in first.parameters().items():
        assert name.startswith("exploration/") or np.array_equal(theirs[name], array)
    state = first.read()
    assert state["target"].tobytes() == state["flat"].tobytes()[: state["target"].nbytes]
    assert (2, 0) == (found.summary["updates"], int(state["updates"]))


@started
def test_another_observation_size_takes_the_rest(tmp_path: Path) -> None:
    for name, size in (("A", 4), ("B", 6)):
        start = {"init_from": "A"} if name == "B" else {}
        env = {
            "id": WIDE,
            "kwargs": {"size": size},
            "normalisation": {"observations": True, "returns": True},
        }
        run(tmp_path, name, run={"max_updates": 1, **start}, env=env)
    fit = checkpoint(tmp_path, "B", "v0-0000000000").manifest["init_from"]["fit"]
    assert ["observation//samples"] == fit["apart"]
    assert "network/torso.layers.0.weight" in [name for name, *_ in fit["differing"]]
    assert {"network/policy_head.weight", "return/samples"} <= set(fit["taken"])


# Branches
# ------------------------------------------------------------------------------------------------


def test_a_resume_under_another_name_continues_in_a_new_run(runs: Path) -> None:
    before = contents(runs / "A")
    found = run(runs, "C", resume="A", run={"max_updates": 6})
    assert (runs / "C", 6) == (found.directory, found.summary["updates"])
    assert before == contents(runs / "A")
    theirs, copied = checkpoint(runs, "A"), checkpoint(runs, "C", "v1-0000000004")
    assert_same(theirs.read(), copied.read())
    assert "v2-0000000006" == resolve("C", runs).name
    steps = theirs.manifest["env_steps"]
    assert found.summary["env_steps"] > steps > 0
    assert "C" == load_config(runs / "C" / "config.toml").run.name


def test_a_branch_needs_no_source_afterwards(runs: Path) -> None:
    run(runs, "C", resume="A", run={"max_updates": 5})
    shutil.rmtree(runs / "A")
    shutil.rmtree(runs / "C" / "checkpoints" / "v2-0000000005")
    again = run(runs, "C", resume="C", run={"max_updates": 6})
    assert 6 == again.summary["updates"]


def test_a_branch_into_a_run_that_exists_is_refused(runs: Path) -> None:
    run(runs, "C", resume="A", run={"max_updates": 5})
    before = contents(runs)
    with pytest.raises(CheckpointError, match="C' exists; choose another run.name"):
        run(runs, "C", resume="A", run={"max_updates": 6})
    assert before == contents(runs)


def test_a_branch_whose_checkpoint_disappears_leaves_no_directory(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that still trains deletes old checkpoints."""
    copy = CheckpointStore.copy

    def late(found: Checkpoint, directory: Path) -> Checkpoint:
        shutil.rmtree(found.path)
        return copy(found, directory)

    monkeypatch.setattr(CheckpointStore, "copy", late)
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        run(runs, "C", resume="A", run={"max_updates": 6})
    assert not (runs / "C").exists()


def test_a_branch_copies_saved_replay(tmp_path: Path) -> None:
    saved = {"checkpoint": {"replay": True}}
    run(tmp_path, "A", **REPLAY, **saved)
    found = run(tmp_path, "C", resume="A", run={"max_updates": 6}, **REPLAY, **saved)
    names = {path.name for path in (tmp_path / "C" / "checkpoints" / "v1-0000000004").iterdir()}
    assert {"manifest.json", "state.safetensors", "replay-0.safetensors"} == names
    assert 6 == found.summary["updates"]


def test_the_command_branches(runs: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["train", "--resume", "A", "run.name=C", "run.max_updates=5", "--runs-dir", str(runs),
         "--plain", "--no-http"],
    )  # fmt: skip
    assert 0 == done.exit_code, done.output
    assert (runs / "C" / "checkpoints" / "v2-0000000005").is_dir()


# Evaluation elsewhere
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("wide")
    run(runs, "W", run={"max_updates": 1}, env={"id": WIDE, "kwargs": {"size": 4}})
    return runs


def played(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["eval", *arguments, "--runs-dir", str(folder), "--episodes", "6"]
    )


def test_an_evaluation_uses_other_settings_of_the_environment(runs: Path) -> None:
    path = resolve("A", runs)
    policy = tianflow.load_policy(path)
    changed = policy.for_evaluation({"env.kwargs.sutton_barto_reward": True})
    assert 1.0 < evaluate(policy, episodes=4)["mean_return"]
    assert -1.0 == evaluate(changed, episodes=4)["mean_return"]
    assert {} == policy.config.env.kwargs


def test_the_seed_of_an_evaluation_decides_its_episodes(wide: Path, runs: Path) -> None:
    results = [
        json.loads(played(runs, "A", "--json", "--seed", seed).stdout) for seed in ("5", "5", "6")
    ]
    assert results[0] == results[1]
    assert {**results[0], "seed": 6} != results[2]
    assert (5, False) == (results[0]["seed"], results[0]["sampled"])


def test_sampled_actions_differ_from_the_most_probable_ones(wide: Path) -> None:
    probable = json.loads(played(wide, "W", "--json", "--trust").stdout)
    sampled = json.loads(played(wide, "W", "--json", "--trust", "--sampled").stdout)
    assert (False, True) == (probable["sampled"], sampled["sampled"])
    assert probable["mean_return"] != sampled["mean_return"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("env.kwargs.size=8", ("env.kwargs.size = 8", "float32[4]", "float32[8]")),
        ("env.kwargs.actions=3", ("env.kwargs.actions = 3", "actions discrete", "of 2", "of 3")),
        (
            "env.id=Acrobot-v1 env.kwargs=null",
            ("env.id = 'Acrobot-v1'", "float32[4]", "float32[6]"),
        ),
        (
            "network.lstm=8",
            ("network.lstm", "is not a setting of the environment", "env.set.NAME", "env.wrappers"),
        ),
        ("env.normalisation.clip=1.0", ("env.normalisation.clip", "is not a setting")),
        ("env.sise=8", ("env.sise",)),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_with_both_sides(
    wide: Path, override: str, expected: tuple[str, ...]
) -> None:
    done = played(wide, "W", *override.split(), "--trust")
    assert 2 == done.exit_code, done.output
    assert all(part in done.stderr for part in expected), done.stderr


def test_an_override_may_replace_the_environment_of_a_stranger(wide: Path, runs: Path) -> None:
    assert 2 == played(wide, "W").exit_code
    assert "--trust" in played(wide, "W", "env.kwargs.size=4").stderr
    done = played(runs, "A", "env.id=tests.support.environments:WideEnv")
    assert 0 == done.exit_code, done.output
    done = played(wide, "W", f"env.id={WIDE}")
    assert 0 == done.exit_code, done.output


def test_other_settings_of_a_stranger_still_need_consent(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "of_another.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nwrap = lambda env: env\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = Path(shutil.copytree(wide, tmp_path / "runs"))
    file = resolve("W", runs) / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["config"]["env"]["wrappers"] = ["of_another:wrap"]
    file.write_text(json.dumps(manifest))
    done = played(runs, "W", f"env.id={WIDE}")
    assert (2, True) == (done.exit_code, "env.wrappers" in done.stderr)
    assert not mark.exists()
