"""Progress of environments: each call of each environment can be seen from another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from tianflow.core.payloads import Activity
from tianflow.envs.progress import EnvironmentProgress
from tianflow.envs.vector import VectorEnvironment

COUNT = 3


class LookingEnv(gymnasium.Env[Any, Any]):
    """Calls ``look`` in its constructor, in each reset and in each step. Its episodes have one
    step.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        look()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._look()
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._look()
        return np.zeros(1, np.float32), 0.0, True, False, {}


@pytest.fixture
def seen() -> list[Activity | None]:
    return []


def make(progress: EnvironmentProgress, seen: list[Activity | None]) -> VectorEnvironment:
    def one() -> Any:
        return progress.constructed(LookingEnv(lambda: seen.append(progress.activity("actor-0"))))

    with progress.during("constructor"):
        vector = gymnasium.vector.SyncVectorEnv([one] * COUNT)
        return VectorEnvironment(vector, "looking", progress=progress)


def row(environment: VectorEnvironment) -> Any:
    from tianflow.envs.vector import StepRow

    leaf = environment.spec.observation[0]
    observation = {leaf.name: np.zeros((COUNT, 1), np.float32)}
    return StepRow(observation, np.zeros(COUNT, np.bool_), None, {})


def test_each_constructor_is_another_call(seen: list[Activity | None]) -> None:
    make(EnvironmentProgress(), seen)
    assert [Activity("actor-0", "constructor", calls, -1) for calls in (1, 2, 3)] == seen


def test_each_environment_of_a_reset_and_of_a_step_is_seen(seen: list[Activity | None]) -> None:
    """The second step only resets, one environment after another."""
    progress = EnvironmentProgress()
    environment = make(progress, seen)
    observation = {environment.spec.observation[0].name: np.zeros((COUNT, 1), np.float32)}
    seen.clear()
    with progress.during("reset"):
        environment.reset(0, observation, None)
    assert [("reset", 0), ("reset", 1), ("reset", 2)] == [
        (a.operation, a.environment) for a in seen if a is not None
    ]
    seen.clear()
    with progress.during("step"):
        for _ in range(2):
            environment.step(np.zeros((COUNT, 1), np.int64), row(environment))
    assert 2 * [("step", 0), ("step", 1), ("step", 2)] == [
        (a.operation, a.environment) for a in seen if a is not None
    ]
    assert 2 * COUNT == len(set(seen))


def test_between_operations_no_call_is_in_progress(seen: list[Activity | None]) -> None:
    progress = EnvironmentProgress()
    make(progress, seen)
    assert progress.activity("actor-0") is None
    with pytest.raises(ZeroDivisionError), progress.during("reset"):
        raise ZeroDivisionError
    assert progress.activity("actor-0") is None
