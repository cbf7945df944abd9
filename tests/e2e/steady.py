"""The oracle with updates that all take the same time, as those of most learners do:
``tests.e2e.steady:SteadyOracle``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.support.oracle import Oracle, OracleLearner, OracleSettings
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch, StepResult


class SteadyLearner(OracleLearner):
    """Takes ``update_s`` for an update, exactly."""

    def __init__(self, settings: OracleSettings) -> None:
        super().__init__(settings.model_copy(update={"update_s": 0.0}))
        self._update_s = settings.update_s

    def step(
        self, batch: LearnerBatch, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        time.sleep(self._update_s)
        return super().step(batch, should_stop)


class SteadyOracle(Oracle):
    """What ``algorithm.name`` names."""

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> SteadyLearner:
        assert isinstance(config.algorithm, OracleSettings)
        return SteadyLearner(config.algorithm)
