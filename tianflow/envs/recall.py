"""The smallest task that needs memory, for configs that show it: ``env.id =
"tianflow.envs.recall:Recall"``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Array = NDArray[Any]
Info = dict[str, Any]


class Recall(gymnasium.Env[Array, Any]):
    """Say at the end what was shown at the beginning, ``gap`` blank steps before.

    The observation [3] float32 is (cue is 0, cue is 1, time to answer). The only reward comes with
    the last step: 1 for the cue, -1 for the other. Without memory the mean return is 0 whatever is
    done; with it, 1.
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
