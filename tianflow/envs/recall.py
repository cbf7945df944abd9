"""Recall: the smallest task that requires memory, ``env.id = "tianflow.envs.recall:Recall"``."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Array = NDArray[Any]
Info = dict[str, Any]


class Recall(gymnasium.Env[Array, Any]):
    """Repeat at the end the cue shown at the beginning, ``gap`` blank steps before.

    The observation [3] float32 is (cue is 0, cue is 1, time to answer). Only the last step has a
    reward: 1 for the cue, -1 for the other action. The best mean return is 0 without memory, 1 with
    it.
    """

    def __init__(self, gap: int = 10) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._gap, self._t, self._cue = gap, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        super().reset(seed=seed, options=options)
        self._t, self._cue = 0, int(self.np_random.integers(2))
        observation = np.zeros(3, np.float32)
        observation[self._cue] = 1.0
        return observation, {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._t += 1
        observation = np.zeros(3, np.float32)
        observation[2] = self._t == self._gap + 1
        if self._t <= self._gap + 1:
            return observation, 0.0, False, False, {}
        return observation, 1.0 if int(action) == self._cue else -1.0, True, False, {}
