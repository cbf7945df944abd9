"""Peer script: RLlib on its new API, PPO on CartPole-v1 to a target return, IMPALA on Pong for its
rate.

``python -m benchmarks.peers.rllib_algorithms cartpole|pong ...``, with an interpreter that has
``ray[rllib]``. CartPole takes the settings of RLlib's own tuned example, with eight environments
for each of two runners. The clock starts with the first ``train``, after building. Policy lag is
RLlib's own, in gradient updates.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Lag, Progress, Reporter, Task, read_task

CARTPOLE: dict[str, Any] = {
    "algorithm": "PPO",
    "num_env_runners": 2,
    "num_envs_per_env_runner": 8,
    "training": {
        "gamma": 0.99,
        "lr": 3e-4,
        "num_epochs": 6,
        "vf_loss_coeff": 0.01,
        "use_kl_loss": True,
    },
    "model": {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
}
PONG: dict[str, Any] = {
    "algorithm": "IMPALA",
    "num_env_runners": 1,
    "num_envs_per_env_runner": 5,
    "training": {
        "train_batch_size_per_learner": 500,
        "grad_clip": 40.0,
        "grad_clip_by": "global_norm",
        "lr": 5e-4,
        "vf_loss_coeff": 0.5,
        "entropy_coeff": 0.01,
        "broadcast_interval": 1,
    },
    "model": {
        "conv_filters": [[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"]],
        "conv_activation": "relu",
        "head_fcnet_hiddens": [512],
        "head_fcnet_activation": "relu",
        "vf_share_layers": True,
    },
}
"""84 x 84 x 4, frame skip 4, Nature CNN. Two cores carry one runner beside the learner."""
SAME_NETWORK = {"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh", "vf_share_layers": False}
"""Network of the other peers, in place of the example's 32 linear units, for CartPole with
``network=64-64``.
"""
LAG = "diff_num_grad_updates"


def settings_of(task: Task) -> dict[str, Any]:
    """Return the settings that the task's options choose."""
    if task.env == "cartpole":
        return CARTPOLE | (
            {"model": SAME_NETWORK} if task.options.get("network") == "64-64" else {}
        )
    return PONG


def make_pong(_: Any) -> Any:
    """Make Pong with RLlib's Atari wrappers."""
    import ale_py
    import cv2
    import gymnasium as gym
    from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    game = gym.make(
        "ALE/Pong-v5", frameskip=1, full_action_space=False, repeat_action_probability=0.0
    )
    return wrap_atari_for_new_api_stack(game, dim=84, framestack=4)


def note_return(
    file: Path, *, episode: Any, prev_episode_chunks: Sequence[Any] | None = None, **_: Any
) -> None:
    """Write the return of a training episode that ended in a runner.

    RLlib's own mean covers the episodes of one iteration only. RLlib also reports an episode in the
    pieces into which sampling cut it.
    """
    pieces = (*(prev_episode_chunks or ()), episode)
    with file.open("a", encoding="utf-8") as noted:
        noted.write(f"{sum(piece.get_return() for piece in pieces)}\n")


def build(task: Task, settings: Mapping[str, Any], returns: Path) -> Any:
    """Build the algorithm, with its learner in this process and its runners in separate processes,
    which write ``returns``.
    """
    from ray import tune
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    tune.register_env("pong84", make_pong)
    config = PPOConfig() if settings["algorithm"] == "PPO" else IMPALAConfig()
    pong = task.env == "pong"
    return (
        config.environment("pong84" if pong else "CartPole-v1", clip_rewards=True if pong else None)
        .env_runners(
            num_env_runners=settings["num_env_runners"],
            num_envs_per_env_runner=settings["num_envs_per_env_runner"],
        )
        .learners(num_learners=0)
        .debugging(seed=task.seed)
        .callbacks(on_episode_end=functools.partial(note_return, returns))
        .reporting(min_time_s_per_iteration=1 if pong else None)
        .training(**settings["training"])
        .rl_module(model_config=DefaultModelConfig(**settings["model"]))
        .build_algo()
    )


def numbers(found: Mapping[str, Any], key: str) -> Iterator[float]:
    """Yield every number in nested ``found`` whose name contains ``key``."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from numbers(value, key)
        elif key in str(name):
            yield float(value)


def train(algorithm: Any, progress: Progress, lag: Lag, returns: Path) -> None:
    """Train until ``progress`` ends it. It observes once for each ``train``."""
    progress.start()
    with returns.open(encoding="utf-8") as noted:
        over = False
        while not over:
            result = algorithm.train()
            sampled = result.get("env_runners", {})
            steps = result.get(
                "num_env_steps_sampled_lifetime", sampled.get("num_env_steps_sampled_lifetime", 0)
            )
            for number in numbers(result.get("learners", {}), LAG):
                lag.add(number, number)
            over = progress.observe(int(steps), map(float, noted))


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__)
    reporter = Reporter()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    import ray

    settings = settings_of(task)
    lag, progress = Lag("gradient updates"), Progress(task)
    # the names of Ray's sockets must stay short
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
        ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=2 << 30, _temp_dir=directory
        )
        returns = Path(directory) / "returns"
        returns.touch()
        algorithm = build(task, settings, returns)
        train(algorithm, progress, lag, returns)
        reporter.report(
            task,
            progress,
            peer=f"RLlib {settings['algorithm']}",
            clock_starts="the first train(), after building",
            settings=settings,
            packages=("ray", "torch", "gymnasium", "ale-py", "numpy"),
            lag=lag.summary(),
        )
        algorithm.stop()
        ray.shutdown()


if __name__ == "__main__":
    main()
