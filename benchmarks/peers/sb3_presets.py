"""Peer script: Stable-Baselines3 on the environment of a preset, with the settings of RL Zoo
(rl-baselines3-zoo 2.9) or with its own defaults.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.lib import child
from benchmarks.peers.sb3_ppo import CARTPOLE

EPISODES = 100
FALLING = frozenset({"learning_rate", "clip_range", "schedule_steps"})
"""Entries of `CARTPOLE` that are not arguments here: two schedules, and their length."""
WIDE: Mapping[str, Any] = {"net_arch": [256, 256]}
LANDER_PPO: Mapping[str, Any] = {
    "n_envs": 16,
    "n_steps": 1024,
    "batch_size": 64,
    "gae_lambda": 0.98,
    "gamma": 0.999,
    "n_epochs": 4,
    "ent_coef": 0.01,
}
EAGER_DQN: Mapping[str, Any] = {
    "learning_rate": 6.3e-4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 0,
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": -1,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
    "policy_kwargs": WIDE,
}
ZOO: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        **{key: value for key, value in CARTPOLE.items() if key not in FALLING},
        "linear": {key: CARTPOLE[key] for key in ("learning_rate", "clip_range")},
    },
    ("a2c", "CartPole-v1"): {"n_envs": 8},
    ("dqn", "CartPole-v1"): {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "target_update_interval": 10,
        "train_freq": 256,
        "gradient_steps": 128,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
        "policy_kwargs": WIDE,
    },
    ("ppo", "Acrobot-v1"): {
        "n_envs": 16,
        "normalize": True,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "n_epochs": 4,
    },
    ("dqn", "Acrobot-v1"): EAGER_DQN,
    ("ppo", "MountainCar-v0"): {
        "n_envs": 16,
        "normalize": True,
        "n_steps": 16,
        "gae_lambda": 0.98,
        "n_epochs": 4,
    },
    ("dqn", "MountainCar-v0"): {
        "learning_rate": 4e-3,
        "batch_size": 128,
        "buffer_size": 10_000,
        "learning_starts": 1_000,
        "gamma": 0.98,
        "target_update_interval": 600,
        "train_freq": 16,
        "gradient_steps": 8,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.07,
        "policy_kwargs": WIDE,
    },
    ("ppo", "LunarLander-v3"): LANDER_PPO,
    ("ppo", "LunarLanderContinuous-v3"): LANDER_PPO,
    ("dqn", "LunarLander-v3"): EAGER_DQN,
    ("ppo", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "gamma": 0.9,
        "learning_rate": 1e-3,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    ("sac", "Pendulum-v1"): {"learning_rate": 1e-3},
    ("td3", "Pendulum-v1"): {
        "gamma": 0.98,
        "buffer_size": 200_000,
        "learning_starts": 10_000,
        "noise": 0.1,
        "policy_kwargs": {"net_arch": [400, 300]},
    },
    ("sac", "HalfCheetah-v5"): {"learning_starts": 10_000},
    ("sac", "Hopper-v5"): {"learning_starts": 10_000},
    ("ppo", "HalfCheetah-v5"): {
        "normalize": True,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": "relu",
            "net_arch": [256, 256],
        },
    },
    ("ppo", "Hopper-v5"): {
        "normalize": True,
        "n_steps": 512,
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": "relu",
            "net_arch": [256, 256],
        },
    },
}
"""Arguments of the algorithm, and RL Zoo's own keys: n_envs, normalize, noise, and schedules that
fall linearly to 0. Other environments have no entry there, and run with the library's defaults.
"""


def main() -> None:
    """Arguments: ``zoo|defaults ALGORITHM ENV STEPS SEED``. Train, play `EPISODES` with the most
    probable actions, and report the result.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", choices=("zoo", "defaults"))
    parser.add_argument("algorithm", choices=("a2c", "dqn", "ppo", "sac", "td3"))
    parser.add_argument("env")
    parser.add_argument("steps", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    settings = ZOO.get((given.algorithm, given.env), {}) if given.settings == "zoo" else {}
    child.report(train(given.algorithm, given.env, given.steps, given.seed, dict(settings)))


def train(
    algorithm: str, env: str, steps: int, seed: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Train and evaluate once."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    environments = make_vec_env(env, settings.pop("n_envs", 1), seed=seed)
    tested = make_vec_env(env, 1, seed=seed + 1000)
    if settings.pop("normalize", False):
        environments = VecNormalize(environments, gamma=settings.get("gamma", 0.99))
        tested = VecNormalize(tested, training=False, norm_reward=False)
        tested.obs_rms = environments.obs_rms
    for name, start in settings.pop("linear", {}).items():
        settings[name] = lambda left, start=start: left * start
    if deviation := settings.pop("noise", None):
        size = environments.action_space.shape
        zeros = torch.zeros(size).numpy()
        settings["action_noise"] = NormalActionNoise(zeros, zeros + deviation)
    if "activation_fn" in settings.get("policy_kwargs", {}):
        settings["policy_kwargs"] = {**settings["policy_kwargs"], "activation_fn": torch.nn.ReLU}
    factory = getattr(stable_baselines3, algorithm.upper())
    model = factory("MlpPolicy", environments, seed=seed, device="cpu", **settings)
    began = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - began
    training = [episode["r"] for episode in model.ep_info_buffer or ()]
    returns, _ = evaluate_policy(
        model, tested, n_eval_episodes=EPISODES, return_episode_rewards=True, warn=False
    )
    return {
        "score": statistics.mean(returns),
        "training": statistics.mean(training) if training else None,
        "env_steps": model.num_timesteps,
        "training_s": seconds,
    }


if __name__ == "__main__":
    main()
