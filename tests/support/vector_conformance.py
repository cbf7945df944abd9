"""What Gymnasium's documentation promises of every vector environment, as tests.

A class that inherits from `VectorConformance` has a fixture ``make_vector``: a function of an
environment maker, a count and an autoreset mode that gives a vector environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tests.support import environments
from tests.support.remote_worlds import EchoEnv

MakeVector = Callable[..., VectorEnv[Any, Any, Any]]
SPACES = (
    EchoEnv,
    environments.DiscreteStartEnv,
    environments.MultiDiscreteEnv,
    environments.MultiBinaryEnv,
    environments.BoxActionEnv,
    environments.DictEnv,
    environments.TupleEnv,
)
MODES = tuple(AutoresetMode)
ACTION = np.arange(3) + 10


def short() -> EchoEnv:
    return EchoEnv(length=2)


def cut_off() -> EchoEnv:
    return EchoEnv(length=2, ending="truncate")


class Uneven(EchoEnv):
    """Every second copy, by what it drew, has no infos."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return (*result, info if int(action) % 2 == 0 else {})


class Failing(EchoEnv):
    def step(self, action: Any) -> Any:
        raise RuntimeError("it broke")


class VectorConformance:
    @pytest.mark.parametrize("environment", SPACES, ids=lambda env: env.__name__)
    def test_spaces_are_batches_of_those_of_one_environment(
        self, make_vector: MakeVector, environment: Callable[[], Any]
    ) -> None:
        vector, single = make_vector(environment, 3), environment()
        assert 3 == vector.num_envs
        assert single.observation_space == vector.single_observation_space
        assert single.action_space == vector.single_action_space
        assert batch_space(single.observation_space, 3) == vector.observation_space
        assert batch_space(single.action_space, 3) == vector.action_space

    @pytest.mark.parametrize("environment", SPACES, ids=lambda env: env.__name__)
    def test_observations_are_in_the_space_and_results_have_one_entry_a_row(
        self, make_vector: MakeVector, environment: Callable[[], Any]
    ) -> None:
        vector = make_vector(environment, 3)
        observation, info = vector.reset(seed=1)
        assert vector.observation_space.contains(observation)
        assert isinstance(info, dict)
        vector.action_space.seed(1)
        for _ in range(8):
            observation, *arrays, info = vector.step(vector.action_space.sample())
            assert vector.observation_space.contains(observation)
            assert [np.float64, np.bool_, np.bool_] == [array.dtype for array in arrays]
            assert [(3,)] * 3 == [array.shape for array in arrays]
            assert isinstance(info, dict)

    @pytest.mark.parametrize("mode", MODES)
    def test_metadata_names_the_autoreset_mode(
        self, make_vector: MakeVector, mode: AutoresetMode
    ) -> None:
        assert mode is make_vector(EchoEnv, 2, mode).metadata["autoreset_mode"]

    def test_row_i_is_seeded_with_the_seed_plus_i(self, make_vector: MakeVector) -> None:
        vector = make_vector(EchoEnv, 3)
        alone = [EchoEnv().reset(seed=40 + row)[0][0] for row in range(3)]
        assert alone == vector.reset(seed=40)[0][:, 0].tolist()
        assert alone == vector.reset(seed=[40, 41, 42])[0][:, 0].tolist()

    def test_a_seed_of_none_draws_something_else_each_time(self, make_vector: MakeVector) -> None:
        vector = make_vector(EchoEnv, 3)
        drawn = {*vector.reset()[0][:, 0], *vector.reset()[0][:, 0]}
        assert len(drawn) > 3
        first = vector.reset(seed=[7, None, 9])[0][:, 0]
        second = vector.reset(seed=[7, None, 9])[0][:, 0]
        assert [True, False, True] == (first == second).tolist()

    def test_the_same_seeds_and_actions_give_the_same_results(
        self, make_vector: MakeVector
    ) -> None:
        vector, seen = make_vector(lambda: gymnasium.make("CartPole-v1"), 3), []
        for _ in range(2):
            observation, _ = vector.reset(seed=5)
            seen.append([observation])
            vector.action_space.seed(5)
            for _ in range(60):
                observation, *_ = vector.step(vector.action_space.sample())
                seen[-1].append(observation)
        assert np.array_equal(*seen)

    def test_a_list_of_another_length_is_refused(self, make_vector: MakeVector) -> None:
        with pytest.raises(ValueError, match="2"):
            make_vector(EchoEnv, 3).reset(seed=[1, 2])

    def test_options_reach_every_environment(self, make_vector: MakeVector) -> None:
        _, info = make_vector(EchoEnv, 2).reset(options={"level": 3, "name": "x"})
        assert ["{'level': 3, 'name': 'x'}"] * 2 == info["options"].tolist()
        assert [True, True] == info["_options"].tolist()

    def test_returned_arrays_are_the_callers(self, make_vector: MakeVector) -> None:
        vector = make_vector(EchoEnv, 3)
        first, _ = vector.reset(seed=1)
        original = first.copy()
        second, reward, *_ = vector.step(ACTION)
        assert np.array_equal(original, first)
        before, reward_before = second.copy(), reward.copy()
        first[:], second[:] = -1.0, -1.0
        vector.step(ACTION)
        assert (second == -1.0).all()
        assert np.array_equal(reward_before, reward)
        assert (before[:, 2] == 1.0).all()

    @pytest.mark.parametrize(("maker", "terminates"), [(short, True), (cut_off, False)])
    def test_next_step_resets_in_the_step_after_the_last_one(
        self, make_vector: MakeVector, maker: Any, terminates: bool
    ) -> None:
        vector = make_vector(maker, 3, AutoresetMode.NEXT_STEP)
        vector.reset(seed=1)
        vector.step(ACTION)
        observation, reward, terminated, truncated, _ = vector.step(ACTION)
        assert [2.0] * 3 == observation[:, 2].tolist() == reward.tolist()
        assert [terminates] * 3 == terminated.tolist() == (~truncated).tolist()
        observation, reward, terminated, truncated, info = vector.step(ACTION)
        assert [[1.0, 0.0, -1.0]] * 3 == observation[:, 1:].tolist()
        assert [0.0] * 3 == reward.tolist()
        assert not terminated.any()
        assert not truncated.any()
        assert [1, 1, 1] == info["episode"].tolist()
        assert [1.0] * 3 == vector.step(ACTION)[0][:, 2].tolist()

    @pytest.mark.parametrize(("maker", "terminates"), [(short, True), (cut_off, False)])
    def test_same_step_returns_the_next_episode_and_the_last_observation_in_the_info(
        self, make_vector: MakeVector, maker: Any, terminates: bool
    ) -> None:
        vector = make_vector(maker, 3, AutoresetMode.SAME_STEP)
        vector.reset(seed=1)
        info = vector.step(ACTION)[4]
        assert "final_obs" not in info
        observation, reward, terminated, truncated, info = vector.step(ACTION)
        assert [[1.0, 0.0, -1.0]] * 3 == observation[:, 1:].tolist()
        assert [2.0] * 3 == reward.tolist()
        assert [terminates] * 3 == terminated.tolist() == (~truncated).tolist()
        assert [True] * 3 == info["_final_obs"].tolist() == info["_final_info"].tolist()
        assert [[0.0, 2.0, 10.0 + row] for row in range(3)] == [
            final[1:].tolist() for final in info["final_obs"]
        ]
        assert [1, 1, 1] == info["episode"].tolist()

    def test_disabled_leaves_the_reset_to_the_caller(self, make_vector: MakeVector) -> None:
        vector = make_vector(short, 3, AutoresetMode.DISABLED)
        vector.reset(seed=1)
        vector.step(ACTION)
        observation, _, terminated, *_ = vector.step(ACTION)
        assert [True] * 3 == terminated.tolist()
        assert [2.0] * 3 == observation[:, 2].tolist()
        observation, _ = vector.reset(options={"reset_mask": terminated})
        assert [0.0] * 3 == observation[:, 2].tolist()
        assert [1.0] * 3 == vector.step(ACTION)[0][:, 2].tolist()

    def test_a_mask_resets_only_its_rows(self, make_vector: MakeVector) -> None:
        vector = make_vector(EchoEnv, 3, AutoresetMode.DISABLED)
        vector.reset(seed=1)
        vector.step(ACTION)
        mask = np.array([False, True, False])
        _, info = vector.reset(seed=8, options={"reset_mask": mask, "level": 1})
        assert [None, "{'level': 1}", None] == info["options"].tolist()
        assert mask.tolist() == info["_options"].tolist()
        assert [2.0, 1.0, 2.0] == vector.step(ACTION)[0][:, 2].tolist()

    @pytest.mark.parametrize(
        ("mask", "error"),
        [
            ([True, True], TypeError),
            (np.array([1, 1]), TypeError),
            (np.array([True]), ValueError),
            (np.array([False, False]), ValueError),
        ],
    )
    def test_an_invalid_mask_is_refused(
        self, make_vector: MakeVector, mask: Any, error: type[Exception]
    ) -> None:
        vector = make_vector(EchoEnv, 2)
        with pytest.raises(error, match="reset_mask"):
            vector.reset(options={"reset_mask": mask})

    def test_infos_are_arrays_with_a_mask_of_the_rows_that_have_them(
        self, make_vector: MakeVector
    ) -> None:
        vector = make_vector(Uneven, 3)
        vector.reset(seed=1)
        info = vector.step(np.array([10, 11, 12]))[4]
        for key, dtype, values in (
            ("number", np.int64, [3, 0, 3]),
            ("single", np.float32, [0.5, 0.0, 0.5]),
            ("flag", np.bool_, [True, False, True]),
            ("array", np.int16, [[0, 1, 2], [0, 0, 0], [0, 1, 2]]),
            ("text", np.object_, ["words", None, "words"]),
            ("nothing", np.object_, [None, None, None]),
            ("pair", np.object_, [(1, "two"), None, (1, "two")]),
        ):
            assert dtype == info[key].dtype, key
            assert values == info[key].tolist(), key
            assert [True, False, True] == info[f"_{key}"].tolist(), key
        assert [2.5, 0.0, 2.5] == info["nested"]["deep"]["value"].tolist()
        assert {} == vector.step(np.array([10, 11, 12]))[4]

    def test_what_an_environment_raises_reaches_the_caller(self, make_vector: MakeVector) -> None:
        vector = make_vector(Failing, 2)
        vector.reset(seed=1)
        with pytest.raises(Exception, match="it broke"):
            vector.step(np.array([1, 2]))

    def test_a_closed_vector_is_closed(self, make_vector: MakeVector) -> None:
        vector = make_vector(EchoEnv, 2)
        vector.reset(seed=1)
        assert not vector.closed
        vector.close()
        assert vector.closed
        vector.close()
        with pytest.raises(ClosedEnvironmentError):
            vector.step(np.array([1, 2]))
        with pytest.raises(ClosedEnvironmentError):
            vector.reset()
