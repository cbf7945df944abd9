"""What SAC and TD3 share: twin critics with targets, and what their error is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tianflow.algorithms.common.off_policy import OffPolicyLearner, Transitions
from tianflow.algorithms.common.off_policy_models import (
    Module,
    Optimiser,
    QModel,
    TargetNetwork,
    TrainedNetwork,
)
from tianflow.config.model import Config
from tianflow.config.off_policy import ContinuousSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks.q_values import ActionRange, Critics, seeded
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import n_step_target, weighted_loss

Settings = TypeVar("Settings", bound=ContinuousSettings)


class CriticEvaluation(NamedTuple):
    """What the critics say about a batch: their loss and mean value without gradient, and the mean
    size of both errors [n].
    """

    loss: Tensor
    value: Tensor
    error: Tensor


class ActorAndCritics(OffPolicyLearner[Module, Settings]):
    """A published actor, and two critics with targets that only the learner has."""

    def __init__(
        self,
        model: QModel[Module],
        config: Config,
        spec: EnvironmentSpec,
        settings: Settings,
        device: torch.device,
    ) -> None:
        super().__init__(model, config, settings, device)
        # Another seed than the actor's, so that their torsos begin apart.
        self.critics = TrainedNetwork(
            seeded(config.run.seed + 1, lambda: Critics(config.network, spec)), {}, device
        )
        self.target_critics = TargetNetwork(self.critics)
        self.range = ActionRange(spec.action, device)
        self.optimisers["critics"] = Optimiser(
            self.critics.buffer.parameters, self.critics.buffer.gradients, settings
        )
        self.kept |= {
            "critics": self.critics.buffer.bytes,
            "target_critics": self.target_critics.parameters,
        }
        self._actor_parameters: Sequence[Tensor] = list(model.network.parameters())

    @abstractmethod
    def bootstrap(self, part: Transitions) -> Tensor:
        """The value of ``part.after`` [n]."""

    def look_at_critics(self, part: Transitions) -> CriticEvaluation:
        """Add the gradient of the critics' loss, ``mean(weight error^2) / 2`` of one plus that of
        the other, to its buffer.
        """
        with torch.no_grad():
            target = n_step_target(part.step, self.bootstrap(part))
        values: Tensor = self.forward(
            self.critics.network, part.observation, self.range.scaled(part.action)
        )
        error = target - values
        loss = weighted_loss(error, part.weight, part.learned.expand_as(error), delta=None) * 2.0
        torch.autograd.backward(loss)
        size = torch.where(part.learned, error.detach().abs().mean(0), 0.0)
        return CriticEvaluation(
            loss.detach(), masked_mean(values.detach().mean(0), part.learned), size
        )

    def look_at_actor(self, loss: Tensor) -> None:
        """Add the gradient of the actor's loss to its buffer, and to no critic's."""
        torch.autograd.backward(loss, inputs=self._actor_parameters)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal noise from the learner's own generator."""
        return torch.randn(*shape, generator=self.generator).to(self.device)
