"""The oracle with updates that all take the same time, as those of most learners do:
``tests.e2e.steady:SteadyOracle``. With inference that takes time, too: ``ServedOracle``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.oracle import Oracle, OracleLearner, OraclePolicy, OracleSettings
from tianflow.config.model import Config
from tianflow.core.payloads import ActionSpec, EnvironmentSpec
from tianflow.interfaces import ActorStep, LearnerBatch, StepResult

if TYPE_CHECKING:
    import torch


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


class ServedSettings(OracleSettings):
    """The oracle's, and the time that inference takes."""

    act_s: float = 0.0
    """Seconds for each environment of a batch."""
    slow: str = ""
    """Once this file exists, inference takes four times as long."""


class ServedPolicy(OraclePolicy):
    """Takes its time for each environment, as a network on a busy device does."""

    def __init__(self, config: Config, action: ActionSpec) -> None:
        super().__init__(config, action)
        assert isinstance(config.algorithm, ServedSettings)
        self._act_s, self._slow = config.algorithm.act_s, Path(config.algorithm.slow)

    def act(self, observation: Any, *others: Any) -> ActorStep:
        count = len(next(iter(observation.values())))
        time.sleep(count * self._act_s * (4.0 if self._slow.exists() else 1.0))
        return super().act(observation, *others)


class ServedOracle(SteadyOracle):
    """What ``algorithm.name`` names."""

    settings = ServedSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> ServedPolicy:
        return ServedPolicy(config, spec.action)
