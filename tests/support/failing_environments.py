"""Environments that fail where they are made, or leave a process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np


class Raising(gymnasium.Env[Any, Any]):
    """Raises in its constructor."""

    observation_space: Any = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        raise ValueError("no licence")


class Ending(Raising):
    """Ends its process."""

    def __init__(self) -> None:
        os._exit(3)


class Hanging(Raising):
    """Never made; starts a process first."""

    def __init__(self) -> None:
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        time.sleep(600)


class Forking(Raising):
    """Usable, and leaves a forked process behind, which holds every descriptor."""

    def __init__(self) -> None:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}
