"""Environments of envpool: many of them stepped in C++, as one of Gymnasium's vectors."""

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
"""Before the name of a game in Gymnasium's ids; envpool's own ids have it not."""
OURS = ("batch_size", "env_seed", "env_type", "gym_reset_return_info", "seed")
"""Arguments of `envpool.make` that follow from what a vector is: it steps all of its environments
at once, seeded by its reset.
"""


class PooledVectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """``num_envs`` environments ``name`` of envpool with NEXT_STEP autoreset, on one thread unless
    ``num_threads`` says otherwise.

    envpool seeds environments when it makes them, so a `reset` with a seed makes them anew:
    environment i with ``seed + i``.

    Raises:
        TypeError: an argument that envpool's environment does not have.
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
        """Frames of a game that one step takes; 1 for what is no game of Atari."""
        self._pool: Any = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """First observations of all environments, made anew with ``seed``.

        Raises:
            ValueError: there are ``options``, of which envpool has none.
        """
        if options:
            raise ValueError(f"envpool has no options of a reset, and was given {sorted(options)}")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", module=r"gymnasium\."
            )  # what it thinks of the bounds of envpool's spaces
            if self._pool is None or seed is not None:
                self.close_extras()
                self._pool = envpool.make(**self._make, **({} if seed is None else {"seed": seed}))
            return self._pool.reset()  # type: ignore[no-any-return]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every environment, of which those that had ended only reset."""
        return self._pool.step(actions)  # type: ignore[no-any-return]

    def close_extras(self, **_: Any) -> None:
        """Let go of the environments and of their thread."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def name_of(env_id: str, kwargs: Mapping[str, Any]) -> str:
    """What envpool calls ``env_id``, an id of its own or ``ALE/`` and one.

    Raises:
        ConfigError: it has no such environment, or an argument in ``kwargs`` is not the user's to
            choose.
    """
    for name in OURS:
        if name in kwargs:
            raise ConfigError(
                [
                    Problem(
                        f"env.kwargs.{name}",
                        kwargs[name],
                        "is chosen by the actor",
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
                    "envpool has no such environment",
                    "one of its ids",
                    plugins.nearest(name, known),
                )
            ]
        )
    return name
