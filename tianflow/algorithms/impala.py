"""IMPALA: a V-trace actor-critic (arXiv 1802.01561), which corrects for staleness."""

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
"""Relative float32 rounding error of an importance weight; a weight so close to its limit is not
clipped.
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

    settings, make_policy, make_learner = ImpalaSettings, ActorCriticPolicy, ImpalaLearner
