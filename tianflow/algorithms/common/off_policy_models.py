"""Models of replay algorithms: trained networks on flat buffers, target networks, optimisers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from tianflow.algorithms.common.normalisers import ObservationNormaliser
from tianflow.algorithms.common.parameter_buffer import Adam, FlatBuffer
from tianflow.config.model import AlgorithmSettings, Config
from tianflow.core.payloads import EnvironmentSpec

Module = TypeVar("Module", bound=nn.Module)


class TrainedNetwork(Generic[Module]):
    """A network whose tensors, and float64 ``extras``, are in one `FlatBuffer`."""

    def __init__(
        self, network: Module, extras: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        # In training mode, dropout would make the learner's policy differ from the actors'.
        self.network = network.to(device).eval()
        self.buffer = FlatBuffer(self.network, extras, device)

    def norm(self) -> Tensor:
        """Norm of the accumulated gradient."""
        length: Tensor = torch.linalg.vector_norm(self.buffer.gradients)
        return length


class QModel(TrainedNetwork[Module]):
    """Published model: a network, observation statistics, and exploration scalars.

    Actors and learner create the same model from config and spec: names and offsets agree.
    """

    def __init__(
        self,
        network: Module,
        config: Config,
        spec: EnvironmentSpec,
        exploration: Mapping[str, float],
        device: torch.device,
    ) -> None:
        self.observations = ObservationNormaliser.of(spec, config.env.normalisation)
        super().__init__(
            network,
            self.observations.shapes | {f"exploration/{name}": () for name in exploration},
            device,
        )
        self.observations.bind(self.buffer.extras)
        self.explore(exploration)

    def explore(self, exploration: Mapping[str, float]) -> None:
        """Overwrite exploration scalars."""
        for name, value in exploration.items():
            self.buffer.extras[f"exploration/{name}"].fill_(value)

    def exploration(self, name: str) -> float:
        """An exploration scalar in the buffer."""
        return float(self.buffer.extras[f"exploration/{name}"])


class TargetNetwork(Generic[Module]):
    """A copy of a trained network that follows it on request. It has no gradients."""

    def __init__(self, source: TrainedNetwork[Module]) -> None:
        self._source = source.buffer.parameters
        copied = copy.deepcopy(source.network).requires_grad_(False)
        buffer = FlatBuffer(copied, {}, self._source.device)
        for parameter in copied.parameters():
            parameter.grad = None
        self.network, self.parameters = copied, buffer.parameters

    def follow(self, share: float) -> None:
        """Move by ``share`` towards the source; 1 copies it."""
        if share == 1.0:
            self.parameters.copy_(self._source)
        else:
            self.parameters.lerp_(self._source, share)


class Optimiser:
    """Adam on one flat vector whose gradient is clipped by its norm."""

    def __init__(self, parameters: Tensor, gradients: Tensor, settings: AlgorithmSettings) -> None:
        self.adam = Adam(parameters, gradients, epsilon=settings.adam_epsilon)
        self.parameters, self.gradients, self._limit = parameters, gradients, settings.max_grad_norm

    def advance(self, learning_rate: float) -> None:
        """Begin the next step, of this ``learning_rate``."""
        self.adam.advance(learning_rate)

    def descend(self, norm: Tensor) -> None:
        """End the step, against the gradient, whose norm is ``norm``, and clear the gradient. It
        may be part of a CUDA graph.
        """
        self.gradients.mul_((self._limit / (norm + 1e-6)).clamp(max=1.0))
        self.adam.apply()
        self.gradients.zero_()
