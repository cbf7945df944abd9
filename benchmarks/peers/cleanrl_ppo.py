"""Peer script: PPO in one file after CleanRL's ``ppo.py`` and ``ppo_atari_envpool.py``, with their
settings and their order of steps.

One part differs: Pong uses the vector environment of the Arcade Learning Environment instead of
envpool, because envpool pins cores. ``python -m benchmarks.peers.cleanrl_ppo cartpole|pong ...``.
The clock starts at the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peers.common import Progress, Reporter, Task, read_task


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings with the defaults of the two files."""

    envs: int
    steps: int
    total: int
    clip: float
    learning_rate: float = 2.5e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    minibatches: int = 4
    epochs: int = 4
    entropy: float = 0.01
    value: float = 0.5
    max_norm: float = 0.5
    adam_epsilon: float = 1e-5


CARTPOLE = Settings(envs=4, steps=128, total=500_000, clip=0.2)
PONG = Settings(envs=8, steps=128, total=10_000_000, clip=0.1)


def layer(made: Any, gain: float = 2.0**0.5) -> Any:
    """Initialise ``made`` with orthogonal weights and zero bias."""
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class MlpAgent(nn.Module):
    """Separate actor and critic: 64-64, tanh. Observations: (B, 4) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(*self._body(), layer(nn.Linear(64, 2), 0.01))
        self.critic = nn.Sequential(*self._body(), layer(nn.Linear(64, 1), 1.0))

    @staticmethod
    def _body() -> tuple[nn.Module, ...]:
        return (layer(nn.Linear(4, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh())

    def forward(
        self, observations: torch.Tensor
    ) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        """Return the action distribution, and values (B,)."""
        return torch.distributions.Categorical(logits=self.actor(observations)), self.critic(
            observations
        ).flatten()


class CnnAgent(nn.Module):
    """Nature CNN shared by actor and critic. Observations: (B, 4, 84, 84) uint8."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        convolutions = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
        parts = [
            part
            for i, o, k, s in convolutions
            for part in (layer(nn.Conv2d(i, o, k, stride=s)), nn.ReLU())
        ]
        self.body = nn.Sequential(
            *parts, nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()
        )
        self.actor, self.critic = (
            layer(nn.Linear(512, actions), 0.01),
            layer(nn.Linear(512, 1), 1.0),
        )

    def forward(
        self, observations: torch.Tensor
    ) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        """Return the action distribution, and values (B,)."""
        seen = self.body(observations / 255.0)
        return torch.distributions.Categorical(logits=self.actor(seen)), self.critic(seen).flatten()


def make_environments(env: str, count: int) -> Any:
    """Make a vector of ``count`` environments that return the next episode's first observation with
    the last step.
    """
    import gymnasium as gym

    same_step = gym.vector.AutoresetMode.SAME_STEP
    if env == "cartpole":
        return gym.vector.SyncVectorEnv(
            [lambda: gym.make("CartPole-v1")] * count, autoreset_mode=same_step
        )
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        "pong",
        num_envs=count,
        reward_clipping=True,
        repeat_action_probability=0.0,
        autoreset_mode=same_step,
    )


def advantages(
    rewards: torch.Tensor,
    over: torch.Tensor,
    values: torch.Tensor,
    last: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Return generalised advantages (T, B) of ``rewards`` and values (T, B). ``over``: steps after
    which an episode ended. ``last``: (B,).
    """
    found, gain = torch.zeros_like(rewards), torch.zeros_like(last)
    for t in reversed(range(len(rewards))):
        on = 1.0 - over[t]
        delta = rewards[t] + settings.discount * on * last - values[t]
        gain = delta + settings.discount * settings.gae_lambda * on * gain
        found[t], last = gain, values[t]
    return found


class Trainer:
    """Alternates sampling and learning."""

    def __init__(self, task: Task, settings: Settings) -> None:
        self._settings = settings
        self._environments = make_environments(task.env, settings.envs)
        space = self._environments.single_observation_space
        self._agent: nn.Module = (
            MlpAgent()
            if task.env == "cartpole"
            else CnnAgent(int(self._environments.single_action_space.n))
        )
        self._optimiser = torch.optim.Adam(
            self._agent.parameters(), lr=settings.learning_rate, eps=settings.adam_epsilon
        )
        shape = (settings.steps, settings.envs)
        self._observations = torch.zeros(
            *shape, *space.shape, dtype=torch.float32 if task.env == "cartpole" else torch.uint8
        )
        self._actions, self._logs, self._rewards, self._over, self._values = (
            torch.zeros(shape) for _ in range(5)
        )
        self._seen = torch.as_tensor(self._environments.reset(seed=task.seed)[0])
        self._running = np.zeros(settings.envs)

    def sample(self) -> Iterator[list[float]]:
        """Fill the buffers. Yield the returns of the episodes that ended, step by step."""
        for t in range(self._settings.steps):
            with torch.no_grad():
                chances, self._values[t] = self._agent(self._seen)
                actions = chances.sample()
            self._observations[t], self._actions[t], self._logs[t] = (
                self._seen,
                actions,
                chances.log_prob(actions),
            )
            seen, rewards, ended, cut, _ = self._environments.step(actions.numpy())
            over = np.logical_or(ended, cut)
            self._running += rewards
            returns = self._running[over].tolist()
            self._running[over] = 0.0
            self._rewards[t], self._over[t] = torch.as_tensor(rewards), torch.as_tensor(over)
            self._seen = torch.as_tensor(seen)
            yield returns

    def learn(self, left: float) -> None:
        """Run epochs over the samples. ``left``: remaining share of training, which scales the
        learning rate.
        """
        settings = self._settings
        self._optimiser.param_groups[0]["lr"] = left * settings.learning_rate
        with torch.no_grad():
            gains = advantages(
                self._rewards, self._over, self._values, self._agent(self._seen)[1], settings
            )
        parts = (
            self._observations,
            self._actions,
            self._logs,
            gains,
            gains + self._values,
            self._values,
        )
        flat = [part.flatten(0, 1) for part in parts]
        for _ in range(settings.epochs):
            for chosen in torch.randperm(len(flat[0])).chunk(settings.minibatches):
                self._step(*(part[chosen] for part in flat))

    def _step(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        logs: torch.Tensor,
        gains: torch.Tensor,
        *values: torch.Tensor,
    ) -> None:
        settings, (targets, before) = self._settings, values
        chances, now = self._agent(observations)
        ratio = (chances.log_prob(actions) - logs).exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        policy = torch.max(
            -gains * ratio, -gains * ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
        ).mean()
        clipped = before + (now - before).clamp(-settings.clip, settings.clip)
        value = 0.5 * torch.max((now - targets) ** 2, (clipped - targets) ** 2).mean()
        self._optimiser.zero_grad()
        (policy - settings.entropy * chances.entropy().mean() + settings.value * value).backward()
        nn.utils.clip_grad_norm_(self._agent.parameters(), settings.max_norm)
        self._optimiser.step()


def train(task: Task, settings: Settings, progress: Progress) -> None:
    """Train until ``progress`` ends it. It observes after each step if there is a target, else
    after each cycle.
    """
    trainer = Trainer(task, settings)
    progress.start()
    steps, over = 0, False
    while not over:
        returns: list[float] = []
        for ended in trainer.sample():
            steps += settings.envs
            returns += ended
            if task.target is not None and ended:
                over = progress.observe(steps, returns)
                returns = []
            if over:
                return
        trainer.learn(1.0 - (steps - settings.envs * settings.steps) / settings.total)
        over = progress.observe(steps, returns) or steps >= settings.total


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__)
    reporter = Reporter()
    torch.manual_seed(task.seed)
    settings = CARTPOLE if task.env == "cartpole" else PONG
    progress = Progress(task)
    train(task, settings, progress)
    packages = ("torch", "gymnasium", "ale-py", "numpy")
    reporter.report(
        task,
        progress,
        peer="CleanRL-style PPO",
        clock_starts="the first step",
        settings=asdict(settings),
        packages=packages,
    )


if __name__ == "__main__":
    main()
