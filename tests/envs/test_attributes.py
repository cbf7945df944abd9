"""Attributes of an environment change at the beginning of an episode, and at no other time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.support.environments import LengthEnv, WideEnv
from tests.support.settings import cartpole
from tianflow.config.model import EnvSettings
from tianflow.envs.attributes import AttributeRefusedError, AttributeSetter
from tianflow.envs.make import make, probe
from tianflow.errors import ConfigError

LENGTH = "tests.support.environments:LengthEnv"
WIDE = "tests.support.environments:WideEnv"


class Scaled(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Multiplies rewards."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.factor = 1.0

    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, self.factor * float(reward), *rest


class Resized(WideEnv):
    """The attribute ``size`` changes the observation space at a reset."""

    size = 4

    def reset(self, **arguments: Any) -> Any:
        self.observation_space = gymnasium.spaces.Box(-10.0, 10.0, (self.size,), np.float32)
        return super().reset(**arguments)


def episode_length(environment: Any) -> int:
    for length in range(1, 100):
        if environment.step(0)[2]:
            return length
    raise AssertionError("the episode does not end")


def test_an_attribute_changes_at_the_next_reset_only() -> None:
    wanted: dict[str, Any] = {}
    environment = AttributeSetter(lambda: wanted)(LengthEnv(length=3))
    environment.reset(seed=1)
    wanted = {"length": 7}
    assert 3 == episode_length(environment)
    environment.reset()
    assert 7 == episode_length(environment)


def test_an_attribute_without_an_entry_has_the_value_of_the_constructor_again() -> None:
    wanted: dict[str, Any] = {"length": 7}
    environment = AttributeSetter(lambda: wanted)(LengthEnv(length=3))
    lengths = []
    for given in ({"length": 7}, {"reward": 2.0}, {"length": 5}, {}):
        wanted = given
        environment.reset()
        lengths.append((environment.length, environment.reward))
    assert [(7, 1.0), (3, 2.0), (5, 1.0), (3, 1.0)] == lengths


def test_an_attribute_of_a_wrapper_is_set_there() -> None:
    wrapped = Scaled(LengthEnv())
    environment = AttributeSetter(lambda: {"factor": 3.0, "reward": 2.0})(wrapped)
    environment.reset()
    assert 6.0 == environment.step(0)[1]
    assert not hasattr(wrapped.unwrapped, "factor")


def test_environments_share_no_value() -> None:
    wanted = {"length": [1, 2]}
    environments = [AttributeSetter(lambda: wanted)(LengthEnv()) for _ in range(2)]
    for environment in environments:
        environment.reset()
    environments[0].length.append(3)
    assert ([1, 2], [1, 2]) == (environments[1].length, wanted["length"])


@pytest.mark.parametrize("name", ["lenght", "_t", "render_fps"])
def test_an_unknown_or_private_attribute_is_refused_by_name(name: str) -> None:
    environment = AttributeSetter(lambda: {name: 3})(Scaled(LengthEnv()))
    with pytest.raises(AttributeRefusedError, match=rf"env\.set\.{name} = 3: is not an attribute"):
        environment.reset()
    assert not hasattr(environment, "lenght")
    with pytest.raises(AttributeRefusedError, match="accepted: one of factor, length, reward"):
        environment.reset()


def test_attributes_that_change_the_spaces_are_refused() -> None:
    environment = AttributeSetter(lambda: {"size": 6})(Resized())
    with pytest.raises(
        AttributeRefusedError, match=r"env\.set = .*changes the spaces from .*\(4,\)"
    ):
        environment.reset()


def test_each_environment_of_a_vector_changes_at_its_own_reset() -> None:
    wanted: dict[str, Any] = {}
    settings = EnvSettings(id=LENGTH, kwargs={"length": 3})
    environment = make(settings, 2, attributes=lambda: wanted)
    rows = {"": np.zeros((2, 2), np.float32)}
    environment.reset(1, rows, None)
    first, second = (environment._vector.envs[index] for index in range(2))
    second._t = 1  # its episode ends one step earlier
    wanted = {"length": 9}
    lengths = []
    for _ in range(4):
        environment._vector.step(np.zeros(2, np.int64))
        lengths.append((first.length, second.length))
    assert [(3, 3), (3, 3), (3, 9), (9, 9)] == lengths


def test_the_settings_apply_without_a_run() -> None:
    environment = make(EnvSettings(id=LENGTH, set={"length": 7}), 1)
    environment.reset(1, {"": np.zeros((1, 2), np.float32)}, None)
    assert 7 == environment.single.length


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"id": LENGTH, "set": {"lenght": 3}},
            r"env\.set\.lenght = 3: is not an attribute of .*did you mean 'length'",
        ),
        (
            {"id": "CartPole-v1", "set": {"length": 3}},
            r"env\.set = .*native vector; accepted: env\.vectorization = 'sync'",
        ),
        (
            {"id": "tests.envs.test_attributes:Resized", "set": {"size": 6}},
            r"env\.set = .*changes the spaces",
        ),
    ],
)
def test_a_specification_needs_attributes_that_can_be_set(
    env: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        probe(cartpole(env=env))


def test_an_environment_of_gymnasium_in_copies_has_its_attributes() -> None:
    env = {"id": "CartPole-v1", "vectorization": "sync", "set": {"masspole": 0.5}}
    assert probe(cartpole(env=env)) == probe(
        cartpole(env={"id": "CartPole-v1", "vectorization": "sync"})
    )
