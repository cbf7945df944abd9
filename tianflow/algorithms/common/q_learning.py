"""Policy and learner that DQN and R2D2 share: Q-learning with a network of action values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tianflow.algorithms.common.off_policy import (
    OffPolicyLearner,
    OffPolicyPolicy,
)
from tianflow.algorithms.common.off_policy_models import QModel, TargetNetwork
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.networks import state_spec
from tianflow.config.off_policy import QSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import ActorStep
from tianflow.networks.q_values import QNetwork, seeded
from tianflow.ops.exploration import apex_epsilons, epsilon_noise, scores_of
from tianflow.ops.q_values import masked_values, taken

Settings = TypeVar("Settings", bound=QSettings)
CPU = torch.device("cpu")


def make_model(config: Config, spec: EnvironmentSpec, device: torch.device) -> QModel[QNetwork]:
    """Action values, with epsilon before the first update."""
    settings = config.algorithm
    assert isinstance(settings, QSettings)
    network = seeded(
        config.run.seed, lambda: QNetwork(config.network, spec, duelling=settings.duelling)
    )
    return QModel(network, config, spec, settings.exploration(0), device)


class QPolicy(OffPolicyPolicy[QNetwork]):
    """Epsilon-greedy policy with an epsilon per environment. ``parameters`` are all action
    values.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device = CPU) -> None:
        super().__init__(make_model(config, spec, device))
        (self._actions,) = spec.action.categories
        self._state_shapes = state_spec(config.network)

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {name: torch.zeros(num_envs, *shape) for name, shape in self._state_shapes.items()}

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> Tensor:
        """[steps, num_envs, A]: 0 where the environment is greedy, else a random score per
        action.
        """
        epsilons = apex_epsilons(
            self.index * num_envs,
            num_envs,
            self.count * num_envs,
            epsilon=self.model.exploration("epsilon"),
            alpha=self.model.exploration("alpha"),
        )
        return epsilon_noise(steps, epsilons, self._actions, generator)

    def act(
        self, observation: Tree, state: Tree, noise: Tensor | None, mask: Tensor | None = None
    ) -> ActorStep:
        """Select actions. The caller sets the state to zero where an episode begins."""
        with torch.inference_mode():
            values, after = self.acting.forward(
                self.acting.network.act, self.model.observations(observation), state
            )
            values = masked_values(values, mask)
            scores = values if noise is None else masked_values(scores_of(values, noise), mask)
        return ActorStep(scores.argmax(-1), values, after)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``q_values`` [N, A]."""
        return {"q_values": parameters}

    def record(self, parameters: Tensor, action: Tensor) -> dict[str, Tensor]:
        """``q_taken`` and ``q_max`` [T, N] for initial priorities (Ape-X).

        They are the values of the selected action and of the best allowed one.
        """
        with torch.inference_mode():
            return {"q_taken": taken(parameters, action), "q_max": parameters.amax(-1)}


class QLearner(OffPolicyLearner[QNetwork, Settings]):
    """Learner with one target network, which is copied from the online one at an interval of
    updates.
    """

    def __init__(
        self, config: Config, spec: EnvironmentSpec, settings: Settings, device: torch.device
    ) -> None:
        super().__init__(make_model(config, spec, device), config, settings, device)
        self.target = TargetNetwork(self.model)
        self.saved_tensors["target"] = self.target.parameters

    def after_step(self) -> None:
        if self.updates % self.settings.target_update_updates == 0:
            self.target.follow(1.0)

    def follow_parameters(self) -> None:
        self.target.follow(1.0)

    def exploration(self, settings: Settings, updates: int) -> Mapping[str, float]:
        return settings.exploration(updates)
