"""Model of actor-critic algorithms: a network with action distribution and normalisers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from tianflow import plugins
from tianflow.algorithms.common.normalisers import ObservationNormaliser, RewardNormaliser
from tianflow.algorithms.common.parameter_buffer import FlatBuffer
from tianflow.algorithms.common.precision import Forward, in_float32
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.networks import BUILT_IN, state_spec
from tianflow.core.payloads import EnvironmentSpec
from tianflow.errors import ConfigError, Problem
from tianflow.networks import Network, Output, make_network
from tianflow.ops.distributions import distribution_for


class ActorCriticModel:
    """A network, its action distribution and its normalisers, with all tensors in one `FlatBuffer`.

    Actors and learner create the same model from config and spec: names, offsets and initial
    weights agree. ``forward`` calls the network in `evaluate`.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvironmentSpec,
        device: torch.device,
        forward: Forward = in_float32,
    ) -> None:
        self.forward = forward
        normalisation = config.env.normalisation
        # In training mode, dropout would make the learner's policy differ from the actors'.
        self.network = make_network(config.network, spec, seed=config.run.seed).to(device).eval()
        self.distribution = distribution_for(spec.action)
        self.state_shapes = state_spec(config.network)
        self.observations = ObservationNormaliser.of(spec, normalisation)
        self.rewards = RewardNormaliser(normalisation.returns, clip=normalisation.clip)
        self.buffer = FlatBuffer(
            self.network, self.observations.shapes | self.rewards.shapes, device
        )
        self.gradients = self.buffer.gradients
        self.observations.bind(self.buffer.extras)
        self.rewards.bind(self.buffer.extras)
        if config.network.name not in BUILT_IN:
            self._require_fit(config.network.name, spec, device)

    def evaluate(self, observation: Tree, state: Tree, start: Tensor) -> Output:
        """The network on a sequence of stored observations [T, B, ...]; see `Network.forward`."""
        output: Output = self.forward(
            self.network, self.observations.batch(observation), state, start
        )
        return output

    def in_float32(self) -> ActorCriticModel:
        """The same model, whose `evaluate` computes in float32."""
        exact = copy(self)
        exact.forward = in_float32
        return exact

    def replica(self) -> ActorCriticModel:
        """A model with the same parameters and normalisers, and a gradient of its own."""
        replica = copy(self)
        replica.network = deepcopy(self.network)
        replica.gradients = self.buffer.bind_replica(replica.network)
        return replica

    def _require_fit(self, name: str, spec: EnvironmentSpec, device: torch.device) -> None:
        """Try one step of a plug-in network, on zeros. Its random numbers are not the run's.

        Raises:
            ConfigError: it raises, or its output does not fit the action distribution or the
                declared state.
        """
        n, parameters = spec.num_envs, self.distribution.size
        observation = {
            leaf.name: torch.from_numpy(np.zeros((n, *leaf.shape), leaf.dtype)).to(device)
            for leaf in spec.observation
        }
        state = {
            leaf: torch.zeros(n, *shape, device=device) for leaf, shape in self.state_shapes.items()
        }
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                seen = self.observations(observation)
                found, after = act_of(self.network)(seen, state)
                shapes = {leaf: tuple(array.shape) for leaf, array in after.items()}
                row = {leaf: array.unsqueeze(0) for leaf, array in seen.items()}
                start = torch.zeros(1, n, dtype=torch.bool, device=device)
                values = self.network(row, state, start).value.shape
        except Exception as error:
            message = f"cannot act on the observations of {spec.id}"
            cause = f"{message}: {type(error).__name__}: {error}{plugins.raised_at(error)}"
            accepted = ""
            if isinstance(error, KeyError):  # of a leaf, most likely
                accepted = (
                    f"leaves of the observation: {list(observation)}; leaves of the state: "
                    f"{list(state)}, as state_spec declares"
                )
            raise ConfigError([Problem("network.name", name, cause, accepted)]) from error
        if found.shape != (n, parameters):
            message = (
                f"its policy parameters for {n} environments are {list(found.shape)}, so no "
                f"actions of {spec.id} follow from them"
            )
            accepted = f"{[n, parameters]}: distribution_for(spec.action).size is {parameters}"
            raise ConfigError([Problem("network.name", name, message, accepted)])
        if values != (1, n):
            message = f"its values for one step of {n} environments are {list(values)}"
            raise ConfigError([Problem("network.name", name, message, f"{[1, n]}, as [T, N]")])
        declared = {leaf: tuple(array.shape) for leaf, array in state.items()}
        if shapes != declared:
            message = f"its recurrent state after a step for {n} environments is {shapes}"
            accepted = f"{declared}, as state_spec declares"
            raise ConfigError([Problem("network.name", name, message, accepted)])


def act_of(network: nn.Module) -> Callable[[Tree, Tree], tuple[Tensor, Tree]]:
    """The network's `Network.act`, which a module without that base class need not have."""
    act: Callable[[Tree, Tree], tuple[Tensor, Tree]] = getattr(
        network,
        "act",
        partial(Network.act, network),  # type: ignore[arg-type]
    )
    return act
