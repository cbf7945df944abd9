"""An environment and an algorithm by which a frame that is trained on twice is found.

No two observations of all environments are alike. The learner writes down each observation that a
trained action followed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.lib.oracle import EchoEnv, Oracle, OracleLearner, OracleSettings
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch, StepResult

COUNTER_BITS, IDENTITY_BITS = 24, 38
"""An observation is one number: a random identity of its environment, and a counter."""
_OBSERVATION = "obs/"


class FramesEnv(EchoEnv):
    """An `EchoEnv` whose observations are never alike. No two environments share one."""

    def __init__(self, **echo: Any) -> None:
        super().__init__(**echo)
        highest = 2 ** (COUNTER_BITS + IDENTITY_BITS)
        self.observation_space = spaces.Box(0, highest, (1,), np.int64)
        self._newest = secrets.randbits(IDENTITY_BITS) << COUNTER_BITS

    def _observe(self) -> NDArray[Any]:
        self._newest += 1
        return np.array([self._newest], np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode."""
        _, infos = super().reset(seed=seed, options=options)
        return self._observe(), infos

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Step."""
        _, reward, terminated, truncated, infos = super().step(action)
        return self._observe(), reward, terminated, truncated, infos


class FramesSettings(OracleSettings):
    """Settings of the oracle, and the file for the frames."""

    name: str = "benchmarks.lib.node_faults.frames:Frames"
    frames: str = ""


class FramesLearner(OracleLearner):
    """An `OracleLearner` that writes down the frames of each batch."""

    def __init__(self, settings: FramesSettings) -> None:
        super().__init__(settings)
        self._frames = os.open(settings.frames, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(
        self, batch: LearnerBatch, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Write down the frames, and do what the oracle does."""
        (name,) = (name for name in batch.arrays if name.startswith(_OBSERVATION))
        valid = batch.arrays["valid"]
        os.write(self._frames, batch.arrays[name][: len(valid)][valid].numpy().tobytes())
        return super().step(batch, should_stop)


class Frames(Oracle):
    """The oracle that uses each trajectory once, with frames."""

    settings = FramesSettings

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> OracleLearner:  # noqa: ARG004 - it computes nothing
        """Make the learner's half."""
        assert isinstance(config.algorithm, FramesSettings)
        return FramesLearner(config.algorithm)


def count_frames(path: Path) -> tuple[int, int]:
    """Return how many frames were trained on, and how many of them more than once."""
    frames = np.fromfile(path, np.int64)
    return len(frames), len(frames) - len(np.unique(frames))
