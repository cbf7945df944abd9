"""A source of parameters is read as data, refused by path, and compared with the new run."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import tianflow
from tests.support.settings import cartpole
from tianflow.config.model import Config
from tianflow.errors import ConfigError
from tianflow.planning.initial import MOST_DIFFERENCES, find_source, initial_state
from tianflow.planning.validation import require_valid
from tianflow.rundir.checkpoints import CheckpointStore, resolve

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    tianflow.train(cartpole(run={"name": "A", "max_updates": 2}), runs_dir=runs)
    return runs


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def newest(runs: Path) -> Path:
    return resolve("A", runs, only_runs=True)


def start(runs: Path, source: str = "A", **sections: dict[str, Any]) -> Any:
    config: Config = cartpole(**{**sections, "run": {"init_from": source}})
    spec = require_valid(config).spec
    assert spec is not None
    return initial_state(config, spec, find_source(source, runs))


def rewrite(runs: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """Replace the state of the newest checkpoint, with a hash that is right."""
    found = newest(runs)
    manifest = json.loads((found / "manifest.json").read_text())
    data = safetensors.numpy.save(arrays, metadata or None)
    (found / "state.safetensors").write_bytes(data)
    manifest["state"] = {"sha256": hashlib.sha256(data).hexdigest(), "nbytes": len(data)}
    (found / "manifest.json").write_text(json.dumps(manifest))


def metadata_of(runs: Path) -> dict[str, str]:
    with safetensors.safe_open(newest(runs) / "state.safetensors", framework="np") as file:
        return dict(file.metadata() or {})


@pytest.mark.e2e
def test_all_parameters_of_the_same_run_fit(runs: Path) -> None:
    found = start(runs)
    assert newest(runs) == found.source
    assert [
        f"run.init_from: {len(found.fit.taken)} parameters are those of {found.source}; all fit"
    ] == list(found.notes())
    there = CheckpointStore.load(newest(runs)).read()
    here = safetensors.numpy.load(found.data)
    assert np.array_equal(there["flat"], here["flat"])
    assert (0, 4) == (int(here["adam/steps"]), int(there["adam/steps"]) // 4)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("B", r"run\.init_from.*'B' does not exist.*: A"),
        ("A-", "did you mean 'A'"),
        ("./nothing/here", "does not exist"),
    ],
)
def test_a_missing_source_is_refused_by_path(runs: Path, source: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_source(source, runs)


def test_a_name_is_that_of_a_run_and_not_of_a_folder_here(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(runs / "A", tmp_path / "here" / "B")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="'B' does not exist"):
        find_source("B", runs)
    assert tmp_path / "here" / "B" in find_source("./B", runs).path.parents


def test_a_damaged_source_is_refused_by_path(runs: Path) -> None:
    state = newest(runs) / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(ConfigError, match=r"run\.init_from.*no whole checkpoint"):
        find_source("A", runs)
    with pytest.raises(ConfigError, match=r"run\.init_from.*is corrupt: its sha256"):
        find_source(str(newest_by_name(runs)), runs)


def newest_by_name(runs: Path) -> Path:
    return max((runs / "A" / "checkpoints").glob("v*-*"))


def test_a_source_of_an_older_version_is_refused_with_the_way_out(runs: Path) -> None:
    rewrite(runs, CheckpointStore.load(newest(runs)).read(), {})
    with pytest.raises(ConfigError, match=r"run\.init_from.*continue that run with --resume"):
        start(runs)


def test_a_parameter_that_is_not_finite_is_refused(runs: Path) -> None:
    """The flat array holds bytes, which are always finite."""
    arrays, metadata = CheckpointStore.load(newest(runs)).read(), metadata_of(runs)
    arrays["flat"][:4] = np.asarray([np.nan], np.float32).view(np.uint8)
    rewrite(runs, arrays, metadata)
    with pytest.raises(ConfigError, match=r"run\.init_from.*is not finite"):
        start(runs)


def test_names_of_a_stranger_that_lead_out_of_the_arrays_are_refused(runs: Path) -> None:
    arrays = CheckpointStore.load(newest(runs)).read()
    rows = {"flat": [["network/x", "float32", [10**9], 0]]}
    rewrite(runs, arrays, {"parameters": json.dumps(rows)})
    with pytest.raises(ConfigError, match=r"run\.init_from.*beyond the end"):
        start(runs)


@pytest.mark.e2e
def test_a_source_without_a_common_parameter_is_refused_with_both_algorithms(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.init_from.*no parameter of the network") as caught:
        start(runs, network={"name": "tests.support.networks:Fitting"})
    assert "source is of ppo" in str(caught.value)


@pytest.mark.e2e
def test_differences_from_the_source_are_listed(runs: Path) -> None:
    found = start(
        runs,
        env={"kwargs": {"sutton_barto_reward": True}},
        network={"hidden": [8]},
        algorithm={"gae_lambda": 0.9},
    )
    first, second = found.notes()
    assert (
        "run.init_from: differences from the source: env.kwargs.sutton_barto_reward none -> true; "
        "network.hidden [16] -> [8]; algorithm.gae_lambda 0.95 -> 0.9"
    ) == first
    assert "network/policy_head.weight (float32[2, 16], here float32[2, 8])" in second


@pytest.mark.e2e
def test_the_list_of_differences_is_short(runs: Path) -> None:
    found = start(runs, env={"id": "Acrobot-v1"})
    assert "source has observations" in found.differences[0]
    many = tuple(f"d{index}" for index in range(MOST_DIFFERENCES + 3))
    object.__setattr__(found, "differences", many)
    first = next(found.notes())
    assert first.endswith(f"d{MOST_DIFFERENCES - 1}; 3 more")


@pytest.mark.e2e
def test_nothing_that_the_source_names_is_imported(runs: Path, tmp_path: Path) -> None:
    """A checkpoint of a stranger names modules that would leave a mark."""
    mark = tmp_path / "ran"
    (tmp_path / "of_a_source.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    found = newest(runs)
    manifest = json.loads((found / "manifest.json").read_text())
    for section, key in (("env", "id"), ("network", "name"), ("algorithm", "name")):
        manifest["config"][section][key] = "of_a_source:Thing"
    manifest["config"]["env"]["wrappers"] = ["of_a_source:wrap"]
    (found / "manifest.json").write_text(json.dumps(manifest))
    sys.path.append(str(tmp_path))
    try:
        taken = start(runs).fit.taken
    finally:
        sys.path.remove(str(tmp_path))
    assert taken
    assert not mark.exists()
    assert "of_a_source" not in sys.modules
