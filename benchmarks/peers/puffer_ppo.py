"""Peer script: PufferLib's own trainer with its own defaults on CPU cores, CartPole-v1 for its
rate.

PufferLib's settings for CartPole are for CartPole-v0 and do not set the algorithm. The script
takes those of ``config/default.ini``. Options choose the number of environments and processes.
``python -m benchmarks.peers.puffer_ppo cartpole ...``, with an interpreter that has pufferlib. The
clock starts with the first evaluation.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib.metadata
import os
import tempfile
import warnings
from typing import Any

import gymnasium
import torch

from benchmarks.peers.common import Progress, Reporter, Task, read_task

HIDDEN = 64
NEVER = 10**9


class Returns(gymnasium.Wrapper):
    """Reports the return of each episode with its last step."""

    def reset(self, **options: Any) -> Any:
        """Begin an episode."""
        self._return = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._return += float(reward)
        if terminated or truncated:
            info = {**info, "episode_return": self._return}
        return observation, reward, terminated, truncated, info


def environment(buf: Any = None, seed: int = 0) -> Any:
    """Make one environment in PufferLib's wrapper."""
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env=Returns(gymnasium.make("CartPole-v1")), buf=buf, seed=seed)


def vector(task: Task) -> Any:
    """Make all environments, in this process or in ``workers``. With workers, one half of them
    steps while the other half waits for actions.
    """
    from pufferlib import vector

    count, workers = int(task.options.get("envs", "1024")), int(task.options.get("workers", "0"))
    if not workers:
        return vector.make(environment, backend=vector.Serial, num_envs=count, seed=task.seed)
    options = {"num_workers": workers, "batch_size": count // 2, "zero_copy": True}
    return vector.make(
        environment, backend=vector.Multiprocessing, num_envs=count, seed=task.seed, **options
    )


def defaults() -> dict[str, Any]:
    """Return the trainer's installed settings."""
    shipped = configparser.ConfigParser()
    shipped.read(
        str(
            importlib.metadata.distribution("pufferlib").locate_file("pufferlib/config/default.ini")
        ),
        encoding="utf-8",
    )
    return {name: _value(text) for name, text in shipped["train"].items()}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):  # a plain word
        return text


def settings_of(task: Task) -> dict[str, Any]:
    """Return the trainer's settings. The trainer writes into the working directory."""
    own = {
        "env": "cartpole",
        "seed": task.seed,
        "device": "cpu",
        "use_rnn": False,
        "data_dir": ".",
        "checkpoint_interval": NEVER,
    }
    found = defaults() | own
    return found | {"bptt_horizon": int(task.options.get("horizon", found["bptt_horizon"]))}


def train(task: Task, progress: Progress, settings: dict[str, Any]) -> None:
    """Train until ``progress`` ends it."""
    from pufferlib import models, pufferl

    pufferl.PuffeRL.print_dashboard = lambda *_, **__: None  # it would be drawn ten times a second
    environments = vector(task)
    trainer = pufferl.PuffeRL(
        dict(settings), environments, models.Default(environments.driver_env, hidden_size=HIDDEN)
    )
    progress.start()
    over = False
    while not over:
        trainer.evaluate()
        returns = list(trainer.stats["episode_return"])
        trainer.stats.clear()
        trainer.train()
        over = progress.observe(trainer.global_step, returns)
    trainer.utilization.stop()
    environments.close()


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__, envs=("cartpole",))
    reporter = Reporter()
    warnings.filterwarnings("ignore")
    torch.manual_seed(task.seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    progress = Progress(task)
    settings = settings_of(task)
    # the import of pufferlib leaves a link in the working directory
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        train(task, progress, settings)
    reporter.report(
        task,
        progress,
        peer="PufferLib PPO",
        clock_starts="the first evaluation",
        settings={**settings, **task.options, "hidden": HIDDEN},
        packages=("pufferlib", "torch", "gymnasium", "numpy"),
    )


if __name__ == "__main__":
    main()
