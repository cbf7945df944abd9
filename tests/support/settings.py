"""Configs for tests, from a few words."""

from __future__ import annotations

from typing import Any

from tianflow.config.loading import load_config
from tianflow.config.model import Config

SMALL: dict[str, dict[str, Any]] = {
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "algorithm": {"name": "ppo", "epochs": 2, "minibatch_size": 16},
    "network": {"hidden": [16]},
    "actors": {"count": 1, "rollout_steps": 16},
    "placement": {"launcher": "inline"},
    "evaluation": {"episodes": 4, "num_envs": 2},
    "run": {"max_updates": 4},
}


def cartpole(**sections: dict[str, Any]) -> Config:
    """A small run of PPO on CartPole in one process; keywords are sections that overwrite single
    keys.
    """
    return load_config(
        {
            name: {**SMALL.get(name, {}), **sections.get(name, {})}
            for name in (*SMALL, *(set(sections) - set(SMALL)))
        }
    )
