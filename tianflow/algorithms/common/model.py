"""A network with its action distribution and normalisers, on one flat buffer: what actors and
learner of an actor-critic have alike.
"""

from __future__ import annotations

from copy import copy, deepcopy

import torch
from torch import Tensor

from tianflow.algorithms.common.normalisers import ObservationNormaliser, RewardNormaliser
from tianflow.algorithms.common.parameter_buffer import FlatBuffer
from tianflow.algorithms.common.precision import Forward, as_it_is
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.networks import state_spec
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks import Output, make_network
from tianflow.ops.distributions import distribution_for


class ActorCriticModel:
    """A network, its action distribution and its normalisers, all of whose tensors lie in one
    `FlatBuffer`.

    Actors and learner make it alike from config and spec: same names, same offsets, same weights at
    first. ``forward`` is how `evaluate` calls the network.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvironmentSpec,
        device: torch.device,
        forward: Forward = as_it_is,
    ) -> None:
        self._forward = forward
        normalisation = config.env.normalisation
        # In training mode dropout would give the learner another policy than the one that acted.
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

    def evaluate(self, observation: Tree, state: Tree, start: Tensor) -> Output:
        """The network on a sequence of stored observations [T, B, ...]; see `Network.forward`."""
        output: Output = self._forward(
            self.network, self.observations.batch(observation), state, start
        )
        return output

    def twin(self) -> ActorCriticModel:
        """It reads the same parameters and normalisers; what it is differentiated for goes into a
        gradient of its own.
        """
        twin = copy(self)
        twin.network = deepcopy(self.network)
        twin.gradients = self.buffer.another_gradient(twin.network)
        return twin
