"""SAC with automatic temperature (arXiv 1812.05905): a squashed Gaussian actor and two critics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tianflow.algorithms.common.continuous import ActorAndCritics
from tianflow.algorithms.common.divergence import copy_weights, spread
from tianflow.algorithms.common.off_policy import (
    OffPolicyPolicy,
    Transitions,
    UpdateParts,
    read_transitions,
)
from tianflow.algorithms.common.off_policy_models import Optimiser, QModel
from tianflow.algorithms.common.precision import arithmetic
from tianflow.algorithms.common.update import Tree, subtree
from tianflow.config.model import Config
from tianflow.config.off_policy import SACSettings
from tianflow.core.payloads import EnvironmentSpec, TableEntry, WeightsTable
from tianflow.interfaces import ActorStep, LearnerBatch
from tianflow.networks.q_values import ActionRange, SquashedGaussian, action_size, seeded
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import priority
from tianflow.ops.squashed_gaussian import squashed_kl, squashed_sample

CPU = torch.device("cpu")


def _make_model(
    config: Config, spec: EnvironmentSpec, device: torch.device
) -> QModel[SquashedGaussian]:
    network = seeded(config.run.seed, lambda: SquashedGaussian(config.network, spec))
    return QModel(network, config, spec, {}, device)


class SACPolicy(OffPolicyPolicy[SquashedGaussian]):
    """Policy of SAC. ``parameters`` are concatenated means and log standard deviations before
    squashing.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device = CPU) -> None:
        super().__init__(_make_model(config, spec, device))
        self._size, self._range = action_size(spec.action), ActionRange(spec.action, device)

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> Tensor:
        """[steps, num_envs, D] standard normal."""
        return torch.from_numpy(
            generator.standard_normal((steps, num_envs, self._size), dtype=np.float32)
        )

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: Tensor | None,
        mask: Tensor | None = None,  # noqa: ARG002 - continuous actions have no mask
    ) -> ActorStep:
        """Sampled actions; without noise, tanh of the mean."""
        with torch.inference_mode():
            parameters = self.acting.forward(
                self.acting.network, self.model.observations(observation)
            )
            mean, log_std = parameters.chunk(2, -1)
            action = mean.tanh() if noise is None else squashed_sample(mean, log_std, noise)[0]
        return ActorStep(self._range.stored(action), parameters, state)

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``mean`` and ``log_std`` [N, D], before squashing."""
        mean, log_std = parameters.chunk(2, -1)
        return {"mean": mean, "log_std": log_std}


class SACLearner(ActorAndCritics[SquashedGaussian, SACSettings]):
    """Learner of SAC. A priority is the mean of both critics' absolute errors, before the update.

    All gradients are taken at the parameters before the update.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings = config.algorithm
        assert isinstance(settings, SACSettings)
        super().__init__(_make_model(config, spec, device), config, spec, settings, device)
        self._make_retained = partial(_make_model, config, spec, device)
        self._retained: QModel[SquashedGaussian] | None = None
        self.log_temperature = torch.full(
            (1,), math.log(settings.initial_temperature), device=device
        )
        temperature = Optimiser(
            self.log_temperature, torch.zeros_like(self.log_temperature), settings
        )
        self.optimisers["temperature"] = temperature
        self.saved_tensors["log_temperature"] = self.log_temperature
        if settings.target_entropy is not None:  # else it is a setting, not learned
            self.tables["log_temperature"] = WeightsTable(
                (TableEntry("log_temperature", (1,), "float32", 0, 4),), 4
            )

    def noise(self, arrays: Tree) -> Tree:
        """Of the actions after and at the beginning of windows, [n, D]."""
        return {name: self.normal(arrays) for name in ("noise/after", "noise/first")}

    def compute_gradients(self, arrays: Tree) -> UpdateParts:
        part = read_transitions(arrays, self.model.observations, discount=self.settings.discount)
        critics = self.critic_gradients(part, arrays["noise/after"])
        action, log_prob = self._sample(part.observation, arrays["noise/first"])
        value = self.forward(self.critics.network, part.observation, action).amin(0)
        actor_loss = masked_mean(self._temperature() * log_prob - value, part.learned)
        self.actor_gradient(actor_loss)
        entropy = -masked_mean(log_prob.detach(), part.learned)
        norms = {"adam": self.model.norm(), "critics": self.critics.norm()}
        if self.settings.target_entropy is not None:
            gradients = self.optimisers["temperature"].gradients
            # gradient of log(temperature) * (entropy - target), arXiv 1812.05905, eq. 18
            gradients.copy_(entropy - self._target_entropy())
            norms["temperature"] = torch.linalg.vector_norm(gradients)
        statistics = {
            "loss": critics.loss + actor_loss.detach(),
            "value_loss": critics.loss,
            "policy_loss": actor_loss.detach(),
            "entropy": entropy,
            "temperature": self._temperature().squeeze(0),
            "td_error": masked_mean(critics.error, part.learned),
            "q_value": critics.value,
        }
        return UpdateParts(
            part.learned.sum(), norms, statistics, priority(critics.error, part.learned)
        )

    def bootstrap(self, part: Transitions, noise: Tensor) -> Tensor:
        """``min_i Q_i(after, a) - temperature log pi(a)`` for a new sample a of the policy.

        Source: arXiv 1812.05905, eq. 3 and 6.
        """
        action, log_prob = self._sample(part.after, noise)
        value: Tensor = self.forward(self.target_critics.network, part.after, action).amin(0)
        return value - self._temperature() * log_prob

    def after_step(self) -> None:
        self.target_critics.follow(self.settings.target_smoothing)

    def exploration(self, settings: SACSettings, updates: int) -> Mapping[str, float]:  # noqa: ARG002 - the policy explores by sampling
        return {}

    def retain_policy(self) -> None:
        """Copy the current policy for `divergence`; `tianflow.interfaces.MeasuresDivergence`."""
        if self._retained is None:
            self._retained = self._make_retained()
        copy_weights(self.model, self._retained)

    def divergence(self, batch: LearnerBatch, states: int) -> float:
        """Mean KL(retained || current) in nats, on the first states of at most ``states`` windows.

        Both policies compute in float32, and each normalises with its own statistics.
        """
        assert self._retained is not None, "no policy was retained"
        windows = spread(batch.arrays["valid"][0].nonzero().squeeze(1), states)
        if not windows.numel():
            return 0.0
        first = {
            name: leaf[0].index_select(0, windows)
            for name, leaf in subtree(batch.arrays, "obs/").items()
        }
        with torch.no_grad(), arithmetic(self.device):
            retained, current = (
                model.network(model.observations(first)) for model in (self._retained, self.model)
            )
            return squashed_kl(retained, current).mean().item()

    def _sample(self, observation: Tree, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.forward(self.model.network, observation).chunk(2, -1)
        return squashed_sample(mean, log_std, noise)

    def _temperature(self) -> Tensor:
        return self.log_temperature.exp()

    def _target_entropy(self) -> float:
        wanted = self.settings.target_entropy
        assert wanted is not None
        return -float(self.action_size) if wanted == "auto" else wanted


class SAC:
    """Entry point ``sac``; `tianflow.interfaces.AlgorithmFactory`."""

    settings, make_policy, make_learner = SACSettings, SACPolicy, SACLearner
