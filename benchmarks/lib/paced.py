"""Environment and algorithm that take a set time, so that only the balance controller limits a run.

They compute what CartPole and IMPALA compute, and sleep for the rest of the time. Both halves of a
run are then equally fast on any machine. Actors that share a core do not slow each other down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from pydantic import NonNegativeFloat, PositiveFloat

from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
from tianflow.algorithms.common.on_arrays import ActOnArrays
from tianflow.algorithms.common.update import Tree, never_stop
from tianflow.algorithms.impala import ImpalaLearner
from tianflow.config.model import Config, ImpalaSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import ActorStep, LearnerBatch, StepResult

SPIN_S = 1.5e-4
"""Delay with which a sleeping thread wakes up. The last part of a wait is spent awake."""
OWN_SHARE = 0.25
"""Largest share of a step that the choice of actions may take. A longer gap means that the actor
was waiting, and it extends the schedule.
"""


def rest_until(due: float) -> None:
    """Return at ``due`` (monotonic seconds), and sleep for most of the time."""
    while (left := due - time.monotonic()) > 0.0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)


class Pace:
    """Schedule of steps that are ``seconds`` apart while they follow each other."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def due(self, now: float) -> float:
        """Return the time at which the step that begins ``now`` is due."""
        began = self._last if now - self._last <= OWN_SHARE * self._seconds else now
        self._last = began + self._seconds
        return self._last


class PacedCartPole(CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole with one step of all environments every ``seconds``
    seconds.
    """

    def __init__(self, num_envs: int, seconds: float) -> None:
        super().__init__(num_envs=num_envs, max_episode_steps=500)
        self._pace = Pace(seconds)

    def step(self, action: Any) -> Any:
        """Step as CartPole does, and return when the step is due."""
        due = self._pace.due(time.monotonic())
        outcome = super().step(action)
        rest_until(due)
        return outcome


class PacedImpalaSettings(ImpalaSettings):
    """Settings of IMPALA, and the duration of an update: constant, or exponentially distributed if
    it ``varies``.
    """

    name: Literal["benchmarks.lib.paced:PacedImpala"] = "benchmarks.lib.paced:PacedImpala"
    update_seconds: PositiveFloat = 0.04
    varies: bool = False
    act_seconds: NonNegativeFloat = 0.0
    """Least duration of a batch of actions, whatever its size, as on a device far away."""


class PacedPolicy(ActorCriticPolicy):
    """IMPALA's policy, which takes at least ``act_seconds`` to choose actions."""

    def __init__(self, config: Config, spec: EnvironmentSpec) -> None:
        super().__init__(config, spec)
        assert isinstance(config.algorithm, PacedImpalaSettings)
        self._seconds = config.algorithm.act_seconds

    def on_arrays(self, num_envs: int) -> ActOnArrays | None:
        """Offer arrays only at full speed, because `act` sleeps."""
        return None if self._seconds else super().on_arrays(num_envs)

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> ActorStep:
        """Choose actions as IMPALA does, and return when they are due."""
        due = time.monotonic() + self._seconds
        chosen = super().act(observation, state, noise, mask)
        rest_until(due)
        return chosen


class PacedImpalaLearner(ImpalaLearner):
    """IMPALA's update, which takes at least ``update_seconds`` (or the drawn time)."""

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, PacedImpalaSettings)
        self._seconds, self._varies = settings.update_seconds, settings.varies
        self._random = np.random.default_rng(config.run.seed)

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = never_stop) -> StepResult:
        """Update as IMPALA does, and return when the update is due."""
        due = time.monotonic() + self._seconds * (
            self._random.exponential() if self._varies else 1.0
        )
        result = super().step(batch, should_stop)
        rest_until(due)
        return result


class PacedImpala:
    """Algorithm that ``algorithm.name`` names."""

    settings = PacedImpalaSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> PacedPolicy:
        """Make the actor's half."""
        return PacedPolicy(config, spec)

    @staticmethod
    def make_learner(
        config: Config, spec: EnvironmentSpec, device: torch.device
    ) -> PacedImpalaLearner:
        """Make the learner's half, on ``device``."""
        return PacedImpalaLearner(config, spec, device)
