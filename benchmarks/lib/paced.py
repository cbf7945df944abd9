"""An environment and an algorithm that take a set time, so that nothing but the balance controller
limits a run.

They compute what CartPole and IMPALA compute, and rest for what is left of the time. Both halves of
a run are then equally fast on any machine, and actors that share a core do not slow one another
down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from pydantic import PositiveFloat

from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
from tianflow.algorithms.common.update import never
from tianflow.algorithms.impala import ImpalaLearner
from tianflow.config.model import Config, ImpalaSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch, StepResult

SPIN_S = 1.5e-4
"""A sleeping thread wakes up so much late; for the last bit it stays awake."""
OWN_SHARE = 0.25
"""Choosing actions counts as part of a step up to this share of it; a longer gap is somebody
waiting, and adds to it.
"""


def rest_until(due: float) -> None:
    """Return at ``due`` (monotonic seconds), sleeping for most of the time."""
    while (left := due - time.monotonic()) > 0.0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)


class Pace:
    """Gives out the times at which steps are due, ``seconds`` apart while they follow one
    another.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def due(self, now: float) -> float:
        """When the step that begins ``now`` is due."""
        began = self._last if now - self._last <= OWN_SHARE * self._seconds else now
        self._last = began + self._seconds
        return self._last


class PacedCartPole(CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole, one step of all environments every ``seconds`` seconds."""

    def __init__(self, num_envs: int, seconds: float) -> None:
        super().__init__(num_envs=num_envs, max_episode_steps=500)
        self._pace = Pace(seconds)

    def step(self, action: Any) -> Any:
        """As CartPole's, and not before it is due."""
        due = self._pace.due(time.monotonic())
        outcome = super().step(action)
        rest_until(due)
        return outcome


class PacedImpalaSettings(ImpalaSettings):
    """IMPALA's, and how long an update takes: always, or on average where it ``varies``,
    exponentially.
    """

    name: Literal["benchmarks.lib.paced:PacedImpala"] = "benchmarks.lib.paced:PacedImpala"  # type: ignore[assignment]  # a plug-in's own name
    update_seconds: PositiveFloat = 0.04
    varies: bool = False


class PacedImpalaLearner(ImpalaLearner):
    """IMPALA's update, which takes ``update_seconds``, or what it computes where a drawn time is
    shorter.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, PacedImpalaSettings)
        self._seconds, self._varies = settings.update_seconds, settings.varies
        self._random = np.random.default_rng(config.run.seed)

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = never) -> StepResult:
        """As IMPALA's, and not before it is due."""
        due = time.monotonic() + self._seconds * (
            self._random.exponential() if self._varies else 1.0
        )
        result = super().step(batch, should_stop)
        rest_until(due)
        return result


class PacedImpala:
    """What ``algorithm.name`` names."""

    settings = PacedImpalaSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> ActorCriticPolicy:
        """IMPALA's."""
        return ActorCriticPolicy(config, spec)

    @staticmethod
    def make_learner(
        config: Config, spec: EnvironmentSpec, device: torch.device
    ) -> PacedImpalaLearner:
        """The learner's half, on ``device``."""
        return PacedImpalaLearner(config, spec, device)
