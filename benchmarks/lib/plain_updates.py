"""One-file updates of SAC, TD3 and DQN in PyTorch, as a reader of the papers writes them.

Replay is tensors on the device. Losses may be compiled by ``torch.compile``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
STORED, BATCH, DISCOUNT, SMOOTHING = 20_000, 256, 0.99, 0.005


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Fully connected layers with rectifiers."""
    sizes, layers = (inputs, *hidden), []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class Critics(nn.Module):
    """Two state-action values."""

    def __init__(self, observations: int, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.first = mlp(observations + actions, hidden, 1)
        self.second = mlp(observations + actions, hidden, 1)

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([observation, action], -1)
        return self.first(x).squeeze(-1), self.second(x).squeeze(-1)


class Replay:
    """Random transitions on the device."""

    def __init__(self, observations: int, action: Tensor, device: torch.device) -> None:
        self._columns = [
            torch.randn(STORED, observations, device=device),
            torch.randn(STORED, observations, device=device),
            action.to(device),
            torch.randn(STORED, device=device),
            (torch.rand(STORED, device=device) < 0.05).float(),
        ]
        self._device = device

    def draw(self) -> list[Tensor]:
        """Observations, later observations, actions, rewards, ends."""
        rows = torch.randint(0, STORED, (BATCH,), device=self._device)
        return [column[rows] for column in self._columns]


def adam(parameters: Any) -> torch.optim.Adam:
    """Adam in one operation for all parameters."""
    return torch.optim.Adam(parameters, 3e-4, fused=True)


def follow(target: nn.Module, source: nn.Module) -> None:
    """Move a target network towards its source."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), SMOOTHING)


def sac(
    observations: int,
    actions: int,
    hidden: Sequence[int],
    device: torch.device,
    compiled: Decorator,
) -> Callable[[], None]:
    """One update of SAC with automatic temperature."""
    actor = mlp(observations, hidden, 2 * actions).to(device)
    critics = Critics(observations, actions, hidden).to(device)
    target = copy.deepcopy(critics).requires_grad_(False)
    log_temperature = torch.zeros((), device=device, requires_grad=True)
    replay = Replay(observations, torch.rand(STORED, actions) * 2.0 - 1.0, device)
    of_actor, of_critics = adam(actor.parameters()), adam(critics.parameters())
    of_temperature = adam([log_temperature])
    trained = list(actor.parameters())

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(observation).chunk(2, -1)
        log_std = log_std.clamp(-20.0, 2.0)
        noise = torch.randn_like(mean)
        action = (mean + log_std.exp() * noise).tanh()
        density = -0.5 * noise.square() - log_std - 0.9189385
        return action, (density - (1.0 - action.square() + 1e-6).log()).sum(-1)

    @compiled
    def critic_loss(o: Tensor, later: Tensor, a: Tensor, r: Tensor, end: Tensor) -> Tensor:
        with torch.no_grad():
            action, log_prob = sample(later)
            value = torch.minimum(*target(later, action)) - log_temperature.exp() * log_prob
            goal = r + DISCOUNT * (1.0 - end) * value
        first, second = critics(o, a)
        return functional.mse_loss(first, goal) + functional.mse_loss(second, goal)

    @compiled
    def actor_loss(o: Tensor) -> tuple[Tensor, Tensor]:
        action, log_prob = sample(o)
        value = torch.minimum(*critics(o, action))
        loss = (log_temperature.detach().exp() * log_prob - value).mean()
        return loss, log_prob.detach().mean()

    def update() -> None:
        o, later, a, r, end = replay.draw()
        of_critics.zero_grad()
        critic_loss(o, later, a, r, end).backward()
        of_critics.step()
        of_actor.zero_grad()
        loss, log_prob = actor_loss(o)
        loss.backward(inputs=trained)
        of_actor.step()
        of_temperature.zero_grad()
        (-log_temperature * (log_prob - actions)).backward()
        of_temperature.step()
        follow(target, critics)

    return update


def td3(
    observations: int,
    actions: int,
    hidden: Sequence[int],
    device: torch.device,
    compiled: Decorator,
) -> Callable[[], None]:
    """One update of TD3."""
    actor = nn.Sequential(mlp(observations, hidden, actions), nn.Tanh()).to(device)
    critics = Critics(observations, actions, hidden).to(device)
    target = copy.deepcopy(critics).requires_grad_(False)
    target_actor = copy.deepcopy(actor).requires_grad_(False)
    replay = Replay(observations, torch.rand(STORED, actions) * 2.0 - 1.0, device)
    of_actor, of_critics = adam(actor.parameters()), adam(critics.parameters())
    trained, count = list(actor.parameters()), 0

    @compiled
    def critic_loss(o: Tensor, later: Tensor, a: Tensor, r: Tensor, end: Tensor) -> Tensor:
        with torch.no_grad():
            noise = (torch.randn_like(a) * 0.2).clamp(-0.5, 0.5)
            action = (target_actor(later) + noise).clamp(-1.0, 1.0)
            goal = r + DISCOUNT * (1.0 - end) * torch.minimum(*target(later, action))
        first, second = critics(o, a)
        return functional.mse_loss(first, goal) + functional.mse_loss(second, goal)

    @compiled
    def actor_loss(o: Tensor) -> Tensor:
        value: Tensor = critics(o, actor(o))[0]
        return -value.mean()

    def update() -> None:
        nonlocal count
        o, later, a, r, end = replay.draw()
        of_critics.zero_grad()
        critic_loss(o, later, a, r, end).backward()
        of_critics.step()
        count += 1
        if count % 2:
            return
        of_actor.zero_grad()
        actor_loss(o).backward(inputs=trained)
        of_actor.step()
        follow(target, critics)
        follow(target_actor, actor)

    return update


def dqn(
    observations: int,
    actions: int,
    hidden: Sequence[int],
    device: torch.device,
    compiled: Decorator,
) -> Callable[[], None]:
    """One update of DQN."""
    values = mlp(observations, hidden, actions).to(device)
    target = copy.deepcopy(values).requires_grad_(False)
    replay = Replay(observations, torch.randint(0, actions, (STORED,)), device)
    optimiser = adam(values.parameters())

    @compiled
    def loss(o: Tensor, later: Tensor, a: Tensor, r: Tensor, end: Tensor) -> Tensor:
        with torch.no_grad():
            goal = r + DISCOUNT * (1.0 - end) * target(later).amax(-1)
        return functional.smooth_l1_loss(values(o).gather(1, a.unsqueeze(1)).squeeze(1), goal)

    def update() -> None:
        optimiser.zero_grad()
        loss(*replay.draw()).backward()
        nn.utils.clip_grad_norm_(values.parameters(), 10.0)
        optimiser.step()

    return update


UPDATES = {"sac": sac, "td3": td3, "dqn": dqn}
