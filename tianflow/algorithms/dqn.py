"""DQN (Nature 518, 2015), with double Q-learning, duelling streams, n-step returns and priorities.

Importance weights and Ape-X's exploration are optional settings, too.
"""

from __future__ import annotations

import torch

from tianflow.algorithms.common.off_policy import (
    UpdateParts,
    read_transitions,
)
from tianflow.algorithms.common.q_learning import QLearner, QPolicy
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.off_policy import DQNSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import (
    double_q_value,
    n_step_target,
    priority,
    taken,
    weighted_loss,
)


class DQNLearner(QLearner[DQNSettings]):
    """Learner of DQN. A priority is the absolute n-step error of a window's first step, before the
    update, plus PER's epsilon.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings = config.algorithm
        assert isinstance(settings, DQNSettings)
        super().__init__(config, spec, settings, device)

    def compute_gradients(self, arrays: Tree) -> UpdateParts:
        part = read_transitions(arrays, self.model.observations, discount=self.settings.discount)
        with torch.no_grad():
            valued, _ = self.forward(self.target.network.act, part.after, {})
            chosen = (
                self.forward(self.model.network.act, part.after, {})[0]
                if self.settings.double
                else valued
            )
            target = n_step_target(part.step, double_q_value(chosen, valued, part.mask_after))
        values, _ = self.forward(self.model.network.act, part.observation, {})
        value = taken(values, part.action)
        error = target - value
        loss = weighted_loss(error, part.weight, part.learned, delta=self.settings.huber_delta)
        torch.autograd.backward(loss)
        size = torch.where(part.learned, error.detach().abs(), 0.0)
        statistics = {
            "loss": loss.detach(),
            "td_error": masked_mean(size, part.learned),
            "q_value": masked_mean(value.detach(), part.learned),
        }
        return UpdateParts(
            part.learned.sum(),
            {"adam": self.model.norm()},
            statistics,
            priority(size, part.learned),
        )


class DQN:
    """Entry point ``dqn``; `tianflow.interfaces.AlgorithmFactory`."""

    settings, make_policy, make_learner = DQNSettings, QPolicy, DQNLearner
