"""Scheduled values in force, as statistics."""

from __future__ import annotations

from typing import Any

import pytest

from tianflow.components.schedules import mean_epsilon, schedules_in_force, settings_in_force
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.ops.exploration import apex_epsilons


def config(algorithm: dict[str, Any], **sections: Any) -> Config:
    environment = "Pendulum-v1" if algorithm["name"] in {"sac", "td3"} else "CartPole-v1"
    return load_config(
        {"env": {"id": environment, "num_envs": 4}, "algorithm": algorithm, **sections}
    )


@pytest.mark.parametrize("environments", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 1e-12, 0.5, 7.0])
def test_the_mean_epsilon_is_that_of_the_environments(
    environments: int, epsilon: float, alpha: float
) -> None:
    every = apex_epsilons(0, environments, environments, epsilon=epsilon, alpha=alpha)
    assert every.mean() == pytest.approx(
        mean_epsilon(environments, epsilon=epsilon, alpha=alpha), rel=1e-4
    )


def test_epsilon_follows_its_schedule() -> None:
    settings = {"epsilon_start": 1.0, "epsilon_end": 0.1, "epsilon_updates": 100}
    dqn = config({"name": "dqn", **settings})
    for updates, epsilon in ((0, 1.0), (50, 0.55), (1000, 0.1)):
        found = schedules_in_force(dqn, updates)
        assert {"rollout/exploration_rate": pytest.approx(epsilon)} == found


def test_epsilons_of_ape_x_have_the_mean_of_all_actors() -> None:
    apex = config({"name": "dqn", "epsilon_base": 0.4, "epsilon_alpha": 7.0}, actors={"count": 2})
    expected = apex_epsilons(0, 8, 8, epsilon=0.4, alpha=7.0).mean()
    assert {"rollout/exploration_rate": pytest.approx(expected)} == schedules_in_force(apex, 5)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_beta_of_the_batch_is_there_where_draws_are_prioritised(name: str) -> None:
    prioritised = config({"name": name}, replay={"selector": "prioritised"})
    assert 0.7 == schedules_in_force(prioritised, 0, 0.7)["beta"]
    assert "beta" not in schedules_in_force(
        config({"name": name}, replay={"selector": "uniform"}), 0, 0.7
    )


def test_scheduled_settings_that_an_algorithm_has_are_statistics() -> None:
    expected = {"learning_rate": 1e-3, "entropy_cost": 0.5}
    given = {"learning_rate": 1e-3, "entropy_cost": 0.5}
    assert expected == settings_in_force(config({"name": "impala", **given}).algorithm)
    ppo = config({"name": "ppo", **given, "clip": 0.3}).algorithm
    assert {**expected, "clip_range": 0.3} == settings_in_force(ppo)
    dqn = config({"name": "dqn", "learning_rate": 1e-3}).algorithm
    assert {"learning_rate": 1e-3} == settings_in_force(dqn)


def test_noise_of_td3_follows_its_schedule() -> None:
    noise = {"noise_start": 0.5, "noise_end": 0.1, "noise_updates": 10}
    assert {"rollout/noise_std": pytest.approx(0.3)} == schedules_in_force(
        config({"name": "td3", **noise}), 5
    )


@pytest.mark.parametrize("name", ["ppo", "impala", "a2c", "sac"])
def test_algorithms_that_sample_their_actions_have_none(name: str) -> None:
    assert {} == schedules_in_force(config({"name": name}), 3)
