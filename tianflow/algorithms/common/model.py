"""Model of actor-critic algorithms: a network with action distribution and normalisers."""

from __future__ import annotations

from copy import copy, deepcopy

import torch
from torch import Tensor

from tianflow.algorithms.common.normalisers import ObservationNormaliser, RewardNormaliser
from tianflow.algorithms.common.parameter_buffer import FlatBuffer
from tianflow.algorithms.common.precision import Forward, in_float32
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.networks import state_spec
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks import Output, make_network
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
