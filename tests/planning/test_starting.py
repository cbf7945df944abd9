"""Settings of a run that names only an algorithm and an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tianflow import api
from tianflow.config.loading import load_config, shipped
from tianflow.config.model import DQNSettings, PPOSettings
from tianflow.errors import ConfigError
from tianflow.planning import starting
from tianflow.planning.starting import origin, preset_of, start_config


def test_the_preset_for_algorithm_and_environment_is_used() -> None:
    config = start_config("ppo", "CartPole-v1")
    assert config == load_config("cartpole_ppo", {"run.preset": "preset cartpole_ppo"})
    assert "settings: preset cartpole_ppo" == origin(config)


def test_of_several_presets_the_one_with_the_name_of_the_algorithm_is_used() -> None:
    found = [preset_of(name, "CartPole-v1") for name in ("impala", "dqn", "r2d2")]
    assert ["cartpole_impala", "cartpole_dqn", None] == found
    assert "pong_apex" == preset_of("dqn", "ALE/Pong-v5")


def test_a_file_of_another_kind_beside_the_presets_is_no_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "another.toml"
    file.write_text("[build]\nname = 'ppo'\n")
    monkeypatch.setattr(starting, "shipped", lambda: {"another": file, **shipped()})
    assert "cartpole_ppo" == preset_of("ppo", "CartPole-v1")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_preset_ends_by_itself(name: str) -> None:
    assert load_config(name).run.max_env_steps is not None


def test_without_a_preset_defaults_for_the_kind_of_environment_are_used() -> None:
    config = start_config("impala", "Acrobot-v1")
    assert "defaults of impala for discrete actions" == config.run.preset
    assert "defaults of impala for continuous actions" == (
        start_config("impala", "Pendulum-v1").run.preset
    )


@pytest.mark.parametrize("env", ["CartPole-v1", "FrozenLake-v1"])
def test_overrides_win_over_presets_and_defaults(env: str) -> None:
    settings = ["algorithm.learning_rate=0.5", "env.num_envs=3"]
    config = start_config("dqn", env, settings)
    assert (0.5, 3) == (config.algorithm.learning_rate, config.env.num_envs)


def test_overrides_may_be_tables() -> None:
    config = start_config("a2c", "Acrobot-v1", {"env": {"num_envs": 3}, "run.seed": 9})
    assert (3, 9, 10) == (config.env.num_envs, config.run.seed, config.actors.rollout_steps)


def test_presets_can_be_left_aside() -> None:
    config = start_config("dqn", "CartPole-v1", presets=False)
    assert "defaults of dqn for discrete actions" == config.run.preset
    assert isinstance(config.algorithm, DQNSettings)


def test_arguments_of_the_environment_reach_the_environment_that_is_looked_at() -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs = .*no_such"):
        start_config("a2c", "Acrobot-v1", {"env.kwargs": {"no_such": 1}})


def test_an_algorithm_that_does_not_fit_is_refused_later_and_by_its_name() -> None:
    config = start_config("sac", "Acrobot-v1")
    with pytest.raises(ConfigError, match=r"algorithm\.name.*needs continuous actions"):
        api.validation.require_valid(config)


def test_python_takes_the_same_pair() -> None:
    config = api.load_settings("ppo", {"run.seed": 3}, env="CartPole-v1")
    assert config == start_config("ppo", "CartPole-v1", {"run.seed": 3})
    assert isinstance(config.algorithm, PPOSettings)


def test_python_takes_only_the_name_of_an_algorithm_with_an_environment() -> None:
    with pytest.raises(ConfigError, match="an algorithm is expected"):
        api.load_settings({"algorithm": {"name": "ppo"}}, env="CartPole-v1")
