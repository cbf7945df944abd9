"""Peer script: Stable-Baselines3's SAC on HalfCheetah-v5 with the settings of
``configs/halfcheetah_sac.toml``.
"""

from __future__ import annotations

import argparse
import time

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from benchmarks.lib import child

SETTINGS = {
    "learning_rate": 3e-4,
    "buffer_size": 1_000_000,
    "learning_starts": 1_000,
    "batch_size": 256,
    "tau": 0.005,
    "gamma": 0.99,
    "train_freq": 1,
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [256, 256]},
}
EPISODES = 10


def main() -> None:
    """Arguments: ``SEED STEPS``. Train, play `EPISODES` with the most probable actions, and report
    the result.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = SAC(
        "MlpPolicy",
        make_vec_env("HalfCheetah-v5", 1, seed=given.seed),
        device="cpu",
        seed=given.seed,
        **SETTINGS,
    )
    began = time.perf_counter()
    model.learn(given.steps)
    seconds = time.perf_counter() - began
    mean, deviation = evaluate_policy(
        model, make_vec_env("HalfCheetah-v5", 1, seed=given.seed + 1000), n_eval_episodes=EPISODES
    )
    child.report(
        {
            "evaluation_return": float(mean),
            "deviation": float(deviation),
            "training_s": seconds,
            "env_steps": model.num_timesteps,
        }
    )


if __name__ == "__main__":
    main()
