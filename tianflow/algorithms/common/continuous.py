"""Learner that SAC and TD3 share: an actor, two critics, and target networks."""

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
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.off_policy import ContinuousSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks.q_values import ActionRange, Critics, action_size, seeded
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import n_step_target, weighted_loss

Settings = TypeVar("Settings", bound=ContinuousSettings)


class CriticEvaluation(NamedTuple):
    """Evaluation of a batch by the critics: loss and mean value without gradient, mean error size
    [n].
    """

    loss: Tensor
    value: Tensor
    error: Tensor


class ActorAndCritics(OffPolicyLearner[Module, Settings]):
    """A published actor, and two critics with targets that stay in the learner."""

    def __init__(
        self,
        model: QModel[Module],
        config: Config,
        spec: EnvironmentSpec,
        settings: Settings,
        device: torch.device,
    ) -> None:
        super().__init__(model, config, settings, device)
        # Another seed than the actor's, so that their torsos differ.
        self.critics = TrainedNetwork(
            seeded(config.run.seed + 1, lambda: Critics(config.network, spec)), {}, device
        )
        self.target_critics = TargetNetwork(self.critics)
        self.range, self.action_size = ActionRange(spec.action, device), action_size(spec.action)
        self.optimisers["critics"] = Optimiser(
            self.critics.buffer.parameters, self.critics.buffer.gradients, settings
        )
        self.saved_tensors |= {
            "critics": self.critics.buffer.bytes,
            "target_critics": self.target_critics.parameters,
        }
        self.tables["critics"] = self.critics.buffer.table
        self._actor_parameters: Sequence[Tensor] = list(model.network.parameters())

    def follow_parameters(self) -> None:
        self.target_critics.follow(1.0)

    @abstractmethod
    def bootstrap(self, part: Transitions, noise: Tensor) -> Tensor:
        """The value of ``part.after`` [n], given standard normal ``noise`` [n, D]."""

    def critic_gradients(self, part: Transitions, noise: Tensor) -> CriticEvaluation:
        """Add the gradient of the critics' loss to its buffer.

        The loss is the sum of ``mean(weight error^2) / 2`` over both critics. ``noise``: see
        `bootstrap`.
        """
        with torch.no_grad():
            target = n_step_target(part.step, self.bootstrap(part, noise))
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

    def actor_gradient(self, loss: Tensor) -> None:
        """Add the gradient of the actor's loss to the actor's buffer only."""
        torch.autograd.backward(loss, inputs=self._actor_parameters)

    def normal(self, arrays: Tree) -> Tensor:
        """Standard normal noise for each window of ``arrays``, [n, D], from the learner's
        generator.
        """
        shape = (arrays["valid"].shape[1], self.action_size)
        return torch.randn(*shape, generator=self.generator).to(self.device)
