"""Peer script: Stable-Baselines3's PPO with RL Zoo's published settings, CartPole-v1 to a target
return, Pong for its rate.

``python -m benchmarks.peers.sb3_ppo cartpole|pong ...``, with an interpreter that has
stable-baselines3. ``episodes=N`` evaluates the result over N episodes of most probable actions. The
clock starts with ``learn``, after imports and construction.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.common import Progress, Reporter, Task, read_task

CARTPOLE: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "clip_range": 0.2,
    "schedule_steps": 100_000,
}
"""RL Zoo's ``ppo: CartPole-v1``. Rate and clip fall linearly. A run without the target after
``schedule_steps`` has failed.
"""
PONG: dict[str, Any] = {
    "n_envs": 8,
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "learning_rate": 2.5e-4,
    "clip_range": 0.1,
    "schedule_steps": 10_000_000,
}
"""RL Zoo's ``ppo: atari``: 84 x 84 x 4, frame skip 4, Nature CNN."""


def make_environments(env: str, count: int, seed: int) -> Any:
    """Make a vector of ``count`` environments with RL Zoo's wrappers."""
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if env == "cartpole":
        return make_vec_env("CartPole-v1", count, seed=seed)
    import ale_py
    import cv2

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env("PongNoFrameskip-v4", count, seed=seed), 4)


def callback(progress: Progress, *, each_step: bool) -> Any:
    """Make a callback that observes each step at which an episode ends, or whole cycles of sampling
    and learning if only the rate counts.
    """
    from stable_baselines3.common.callbacks import BaseCallback

    class Observer(BaseCallback):  # type: ignore[misc]  # the lint environment lacks its type hints
        def __init__(self) -> None:
            super().__init__()
            self._over = False
            self._returns: list[float] = []

        def _on_training_start(self) -> None:
            progress.start()

        def _on_rollout_start(self) -> None:
            self._over = progress.observe(self.num_timesteps, self._returns)
            self._returns = []

        def _on_step(self) -> bool:
            self._returns += [
                info["episode"]["r"] for info in self.locals["infos"] if "episode" in info
            ]
            if each_step and self._returns:
                self._on_rollout_start()
            return not self._over

    return Observer()


def train(task: Task, progress: Progress) -> Any:
    """Return the trained model."""
    from stable_baselines3 import PPO

    settings = CARTPOLE if task.env == "cartpole" else PONG
    chosen = {
        key: value
        for key, value in settings.items()
        if key not in ("n_envs", "learning_rate", "clip_range", "schedule_steps")
    }
    model = PPO(
        "MlpPolicy" if task.env == "cartpole" else "CnnPolicy",
        make_environments(task.env, settings["n_envs"], task.seed),
        learning_rate=lambda left: left * settings["learning_rate"],
        clip_range=lambda left: left * settings["clip_range"],
        device="cpu",
        seed=task.seed,
        **chosen,
    )
    model.learn(
        settings["schedule_steps"], callback=callback(progress, each_step=task.env == "cartpole")
    )
    return model


def evaluate(model: Any, seed: int, episodes: int) -> float:
    """Return CartPole's mean return with the most probable actions."""
    from stable_baselines3.common.evaluation import evaluate_policy

    mean_return, _ = evaluate_policy(
        model,
        make_environments("cartpole", 16, seed + 1000),
        n_eval_episodes=episodes,
        deterministic=True,
    )
    return float(mean_return)


def main() -> None:
    """Train, evaluate if requested, and report the result."""
    task = read_task(__doc__)
    reporter = Reporter()
    progress = Progress(task)
    model = train(task, progress)
    episodes = int(task.options.get("episodes", "0"))
    reporter.report(
        task,
        progress,
        peer="Stable-Baselines3 PPO",
        clock_starts="learn()",
        settings=CARTPOLE if task.env == "cartpole" else PONG,
        packages=("stable-baselines3", "torch", "gymnasium", "ale-py", "numpy"),
        evaluation_return=evaluate(model, task.seed, episodes) if episodes else None,
    )


if __name__ == "__main__":
    main()
