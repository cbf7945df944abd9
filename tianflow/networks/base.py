"""Interface of networks, and their factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tianflow.config.model import NetworkSettings
from tianflow.config.networks import load_network
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import ConfigError, Problem
from tianflow.networks.arrays import ArrayMlp

Tree = Mapping[str, Tensor]


class Output(NamedTuple):
    """Output of a network for a sequence.

    ``parameters``: float32 [T, B, P], parameters of the action distribution
    (`tianflow.ops.distributions.distribution_for`): concatenated logits of all choices, or means
    and then log standard deviations. ``value``: float32 [T, B]. ``state``: {leaf: [T, B, ...]},
    recurrent state *after* each step; empty without one.
    """

    parameters: Tensor
    value: Tensor
    state: Tree


class Network(nn.Module):
    """A policy and a value function over observation sequences.

    ``network.name = "module:attribute"`` names a plug-in network: a class or function
    ``(config.network, EnvironmentSpec)`` that returns a module with `forward`. This base class
    provides the other methods. Parameters must be float32, without persistent buffers, because only
    parameters are published. Settings of the plug-in are in ``config.network.kwargs``.

    With ``learner.precision = "bf16"`` the learner calls the network under `torch.autocast` and
    converts its output to float32. With ``actors.precision = "bf16"`` actors do the same with
    bfloat16 parameters. A network supports both unless it writes to tensors of its own with a fixed
    dtype.
    """

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:  # noqa: ARG004 - subclasses use it
        """{leaf: shape for one environment} of the recurrent state. A static method, for memory
        layouts.
        """
        return {}

    def forward(self, observation: Tree, state: Tree, start: Tensor) -> Output:
        """Evaluate a sequence.

        Args:
            observation: {leaf: [T, B, *leaf shape]} in stored dtypes: uint8 is not scaled,
                categorical leaves are zero-based numbers. If the run normalises observations, float
                leaves are normalised, and images are float32 with channels innermost in memory; use
                ``reshape`` for them where ``view`` fails.
            state: {leaf: [B, ...]}, recurrent state before the first step.
            start: bool [T, B]; where True, the state must be zero before ``observation[t]``.
        """
        raise NotImplementedError

    def act(self, observation: Tree, state: Tree) -> tuple[Tensor, Tree]:
        """One step of an actor: {leaf: [N, ...]}, state before it -> parameters [N, P], state after
        it.

        The caller sets the state to zero where an episode begins. Override it to skip the value.
        """
        sequence = {name: leaf.unsqueeze(0) for name, leaf in observation.items()}
        first = next(iter(observation.values()))
        output: Output = self(
            sequence, state, torch.zeros(1, first.shape[0], dtype=torch.bool, device=first.device)
        )
        return output.parameters[0], {name: leaf[0] for name, leaf in output.state.items()}

    def on_arrays(self) -> ArrayMlp | None:
        """`act` on NumPy arrays, for small networks without recurrent state; None if not
        supported.
        """
        return None


def make_network(settings: NetworkSettings, spec: EnvironmentSpec, *, seed: int = 0) -> nn.Module:
    """The network that ``settings`` names, with weights from ``seed`` alone.

    The global random generator stays unchanged.

    Raises:
        ConfigError: the name is unknown, or its module cannot be published.
    """
    factory = load_network(settings)
    if not callable(factory):
        raise ConfigError(
            [
                Problem(
                    "network.name",
                    settings.name,
                    "is not callable",
                    "a class or function that returns a torch.nn.Module",
                )
            ]
        )
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` seeds the generators of all devices, and without a GPU it formats the
        # call stack for each type of device.
        torch.default_generator.manual_seed(seed)
        network = factory(settings, spec)
    problem = _why_not_publishable(network)
    if problem:
        raise ConfigError(
            [
                Problem(
                    "network.name",
                    settings.name,
                    problem,
                    "a torch.nn.Module with float32 parameters, without buffers",
                )
            ]
        )
    assert isinstance(network, nn.Module)
    return network


def _why_not_publishable(network: object) -> str:
    if not isinstance(network, nn.Module):
        return f"returned {type(network).__name__}"
    other = [
        name for name, parameter in network.named_parameters() if parameter.dtype != torch.float32
    ]
    if other:
        return f"parameter {other[0]} is not float32"
    buffers = set(network.state_dict()) - {
        name for name, _ in network.named_parameters(remove_duplicate=False)
    }
    if buffers:
        return f"{min(buffers)} is a buffer: buffers are neither published nor saved"
    return ""
