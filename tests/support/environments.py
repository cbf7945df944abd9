"""Small environments that tests name as ``tests.support.environments:Name`` or, where registered,
``tests.support.environments:Name-v0``.

Each shows one situation that an environment can bring about. A ``marker`` is the path of a file: an
environment that is to fail once does so only while the file does not exist, and makes it first, so
"once" holds across processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from tianflow.envs.recall import Recall

Info = dict[str, Any]
Array = NDArray[Any]
Ending = Literal["terminate", "truncate"]


def _first_time(marker: str | None) -> bool:
    """True if there is no marker, or the file did not exist yet (it does afterwards)."""
    if marker is None:
        return True
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class CounterEnv(gymnasium.Env[Array, Any]):
    """The observation is (episode, t). Reward 1 a step; episode k ends after ``length`` steps, or
    ``length[k % len]``.
    """

    def __init__(
        self, length: int | tuple[int, ...] = 5, ending: Ending = "terminate", reward: float = 1.0
    ) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._lengths = (length,) if isinstance(length, int) else tuple(length)
        self._ending, self._reward = ending, reward
        self.episode, self.t = -1, 0

    def observation(self) -> Array:
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        length = self._lengths[self.episode % len(self._lengths)]
        if self.t >= length:
            raise AssertionError("stepped after the end of an episode")
        self.t += 1
        over = self.t >= length
        return (
            self.observation(),
            self._reward,
            over and self._ending == "terminate",
            over and self._ending == "truncate",
            {},
        )


class LoggingEnv(CounterEnv):
    """Logs each reset, with values whose names the logger uses itself."""

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        extra = dict.fromkeys(("level", "event", "self", "stacklevel"), "?") | {
            "episode": self.episode
        }
        logging.getLogger("tianflow.scratch").warning("an episode begins", extra=extra)
        return super().reset(seed=seed, options=options)


class OneStateEnv(gymnasium.Env[Array, Any]):
    """One state, reward 1 for ever, truncated (or terminated) after ``length`` steps: V is 1 / (1 -
    discount) or the finite sum.
    """

    def __init__(self, length: int = 10, ending: Ending = "truncate") -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._ending, self._t = length, ending, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self._t = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._t += 1
        over = self._t >= self._length
        return (
            np.ones(1, np.float32),
            1.0,
            over and self._ending == "terminate",
            over and self._ending == "truncate",
            {},
        )


class FaultyEnv(CounterEnv):
    """A CounterEnv to which something happens at its ``at``-th step (counted from 1 over all its
    episodes).
    """

    def __init__(self, at: int = 3, marker: str | None = None, **counter: Any) -> None:
        super().__init__(**counter)
        self._at, self._marker, self.steps = at, marker, 0

    def due(self) -> bool:
        """Count one step; is this the one?"""
        self.steps += 1
        return self.steps == self._at and _first_time(self._marker)


class NaNEnv(FaultyEnv):
    """Returns something that is not finite: in the observation or in the reward."""

    def __init__(
        self,
        what: Literal["observation", "reward"] = "observation",
        value: float = float("nan"),
        **faulty: Any,
    ) -> None:
        super().__init__(**faulty)
        self._what, self._value = what, value

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.due():
            if self._what == "reward":
                reward = self._value
            else:
                observation[-1] = self._value
        return observation, reward, terminated, truncated, info


class EnvironmentBrokeError(Exception):
    """What `RaisingEnv` raises."""


class RaisingEnv(FaultyEnv):
    """Raises in its constructor, in every `reset`, or at the ``at``-th step; once, with a marker;
    else each time it is made anew.
    """

    def __init__(
        self, where: Literal["constructor", "reset", "step"] = "step", **faulty: Any
    ) -> None:
        super().__init__(**faulty)
        self._where = where
        if where == "constructor" and _first_time(self._marker):
            raise EnvironmentBrokeError("the constructor broke")

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        if self._where == "reset" and _first_time(self._marker):
            raise EnvironmentBrokeError("reset broke")
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if self._where == "step" and self.due():
            raise EnvironmentBrokeError("step broke")
        return super().step(action)


class SlowEnv(CounterEnv):
    """Takes ``seconds`` for a step; with ``share`` < 1 only that share of steps, drawn at random,
    is slow.
    """

    def __init__(self, seconds: float = 0.01, share: float = 1.0, **counter: Any) -> None:
        super().__init__(**counter)
        self._seconds, self._share = seconds, share

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if self._share >= 1.0 or self.np_random.random() < self._share:
            time.sleep(self._seconds)
        return super().step(action)


class PacedEnv(SlowEnv):
    """Takes two milliseconds for a step: most of the time a run in it waits, and leaves the cores
    to others.
    """

    def __init__(self, seconds: float = 0.002, **slow: Any) -> None:
        super().__init__(seconds, **slow)


class VanishingEnv(PacedEnv):
    """Cannot be made once the file exists that an environment variable names."""

    VARIABLE = "TIANFLOW_TEST_VANISHED"

    def __init__(self) -> None:
        if Path(os.environ[self.VARIABLE]).exists():
            raise EnvironmentBrokeError("the simulator has vanished")
        super().__init__()


class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Has any environment take two milliseconds for a step, as `PacedEnv` does."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        time.sleep(0.002)
        return super().step(action)


class HangingEnv(FaultyEnv):
    """Blocks for ever at the ``at``-th step."""

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if self.due():
            threading.Event().wait()
        return super().step(action)


class ExitingEnv(FaultyEnv):
    """Ends its whole process at the ``at``-th step."""

    def __init__(self, code: int = 1, **faulty: Any) -> None:
        super().__init__(**faulty)
        self._code = code

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if self.due():
            os._exit(self._code)
        return super().step(action)


class MutatingEnv(CounterEnv):
    """Returns one and the same array every time, and changes it."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self._array = np.zeros(2, np.float32)

    def observation(self) -> Array:
        self._array[:] = self.episode, self.t
        return self._array


class SeedEnv(CounterEnv):
    """The observation is (seed given to the last seeded reset, a random number drawn from it)."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self.observation_space = spaces.Box(-1, 2**63 - 2, (2,), np.int64)
        self._seed = -1

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        self._seed = self._seed if seed is None else seed
        return super().reset(seed=seed)

    def observation(self) -> Array:
        return np.array([self._seed, self.np_random.integers(2**31)], np.int64)


class PickyEnv(CounterEnv):
    """Asserts that every action lies in its action space, as given: dtype, shape and bounds. The
    reward is the sum of the action.
    """

    def __init__(self, action_space: spaces.Space[Any], **counter: Any) -> None:
        super().__init__(**counter)
        self.action_space = action_space

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if not self.action_space.contains(action):
            raise AssertionError(f"{action!r} is not in {self.action_space}")
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(np.sum(action)), terminated, truncated, info


class DiscreteStartEnv(PickyEnv):
    """Actions 5, 6, 7."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(spaces.Discrete(3, start=5), **counter)


class MultiDiscreteEnv(PickyEnv):
    """Three choices, of 2, 3 and 4 values, one of them not starting at zero."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(spaces.MultiDiscrete([2, 3, 4], start=[0, -1, 10]), **counter)


class MultiBinaryEnv(PickyEnv):
    """A table of 2 x 3 switches."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(spaces.MultiBinary((2, 3)), **counter)


class BoxActionEnv(PickyEnv):
    """A bounded Box of two numbers; actions outside of it are an error."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(
            spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 0.5], np.float32)),
            **counter,
        )


class UnboundedBoxActionEnv(PickyEnv):
    """A Box of shape (2, 1) without bounds, of float64."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(spaces.Box(-np.inf, np.inf, (2, 1), np.float64), **counter)


class MaskedEnv(CounterEnv):
    """Four actions of which a changing two are allowed; a masked action is an error. The last
    observation allows none.
    """

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self.action_space = spaces.Discrete(4)

    def mask(self) -> Array:
        allowed = np.zeros(4, np.int8)
        if self.t < self._lengths[self.episode % len(self._lengths)]:
            allowed[[self.t % 4, (self.t + 1) % 4]] = 1
        return allowed

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        return super().reset(seed=seed)[0], {"action_mask": self.mask()}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if not self.mask()[action]:
            raise AssertionError(f"action {action} is masked at step {self.t}")
        return *super().step(action)[:4], {"action_mask": self.mask()}


class MaskedMultiDiscreteEnv(CounterEnv):
    """Two choices, of 2 and 3 values; only the first value of the first and the last of the second
    are allowed.
    """

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        self.action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        return super().reset(seed=seed)[0], self._masks()

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if tuple(action) != (0, 2):
            raise AssertionError(f"action {action} is masked")
        return *super().step(action)[:4], self._masks()

    def _masks(self) -> Info:
        return {"action_mask": (np.array([1, 0], np.int8), np.array([0, 0, 1], np.int8))}


class _StructuredEnv(gymnasium.Env[Any, Any]):
    """Ends after ``length`` steps; reward 1; the observation is what a subclass makes of t."""

    def __init__(self, length: int = 4) -> None:
        self.action_space = spaces.Discrete(2)
        self._length, self.t = length, 0

    def observation(self) -> Any:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        self.t += 1
        return self.observation(), 1.0, self.t >= self._length, False, {}


class DictEnv(_StructuredEnv):
    """A uint8 image, a vector, and a Discrete inside a nested Dict; all of them tell t."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (1, 6, 6), np.uint8),
                "arm": spaces.Dict(
                    {
                        "joints": spaces.Box(-10.0, 10.0, (3,), np.float64),
                        "mode": spaces.Discrete(8, start=2),
                    }
                ),
            }
        )

    def observation(self) -> Any:
        return {
            "camera": np.full((1, 6, 6), self.t, np.uint8),
            "arm": {"joints": np.full(3, self.t / 2), "mode": np.int64(2 + self.t % 8)},
        }


class TupleEnv(_StructuredEnv):
    """A vector, a MultiDiscrete and a MultiBinary in a Tuple; all of them tell t."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        parts = (
            spaces.Box(-10.0, 10.0, (2,), np.float32),
            spaces.MultiDiscrete([9, 9], start=[1, 0]),
            spaces.MultiBinary(3),
        )
        self.observation_space = spaces.Tuple(parts)

    def observation(self) -> Any:
        return (
            np.full(2, self.t, np.float32),
            np.array([self.t + 1, self.t]),
            np.full(3, self.t % 2, np.int8),
        )


class SequenceEnv(_StructuredEnv):
    """An observation that has no fixed shape."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.observation_space = spaces.Dict(
            {"x": spaces.Box(0.0, 1.0, (1,)), "words": spaces.Sequence(spaces.Discrete(3))}
        )

    def observation(self) -> Any:
        return {"x": np.zeros(1, np.float32), "words": (0, 1)}


class VersionEchoEnv(gymnasium.Env[Array, Any]):
    """For a policy whose action is its version: the reward is the action, the observation (last
    action, t); so data prove their age.
    """

    def __init__(
        self, length: int = 7, action: Literal["discrete", "box"] = "discrete", seconds: float = 0.0
    ) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (2,), np.float32)
        self.action_space = (
            spaces.Discrete(10**6)
            if action == "discrete"
            else spaces.Box(-1.0, 1e6, (1,), np.float32)
        )
        self._length, self._seconds, self._t = length, seconds, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed)
        self._t = 0
        return np.array([-1.0, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if self._seconds:
            time.sleep(self._seconds)
        self._t += 1
        value = float(np.sum(action))
        return np.array([value, self._t], np.float32), value, False, self._t >= self._length, {}


def _makers(env: str, num_envs: int, kwargs: Info) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    kind = globals()[env]
    return [lambda: kind(**kwargs) for _ in range(num_envs)]


class NextStepVector(SyncVectorEnv):
    """A user's own vector of any environment of this module, with NEXT_STEP autoreset."""

    def __init__(self, num_envs: int = 1, env: str = "CounterEnv", **kwargs: Any) -> None:
        super().__init__(_makers(env, num_envs, kwargs), autoreset_mode=AutoresetMode.NEXT_STEP)


class SameStepVector(SyncVectorEnv):
    """The same with SAME_STEP autoreset."""

    def __init__(self, num_envs: int = 1, env: str = "CounterEnv", **kwargs: Any) -> None:
        super().__init__(_makers(env, num_envs, kwargs), autoreset_mode=AutoresetMode.SAME_STEP)


class DisabledVector(SyncVectorEnv):
    """The same with autoreset DISABLED."""

    def __init__(self, num_envs: int = 1, env: str = "CounterEnv", **kwargs: Any) -> None:
        super().__init__(_makers(env, num_envs, kwargs), autoreset_mode=AutoresetMode.DISABLED)


REGISTERED: dict[str, type[gymnasium.Env[Any, Any]]] = {
    "Counter-v0": CounterEnv,
    "OneState-v0": OneStateEnv,
    "NaN-v0": NaNEnv,
    "Raising-v0": RaisingEnv,
    "Slow-v0": SlowEnv,
    "Hanging-v0": HangingEnv,
    "Exiting-v0": ExitingEnv,
    "DiscreteStart-v0": DiscreteStartEnv,
    "BoxAction-v0": BoxActionEnv,
    "Dict-v0": DictEnv,
    "Memory-v0": Recall,
    "VersionEcho-v0": VersionEchoEnv,
}

for _id, _kind in REGISTERED.items():
    gymnasium.register(_id, entry_point=f"{__name__}:{_kind.__name__}")


class UnclosableEnv(PacedEnv):
    """Never comes back from ``close``."""

    def close(self) -> None:
        threading.Event().wait()


class WideEnv(gymnasium.Env[Array, Any]):
    """The observation has ``size`` random numbers. Reward 1 a step for action 1; episodes last 5
    steps.
    """

    def __init__(self, size: int = 4, actions: int = 2) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (size,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed, options=options)
        self._t = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._t += 1
        return self._observation(), float(action == 1), self._t == 5, False, {}

    def _observation(self) -> Array:
        return self.np_random.uniform(-1.0, 1.0, self.observation_space.shape).astype(np.float32)


class LengthEnv(gymnasium.Env[Array, Any]):
    """Every step has ``reward``; episodes last ``length`` steps. So a return shows the keyword
    arguments of the environment. ``spread``: a random number below it is added.
    """

    def __init__(self, length: int = 5, reward: float = 1.0, spread: float = 0.0) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.reward, self.spread = length, reward, spread
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed, options=options)
        self._t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._t += 1
        reward = self.reward + self.spread * self.np_random.random()
        return np.zeros(2, np.float32), reward, self._t >= self.length, False, {}
