"""The environment and the algorithms of the storm. They hang on request.

A request is a file ``hang-ROLE-MOMENT`` in the folder of the storm. The first process of that role
that reaches that moment takes the file, leaves the time in ``hung-ROLE-PID``, and hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from benchmarks.lib.oracle import (
    EchoEnv,
    Oracle,
    OracleLearner,
    OracleSettings,
    ReplayOracle,
    ReplayOracleLearner,
    ReplayOracleSettings,
)
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec

if TYPE_CHECKING:
    import torch

FOLDER = "STORM_FOLDER"
"""Environment variable: the folder of requests."""
MOMENTS = ("step", "reset", "constructor")
UPDATE = "update"
_POLL_S = 0.05


def request_hang(folder: Path, role: str, moment: str, seconds: float) -> None:
    """Ask the next process of ``role`` to hang at ``moment``, for ``seconds``."""
    staged = folder / f".{role}-{moment}"
    staged.write_text(str(seconds), encoding="utf-8")
    staged.replace(folder / f"hang-{role}-{moment}")


def withdraw(folder: Path, role: str, moment: str) -> bool:
    """Take back a request that no process has met. True if there was one."""
    try:
        (folder / f"hang-{role}-{moment}").unlink()
    except FileNotFoundError:
        return False
    return True


def hung(folder: Path, role: str) -> list[int]:
    """Return the pids of processes of ``role`` that have begun to hang, in any order."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"hung-{role}-*")]


def hung_since(folder: Path, role: str, pid: int) -> float:
    """Return when a process began to hang, by the monotonic clock."""
    return float((folder / f"hung-{role}-{pid}").read_text(encoding="utf-8"))


def forget(folder: Path, role: str) -> list[int]:
    """Remove the traces of hangs of ``role``, and return their pids."""
    pids = hung(folder, role)
    for pid in pids:
        (folder / f"hung-{role}-{pid}").unlink(missing_ok=True)
    return pids


def hang_if_asked(moment: str, give_up: Callable[[], bool] = lambda: False) -> None:
    """Hang here if this process is asked to. Does nothing outside of hosts."""
    folder, role = os.environ.get(FOLDER), os.environ.get("TIANFLOW_HOST")
    if folder is None or role is None:
        return
    request, mine = f"{folder}/hang-{role}-{moment}", f"{folder}/.{role}-{os.getpid()}"
    try:
        os.rename(request, mine)  # noqa: PTH104 - every step tries it, and a Path costs more
    except OSError:
        return
    taken, began = Path(mine), time.monotonic()
    deadline = began + float(taken.read_text(encoding="utf-8"))
    taken.write_text(str(began), encoding="utf-8")
    taken.replace(f"{folder}/hung-{role}-{os.getpid()}")  # a reader sees the whole time or no file
    while time.monotonic() < deadline and not give_up():
        time.sleep(_POLL_S)


class StormEnv(EchoEnv):
    """An `EchoEnv` that can hang in its constructor, in `reset` and in `step`."""

    def __init__(self, **echo: Any) -> None:
        super().__init__(**echo)
        hang_if_asked("constructor")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin an episode, or hang."""
        hang_if_asked("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Step, or hang."""
        hang_if_asked("step")
        return super().step(action)


class _Hanging(OracleLearner):
    def compute(self, should_stop: Callable[[], bool]) -> None:
        """Take the time of an update, or hang."""
        hang_if_asked(UPDATE, should_stop)
        super().compute(should_stop)


class StormLearner(_Hanging, OracleLearner):
    """An `OracleLearner` that can hang in an update."""


class StormReplayLearner(_Hanging, ReplayOracleLearner):
    """A `ReplayOracleLearner` that can hang in an update."""


class StormOracle(Oracle):
    """The algorithm that uses each trajectory once."""

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> OracleLearner:  # noqa: ARG004 - it computes nothing
        """Make the learner's half."""
        assert isinstance(config.algorithm, OracleSettings)
        return StormLearner(config.algorithm)


class StormReplayOracle(ReplayOracle):
    """The algorithm that draws from replay."""

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> OracleLearner:  # noqa: ARG004 - it computes nothing
        """Make the learner's half."""
        assert isinstance(config.algorithm, ReplayOracleSettings)
        return StormReplayLearner(config.algorithm)
