"""A new learner takes the parameters of another one that fit, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tianflow import plugins
from tianflow.algorithms.common.transfer import transfer
from tianflow.config.loading import load_config
from tianflow.config.off_policy import SACSettings
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.interfaces import TransfersParameters
from tianflow.rundir.parameters import Fit, encode_tables, read_parameters

CHOICE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
FORCE = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=(1.0, 1.0))
SPEC = EnvironmentSpec(
    id="x", num_envs=2, observation=(LeafSpec("", (4,), "float32"),), action=CHOICE,
    autoreset="next_step",
)  # fmt: skip
WIDE = replace(SPEC, observation=(LeafSpec("", (6,), "float32"),))
BOX = replace(SPEC, action=FORCE)
NORMALISED = {"normalisation": {"observations": True, "returns": True}}
CPU = torch.device("cpu")


def make(
    name: str,
    spec: EnvironmentSpec,
    *,
    seed: int = 1,
    drawn: bool = False,
    settings: Any = None,
    **sections: Any,
) -> Any:
    """A learner; ``drawn``: with state that no new learner has."""
    tables: dict[str, dict[str, Any]] = {
        "env": {"id": "x"},
        "algorithm": {"name": name},
        "network": {"hidden": [8]},
        "run": {"seed": seed},
    }
    config = load_config(
        {key: tables.get(key, {}) | sections.get(key, {}) for key in {*tables, *sections}}
    )
    if settings is not None:
        config = config.model_copy(update={"algorithm": settings})
    factory: Any = plugins.load("tianflow.algorithms", name, path="algorithm.name")
    learner = factory.make_learner(config, spec, CPU)
    if drawn:
        generator = np.random.default_rng(3)
        state = learner.state_dict()
        for key, array in state.items():
            if key in learner.tables and array.dtype == np.uint8:
                for entry in learner.tables[key].entries:
                    place = array[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
                    place[:] = generator.uniform(0.5, 1.5, place.shape)
            elif key.endswith(("mean", "square")) or key == "log_temperature":
                array[:] = generator.uniform(0.5, 1.5, array.shape)
            elif key.endswith(("steps", "updates")):
                array[...] = 9
        learner.load_state_dict(state)
    return learner


def named(learner: Any) -> dict[str, NDArray[Any]]:
    return read_parameters(learner.state_dict(), encode_tables(learner.tables))


def transferred(source: Any, target: Any) -> Fit:
    """Transfer, and compare everything with what `Fit` says."""
    before, there = named(target), named(source)
    fresh = {
        name: array
        for name, array in target.state_dict().items()
        if name not in target.tables and not name.startswith("target")
    }
    found = transfer(target, there)
    assert found is not None
    after = named(target)
    for name, array in after.items():
        expected = there[name] if name in found.taken else before[name]
        assert np.array_equal(expected, array), name
    state = target.state_dict()
    for name, array in fresh.items():
        assert np.array_equal(array, state[name]), name
    return found


@pytest.mark.parametrize("name", ["a2c", "ppo", "impala", "dqn", "r2d2", "sac", "td3"])
def test_an_equal_learner_takes_all_parameters_and_no_optimiser(name: str) -> None:
    spec = BOX if name in ("sac", "td3") else SPEC
    sections = {"network": {"hidden": [8], "lstm": 4}} if name == "r2d2" else {}
    source = make(name, spec, drawn=True, seed=2, **sections)
    target = make(name, spec, **sections)
    assert isinstance(target, TransfersParameters)
    found = transferred(source, target)
    assert ((), (), (), ()) == (found.differing, found.apart, found.new, found.unused)
    state = target.state_dict()
    steps = [int(value) for key, value in state.items() if key.endswith(("steps", "updates"))]
    assert [0] * len(steps) == steps


def test_normalisers_are_taken() -> None:
    source = make("ppo", SPEC, drawn=True, env=NORMALISED)
    target = make("ppo", SPEC, env=NORMALISED)
    found = transferred(source, target)
    assert {"observation//mean", "observation//samples", "return/variance"} <= set(found.taken)
    observation = {"": torch.ones(1, 4)}
    assert torch.equal(
        source.model.observations(observation)[""], target.model.observations(observation)[""]
    )


def test_another_observation_size_loses_the_first_layer_and_its_moments_only() -> None:
    source = make("ppo", SPEC, drawn=True, env=NORMALISED)
    found = transferred(source, make("ppo", WIDE, env=NORMALISED))
    assert {
        "network/torso.layers.0.weight",
        "network/value_torso.layers.0.weight",
        "observation//mean",
        "observation//variance",
    } == {name for name, *_ in found.differing}
    assert ("observation//samples",) == found.apart
    assert {"network/policy_head.weight", "return/samples"} <= set(found.taken)


def test_other_actions_lose_the_head_only() -> None:
    other = replace(SPEC, action=replace(CHOICE, categories=(5,)))
    found = transferred(make("ppo", SPEC, drawn=True), make("ppo", other))
    assert ["network/policy_head.weight", "network/policy_head.bias"] == [
        name for name, *_ in found.differing
    ]


def test_an_lstm_is_taken_or_named() -> None:
    memory = {"network": {"hidden": [8], "lstm": 4}}
    found = transferred(make("ppo", SPEC, drawn=True, **memory), make("ppo", SPEC, **memory))
    assert any("lstm" in name for name in found.taken)
    found = transferred(make("ppo", SPEC, drawn=True), make("ppo", SPEC, **memory))
    assert any("lstm" in name for name in found.new)
    assert "network/torso.layers.0.weight" in found.taken


@pytest.mark.parametrize(
    ("name", "targets"),
    [("dqn", {"target": "flat"}), ("sac", {"target_critics": "critics"}),
     ("td3", {"target_critics": "critics", "target_actor": "flat"})],
)  # fmt: skip
def test_target_networks_equal_the_networks_that_they_follow(
    name: str, targets: dict[str, str]
) -> None:
    spec, wide = (BOX, replace(BOX, observation=WIDE.observation))
    if name == "dqn":
        spec, wide = SPEC, WIDE
    for target in (make(name, spec), make(name, wide)):
        transferred(make(name, spec, drawn=True, seed=2), target)
        state = target.state_dict()
        for copied, source in targets.items():
            size = state[copied].nbytes
            assert state[copied].tobytes() == state[source].tobytes()[:size]


def test_a_learned_temperature_is_taken_and_a_fixed_one_is_a_setting() -> None:
    source = make("sac", BOX, drawn=True)
    target = make("sac", BOX)
    assert "log_temperature" in transferred(source, target).taken
    assert torch.equal(source.log_temperature, target.log_temperature)
    fixed = SACSettings(target_entropy=None, initial_temperature=1.0)
    target = make("sac", BOX, settings=fixed)
    assert ("log_temperature",) == transferred(source, target).unused
    assert 0.0 == target.log_temperature.item()


def test_exploration_stays_that_of_the_settings() -> None:
    source, target = make("dqn", SPEC, drawn=True), make("dqn", SPEC)
    epsilon = target.model.exploration("epsilon")
    transferred(source, target)
    assert epsilon == target.model.exploration("epsilon") != source.model.exploration("epsilon")


def test_critics_of_another_algorithm_are_taken() -> None:
    found = transferred(make("sac", BOX, drawn=True), make("td3", BOX))
    assert any(name.startswith("critics/") for name in found.taken)


def test_a_learner_that_names_no_parameters_is_not_changed() -> None:
    class Unnamed:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    assert transfer(Unnamed(), {}) is None  # type: ignore[arg-type]
