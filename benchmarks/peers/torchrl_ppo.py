"""Peer script: TorchRL's collector, ``ClipPPOLoss`` and ``GAE``, combined as in its examples,
CartPole-v1 to a target return.

TorchRL publishes no settings for CartPole, so it gets RL Zoo's settings for PPO. ``python -m
benchmarks.peers.torchrl_ppo cartpole ...``, with an interpreter that has torchrl. The clock starts
with the request of the first batch.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.peers.common import Progress, Reporter, Task, read_task

SETTINGS: dict[str, Any] = {
    "n_envs": 8,
    "frames_per_batch": 256,
    "epochs": 20,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "entropy": 0.0,
    "value": 0.5,
    "max_norm": 0.5,
    "clip": 0.2,
    "learning_rate": 1e-3,
    "schedule_steps": 100_000,
}
"""The learning rate falls linearly. A batch is one minibatch."""


def networks() -> tuple[Any, Any]:
    """Return separate actor and critic: 64-64, tanh."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator

    body = {"in_features": 4, "num_cells": [64, 64], "activation_class": nn.Tanh}
    policy = TensorDictModule(MLP(out_features=2, **body), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        policy, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    return actor, ValueOperator(MLP(out_features=1, **body), in_keys=["observation"])


def make_collector(actor: Any, seed: int) -> Any:
    """Make a collector in one process, as in TorchRL's PPO examples for classic control."""
    from torchrl import collectors
    from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv

    def environment() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))

    kind = getattr(collectors, "SyncDataCollector", None) or collectors.Collector  # its later name
    amount = {
        "frames_per_batch": SETTINGS["frames_per_batch"],
        "total_frames": SETTINGS["schedule_steps"],
    }
    made = kind(SerialEnv(SETTINGS["n_envs"], environment), actor, **amount)
    made.set_seed(seed)
    return made


def train(task: Task, progress: Progress) -> None:
    """Train until ``progress`` ends it or the schedule is over."""
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    actor, critic = networks()
    objective = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=SETTINGS["clip"],
        entropy_coeff=SETTINGS["entropy"],
        critic_coeff=SETTINGS["value"],
        normalize_advantage=True,
    )
    advantage = GAE(gamma=SETTINGS["gamma"], lmbda=SETTINGS["gae_lambda"], value_network=critic)
    optimiser = torch.optim.Adam(objective.parameters(), lr=SETTINGS["learning_rate"], eps=1e-5)
    collector = make_collector(actor, task.seed)
    progress.start()
    steps = 0
    for batch in collector:
        steps += batch.numel()
        over = batch["next", "done"].squeeze(-1)
        if progress.observe(steps, batch["next", "episode_reward"].squeeze(-1)[over].tolist()):
            break
        optimiser.param_groups[0]["lr"] = SETTINGS["learning_rate"] * max(
            0.0, 1.0 - steps / SETTINGS["schedule_steps"]
        )
        with torch.no_grad():
            advantage(batch)
        flat = batch.reshape(-1)
        for _ in range(SETTINGS["epochs"]):
            losses = objective(flat)
            optimiser.zero_grad()
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(objective.parameters(), SETTINGS["max_norm"])
            optimiser.step()
        collector.update_policy_weights_()
    collector.shutdown()


def main() -> None:
    """Train, and report the result."""
    task = read_task(__doc__, envs=("cartpole",))
    reporter = Reporter()
    warnings.filterwarnings("ignore")
    torch.manual_seed(task.seed)
    progress = Progress(task)
    train(task, progress)
    reporter.report(
        task,
        progress,
        peer="TorchRL PPO",
        clock_starts="the request of the first batch",
        settings=SETTINGS,
        packages=("torchrl", "tensordict", "torch", "gymnasium", "numpy"),
    )


if __name__ == "__main__":
    main()
