"""The one interface of all networks, and finding one by name."""

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
    """What a network says about a sequence.

    ``parameters``: float32 [T, B, P] of the action distribution
    (`tianflow.ops.distributions.distribution_for`): logits of all choices side by side, or means
    and then log standard deviations. ``value``: float32 [T, B]. ``state``: {leaf: [T, B, ...]}, the
    recurrent state *after* each step; empty without memory.
    """

    parameters: Tensor
    value: Tensor
    state: Tree


class Network(nn.Module):
    """A policy and a value function over one observation sequence.

    A network of your own is named by ``network.name = "module:attribute"``: a class or function
    that takes ``(config.network, EnvironmentSpec)`` and gives a module with `forward`; deriving
    from this class gives it the rest. Its parameters must be float32, and it must have no
    persistent buffers: what is published is its parameters. Its own settings come in
    ``config.network.kwargs``.

    With ``learner.precision = "bf16"`` the learner calls it under `torch.autocast`, and casts up
    what it gives; with that of ``actors`` they do, too, with parameters that are bfloat16. It has
    to run there, which is so unless it writes into tensors of its own with a fixed dtype.
    """

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:  # noqa: ARG004 - others need it
        """{leaf: shape for one environment} of the recurrent state. Called without an instance, to
        lay out memory.
        """
        return {}

    def forward(self, observation: Tree, state: Tree, start: Tensor) -> Output:
        """Look at a sequence.

        Args:
            observation: {leaf: [T, B, *leaf shape]} in stored dtypes: uint8 is not scaled,
                categorical leaves hold zero-based numbers. Float leaves are normalised already if
                the run normalises observations, and images are float32 then; their channels lie
                innermost in memory, so ``reshape`` them where ``view`` would refuse.
            state: {leaf: [B, ...]}, the recurrent state before the first step.
            start: bool [T, B]; where True, the state must be zero before ``observation[t]`` is
                looked at.
        """
        raise NotImplementedError

    def act(self, observation: Tree, state: Tree) -> tuple[Tensor, Tree]:
        """One step of acting: {leaf: [N, ...]}, state before it -> parameters [N, P] and the state
        after it.

        The caller has zeroed the state of environments that begin an episode. Override it where the
        value need not be computed.
        """
        sequence = {name: leaf.unsqueeze(0) for name, leaf in observation.items()}
        first = next(iter(observation.values()))
        output: Output = self(
            sequence, state, torch.zeros(1, first.shape[0], dtype=torch.bool, device=first.device)
        )
        return output.parameters[0], {name: leaf[0] for name, leaf in output.state.items()}

    def on_arrays(self) -> ArrayMlp | None:
        """The same step on NumPy arrays, for networks without memory that are so small that this is
        quicker; None where there is none.
        """
        return None


def make_network(settings: NetworkSettings, spec: EnvironmentSpec, *, seed: int = 0) -> nn.Module:
    """The network that ``settings`` names, with weights drawn from ``seed`` alone (the global
    generator is left as it was).

    Raises:
        ConfigError: there is none of that name, or what it names gives no module that could be
            published.
    """
    factory = load_network(settings)
    if not callable(factory):
        raise ConfigError(
            [
                Problem(
                    "network.name",
                    settings.name,
                    "is not callable",
                    "a class or function giving a torch.nn.Module",
                )
            ]
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
        return f"gave {type(network).__name__}"
    other = [
        name for name, parameter in network.named_parameters() if parameter.dtype != torch.float32
    ]
    if other:
        return f"parameter {other[0]} is not float32"
    buffers = set(network.state_dict()) - {
        name for name, _ in network.named_parameters(remove_duplicate=False)
    }
    if buffers:
        return f"{min(buffers)} is a buffer: it would reach neither actors nor checkpoints"
    return ""
