"""Environments that make trouble, for runs in processes: ``tests.e2e.troubles:Name``. They are
checked in a process without PyTorch, whose import takes long.

A ``folder`` remembers, across processes and restarts, what has happened already.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.environments import (
    Array,
    CounterEnv,
    EnvironmentBrokeError,
    Info,
    PacedEnv,
)


def claim(folder: str, name: str) -> bool:
    """True for the first process that asks for ``name``, and for nobody after it."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def in_a_host() -> bool:
    """False where the config is only checked."""
    return "TIANFLOW_HOST" in os.environ


class HostsOnlyEnv(CounterEnv):
    """Is well as long as it is only looked at; in a host its constructor raises."""

    def __init__(self, **counter: Any) -> None:
        super().__init__(**counter)
        if in_a_host():
            raise EnvironmentBrokeError("no display in this process")


class LateEnv(PacedEnv):
    """In a host, the first constructor of all never comes back."""

    def __init__(self, folder: str, **counter: Any) -> None:
        super().__init__(**counter)
        if in_a_host() and claim(folder, "constructor"):
            threading.Event().wait()


class NeverEnv(CounterEnv):
    """No constructor ever comes back."""

    def __init__(self, folder: str, **counter: Any) -> None:
        super().__init__(**counter)
        claim(folder, "constructor")
        while True:
            time.sleep(60.0)


class TroubleEnv(PacedEnv):
    """Each of ``ways`` happens once in the run, each after ``every`` more steps of some
    environment.
    """

    def __init__(self, folder: str, ways: tuple[str, ...], every: int = 40, **counter: Any) -> None:
        super().__init__(**counter)
        self._folder, self._ways, self._every, self._steps = folder, ways, every, 0

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._steps += 1
        observation, reward, terminated, truncated, info = super().step(action)
        way = self._due()
        if way == "raise":
            raise EnvironmentBrokeError("once in a thousand")
        if way == "exit 0":
            os._exit(0)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hang":
            threading.Event().wait()
        if way == "nan observation":
            observation[0] = np.nan
        if way == "infinite reward":
            reward = float("inf")
        return observation, reward, terminated, truncated, info

    def _due(self) -> str:
        if self._steps % self._every:
            return ""
        return next((way for way in self._ways if claim(self._folder, way)), "")


class SlowToEvaluateEnv(PacedEnv):
    """Each step of an evaluation takes a second."""

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if os.environ.get("TIANFLOW_HOST") == "evaluator":
            time.sleep(1.0)
        return super().step(action)


class SlowResetEnv(CounterEnv):
    """Each reset takes ``reset_s``, in hosts only."""

    def __init__(self, reset_s: float, **counter: Any) -> None:
        super().__init__(**counter)
        self._reset_s = reset_s

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        if in_a_host():
            time.sleep(self._reset_s)
        return super().reset(seed=seed)


class MarkedEnv(CounterEnv):
    """In a host, each step raises an error with the text ``label``."""

    def __init__(self, label: str, **counter: Any) -> None:
        super().__init__(**counter)
        self._label = label

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        if in_a_host():
            raise EnvironmentBrokeError(self._label)
        return super().step(action)


class HostileEnv(PacedEnv):
    """In a host of actors each of ``ways`` happens once in the run, each after ``every`` more steps
    of some environment. It attacks the process, its parent, or the result of the step.
    """

    def __init__(self, folder: str, ways: tuple[str, ...], every: int = 20, **counter: Any) -> None:
        super().__init__(**counter)
        self._folder, self._every, self._steps = folder, every, 0
        self._ways = ways if os.environ.get("TIANFLOW_HOST", "").startswith("actors") else ()

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Info]:
        self._steps += 1
        stepped = super().step(action)
        if self._steps % self._every:
            return stepped
        way = next((way for way in self._ways if claim(self._folder, way)), None)
        if way in ATTACKS:
            ATTACKS[way]()
        return RESULTS[way](stepped) if way in RESULTS else stepped  # type: ignore[no-any-return]  # not always a step


def _spin() -> None:
    while True:
        pass


def _start_threads() -> None:
    for _ in range(40):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


ATTACKS: Mapping[str, Callable[[], object]] = {
    "exit": lambda: sys.exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "spin": _spin,
    "hold the interpreter": lambda: ctypes.PyDLL(None).sleep(3600),  # it does not release the lock
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill its parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "close descriptors": lambda: os.closerange(3, 4096),
    "close standard streams": lambda: os.closerange(0, 3),
    "block signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
    "change the mask of files": lambda: os.umask(0),
    "change the directory": lambda: os.chdir("/"),
    "clear the environment": os.environ.clear,
    "start threads": _start_threads,
}
RESULTS: Mapping[str, Callable[[tuple[Any, ...]], Any]] = {
    "nothing": lambda _: None,
    "two values": lambda stepped: stepped[:2],
    "another shape": lambda stepped: (np.zeros(7, np.float32), *stepped[1:]),
    "another type": lambda stepped: ("x", *stepped[1:]),
    "no reward": lambda stepped: (stepped[0], None, *stepped[2:]),
}
