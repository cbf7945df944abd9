import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest

from tests.envs.test_make import config, problem
from tianflow.envs import probe
from tianflow.envs.make import make
from tianflow.envs.vector import StepRow

STEPS = 5
REAL = pytest.mark.extra("envpool")


class Pool:
    """Returns values of envpool's form from Gymnasium's own environments."""

    def __init__(self, num_envs, seed):
        self.seed, self.closed = seed, False
        self._vector = gymnasium.make_vec(
            "CartPole-v1", num_envs=num_envs, vectorization_mode="sync"
        )

    def reset(self):
        return self._vector.reset(seed=self.seed)

    def step(self, actions):
        return self._vector.step(actions)

    def close(self):
        self.closed = True


@pytest.fixture
def stand_in(monkeypatch):
    """A module in the place of envpool, and the pools that it created."""
    made, module = [], ModuleType("envpool")

    def make_spec(name, *, num_envs, num_threads, stack_num=None, reward_clip=False):
        found = gymnasium.make(name)
        game = {} if stack_num is None else {"stack_num": stack_num, "reward_clip": reward_clip}
        return SimpleNamespace(
            gymnasium_observation_space=found.observation_space,
            gymnasium_action_space=found.action_space,
            config=SimpleNamespace(frame_skip=4, **game),
        )

    def make_pool(
        task_id, *, env_type, num_envs, num_threads, seed=42, stack_num=None, reward_clip=None
    ):
        made.append(Pool(num_envs, seed))
        made[-1].arguments = {"task_id": task_id, "env_type": env_type, "num_threads": num_threads}
        made[-1].reward_clip = reward_clip
        return made[-1]

    module.list_all_envs = lambda: ["CartPole-v1", "Pong-v5"]
    module.make_spec, module.make = make_spec, make_pool
    monkeypatch.setitem(sys.modules, "envpool", module)
    monkeypatch.delitem(sys.modules, "tianflow.envs.pooled", raising=False)
    yield made
    sys.modules.pop("tianflow.envs.pooled", None)


def vector_of(env_id):
    return make(config(env_id, vectorization="envpool").env)._vector


def test_a_pool_is_created_again_with_every_seed(stand_in):
    vector = vector_of("CartPole-v1")
    first = vector.reset(seed=5)[0]
    assert (5, {"task_id": "CartPole-v1", "env_type": "gymnasium", "num_threads": 1}) == (
        stand_in[-1].seed,
        stand_in[-1].arguments,
    )
    vector.reset()
    assert len(stand_in) == 1
    again = vector.reset(seed=5)[0]
    assert np.array_equal(first, again)
    assert [True, False] == [pool.closed for pool in stand_in]
    assert not np.array_equal(first, vector.reset(seed=6)[0])
    vector.close()
    assert all(pool.closed for pool in stand_in)


def test_only_games_have_frames(stand_in):
    assert probe(config("CartPole-v1", vectorization="envpool")).frames_per_step == 1
    assert (
        probe(
            config("CartPole-v1", vectorization="envpool", kwargs={"stack_num": 4})
        ).frames_per_step
        == 4
    )


@pytest.mark.parametrize(("given", "clips"), [({}, False), ({"reward_clip": True}, True)])
def test_a_pool_returns_unclipped_rewards_which_are_clipped_for_learning(stand_in, given, clips):
    settings = config("CartPole-v1", vectorization="envpool", kwargs={"stack_num": 4, **given})
    environment = make(settings.env)
    assert clips == environment.spec.clips_rewards
    environment._vector.reset(seed=1)
    assert (False if clips else None) == stand_in[-1].reward_clip


def test_an_unknown_id_of_envpool_names_the_nearest(stand_in):
    found = problem("ALE/Pongg-v5", vectorization="envpool")
    assert ("env.id", "ALE/Pongg-v5", "Pong-v5") == (found.path, found.value, found.nearest)


@pytest.mark.parametrize("name", ["batch_size", "seed", "env_type"])
def test_arguments_that_the_vector_determines_are_refused(stand_in, name):
    assert (
        problem("CartPole-v1", vectorization="envpool", kwargs={name: 1}).path
        == f"env.kwargs.{name}"
    )


def test_an_argument_that_envpool_does_not_support_is_named(stand_in):
    found = problem("CartPole-v1", vectorization="envpool", kwargs={"lenght": 3})
    assert found.path == "env.kwargs"
    assert "'lenght'" in found.message


def test_a_reset_with_options_is_refused(stand_in):
    with pytest.raises(ValueError, match="reset_mask"):
        vector_of("CartPole-v1").reset(options={"reset_mask": np.ones(3, np.bool_)})


def test_wrappers_of_a_pool_are_refused(stand_in):
    assert (
        problem(
            "CartPole-v1", vectorization="envpool", wrappers=("tests.envs.test_make:scaled",)
        ).path
        == "env.wrappers"
    )


def test_without_envpool_the_refusal_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    monkeypatch.delitem(sys.modules, "tianflow.envs.pooled", raising=False)
    found = problem("CartPole-v1", vectorization="envpool")
    assert found.path == "env.vectorization"
    assert "[envpool]" in found.accepted


@REAL
def test_envpools_limit_on_steps_truncates_and_the_next_step_resets():
    environment = make(
        config("CartPole-v1", vectorization="envpool", kwargs={"max_episode_steps": STEPS}).env
    )
    rows, observation = 2 * STEPS + 2, np.zeros((3, 4), np.float32)
    environment.reset(7, {"": observation}, None)
    reward, terminated, truncated, valid, start = (
        np.zeros((rows, 3), dtype) for dtype in (np.float32, *(np.bool_,) * 4)
    )
    for t in range(rows):
        row = StepRow({"": observation}, start[t], None, {})
        environment.step(np.full(3, t % 2), row)
    environment.settle(
        reward=reward, terminated=terminated, truncated=truncated, valid=valid, start=start
    )
    environment.close()
    assert [t in (STEPS - 1, 2 * STEPS) for t in range(rows)] == truncated[:, 0].tolist()
    assert not terminated.any()
    assert [t not in (STEPS, 2 * STEPS + 1) for t in range(rows)] == valid[:, 0].tolist()
    assert {STEPS} == {episode.length for episode in environment.take_finished()[1]}


@REAL
def test_a_game_of_envpool_equals_that_of_gymnasium():
    kwargs = {"img_height": 42, "img_width": 42}
    pool = probe(config("ALE/Pong-v5", vectorization="envpool", kwargs=kwargs))
    own = probe(config("ALE/Pong-v5", vectorization="native", kwargs=kwargs))
    assert own == pool


@REAL
def test_envpools_environments_are_seeded_one_after_the_other():
    vector = vector_of("CartPole-v1")
    three, second = vector.reset(seed=5)[0], vector.reset(seed=6)[0]
    assert np.array_equal(three[1:], second[:-1])
    vector.close()
