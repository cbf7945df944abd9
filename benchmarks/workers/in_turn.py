"""Worker: one process that steps, acts and learns in turn, as the reference for a run.

It is a plain loop of PyTorch: ALE's own vector, the network `nature_cnn`, and an update of A2C
(arXiv 1602.01783) after each ``actors.rollout_steps``. Number formats are PyTorch's defaults.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib import child
from benchmarks.workers import bare_loops, halves

if TYPE_CHECKING:
    import torch

    from tianflow.config.model import Config


def stepping(config: Config, device: torch.device) -> bare_loops.Work:
    """Return the work of one update. A unit is an environment step."""
    import numpy as np
    import torch
    from torch import nn

    settings, steps, count = config.algorithm, config.actors.rollout_steps, config.env.num_envs
    vector = halves.make_vector(config)
    observation, _ = vector.reset(seed=config.run.seed)
    torch.manual_seed(config.run.seed)
    body = network(observation.shape[1:]).to(device)
    policy = nn.Linear(512, int(vector.single_action_space.n)).to(device)
    value = nn.Linear(512, 1).to(device)
    parameters = [*body.parameters(), *policy.parameters(), *value.parameters()]
    optimiser = torch.optim.Adam(parameters, settings.learning_rate)

    def distribution(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = body(seen.float() / 255.0)
        return torch.log_softmax(policy(features), -1), value(features).squeeze(-1)

    seen = torch.empty((steps, *observation.shape), dtype=torch.uint8, device=device)
    actions = torch.empty((steps, count), dtype=torch.int64, device=device)
    rewards, goes_on = (np.empty((steps, count), np.float32) for _ in range(2))

    def roll() -> None:
        nonlocal observation
        for t in range(steps):
            seen[t] = torch.from_numpy(observation).to(device)
            with torch.no_grad():
                chosen = torch.multinomial(distribution(seen[t])[0].exp(), 1).squeeze(-1)
            actions[t] = chosen
            observation, rewards[t], terminated, truncated, _ = vector.step(chosen.cpu().numpy())
            goes_on[t] = ~(terminated | truncated)

    def returns() -> torch.Tensor:
        with torch.no_grad():
            following = distribution(torch.from_numpy(observation).to(device))[1]
        reward, discount = (
            torch.from_numpy(array).to(device) for array in (rewards, settings.discount * goes_on)
        )
        found = torch.empty_like(reward)
        for t in reversed(range(steps)):
            found[t] = following = reward[t] + discount[t] * following
        return found.flatten()

    def learn() -> None:
        target = returns()
        log_probs, values = distribution(seen.flatten(0, 1))
        taken = log_probs.gather(1, actions.view(-1, 1)).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        loss = (
            -((target - values.detach()) * taken).mean()
            + settings.value_cost * nn.functional.mse_loss(values, target)
            - settings.entropy_cost * entropy
        )
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimiser.step()

    def work() -> int:
        roll()
        learn()
        return steps * count

    return work


def network(shape: tuple[int, ...]) -> torch.nn.Sequential:
    """Return `nature_cnn` up to its 512 features, for images of ``shape``."""
    import torch
    from torch import nn

    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 8, 4), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, 1), nn.ReLU()),
        nn.Flatten(),
    )
    features = convolutions(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(convolutions, nn.Linear(features, 512), nn.ReLU())


def main() -> None:
    """Arguments: ``CONFIG SECONDS DEVICE [section.key=value ...] [--core N]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("device")
    parser.add_argument("--core", type=int)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    import torch

    from tianflow.config.loading import load_config

    torch.set_num_threads(1)
    work = stepping(load_config(given.config, given.overrides), torch.device(given.device))
    work()
    child.report({"steps_per_s": bare_loops.rate(work, given.seconds)})


if __name__ == "__main__":
    main()
