"""Metrics in the info of the step that ends an episode, of every kind of vector."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tianflow.core.payloads import Episode
from tianflow.envs.episode_metrics import metrics_in
from tianflow.envs.make import _merging_what_is_read
from tianflow.envs.vector import StepRow, VectorEnvironment

MODES = ["NextStep", "SameStep", "Disabled"]


class MetricsEnv(gymnasium.Env[Any, Any]):
    """Episodes of three steps. Every info has metrics; those of the last step end with 3."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, place: int, *, metrics: object = None) -> None:
        self.place, self.metrics, self.t, self.episode = place, metrics, 0, 0

    def _info(self) -> dict[str, Any]:
        given = {"t": float(self.t), "who": self.place} if self.metrics is None else self.metrics
        return {"metrics": given, "text": "not merged"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 3, False, self._info()


def sync(mode: str, **given: Any) -> VectorEnvironment:
    made = [lambda place=place: MetricsEnv(place, **given) for place in range(2)]
    return VectorEnvironment(_merging_what_is_read(SyncVectorEnv(made, autoreset_mode=mode)), "it")


class NativeVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector of its own: arrays, as Gymnasium merges infos."""

    num_envs = 2
    single_observation_space = MetricsEnv.observation_space
    single_action_space = MetricsEnv.action_space

    def __init__(self, mode: str) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.inner = SyncVectorEnv(
            [lambda place=place: MetricsEnv(place) for place in range(2)], autoreset_mode=mode
        )

    def reset(self, **given: Any) -> Any:
        return self.inner.reset(**given)

    def step(self, actions: Any) -> Any:
        return self.inner.step(actions)


def play(environment: VectorEnvironment, steps: int) -> tuple[list[Any], list[Episode]]:
    """Metrics and episodes of ``steps`` steps, settled at once."""
    settle(environment, steps)
    return environment.take_metrics(), environment.take_finished()[1]


def settle(environment: VectorEnvironment, steps: int) -> None:
    """Take ``steps`` steps, and settle them at once."""
    n = environment.num_envs

    def leaves() -> dict[str, Any]:
        return {"": np.zeros((n, 1), np.float32)}

    same = environment.spec.autoreset != "next_step"
    start = np.zeros((steps, n), np.bool_)
    for t in range(steps):
        row = StepRow(leaves(), start[t], None, leaves() if same else {})
        environment.step(np.zeros(n, np.int64), row)
    flags = {name: np.zeros((steps, n), np.bool_) for name in ("terminated", "truncated", "valid")}
    environment.settle(reward=np.zeros((steps, n), np.float32), start=start, **flags)


def ready(environment: VectorEnvironment) -> VectorEnvironment:
    environment.reset(1, {"": np.zeros((environment.num_envs, 1), np.float32)}, None)
    return environment


@pytest.mark.parametrize("make", [sync, lambda mode: VectorEnvironment(NativeVector(mode), "it")])
@pytest.mark.parametrize("mode", MODES)
def test_each_ended_episode_has_the_metrics_of_its_last_step(make: Any, mode: str) -> None:
    environment = ready(make(mode))
    metrics, episodes = play(environment, 8)
    expected = [{"t": 3.0, "who": place} for place in (0, 1)]
    assert 2 * expected == metrics
    assert [Episode(3.0, 3)] * 4 == episodes


def test_metrics_are_those_of_the_steps_since_the_last_call() -> None:
    environment = ready(sync("SameStep"))
    assert ([], []) == play(environment, 2)
    assert 2 == len(play(environment, 1)[0])
    assert ([], []) == play(environment, 1)


def test_metrics_that_are_not_taken_do_not_pile_up() -> None:
    environment = ready(sync("SameStep"))
    settle(environment, 3)
    assert 2 == len(environment.take_finished()[1])
    assert [] == environment.take_metrics()


class RepeatingVector(NativeVector):
    """Repeats the end of an episode in the step that only resets."""

    def __init__(self) -> None:
        super().__init__("NextStep")
        self.over = np.zeros(2, np.bool_)

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = self.inner.step(actions)
        repeated = terminated | self.over
        self.over = terminated
        return observation, reward, repeated, truncated, info


def test_a_step_that_only_resets_has_no_metrics_whatever_its_flags() -> None:
    environment = ready(VectorEnvironment(RepeatingVector(), "it"))
    metrics, episodes = play(environment, 8)
    assert len(episodes) == len(metrics) == 4
    assert {3.0} == {each["t"] for each in metrics}


def test_a_new_start_forgets_unsettled_metrics() -> None:
    environment = ready(sync("SameStep"))
    leaves = {"": np.zeros((2, 1), np.float32)}
    rows = StepRow(leaves, np.zeros(2, np.bool_), None, leaves)
    for _ in range(3):
        environment.step(np.zeros(2, np.int64), rows)
    ready(environment)
    assert ([], []) == play(environment, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3.0, {"metrics": 3.0}),
        ({}, None),
        ({"a": "text"}, {"a": "text"}),
        ([1], {"metrics": [1]}),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_value_that_is_not_a_table_is_passed_on_to_be_refused_and_never_raises(
    mode: str, given: object, expected: object
) -> None:
    metrics, episodes = play(ready(sync(mode, metrics=given)), 3)
    assert ([] if expected is None else [expected] * 2) == metrics
    assert 2 == len(episodes)


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ({"metrics": {"a": np.array([1.0, 2.0])}}, {1: {"a": 2.0}}),
        ({"metrics": {"a": np.array([1.0, 2.0]), "_a": np.array([True, False])}}, {}),
        ({"metrics": [{"a": 1.0}, {"a": 5.0}]}, {1: {"a": 5.0}}),
        ({"metrics": {"a": np.array([1.0, 2.0])}, "_metrics": np.array([True, False])}, {}),
        ({"final_info": {"metrics": {"a": [1, 2]}}, "metrics": {"a": [3, 4]}}, {1: {"a": 2}}),
        ({"final_info": np.array([None, None])}, {}),
        ({"metrics": {"a": np.array([1.0])}}, {1: {"metrics": {"a": np.array([1.0])}}}),
        ({"metrics": None}, {}),
    ],
)
def test_infos_of_other_vectors_are_read_where_an_episode_has_ended(
    infos: dict[str, Any], expected: dict[int, Any]
) -> None:
    assert expected == metrics_in(infos, [1])
