"""Stable-Baselines3's PPO on CartPole-v1 with the settings that RL Zoo publishes for it, to a target return.

The clock is that of training: it starts with ``learn``, after imports and construction. The target counts as reached when
the mean return of the last 100 training episodes is there, as it does for tianflow.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from benchmarks import child

SETTINGS: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": "linear from 1e-3",
    "clip_range": "linear from 0.2",
    "schedule_steps": 100_000,
}
"""``ppo: CartPole-v1`` of RL Zoo. A run that is not there after ``schedule_steps`` has not reached the target."""


class _UntilTarget(BaseCallback):  # type: ignore[misc]  # it comes without type hints where lint runs
    def __init__(self, target: float) -> None:
        super().__init__()
        self._target, self._began = target, 0.0
        self.reached_after_s: float | None = None

    def _on_training_start(self) -> None:
        self._began = time.perf_counter()

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer
        enough = episodes is not None and len(episodes) >= 100 and self.locals["dones"].any()
        if enough and float(np.mean([episode["r"] for episode in episodes])) >= self._target:
            self.reached_after_s = time.perf_counter() - self._began
        return self.reached_after_s is None


def main() -> None:
    """``SEED TARGET EPISODES``: train, evaluate over that many episodes, say how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("target", type=float)
    parser.add_argument("episodes", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {key: value for key, value in SETTINGS.items() if key not in ("n_envs", "learning_rate", "clip_range", "schedule_steps")}
    environments = make_vec_env("CartPole-v1", SETTINGS["n_envs"], seed=given.seed)
    model = PPO(
        "MlpPolicy",
        environments,
        learning_rate=lambda left: left * 1e-3,
        clip_range=lambda left: left * 0.2,
        device="cpu",
        seed=given.seed,
        **chosen,
    )
    callback = _UntilTarget(given.target)
    began = time.perf_counter()
    model.learn(SETTINGS["schedule_steps"], callback=callback)
    training_s = time.perf_counter() - began
    judges = make_vec_env("CartPole-v1", 16, seed=given.seed + 1000)
    mean_return, _ = evaluate_policy(model, judges, n_eval_episodes=given.episodes, deterministic=True)
    child.say(
        {
            "time_to_target_s": callback.reached_after_s,
            "training_s": training_s,
            "env_steps": model.num_timesteps,
            "evaluation_return": float(np.mean(mean_return)),
        }
    )


if __name__ == "__main__":
    main()
