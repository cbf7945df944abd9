"""Default settings of a run without a config, by algorithm and kind of environment."""

from __future__ import annotations

from typing import Any

import pytest

from tianflow.config.defaults import BY_SETTINGS, Kind, default_tables, kind_of
from tianflow.config.loading import load_config
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, PPOSettings
from tianflow.config.off_policy import ContinuousSettings, QSettings
from tianflow.config.rules import samples_per_update
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec

DISCRETE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
BOX = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=(1.0, 1.0))
KINDS = [
    *(Kind(continuous, side) for continuous in (False, True) for side in (None, 8, 84)),
    Kind(continuous=False, states=True),
]


def settings(algorithm: str, kind: Kind, **given: Any) -> Config:
    overrides = {key.replace("__", "."): value for key, value in given.items()}
    model = BUILT_IN_ALGORITHMS[algorithm]
    tables = default_tables(algorithm, model, kind, overrides)
    tables["env"] = {**tables.get("env", {}), "id": "Test-v0"}
    return load_config(tables, overrides)


def spec(action: ActionSpec, *leaves: LeafSpec) -> EnvironmentSpec:
    return EnvironmentSpec("Test-v0", leaves, action, 1, "next_step")


def test_the_kind_of_an_environment_is_its_actions_and_its_smallest_image() -> None:
    numbers = LeafSpec("numbers", (4,), "float32")
    images = [LeafSpec(str(side), (side, 90, 3), "uint8") for side in (84, 40)]
    assert Kind(continuous=False, smallest_image=None) == kind_of(spec(DISCRETE, numbers))
    assert Kind(continuous=True, smallest_image=40) == kind_of(spec(BOX, numbers, *images))
    grid = LeafSpec("grid", (), "int64", (16,))
    assert Kind(continuous=False, states=True) == kind_of(spec(DISCRETE, grid, grid))
    assert Kind(continuous=False) == kind_of(spec(DISCRETE, grid, numbers))
    assert "discrete actions and states" == str(kind_of(spec(DISCRETE, grid)))
    assert "continuous actions and images" == str(kind_of(spec(BOX, *images)))


def fits(algorithm: str, kind: Kind) -> bool:
    """Whether the algorithm has the actions of ``kind``."""
    model = BUILT_IN_ALGORITHMS[algorithm]
    return not issubclass(model, ContinuousSettings if not kind.continuous else QSettings)


PAIRS = [(name, kind) for name in BUILT_IN_ALGORITHMS for kind in KINDS if fits(name, kind)]


@pytest.mark.parametrize(("algorithm", "kind"), PAIRS, ids=str)
def test_every_algorithm_has_defaults_that_are_accepted_for_every_kind(
    algorithm: str, kind: Kind
) -> None:
    config = settings(algorithm, kind)
    networks = {None: "mlp", 8: "impala_resnet", 84: "nature_cnn"}
    assert (algorithm, networks[kind.smallest_image]) == (
        config.algorithm.name,
        config.network.name,
    )
    assert config.network.lstm > 0 or algorithm != "r2d2"


def test_every_built_in_algorithm_has_defaults_of_its_own() -> None:
    assert set(BUILT_IN_ALGORITHMS.values()) == {model for model, _ in BY_SETTINGS}


@pytest.mark.parametrize("environments", [1, 8, 64])
def test_an_update_of_ppo_has_2048_steps_whatever_the_number_of_environments(
    environments: int,
) -> None:
    config = settings("ppo", KINDS[0], env__num_envs=environments)
    assert 2048 == samples_per_update(config)


@pytest.mark.parametrize("environments", [1, 8, 64])
def test_an_update_of_ppo_has_1024_steps_where_all_observations_are_states(
    environments: int,
) -> None:
    config = settings("ppo", Kind(continuous=False, states=True), env__num_envs=environments)
    assert 1024 == samples_per_update(config)


def test_a_minibatch_is_no_larger_than_its_batch() -> None:
    config = settings("ppo", KINDS[0], env__num_envs=2, actors__rollout_steps=8)
    assert isinstance(config.algorithm, PPOSettings)
    assert 16 == config.algorithm.minibatch_size


def test_updates_of_a_step_stay_when_the_batch_size_is_given() -> None:
    sizes = [settings("sac", KINDS[3], algorithm__batch_size=size) for size in (64, 256)]
    assert [64.0, 256.0] == [config.replay.samples_per_insert for config in sizes]


def test_learning_begins_before_a_small_table_is_full() -> None:
    assert 250 == settings("dqn", KINDS[0], replay__capacity=1_000).replay.min_size


def test_a_plug_in_that_derives_from_shipped_settings_has_their_defaults() -> None:
    class Mine(PPOSettings):
        name: str = "mine"

    shipped = default_tables("ppo", PPOSettings, KINDS[0], {})
    mine = default_tables("mine", Mine, KINDS[0], {})
    assert {**shipped, "algorithm": {**shipped["algorithm"], "name": "mine"}} == mine
