"""Environments of envpool, stepped in C++, as a vector environment of Gymnasium."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import envpool
import gymnasium
from gymnasium.vector import AutoresetMode

from tianflow import plugins
from tianflow.errors import ConfigError, Problem

ATARI = "ALE/"
"""Prefix of Atari games in Gymnasium's ids, which envpool's ids do not have."""
RESERVED = ("batch_size", "env_seed", "env_type", "gym_reset_return_info", "seed")
"""Arguments of `envpool.make` that the vector determines: it steps all environments, seeded by
reset.
"""


class PooledVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """``num_envs`` environments ``name`` of envpool with NEXT_STEP autoreset.

    It uses one thread unless ``num_threads`` is given. envpool seeds environments at their
    creation, so a `reset` with a seed creates them again: environment i with ``seed + i``.

    Raises:
        TypeError: envpool's environment does not have an argument.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, name: str, num_envs: int, **arguments: Any) -> None:
        self._make = {
            "task_id": name,
            "env_type": "gymnasium",
            "num_envs": num_envs,
            "num_threads": 1,
            **arguments,
        }
        spec = envpool.make_spec(name, num_envs=num_envs, **{"num_threads": 1, **arguments})
        self.num_envs = num_envs
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.frames_per_step = (
            int(spec.config.frame_skip) if hasattr(spec.config, "stack_num") else 1
        )
        """Game frames per step; 1 for environments other than Atari."""
        self.clips_rewards = bool(getattr(spec.config, "reward_clip", False))
        """True if `step` returns rewards clipped to -1..1."""
        self._pool: Any = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """First observations of all environments, created again if ``seed`` is given.

        Raises:
            ValueError: ``options`` are given; envpool has none.
        """
        if options:
            raise ValueError(f"envpool does not support reset options: {sorted(options)}")
        with warnings.catch_warnings():
            # Gymnasium warns about the bounds of envpool's spaces.
            warnings.filterwarnings("ignore", module=r"gymnasium\.")
            if self._pool is None or seed is not None:
                self.close_extras()
                self._pool = envpool.make(**self._make, **({} if seed is None else {"seed": seed}))
            return self._pool.reset()  # type: ignore[no-any-return]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every environment. Environments whose episode has ended only reset."""
        return self._pool.step(actions)  # type: ignore[no-any-return]

    def close_extras(self, **_: Any) -> None:
        """Close the environments and their thread."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def name_of(env_id: str, kwargs: Mapping[str, Any]) -> str:
    """Name of ``env_id`` in envpool: its own id, or ``ALE/`` and its id.

    Raises:
        ConfigError: envpool does not have the environment, or ``kwargs`` has a reserved argument.
    """
    for name in RESERVED:
        if name in kwargs:
            raise ConfigError(
                [
                    Problem(
                        f"env.kwargs.{name}",
                        kwargs[name],
                        "is set by the actor",
                        "other arguments of envpool",
                    )
                ]
            )
    known = tuple(envpool.list_all_envs())
    name = env_id.removeprefix(ATARI)
    if name not in known:
        raise ConfigError(
            [
                Problem(
                    "env.id",
                    env_id,
                    "is not an environment of envpool",
                    "one of its ids",
                    plugins.nearest(name, known),
                )
            ]
        )
    return name
