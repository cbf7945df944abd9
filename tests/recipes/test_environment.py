"""The recipe for an environment and for an environment wrapper: one file, named in the config."""

from __future__ import annotations

from pathlib import Path

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tianflow.config.loading import load_config
from tianflow.planning.validation import validate_here

HALLWAY = '''
    """A hallway with its goal at the right end."""

    import gymnasium
    import numpy


    class Hallway(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), numpy.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, length=5):
            self.length = length

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.place, self.steps = 0, 0
            return self._observation(), {}

        def step(self, action):
            self.place = max(0, self.place + (1 if action else -1))
            self.steps += 1
            there = self.place == self.length
            return self._observation(), float(there), there, self.steps == 50, {}

        def _observation(self):
            return numpy.array([self.place / self.length], numpy.float32)
'''
WRAPPERS = '''
    """Wrappers of the user."""

    import gymnasium


    class Raised(gymnasium.RewardWrapper):
        def reward(self, reward):
            return reward + 1.0


    class Scaled(gymnasium.RewardWrapper):
        def reward(self, reward):
            return 10.0 * reward


    def limited(environment):
        return gymnasium.wrappers.TimeLimit(environment, 4)
'''


def test_an_environment_trains_by_module_and_attribute(
    user_package: UserPackage, tmp_path: Path
) -> None:
    user_package.write("hallway", HALLWAY)
    finished = train(tmp_path, env={"id": "hallway:Hallway", "kwargs": {"length": 2}})
    assert UPDATES == finished.summary["updates"]
    assert 0.0 <= finished.summary["mean_return"] <= 1.0
    assert finished.summary["episodes"] > 0


def test_wrappers_apply_from_the_inside_to_the_outside(
    user_package: UserPackage, tmp_path: Path
) -> None:
    user_package.write("mine", WRAPPERS)
    wrappers = ["mine:Raised", "mine:Scaled", "mine:limited"]
    finished = train(tmp_path, env={"wrappers": wrappers, "vectorization": "sync"})
    assert UPDATES == finished.summary["updates"]
    assert 4 * 10.0 * (1.0 + 1.0) == finished.summary["mean_return"]


def test_a_vector_of_the_registry_refuses_wrappers_and_names_the_setting_that_accepts_them(
    user_package: UserPackage,
) -> None:
    user_package.write("mine", WRAPPERS)
    env = {"id": "CartPole-v1", "wrappers": ["mine:Raised"]}
    tables = {"env": env, "algorithm": {"name": "ppo"}}
    (problem,) = validate_here(load_config(tables)).problems
    assert "env.wrappers" == problem.path
    assert "env.vectorization = 'sync'" in problem.accepted
    assert () == validate_here(load_config(tables, ["env.vectorization=sync"])).problems
