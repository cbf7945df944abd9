"""Environments whose own code depends on global state, or whose infos cannot be merged."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from tests.components.test_rollout import Harness, make_config
from tests.support.fakes import FakePolicy
from tianflow.components.evaluator import play
from tianflow.config.model import EnvSettings
from tianflow.envs.checking import check
from tianflow.envs.make import make
from tianflow.envs.vector import StepRow, VectorEnvironment
from tianflow.errors import EnvironmentFailedError, PoisonedTrajectoryError

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Plain(gymnasium.Env[Any, Any]):
    """Observation [0, 0]; episodes of ten steps."""

    observation_space: Any = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(2)
    copies = 0

    def __init__(self) -> None:
        self.index = type(self).copies
        type(self).copies += 1
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.seen(), self.info()

    def step(self, action: Any) -> Step:
        self.steps += 1
        return self.seen(), self.reward(), self.steps >= 10, False, self.info()

    def seen(self) -> Any:
        return np.zeros(2, np.float32)

    def reward(self) -> float:
        return 1.0

    def info(self) -> dict[str, Any]:
        return {}


class Differentiating(Plain):
    """Its reward is a derivative."""

    def reward(self) -> float:
        at = torch.tensor(3.0, requires_grad=True)
        (at**2).backward()
        assert at.grad is not None
        return float(at.grad)


class Strict(Plain):
    """NumPy raises in it."""

    def __init__(self) -> None:
        super().__init__()
        np.seterr(all="raise")

    def reward(self) -> float:
        assert {"raise"} == set(np.geterr().values())
        return 1e300  # infinite as float32, which a strict error state would refuse to cast


class Unmergeable(Plain):
    """Infos of copies have values of different types and shapes."""

    def info(self) -> dict[str, Any]:
        different = [None, 3, {"a": 1}, "text"][(self.steps + self.index) % 4]
        return {"length": np.zeros(self.steps + self.index), "kind": different}


class Masked(Unmergeable):
    """The same, with action masks."""

    def info(self) -> dict[str, Any]:
        return super().info() | {"action_mask": np.array([True, self.index % 2 == 0])}


class Odd(Plain):
    """Observation 7 of Discrete(3), after the fourth step."""

    observation_space = gymnasium.spaces.Discrete(3)

    def seen(self) -> Any:
        return 7 if self.steps == 4 else 1


def here(name: str) -> EnvSettings:
    return EnvSettings(id=f"{__name__}:{name}", num_envs=3)


def stepped(name: str, count: int) -> tuple[VectorEnvironment, StepRow, np.ndarray[Any, Any]]:
    environment = make(here(name))
    spec = environment.spec
    row = StepRow(
        {leaf.name: np.zeros((3, *leaf.shape), leaf.dtype) for leaf in spec.observation},
        np.ones(3, np.bool_),
        np.ones((3, 2), np.bool_) if name == "Masked" else None,
        {},
    )
    environment.reset(0, row.observation, row.mask)
    reward = np.zeros((count, 3), np.float32)
    with np.errstate(over="ignore"):
        for _ in range(count):
            environment.step(np.zeros(3, np.int64), row)
        flags = {key: np.zeros((count, 3), np.bool_) for key in ("terminated", "truncated")}
        environment.settle(
            reward=reward,
            **flags,
            valid=np.zeros((count, 3), np.bool_),
            start=np.zeros((count, 3), np.bool_),
        )
    return environment, row, reward


def test_an_environment_may_use_autograd_in_a_rollout_and_in_an_evaluation() -> None:
    harness = Harness(make_config(here("Differentiating").id))
    harness.run()
    assert {6.0} == set(harness.slot.arrays["reward"].ravel().tolist())
    played = play(
        FakePolicy(harness.spec.action),
        make(here("Differentiating"), 2),
        harness.spec,
        episodes=2,
        seed=0,
        deterministic=True,
        should_stop=lambda: False,
    )
    assert played is not None
    assert {60.0} == {episode.episode_return for episode in played}


def test_the_numpy_error_state_of_an_environment_is_its_own() -> None:
    before = np.geterr()
    _, _, reward = stepped("Strict", 3)
    assert before == np.geterr()
    assert np.isinf(reward).all()


@pytest.mark.parametrize("name", ["Unmergeable", "Masked"])
def test_only_what_a_run_reads_of_infos_is_merged(name: str) -> None:
    environment, row, _ = stepped(name, 4)
    assert (name == "Masked") == environment.has_masks
    if row.mask is not None:
        assert 2 == len({tuple(mask) for mask in row.mask.tolist()})
    assert check(here(name), steps=20).usable


def test_infos_of_a_registered_environment_are_merged_as_those_of_a_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Unmergeable-v0", f"{__name__}:Unmergeable")
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    environment = make(EnvSettings(id=spec.id, num_envs=3))
    row = StepRow({"": np.zeros((3, 2), np.float32)}, np.ones(3, np.bool_), None, {})
    environment.reset(0, row.observation, None)
    for _ in range(4):
        environment.step(np.zeros(3, np.int64), row)
    assert not environment.has_masks


def test_a_check_makes_two_copies_side_by_side() -> None:
    Plain.copies = 0
    assert check(here("Plain"), steps=3).usable
    assert 3 == Plain.copies  # two side by side, then one for Gymnasium's own check


def test_a_vector_that_resets_in_the_same_step_without_saying_so_is_refused() -> None:
    class Silent(gymnasium.vector.SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            observation, reward, over, cut, info = super().step(actions)
            if over.any():
                info["final_observation"] = observation.copy()
            return observation, reward, over, cut, info

    vector = Silent([Plain] * 2)
    environment = VectorEnvironment(vector, "silent")
    row = StepRow({"": np.zeros((2, 2), np.float32)}, np.ones(2, np.bool_), None, {})
    environment.reset(0, row.observation, None)
    for _ in range(9):
        environment.step(np.zeros(2, np.int64), row)
    with pytest.raises(EnvironmentFailedError, match="autoreset_mode.*does not say so"):
        environment.step(np.zeros(2, np.int64), row)


def test_an_observation_outside_of_its_discrete_space_is_refused_with_its_name() -> None:
    harness = Harness(make_config(here("Odd").id))
    with pytest.raises(PoisonedTrajectoryError, match="obs of environment 0 is 7, .* step 4 of"):
        harness.run()
    assert ["an observation is outside of its Discrete space"] == check(
        here("Odd"), steps=20
    ).problems
