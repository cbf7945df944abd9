"""Checkpoints of strangers: nothing that they name is imported without consent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tianflow
from tests.support.checkpoints import checkpoint
from tianflow.cli import main as cli
from tianflow.config import spaces
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec, SourceLeaf
from tianflow.envs.spec import ObservationCodec
from tianflow.errors import CheckpointError, ConfigError
from tianflow.policy import evaluate

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")

SECTIONS: dict[str, Any] = {
    "env": {"id": "CartPole-v1"},
    "algorithm": {"name": "ppo"},
    "network": {"hidden": [8]},
}
NESTED = EnvironmentSpec(
    "x",
    (LeafSpec("arm/0", (2,), "float32"), LeafSpec("arm/1", (2,), "int64", (3, 4))),
    ActionSpec("box", (2,), "float32", low=(-float("inf"), -1.0), high=(1.0, float("inf"))),
    4,
    "next_step",
    source=(SourceLeaf(("arm", "0"), "float64"), SourceLeaf(("arm", "1"), "int64", (5, -1))),
)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which every name leads to a module that leaves a file when it is imported."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "of_a_stranger.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "import gymnasium\n"
        "def Env(): return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(code)
    monkeypatch.delitem(sys.modules, "of_a_stranger", raising=False)
    path = checkpoint(tmp_path, SECTIONS)
    change(
        path,
        env={"id": "of_a_stranger:Env", "wrappers": []},
        balance={"controller": "of_a_stranger:Controller"},
        metrics={"sinks": ["of_a_stranger:Sink"]},
        placement={"launcher": "of_a_stranger:Launcher"},
    )
    return path


def change(path: Path, *, environment: Any = ..., **sections: dict[str, Any]) -> None:
    """Change the manifest of a checkpoint."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    for section, values in sections.items():
        manifest["config"][section] |= values
    if environment is None:
        del manifest["environment"]
    elif environment is not ...:
        manifest["environment"] = environment
    file.write_text(json.dumps(manifest))


def test_a_policy_is_loaded_and_exported_without_importing_what_it_names(
    stranger: Path, tmp_path: Path
) -> None:
    policy = tianflow.load_policy(stranger)
    action, _ = policy.act(np.zeros(4, np.float32))
    assert action in (0, 1)
    for call in (lambda: evaluate(policy, episodes=1), policy.require_environment):
        with pytest.raises(ConfigError, match=r"env\.id.*of_a_stranger.*--trust"):
            call()
    done = CliRunner().invoke(cli.app, ["export", str(stranger), "-o", str(tmp_path / "p.pt2")])
    assert 0 == done.exit_code, done.output
    done = CliRunner().invoke(cli.app, ["eval", str(stranger), "--episodes", "1"])
    assert (2, True) == (done.exit_code, "--trust" in done.output)
    assert not (tmp_path / "ran").exists()
    assert "of_a_stranger" not in sys.modules


@pytest.mark.parametrize("trust", [True, ["of_a_stranger"]])
def test_a_trusted_environment_is_imported_for_an_evaluation(
    stranger: Path, tmp_path: Path, trust: Any
) -> None:
    policy = tianflow.load_policy(stranger, trust=trust)
    assert 1 == evaluate(policy, episodes=1)["episodes"]
    assert (tmp_path / "ran").exists()


def test_other_settings_of_an_evaluation_import_only_what_they_name(
    stranger: Path, tmp_path: Path
) -> None:
    policy = tianflow.load_policy(stranger)
    with pytest.raises(ConfigError, match=r"env\.id.*of_a_stranger.*--trust"):
        evaluate(policy.for_evaluation(seed=5, sampled=True), episodes=1)
    for options in (["--seed", "5"], ["--sampled"], ["env.max_failures=5"]):
        done = CliRunner().invoke(cli.app, ["eval", str(stranger), "--episodes", "1", *options])
        assert (2, True) == (done.exit_code, "--trust" in done.output)
    options = ["--episodes", "1", "env.id=CartPole-v1"]
    done = CliRunner().invoke(cli.app, ["eval", str(stranger), *options])
    assert 0 == done.exit_code, done.output
    assert not (tmp_path / "ran").exists()


def test_eval_imports_what_is_trusted(stranger: Path) -> None:
    done = CliRunner().invoke(cli.app, ["eval", str(stranger), "--episodes", "1", "--trust"])
    assert 0 == done.exit_code, done.output


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("algorithm", {"name": "of_a_stranger:Algorithm"}),
        ("network", {"name": "of_a_stranger:Network"}),
        ("network", {"kwargs": {"activation": "of_a_stranger:Layer"}}),
    ],
)
def test_a_network_of_another_module_needs_consent(
    stranger: Path, tmp_path: Path, section: str, values: dict[str, Any]
) -> None:
    change(stranger, **{section: values})
    with pytest.raises(ConfigError, match=rf"{section}\..*not allowed"):
        tianflow.load_policy(stranger)
    assert not (tmp_path / "ran").exists()


def test_a_manifest_without_spaces_needs_consent_for_the_environment(
    stranger: Path, tmp_path: Path
) -> None:
    change(stranger, environment=None)
    with pytest.raises(ConfigError, match=r"env\.id"):
        tianflow.load_policy(stranger)
    assert not (tmp_path / "ran").exists()
    assert 4 == tianflow.load_policy(stranger, trust=True).spec.observation[0].shape[0]


def test_spaces_are_restored_from_json() -> None:
    written = json.loads(json.dumps(spaces.to_json(NESTED), allow_nan=False))
    found = spaces.from_json(written)
    assert (NESTED, NESTED.source) == (found, found.source)
    codec = ObservationCodec.from_spec(found)
    arrays = {leaf.name: np.zeros((1, *leaf.shape), leaf.dtype) for leaf in found.observation}
    codec.encode_single({"arm": ([1.0, 2.0], [6, 0])}, 0, arrays)
    assert [[1.0, 2.0]] == arrays["arm/0"].tolist()
    assert [[1, 1]] == arrays["arm/1"].tolist()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: data | {"observation": "x"},
        lambda data: data | {"source": []},
        lambda data: data | {"action": None},
        lambda data: data | {"action": data["action"] | {"kind": "other"}},
        lambda data: data | {"action": data["action"] | {"low": [0.0]}},
        lambda data: data | {"action": data["action"] | {"shape": [10**12]}},
        lambda data: data | {"action": data["action"] | {"dtype": "object"}},
        lambda data: data | {"source": [data["source"][0], data["source"][1] | {"start": [1]}]},
        lambda data: (
            data
            | {"observation": [data["observation"][0] | {"shape": [-1]}, data["observation"][1]]}
        ),
        lambda data: (
            data
            | {
                "observation": [
                    data["observation"][0],
                    data["observation"][1] | {"categories": [0]},
                ]
            }
        ),
    ],
)
def test_damaged_spaces_are_refused(damage: Any) -> None:
    with pytest.raises(CheckpointError, match="environment of the manifest"):
        spaces.from_json(damage(json.loads(json.dumps(spaces.to_json(NESTED)))))
