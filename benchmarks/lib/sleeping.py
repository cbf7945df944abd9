"""Python environment whose steps take time without computing, like those of a simulator or a
device.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

STEP_S = 0.005


class Sleeping(gymnasium.Env[Any, Any]):
    """Sleeps ``seconds`` a step, or exponentially distributed times if it ``varies``. An episode
    has 200 steps.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *, varies: bool = False, seconds: float = STEP_S) -> None:
        self._varies, self._seconds = varies, seconds
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds * (self.np_random.exponential() if self._varies else 1.0))
        self._steps += 1
        return np.zeros(4, np.float32), float(action), False, self._steps >= 200, {}
