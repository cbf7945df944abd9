"""The same seed gives the same weights, bit for bit: as a plain serial loop does, and across an
interruption.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.fakes import FakeSlot
from tianflow import api, plugins
from tianflow.components.rollout import Rollout
from tianflow.components.stacking import BatchStacker
from tianflow.config import loading as config_loading
from tianflow.config import networks as network_rules
from tianflow.config.model import Config
from tianflow.core.layout import make_layout
from tianflow.core.payloads import Grant, Version
from tianflow.planning import validation
from tianflow.rundir.checkpoints import CheckpointStore, resolve

pytestmark = pytest.mark.e2e

E2E = [pytest.mark.e2e, pytest.mark.timeout(300)]
ALGORITHMS: dict[str, dict[str, object]] = {
    "ppo": {"name": "ppo", "minibatch_size": 32, "epochs": 2, "batch_trajectories": 2},
    "impala": {"name": "impala", "batch_trajectories": 2},
}


def make_config(
    algorithm: Mapping[str, object], launcher: str = "inline", **sections: Mapping[str, object]
) -> Config:
    """One actor at bound 0."""
    tables: dict[str, Mapping[str, object]] = {
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": algorithm,
        "network": {"hidden": [16]},
        "actors": {"count": 1, "rollout_steps": 16},
        "balance": {"max_staleness": 0},
        "placement": {"launcher": launcher},
        "evaluation": {"episodes": 1, "num_envs": 1},
    }
    return config_loading.load_config(
        {name: {**tables.get(name, {}), **sections.get(name, {})} for name in {*tables, *sections}}
    )


def final_state(directory: Path) -> dict[str, NDArray[Any]]:
    """Every array of a run's newest checkpoint."""
    return CheckpointStore.load(resolve(str(directory), directory.parent)).read()


def assert_same(expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]) -> None:
    assert sorted(expected) == sorted(found)
    for name, array in expected.items():
        assert array.dtype == found[name].dtype
        assert array.tobytes() == np.ascontiguousarray(found[name]).tobytes(), f"{name} differs"


def serial(config: Config, updates: int) -> dict[str, NDArray[Any]]:
    """What a loop in one thread makes of the same parts: no channels, no ledger, nobody else."""
    torch.set_num_threads(1)
    spec = validation.require_valid(config).spec
    assert spec is not None
    factory: Any = plugins.load("tianflow.algorithms", config.algorithm.name, path="algorithm.name")
    algorithm = factory.make_learner(config, spec, torch.device("cpu"))
    policy = factory.make_policy(config, spec)
    version = Version(1, 0)

    def load() -> Version:
        policy.load(algorithm.flat())
        return version

    rollout = Rollout(
        config=config,
        spec=spec,
        policy=policy,
        load_weights=load,
        component="actor-0",
        actor_index=0,
    )
    state_spec = network_rules.state_spec(config.network)
    layout = make_layout(
        spec, steps=config.actors.rollout_steps, state_spec=state_spec, return_accumulator=False
    )
    batch = config.algorithm.batch_trajectories
    stacker = BatchStacker(layout=layout, trajectories=batch, device=torch.device("cpu"))
    slot = FakeSlot(spec, config.actors.rollout_steps, state_spec)
    for number in range(updates):
        version = Version(1, number)
        for index in range(batch):
            made = rollout.run(slot, Grant(0, 0, version), config.balance.min_fragment_steps)
            stacker.fill(index, slot.arrays, made.length)
        algorithm.set_live(config.algorithm.learning_rate, config.algorithm.entropy_cost)
        algorithm.step(stacker.batch())
    rollout.close()
    return algorithm.state_dict()


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("ppo", "inline"), ("impala", "inline"), pytest.param("ppo", "processes", marks=E2E)],
)
def test_bound_0_with_one_actor_equals_a_plain_serial_loop(
    tmp_path: Path, name: str, launcher: str
) -> None:
    """Weights, optimiser and generator after 20 updates."""
    config = make_config(ALGORITHMS[name], launcher, run={"max_updates": 20, "seed": 3})
    finished = api.train(config, runs_dir=tmp_path)
    assert 20 == finished.summary["updates"]
    assert_same(serial(config, 20), final_state(finished.directory))


CENTRAL = {"actors": {"inference": "central"}, "inference": {"device": "cpu"}}


@pytest.mark.parametrize("launcher", ["inline", pytest.param("processes", marks=E2E)])
def test_bound_0_with_one_actor_and_a_server_equals_a_plain_serial_loop(
    tmp_path: Path, launcher: str
) -> None:
    run = {"max_updates": 10, "seed": 3}
    config = make_config(ALGORITHMS["ppo"], launcher, run=run, **CENTRAL)
    finished = api.train(config, runs_dir=tmp_path)
    local = make_config(ALGORITHMS["ppo"], launcher, run=run)
    assert_same(serial(local, 10), final_state(finished.directory))


KINDS: dict[str, dict[str, Mapping[str, object]]] = {
    "central": CENTRAL,
    "native vector": {},
    "sync vector": {"env": {"id": "CartPole-v1", "num_envs": 3, "vectorization": "sync"}},
    "lstm, normalised": {
        "network": {"hidden": [16], "lstm": 8},
        "env": {"normalisation": {"observations": True, "returns": True}},
        "algorithm": {**ALGORITHMS["impala"], "learning_rate_schedule": "linear"},
        "run": {"max_env_steps": 1_000_000},
    },
}
KINDS["schedules"] = {
    "algorithm": {
        **ALGORITHMS["ppo"],
        "learning_rate": {"schedule": "cosine", "start": 1e-2, "end": 1e-4, "over": 1000},
        "entropy_cost": {"schedule": "piecewise", "points": [[2, 0.1], [11, 0]], "unit": "updates"},
        "clip": {"schedule": "exponential", "start": 0.5, "end": 0.05, "over": 1000},
    },
}
KINDS["central, lstm, normalised"] = {**KINDS["lstm, normalised"], **CENTRAL}


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        *((kind, "inline") for kind in KINDS),
        pytest.param("lstm, normalised", "processes", marks=E2E),
        pytest.param("schedules", "processes", marks=E2E),
        pytest.param("central, lstm, normalised", "processes", marks=E2E),
    ],
)
def test_an_interrupted_and_resumed_deterministic_run_equals_one_that_went_through(
    tmp_path: Path, kind: str, launcher: str
) -> None:
    def config(updates: int) -> Config:
        sections = dict(KINDS[kind])
        algorithm = sections.pop("algorithm", ALGORITHMS["ppo"])
        run = {
            "max_updates": updates,
            "deterministic": True,
            "barrier_updates": 6,
            "seed": 5,
            **sections.pop("run", {}),
        }
        return make_config(algorithm, launcher, run=run, **sections)

    through = api.train(config(12), runs_dir=tmp_path / "through")
    first = api.train(config(6), runs_dir=tmp_path / "parts")
    second = api.train(config(12), resume=first.directory, runs_dir=tmp_path / "parts")
    assert [12, 12] == [through.summary["updates"], second.summary["updates"]]
    assert through.summary["env_steps"] == second.summary["env_steps"]
    assert_same(final_state(through.directory), final_state(second.directory))


def between_barriers(updates: int, **run: Any) -> Config:
    limits = {"max_updates": updates, "deterministic": True, "barrier_updates": 5, "seed": 5}
    return make_config(ALGORITHMS["ppo"], "inline", run={**limits, **run})


def test_a_run_that_was_stopped_between_barriers_resumes_bit_for_bit_from_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    through = api.train(between_barriers(10), runs_dir=tmp_path / "through")
    first = api.train(between_barriers(7), runs_dir=tmp_path / "parts")
    second = api.train(between_barriers(10), resume=first.directory, runs_dir=tmp_path / "parts")
    assert "at its barrier of version 5, to stay bit for bit; updates up to 7" in caplog.text
    assert through.summary["env_steps"] == second.summary["env_steps"]
    assert_same(final_state(through.directory), final_state(second.directory))


@pytest.mark.parametrize("how", ["named", "no barrier"])
def test_a_resume_that_cannot_be_bit_for_bit_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    updates = 7 if how == "named" else 3
    first = api.train(between_barriers(updates), runs_dir=tmp_path)
    named = first.directory / "checkpoints" / f"v1-{updates:010d}"
    second = api.train(
        between_barriers(10),
        resume=named if how == "named" else first.directory,
        runs_dir=tmp_path,
    )
    assert f"version {updates} is not at a barrier (every 5 updates)" in caplog.text
    assert 10 == second.summary["updates"]
