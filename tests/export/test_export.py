"""Exported policies act as the checkpoint's own does, on raw observations, in batches of any size,
and without tianflow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import tianflow
from tests.support.checkpoints import Sections, checkpoint
from tianflow.cli import main as cli
from tianflow.cli.export import write_export
from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD
from tianflow.errors import CheckpointError
from tianflow.export import ExportError, formats
from tianflow.networks import Mlp
from tianflow.policy import LoadedPolicy

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")]
torch.set_num_threads(1)
onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

NORMALISED = {"normalisation": {"observations": True}}
SMALL = {"hidden": [16]}
CASES: dict[str, Sections] = {
    "ppo": {
        "env": {"id": "CartPole-v1", **NORMALISED},
        "algorithm": {"name": "ppo"},
        "network": SMALL,
    },
    "impala_cnn": {
        "env": {"id": "ALE/Pong-v5"},
        "algorithm": {"name": "impala"},
        "network": {"name": "nature_cnn", "kwargs": {"units": 32}},
    },
    "recurrent": {
        "env": {"id": "CartPole-v1", **NORMALISED},
        "algorithm": {"name": "ppo"},
        "network": {**SMALL, "lstm": 8},
    },
    "dqn": {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "network": SMALL},
    "r2d2": {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "r2d2"},
        "network": {**SMALL, "lstm": 8},
    },
    "sac": {
        "env": {"id": "Pendulum-v1", **NORMALISED},
        "algorithm": {"name": "sac"},
        "network": SMALL,
    },
    "td3": {"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "td3"}, "network": SMALL},
    "clipped": {
        "env": {"id": "tests.support.environments:BoxActionEnv"},
        "algorithm": {"name": "ppo"},
        "network": SMALL,
    },
    "box of the previous step": {
        "env": {"id": "tests.support.environments:BoxActionEnv"},
        "algorithm": {"name": "ppo"},
        "network": {**SMALL, "previous_step": True},
    },
    "shifted": {
        "env": {"id": "tests.support.environments:MultiDiscreteEnv"},
        "algorithm": {"name": "ppo"},
        "network": SMALL,
    },
    "masked": {
        "env": {"id": "tests.support.environments:MaskedEnv"},
        "algorithm": {"name": "ppo"},
        "network": SMALL,
    },
    "nested": {
        "env": {"id": "tests.support.environments:DictEnv", **NORMALISED},
        "algorithm": {"name": "ppo"},
        "network": SMALL,
    },
}
LONG = {"impala_cnn", "dqn", "r2d2", "sac", "nested"}
"""Tests of the end-to-end part export these. The other cases meet every kind of output."""
NAMES = {
    "ppo": {"action", "logits"},
    "recurrent": {"action", "logits", "state"},
    "dqn": {"action", "q_values"},
    "r2d2": {"action", "q_values", "state"},
    "sac": {"action", "mean", "log_std"},
    "td3": {"action", "scaled_action"},
    "clipped": {"action", "mean", "log_std"},
    "box of the previous step": {"action", "mean", "log_std", "state"},
}
Exported = Callable[[str, str], tuple[Path, Path]]
EVERY_SUFFIX = pytest.mark.parametrize("suffix", [".pt2", ".onnx"])


def observations(case: str, count: int, generator: np.random.Generator) -> list[Any]:
    """Raw ones, as the environment of ``case`` gives them."""
    if case == "nested":
        return [
            {
                "camera": generator.integers(0, 256, (1, 6, 6)).astype(np.uint8),
                "arm": {
                    "joints": generator.normal(size=3),
                    "mode": np.int64(generator.integers(2, 10)),
                },
            }
            for _ in range(count)
        ]
    if case == "impala_cnn":
        return list(generator.integers(0, 256, (count, 4, 84, 84)).astype(np.uint8))
    size = {"ppo": 4, "recurrent": 4, "dqn": 4, "r2d2": 4, "sac": 3, "td3": 3}.get(case, 2)
    return list(generator.normal(size=(count, size)).astype(np.float32))


def batched(case: str, single: list[Any]) -> Any:
    if case != "nested":
        return np.stack(single)
    arms = [one["arm"] for one in single]
    return {
        "arm/joints": np.stack([arm["joints"] for arm in arms]),
        "arm/mode": np.stack([arm["mode"] for arm in arms]),
        "camera": np.stack([one["camera"] for one in single]),
    }


def as_tensors(tree: Any) -> Any:
    return (
        {name: as_tensors(leaf) for name, leaf in tree.items()}
        if isinstance(tree, Mapping)
        else torch.from_numpy(tree)
    )


def as_arrays(tree: Any) -> Any:
    return (
        {name: as_arrays(leaf) for name, leaf in tree.items()}
        if isinstance(tree, Mapping)
        else np.asarray(tree)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Writes a case's policy into a file, and makes both once for all tests that only read them."""

    @cache
    def export(case: str, suffix: str) -> tuple[Path, Path]:
        path, file = kept(case), tmp_path_factory.mktemp(case) / f"policy{suffix}"
        write_export(path, file, runs_dir=path.parent)
        return path, file

    @cache
    def kept(case: str) -> Path:
        return checkpoint(tmp_path_factory.mktemp(case), CASES[case])

    return export


class Program:
    """An exported file, whatever it is, called with arrays."""

    def __init__(self, path: Path) -> None:
        self._onnx = onnxruntime.InferenceSession(path) if path.suffix == ".onnx" else None
        self._torch: Any = None if self._onnx else torch.export.load(path).module()

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self._onnx is None:
            found: dict[str, Any] = as_arrays(self._torch(**as_tensors(inputs)))
            return found
        names = [output.name for output in self._onnx.get_outputs()]
        values = dict(zip(names, self._onnx.run(names, formats.flat(inputs)), strict=True))
        state = {
            name.removeprefix("next_state/"): values.pop(name)
            for name in names
            if name.startswith("next_state/")
        }
        return values | ({"state": state} if state else {})


def one_by_one(
    policy: LoadedPolicy, single: list[Any], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Actions, and the state after them, of `LoadedPolicy.act`."""
    actions, states = [], []
    for index, observation in enumerate(single):
        state = {
            name: torch.from_numpy(leaf[index : index + 1])
            for name, leaf in inputs.get("state", {}).items()
        }
        mask = inputs["action_mask"][index] if "action_mask" in inputs else None
        reward = inputs["previous_reward"][index] if "previous_reward" in inputs else None
        action, after = policy.act(observation, state or None, mask=mask, reward=reward)
        actions.append(action)
        states.append(after)
    state = {name: np.concatenate([after[name] for after in states]) for name in states[0]}
    return {"action": np.stack(actions), **({"state": state} if state else {})}


def parameters(policy: LoadedPolicy, case: str, inputs: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """What the policy itself computes about the batch."""
    leaves = inputs["observation"] if case == "nested" else {"": inputs["observation"]}
    if case == "nested":
        leaves = {
            **leaves,
            "arm/joints": leaves["arm/joints"].astype(np.float32),
            "arm/mode": leaves["arm/mode"] - 2,
        }
    state = dict(inputs.get("state", {}))
    if "previous_reward" in inputs:
        leaves = {**leaves, PREVIOUS_REWARD: inputs["previous_reward"]}
        leaves[PREVIOUS_ACTION] = state.pop("previous_action")
    mask = torch.from_numpy(inputs["action_mask"]) if "action_mask" in inputs else None
    found: np.ndarray[Any, Any] = policy.policy.act(
        as_tensors(leaves), as_tensors(state), None, mask
    ).parameters.numpy()
    return found


@pytest.mark.parametrize(
    ("case", "suffix"),
    [
        *(
            pytest.param(case, ".pt2", marks=[pytest.mark.e2e] if case in LONG else [])
            for case in CASES
        ),
        ("recurrent", ".onnx"),
        *(
            pytest.param(case, ".onnx", marks=pytest.mark.e2e)
            for case in ("ppo", "impala_cnn", "dqn", "r2d2", "sac", "nested")
        ),
    ],
)
def test_an_exported_policy_is_the_loaded_one_on_batches_of_any_size(
    exported: Exported, case: str, suffix: str
) -> None:
    (path, file), generator = exported(case, suffix), np.random.default_rng(3)
    policy, program = tianflow.load_policy(path), Program(file)
    for batch in (1, 7):
        single = observations(case, batch, generator)
        inputs: dict[str, Any] = {"observation": batched(case, single)}
        if case in ("r2d2", "box of the previous step"):
            inputs["previous_reward"] = generator.normal(size=batch).astype(np.float32)
        if case == "box of the previous step":
            inputs["state"] = {
                "previous_action": generator.normal(size=(batch, 2)).astype(np.float32)
            }
        if case in ("recurrent", "r2d2"):
            inputs["state"] = {
                name: generator.normal(size=(batch, 8)).astype(np.float32) for name in ("h", "c")
            }
        if case == "r2d2":
            inputs["state"]["previous_action"] = generator.integers(0, 3, batch)
        if case == "masked":
            inputs["action_mask"] = generator.permuted(
                np.tile([True, True, False, False], (batch, 1)), axis=1
            )
        found, expected = program(inputs), one_by_one(policy, single, inputs)
        assert found.keys() == NAMES.get(case, {"action", "logits"})
        assert (expected["action"].dtype, expected["action"].shape) == (
            found["action"].dtype,
            found["action"].shape,
        )
        np.testing.assert_allclose(found["action"], expected["action"], atol=1e-5)
        side_by_side = [
            found[name].reshape(batch, -1) for name in found if name not in ("action", "state")
        ]
        np.testing.assert_allclose(
            np.concatenate(side_by_side, -1), parameters(policy, case, inputs), rtol=1e-5, atol=1e-5
        )
        for name, leaf in expected.get("state", {}).items():
            np.testing.assert_allclose(found["state"][name], leaf, atol=1e-5)


def test_actions_outside_of_a_box_are_clipped_inside_the_program(exported: Exported) -> None:
    _, file = exported("clipped", ".pt2")
    found = Program(file)(
        {"observation": np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32) * 300.0}
    )
    low, high = np.array([-1.0, 0.0]), np.array([1.0, 0.5])
    assert ((found["mean"] < low) | (found["mean"] > high)).any()
    np.testing.assert_array_equal(
        np.clip(found["mean"], low, high).astype(np.float32), found["action"]
    )


@pytest.mark.e2e
def test_a_program_needs_no_tianflow_and_no_pickle(exported: Exported) -> None:
    _, file = exported("recurrent", ".pt2")
    code = """
import json, sys
import torch
sys.modules["tianflow"] = None
extra = {"tianflow.json": ""}
program = torch.export.load(sys.argv[1], extra_files=extra).module()
state = {name: torch.zeros(5, 8) for name in ("h", "c")}
print(json.dumps([json.loads(extra["tianflow.json"]), list(program(observation=torch.ones(5, 4), state=state)["state"]["h"].shape)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    metadata, shape = json.loads(done.stdout)
    assert [5, 8] == shape
    assert "float32" == metadata["inputs"]["observation"]["dtype"]
    with zipfile.ZipFile(file) as archive:
        assert {b""} == {
            archive.read(name) for name in archive.namelist() if name.endswith((".pt", ".pkl"))
        }


def metadata_of(path: Path) -> dict[str, Any]:
    if path.suffix == ".onnx":
        (found,) = [prop.value for prop in onnx.load(path).metadata_props if prop.key == "tianflow"]
    else:
        extra = {formats.METADATA: ""}
        torch.export.load(path, extra_files=extra)
        found = extra[formats.METADATA]
    described: dict[str, Any] = json.loads(found)
    return described


@EVERY_SUFFIX
def test_a_file_says_what_it_is_and_what_it_takes(exported: Exported, suffix: str) -> None:
    _, path = exported("recurrent", suffix)
    found = metadata_of(path)
    assert ("ppo", "CartPole-v1", [1, 10], 1234) == (
        found["algorithm"],
        found["environment"]["id"],
        found["checkpoint"]["version"],
        found["checkpoint"]["env_steps"],
    )
    assert ("discrete", [2]) == (found["action_space"]["kind"], found["action_space"]["categories"])
    memory = {"dtype": "float32", "shape": ["batch", 8]}
    assert {
        "observation": {"dtype": "float32", "shape": ["batch", 4]},
        "state/h": memory,
        "state/c": memory,
    } == found["inputs"]
    after = "next_state" if suffix == ".onnx" else "state"
    assert {
        "action": {"dtype": "int64", "shape": ["batch"]},
        "logits": {"dtype": "float32", "shape": ["batch", 2]},
    } == {name: found["outputs"][name] for name in ("action", "logits")}
    assert {"action", "logits", f"{after}/h", f"{after}/c"} == found["outputs"].keys()


def test_bounds_that_are_none_are_strict_json(tmp_path: Path) -> None:
    sections = {
        **CASES["clipped"],
        "env": {"id": "tests.support.environments:UnboundedBoxActionEnv"},
    }
    write_export(checkpoint(tmp_path, sections), tmp_path / "policy.pt2", runs_dir=tmp_path)
    assert [None, None] == metadata_of(tmp_path / "policy.pt2")["action_space"]["low"]


@EVERY_SUFFIX
def test_no_path_of_the_machine_is_written(
    exported: Exported, tmp_path_factory: pytest.TempPathFactory, suffix: str
) -> None:
    _, file = exported("recurrent", suffix)
    data = file.read_bytes()
    for folder in (Path(tianflow.__file__).parent, tmp_path_factory.getbasetemp()):
        assert str(folder).encode() not in data


# what cannot be
# --------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["export", *arguments])


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    checkpoint(tmp_path, CASES["ppo"])
    output = tmp_path / "policy.pt2"
    done = run("a-run", "-o", str(output), "--runs-dir", str(tmp_path))
    assert (0, f"{output}\n", "") == (done.exit_code, done.stdout, done.stderr)
    assert ["a-run", "policy.pt2"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("policy.pt", "has an unknown suffix; accepted: .pt2, .onnx"),
        ("folder.onnx", "is a directory; accepted: the name of a file"),
        ("missing/policy.pt2", "missing' is not a directory; create it"),
    ],
)
def test_an_output_that_cannot_be_written_is_bad_usage(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder.onnx").mkdir()
    done = run("a-run", "-o", str(tmp_path / name), "--runs-dir", str(tmp_path))
    assert 2 == done.exit_code
    assert message in done.stderr


def test_a_checkpoint_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    done = run("a-rum", "-o", str(tmp_path / "policy.pt2"), "--runs-dir", str(tmp_path))
    assert (2, "run or checkpoint 'a-rum' does not exist") == (done.exit_code, done.stderr[:40])
    assert [] == list(tmp_path.iterdir())


def test_without_the_extra_onnx_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, CASES["ppo"])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run("a-run", "-o", str(tmp_path / "policy.onnx"), "--runs-dir", str(tmp_path))
    assert 2 == done.exit_code
    assert 'pip install -c constraints.txt -e ".[onnx]"' in done.stderr


class BatchOfTwo(Mlp):
    """Looks at the size of its batch, as no network should."""

    def act(self, observation: Any, state: Any) -> Any:
        parameters, after = super().act(observation, state)
        return (parameters * 2.0 if parameters.shape[0] == 2 else parameters), after


class Choosy(Mlp):
    """Looks at values, which no program of a fixed form can do."""

    def act(self, observation: Any, state: Any) -> Any:
        parameters, after = super().act(observation, state)
        return (parameters if parameters.sum() > 0.0 else -parameters), after


@pytest.mark.parametrize("network", ["BatchOfTwo", "Choosy"])
def test_a_network_that_cannot_be_a_program_is_refused_and_nothing_is_written(
    tmp_path: Path, network: str
) -> None:
    sections = {**CASES["ppo"], "network": {**SMALL, "name": f"tests.export.test_export:{network}"}}
    path, output = checkpoint(tmp_path, sections), tmp_path / "policy.pt2"
    output.write_text("an older one")
    with pytest.raises(ExportError, match="the policy cannot be traced"):
        write_export(path, output, runs_dir=tmp_path, trust=True)
    assert "an older one" == output.read_text()
    assert ["a-run", "policy.pt2"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_program_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, CASES["ppo"])
    traced = formats._traced

    def spoilt(deployed: Any) -> Any:
        program = traced(deployed)
        program.constants.update(
            {
                name: value + 0.1
                for name, value in program.constants.items()
                if value.is_floating_point()
            }
        )
        return program

    monkeypatch.setattr(formats, "_traced", spoilt)
    with pytest.raises(
        ExportError, match="the exported program and the policy differ in logits, for a batch of 1"
    ):
        write_export(path, tmp_path / "policy.pt2", runs_dir=tmp_path)
    assert not (tmp_path / "policy.pt2").exists()


def test_a_disk_that_refuses_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = checkpoint(tmp_path, CASES["ppo"]), tmp_path / "policy.pt2"
    output.write_text("an older one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tianflow.cli.export.os.fsync", full)
    with pytest.raises(ExportError, match="cannot be written: .*No space left"):
        write_export(path, output, runs_dir=tmp_path)
    assert "an older one" == output.read_text()
    assert ["a-run", "policy.pt2"] == sorted(found.name for found in tmp_path.iterdir())


def test_a_torn_checkpoint_is_not_exported(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, CASES["ppo"])
    (path / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="is torn"):
        write_export(path, tmp_path / "policy.pt2", runs_dir=tmp_path)
