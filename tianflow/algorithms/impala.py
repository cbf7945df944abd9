"""IMPALA: a V-trace actor-critic (arXiv 1802.01561), which corrects for the age of its data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tianflow.algorithms.common.actor_critic import ActorCriticPolicy, Samples
from tianflow.algorithms.common.single_pass import SinglePassLearner
from tianflow.config.model import Config, ImpalaSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.ops.returns import Advantages, vtrace

ROUNDING = 1e-4
"""An importance weight this close to its limit, relatively, differs from it by float32 rounding; it
does not count as clipped.
"""


class ImpalaLearner(SinglePassLearner):
    """Policy gradient with V-trace advantages, value error against V-trace targets, entropy
    bonus.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, ImpalaSettings)
        self._settings = settings
        self.normalise_advantages = settings.normalise_advantages

    def estimate(
        self, samples: Samples, log_ratio: Tensor, v_t: Tensor, v_tp1: Tensor
    ) -> Advantages:
        return vtrace(
            log_rho_t=log_ratio,
            r_t=samples.r_t,
            discount_t=samples.discount_t,
            v_t=v_t,
            v_tp1=v_tp1,
            done_t=samples.done_t,
            valid_t=samples.valid_t,
            lambda_=self._settings.vtrace_lambda,
            rho_bar=self._settings.rho_bar,
            c_bar=self._settings.c_bar,
            pg_rho_bar=self._settings.pg_rho_bar,
        )

    def clipped(self, log_ratio: Tensor) -> Tensor:
        return log_ratio > math.log(self._settings.rho_bar) + ROUNDING


class Impala:
    """Entry point ``impala``; `tianflow.interfaces.AlgorithmFactory`."""

    settings: type = ImpalaSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> ActorCriticPolicy:
        """The actor's half."""
        return ActorCriticPolicy(config, spec)

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> ImpalaLearner:
        """The learner's half, on ``device``."""
        return ImpalaLearner(config, spec, device)
