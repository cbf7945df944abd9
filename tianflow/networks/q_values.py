"""Networks for replay algorithms: action values, critics, and actors with bounded actions.

They use the torsos of the built-in networks, selected by ``network.name``. Actions of critics and
actors are scaled to -1..1; see `ActionRange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tianflow.config.model import NetworkSettings
from tianflow.config.networks import (
    image_size,
    is_image,
    resnet_channels,
    torso_leaves,
    units,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError, Problem
from tianflow.networks.base import Tree
from tianflow.networks.parts import (
    SQRT_2,
    ImageTorso,
    MlpTorso,
    ResettingLstm,
    Vector,
    impala_trunk,
    linear,
    nature_trunk,
)

Torso = MlpTorso | ImageTorso
Built = TypeVar("Built", bound=nn.Module)
ACTION = "action of the critic"
"""Name of the leaf that holds a critic's action. The spaces make a clash with other leaves
unlikely.
"""
LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of an actor's log standard deviations before squashing, as in the code of arXiv
1801.01290.
"""


class QOutput(NamedTuple):
    """Values of all actions, float32 [T, B, A], and recurrent state after each step, {leaf: [T, B,
    ...]}.
    """

    values: Tensor
    state: Tree


def seeded(seed: int, make: Callable[[], Built]) -> Built:
    """The module of ``make``, with weights from ``seed`` alone.

    The global random generator stays unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` seeds the generators of all devices, and without a GPU it formats the
        # call stack for each type of device.
        torch.default_generator.manual_seed(seed)
        return make()


def make_torso(settings: NetworkSettings, leaves: Sequence[LeafSpec]) -> Torso:
    """The torso of the built-in network ``settings.name`` over ``leaves``.

    Raises:
        ConfigError: the name is not a built-in network.
    """
    if settings.name == "mlp":
        return MlpTorso(leaves, settings.hidden, settings.activation)
    channels = [image_size(leaf.shape)[0] for leaf in leaves if is_image(leaf)]
    if settings.name == "nature_cnn":
        return ImageTorso(leaves, [nature_trunk(count) for count in channels], units(settings))
    if settings.name == "impala_resnet":
        sizes = resnet_channels(settings)
        return ImageTorso(
            leaves, [impala_trunk(count, sizes) for count in channels], units(settings)
        )
    accepted = "mlp, nature_cnn, impala_resnet"
    raise ConfigError(
        [
            Problem(
                "network.name",
                settings.name,
                "has no torso for a value network",
                accepted,
            )
        ]
    )


class ValueStream(nn.Module):
    """A hidden layer and a head, [M, width] -> [M, outputs]. Initial outputs are nearly 0."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.hidden = linear(width, width, SQRT_2)
        self.head = linear(width, outputs, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = self.head(torch.relu(self.hidden(x)))
        return values


class QNetwork(nn.Module):
    """Action values: torso, optional LSTM, then one head, or two streams with ``duelling``.

    Duelling (arXiv 1511.06581, eq. 9): ``Q(s, a) = V(s) + A(s, a) - mean_a A(s, a)``.
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec, *, duelling: bool) -> None:
        super().__init__()
        leaves, further = torso_leaves(settings, spec.observation)
        self.torso, self.further = make_torso(settings, leaves), Vector(further)
        inputs = self.torso.size + self.further.size
        self.lstm = ResettingLstm(inputs, settings.lstm) if settings.lstm else None
        width, (actions,) = settings.lstm or self.torso.size, spec.action.categories
        self.value = ValueStream(width, 1) if duelling else None
        self.advantage: nn.Module = (
            ValueStream(width, actions) if duelling else linear(width, actions, 0.01)
        )

    def forward(self, observation: Tree, state: Tree, start: Tensor) -> QOutput:
        """Evaluate a sequence, as `tianflow.networks.Network.forward`."""
        steps, columns = start.shape
        flat = {name: leaf.flatten(0, 1) for name, leaf in observation.items()}
        features: Tensor = self.torso(flat)
        states: Tree = {}
        if self.lstm is not None:
            inputs = self.further.beside(features, flat)
            hidden, states = self.lstm(inputs.view(steps, columns, -1), state, start)
            features = hidden.flatten(0, 1)
        return QOutput(self._values(features).view(steps, columns, -1), states)

    def act(self, observation: Tree, state: Tree) -> tuple[Tensor, Tree]:
        """One step: {leaf: [N, ...]}, state before it -> values [N, A], state after it."""
        features: Tensor = self.torso(observation)
        if self.lstm is not None:
            inputs = self.further.beside(features, observation)
            features, state = self.lstm.step(inputs, state)
        return self._values(features), state

    def _values(self, features: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(-1, keepdim=True)


class Critics(nn.Module):
    """Two independent state-action values (arXiv 1802.09477): {leaf: [M, ...]}, [M, D] -> [2, M].

    Actions are in -1..1.
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__()
        leaves = (*spec.observation, LeafSpec(ACTION, (action_size(spec.action),), "float32"))
        self.torsos = nn.ModuleList(make_torso(settings, leaves) for _ in range(2))
        self.heads = nn.ModuleList(linear(int(torso.size), 1, 1.0) for torso in self.torsos)  # type: ignore[arg-type]

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        inputs = {**observation, ACTION: action}
        return torch.stack(
            [
                head(torso(inputs)).squeeze(-1)
                for torso, head in zip(self.torsos, self.heads, strict=True)
            ]
        )


class SquashedGaussian(nn.Module):
    """Actor with means and log standard deviations before squashing: {leaf: [M, ...]} -> [M, 2
    D].
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__()
        self.torso = make_torso(settings, spec.observation)
        self.head = linear(self.torso.size, 2 * action_size(spec.action), 0.01)

    def forward(self, observation: Tree) -> Tensor:
        mean, log_std = self.head(self.torso(observation)).chunk(2, -1)
        return torch.cat([mean, log_std.clamp(*LOG_STD_RANGE)], -1)


class Deterministic(nn.Module):
    """Deterministic actor: {leaf: [M, ...]} -> actions [M, D] in -1..1."""

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__()
        self.torso = make_torso(settings, spec.observation)
        self.head = linear(self.torso.size, action_size(spec.action), 0.01)

    def forward(self, observation: Tree) -> Tensor:
        action: Tensor = torch.tanh(self.head(self.torso(observation)))
        return action


class ActionRange:
    """Conversion of bounded Box actions: stored [..., *shape], scaled to -1..1 [..., D]."""

    def __init__(self, action: ActionSpec, device: torch.device) -> None:
        low, high = (
            torch.tensor(bounds, dtype=torch.float32, device=device)
            for bounds in (action.low, action.high)
        )
        self._centre, self._half = (high + low) / 2.0, (high - low) / 2.0
        self._shape = action.shape

    def scaled(self, action: Tensor) -> Tensor:
        """Stored -> -1..1."""
        lead = action.shape[: action.dim() - len(self._shape)]
        return (action.reshape(*lead, -1) - self._centre) / self._half

    def stored(self, scaled: Tensor) -> Tensor:
        """-1..1 -> stored."""
        return (self._centre + self._half * scaled).reshape(*scaled.shape[:-1], *self._shape)


def action_size(action: ActionSpec) -> int:
    """D, number of components of one action."""
    return len(action.low)
