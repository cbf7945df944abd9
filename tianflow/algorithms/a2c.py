"""A2C: A3C's n-step advantage actor-critic objective (arXiv 1602.01783), on trajectories.

It does not correct for staleness: with a bound above 0 it follows the gradient at states of an
older policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tianflow.algorithms.common.actor_critic import ActorCriticPolicy, Samples
from tianflow.algorithms.common.single_pass import SinglePassLearner
from tianflow.config.model import A2CSettings, Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.ops.returns import Advantages, actor_critic_returns


class A2CLearner(SinglePassLearner):
    """Policy gradient with n-step advantages, value error against n-step returns, entropy bonus.

    n is the number of steps left in the fragment.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, A2CSettings)
        self.normalise_advantages = settings.normalise_advantages

    def estimate(
        self,
        samples: Samples,
        log_ratio: Tensor,  # noqa: ARG002 - A2C does not correct for it
        v_t: Tensor,
        v_tp1: Tensor,
    ) -> Advantages:
        return actor_critic_returns(
            r_t=samples.r_t,
            discount_t=samples.discount_t,
            v_t=v_t,
            v_tp1=v_tp1,
            done_t=samples.done_t,
            valid_t=samples.valid_t,
        )

    def clipped(self, log_ratio: Tensor) -> Tensor:
        """False everywhere: A2C has no importance weights."""
        return torch.zeros_like(log_ratio, dtype=torch.bool)


class A2C:
    """Entry point ``a2c``; `tianflow.interfaces.AlgorithmFactory`."""

    settings, make_policy, make_learner = A2CSettings, ActorCriticPolicy, A2CLearner
