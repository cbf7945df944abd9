"""Which images are stacks of frames is seen, not guessed: one that is kept as a stack without being
one leaves room for few steps.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from tianflow import envs
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.hosts.shard_factory import make_shard, stacks_of
from tianflow.replay.fragments import Fragment, StepStream


class Images(gymnasium.Env[Any, Any]):
    """Of ``shape`` uint8: frames that move on along the first axis if ``stacked``, else all new at
    every step.
    """

    def __init__(
        self, shape: tuple[int, int, int] = (4, 6, 6), stacked: bool = True, broken: bool = False
    ) -> None:
        self.observation_space, self.action_space = (
            spaces.Box(0, 255, tuple(shape), np.uint8),
            spaces.Discrete(2),
        )
        self._stacked, self._broken = stacked, broken
        self._image = np.zeros(tuple(shape), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._image = self.np_random.integers(256, size=self._image.shape, dtype=np.uint8)
        return self._image, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._broken:
            raise RuntimeError("broken")
        new = self.np_random.integers(256, size=self._image.shape, dtype=np.uint8)
        self._image = np.concatenate([self._image[1:], new[-1:]]) if self._stacked else new
        return self._image, 0.0, False, False, {}


class MaskedImages(Images):
    """Of two actions the first is an error."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"action_mask": np.array([0, 1], np.int8)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 0:
            raise AssertionError("action 0 is masked")
        return *super().step(action)[:4], {"action_mask": np.array([0, 1], np.int8)}


def config(**kwargs: object) -> Config:
    env = {"id": "tests.hosts.test_shard_factory:Images", "num_envs": 2, "kwargs": kwargs}
    return load_config({"env": env, "algorithm": {"name": "dqn"}, "replay": {"capacity": 2000}})


@pytest.mark.parametrize(
    ("kwargs", "stacks"),
    [
        ({"shape": [4, 6, 6]}, {""}),
        ({"shape": [3, 6, 6], "stacked": False}, set()),  # RGB, channels first
        ({"shape": [6, 6, 3], "stacked": False}, set()),  # RGB, channels last
        ({"shape": [4, 6, 6], "broken": True}, set()),
    ],
)
def test_an_image_is_a_stack_if_its_frames_move_on(
    kwargs: dict[str, object], stacks: set[str]
) -> None:
    wanted = config(**kwargs)
    spec = envs.probe(wanted)
    assert stacks == stacks_of(wanted, spec)
    assert stacks == make_shard(wanted, spec).settings.stacks


def test_stacks_are_seen_where_actions_are_masked() -> None:
    wanted = config()
    wanted = wanted.model_copy(
        update={
            "env": wanted.env.model_copy(
                update={"id": "tests.hosts.test_shard_factory:MaskedImages"}
            )
        }
    )
    assert {""} == stacks_of(wanted, envs.probe(wanted))


@pytest.mark.parametrize(
    ("algorithm", "given", "alpha"),
    [("r2d2", {}, 0.9), ("r2d2", {"alpha": 0.5}, 0.5), ("dqn", {}, 0.6)],
)
def test_priorities_have_the_exponent_of_the_algorithms_paper_unless_it_is_set(
    algorithm: str, given: dict[str, float], alpha: float
) -> None:
    config = load_config(
        {
            "env": {"id": "CartPole-v1", "num_envs": 1},
            "algorithm": {"name": algorithm, "n_step": 1},
            "network": {"lstm": 4 if algorithm == "r2d2" else 0, "previous_step": False},
            "replay": {"capacity": 500, "min_size": 1, "selector": "prioritised", **given},
        }
    )
    shard = make_shard(config, envs.probe(config))
    length, _ = config.algorithm.window or (0, 0)
    shape = (length, 1)
    arrays: dict[str, Any] = {
        "obs/": np.zeros((length + 1, 1, 4), np.float32),
        "start": np.arange(length + 1)[:, None] == 0,
        "action": np.zeros(shape, np.int64),
        "version": np.zeros(length, np.int64),
        "valid": np.ones(shape, np.bool_),
        "terminated": np.arange(length)[:, None] == length - 1,
        "truncated": np.zeros(shape, np.bool_),
        **{name: np.zeros(shape, np.float32) for name in ("reward", "q_taken", "q_max")},
    }
    arrays |= {f"state/{name}": np.zeros((*shape, 4), np.float32) for name in "hc"}
    shard.insert(Fragment(arrays, length, StepStream(0, 0), 0), priority=5.0)
    assert shard.mass == pytest.approx(len(shard) * 5.0**alpha)
