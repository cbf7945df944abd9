"""TD3 (arXiv 1802.09477): a deterministic actor, two critics, and delayed actor updates.

Actors explore with Gaussian noise, and targets are smoothed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tianflow.algorithms.common.continuous import ActorAndCritics
from tianflow.algorithms.common.off_policy import (
    OffPolicyPolicy,
    Transitions,
    UpdateParts,
    read_transitions,
)
from tianflow.algorithms.common.off_policy_models import QModel, TargetNetwork
from tianflow.algorithms.common.update import Tree
from tianflow.config.model import Config
from tianflow.config.off_policy import TD3Settings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import ActorStep
from tianflow.networks.q_values import ActionRange, Deterministic, action_size, seeded
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import priority

CPU = torch.device("cpu")


def _make_model(
    config: Config, spec: EnvironmentSpec, device: torch.device
) -> QModel[Deterministic]:
    settings = config.algorithm
    assert isinstance(settings, TD3Settings)
    network = seeded(config.run.seed, lambda: Deterministic(config.network, spec))
    return QModel(network, config, spec, settings.exploration(0), device)


class TD3Policy(OffPolicyPolicy[Deterministic]):
    """Policy of TD3. ``parameters`` are actions in -1..1 before noise."""

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device = CPU) -> None:
        super().__init__(_make_model(config, spec, device))
        self._size, self._range = action_size(spec.action), ActionRange(spec.action, device)

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> Tensor:
        """[steps, num_envs, D] normal noise with the current standard deviation."""
        noise = generator.standard_normal((steps, num_envs, self._size), dtype=np.float32)
        return torch.from_numpy(noise * np.float32(self.model.exploration("noise_std")))

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: Tensor | None,
        mask: Tensor | None = None,  # noqa: ARG002 - continuous actions have no mask
    ) -> ActorStep:
        """Actions with noise, clipped to their range; without noise, unchanged."""
        with torch.inference_mode():
            parameters = self.acting.forward(
                self.acting.network, self.model.observations(observation)
            )
            action = parameters if noise is None else (parameters + noise).clamp(-1.0, 1.0)
        return ActorStep(self._range.stored(action), parameters, state)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``scaled_action`` [N, D] in -1..1."""
        return {"scaled_action": parameters}


class TD3Learner(ActorAndCritics[Deterministic, TD3Settings]):
    """Learner of TD3. A priority is the mean of both critics' absolute errors, before the update.

    The first update, and then every ``policy_delay``-th, also updates the actor and the targets.
    The actor's gradient is taken at the critics before the update.
    """

    kinds = 2

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings = config.algorithm
        assert isinstance(settings, TD3Settings)
        super().__init__(_make_model(config, spec, device), config, spec, settings, device)
        self.target_actor = TargetNetwork(self.model)
        self.saved_tensors["target_actor"] = self.target_actor.parameters

    def kind(self) -> int:
        """1 if the update also updates the actor and the targets, else 0."""
        return int(self.updates % self.settings.policy_delay == 0)

    def noise(self, arrays: Tree) -> Tree:
        """Of the target actions, [n, D]."""
        return {"noise": self.normal(arrays)}

    def compute_gradients(self, arrays: Tree) -> UpdateParts:
        part = read_transitions(arrays, self.model.observations, discount=self.settings.discount)
        critics = self.critic_gradients(part, arrays["noise"])
        norms = {"critics": self.critics.norm()}
        statistics = {
            "loss": critics.loss,
            "value_loss": critics.loss,
            "td_error": masked_mean(critics.error, part.learned),
            "q_value": critics.value,
        }
        if self.kind():
            action = self.forward(self.model.network, part.observation)
            loss = -masked_mean(
                self.forward(self.critics.network, part.observation, action)[0], part.learned
            )
            self.actor_gradient(loss)
            norms["adam"] = self.model.norm()
            statistics |= {"loss": critics.loss + loss.detach(), "policy_loss": loss.detach()}
        return UpdateParts(
            part.learned.sum(), norms, statistics, priority(critics.error, part.learned)
        )

    def bootstrap(self, part: Transitions, noise: Tensor) -> Tensor:
        """``min_i Q_i(after, clip(pi(after) + clipped noise))`` of the target networks.

        Source: arXiv 1802.09477, eq. 14.
        """
        settings = self.settings
        action = self.forward(self.target_actor.network, part.after)
        smoothing = (noise * settings.target_noise).clamp(
            -settings.target_noise_clip, settings.target_noise_clip
        )
        value: Tensor = self.forward(
            self.target_critics.network, part.after, (action + smoothing).clamp(-1.0, 1.0)
        ).amin(0)
        return value

    def follow_parameters(self) -> None:
        super().follow_parameters()
        self.target_actor.follow(1.0)

    def after_step(self) -> None:
        if (self.updates - 1) % self.settings.policy_delay == 0:
            self.target_actor.follow(self.settings.target_smoothing)
            self.target_critics.follow(self.settings.target_smoothing)

    def exploration(self, settings: TD3Settings, updates: int) -> Mapping[str, float]:
        return settings.exploration(updates)


class TD3:
    """Entry point ``td3``; `tianflow.interfaces.AlgorithmFactory`."""

    settings, make_policy, make_learner = TD3Settings, TD3Policy, TD3Learner
