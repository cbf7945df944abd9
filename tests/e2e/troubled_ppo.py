"""Algorithms that make trouble, for runs in processes: ``tests.e2e.troubled_ppo:Name``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import torch

from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
from tianflow.algorithms.ppo import PPO, PPOLearner
from tianflow.config.model import Config, PPOSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch, StepResult


class TroubledSettings(PPOSettings):
    """PPO's, and the trouble."""

    name: str  # type: ignore[assignment]  # any name that leads to a class of this module
    trouble: Literal["none", "refuses", "slow to save"] = "none"


class TroubledLearner(PPOLearner):
    """PPO that does not work in one of several ways."""

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        assert isinstance(config.algorithm, TroubledSettings)
        self._trouble = config.algorithm.trouble

    def step(self, batch: LearnerBatch, should_stop: Any = lambda: False) -> StepResult:
        assert self._trouble != "refuses", "a minibatch of 7 does not divide 32"
        return super().step(batch, should_stop)

    def state_dict(self) -> dict[str, Any]:
        if self._trouble == "slow to save":
            time.sleep(1.5)
        return super().state_dict()


class TroubledPPO(PPO):
    """The plug-in."""

    settings = TroubledSettings

    @staticmethod
    def make_learner(
        config: Config, spec: EnvironmentSpec, device: torch.device
    ) -> TroubledLearner:
        return TroubledLearner(config, spec, device)


class ServerTroubleSettings(PPOSettings):
    """PPO's, and the errors of inference servers."""

    name: str  # type: ignore[assignment]  # any name that leads to a class of this module
    every: int = 40
    """Batches of a server of which the last one fails."""
    full: str
    """Once this file exists, it fails for want of memory."""


class ServerTroublePolicy(ActorCriticPolicy):
    """Fails in inference servers only."""

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        assert isinstance(config.algorithm, ServerTroubleSettings)
        self._every, self._full, self._calls = (
            config.algorithm.every,
            Path(config.algorithm.full),
            0,
        )
        self._here = os.environ.get("TIANFLOW_HOST", "").startswith("inference")

    def on_arrays(self, num_envs: int) -> None:
        return None

    def act(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._here and self._calls % self._every == 0:
            if self._full.exists():
                raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
            raise ValueError("a policy that fails at times")
        return super().act(*arguments)


class ServerTroublePPO(PPO):
    """The plug-in."""

    settings = ServerTroubleSettings

    @staticmethod
    def make_policy(
        config: Config,
        spec: EnvironmentSpec,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - it does not change
    ) -> ServerTroublePolicy:
        return ServerTroublePolicy(config, spec, device)
