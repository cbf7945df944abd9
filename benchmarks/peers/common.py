"""Common part of the peers' scripts: command line, target rule, clocks, and the line that a script
prints.

Peers run in environments of their own, so this module needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import UNSET

EPISODES = 100
"""Number of training episodes whose mean return decides whether a target is reached."""


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a peer's script.

    Attributes:
        env: "cartpole" or "pong".
        target: mean return at which training ends. None: only the rate counts.
        seconds: longest training.
        warm_s: seconds of training before the rate is measured.
        options: ``name=value`` pairs that choose between settings of one peer.
    """

    env: str
    seed: int
    target: float | None
    seconds: float
    warm_s: float
    options: Mapping[str, str]


def read_task(
    description: str | None,
    given: Sequence[str] | None = None,
    *,
    envs: Sequence[str] = ("cartpole", "pong"),
) -> Task:
    """Parse ``ENV [--seed N] [--target RETURN] [--seconds S] [--warm S] [name=value ...]``.

    It removes variables that mislead numerical libraries, so a script calls it before it loads
    them.
    """
    for name in UNSET:
        os.environ.pop(name, None)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("env", choices=envs)
    parser.add_argument("options", nargs="*", metavar="name=value")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target",
        type=float,
        default=None,
        help="mean return of the last 100 training episodes at which training ends",
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="longest training in seconds")
    parser.add_argument(
        "--warm", type=float, default=0.0, help="seconds of training before the rate is measured"
    )
    chosen = parser.parse_intermixed_args(given)
    malformed = [option for option in chosen.options if "=" not in option]
    if malformed:
        parser.error(f"{malformed[0]!r} is not a valid option (expected name=value)")
    options = dict(option.split("=", 1) for option in chosen.options)
    return Task(chosen.env, chosen.seed, chosen.target, chosen.seconds, chosen.warm, options)


class Progress:
    """Progress of training: when the target was reached, when time is up, and the rate after the
    warm-up.

    The target is reached at the first observation at which the last 100 training episodes average
    it.
    """

    def __init__(
        self,
        task: Task,
        *,
        clock: Callable[[], float] = time.perf_counter,
        age: Callable[[], float] | None = None,
    ) -> None:
        self._task, self._clock, self._age = task, clock, age or process_age_s
        self._began = clock()
        self._returns: deque[float] = deque(maxlen=EPISODES)
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self.mean_return: float | None = None
        self.time_to_target_s: float | None = None
        self.start_to_target_s: float | None = None
        self.steps_to_target: int | None = None

    def start(self) -> None:
        """Start the clock of training. Everything is imported and made by now."""
        self._began = self._clock()

    def observe(self, steps: int, returns: Iterable[float] = ()) -> bool:
        """Add the returns of training episodes that ended since the last call, after ``steps``
        environment steps in total.

        Return True when training should end.
        """
        self._returns.extend(returns)
        mean = sum(self._returns) / len(self._returns) if self._returns else None
        return self.observe_mean(steps, mean, len(self._returns))

    def observe_mean(self, steps: int, mean: float | None, episodes: int) -> bool:
        """Observe as `observe` does, for a peer that computes the mean of its last 100 training
        ``episodes`` itself.
        """
        now = self._clock() - self._began
        self.mean_return, self._last = mean, (now, steps)
        if self._first is None and now >= self._task.warm_s:
            self._first = self._last
        target = self._task.target
        if (
            self.time_to_target_s is None
            and target is not None
            and mean is not None
            and episodes >= EPISODES
            and mean >= target
        ):
            self.time_to_target_s, self.steps_to_target, self.start_to_target_s = (
                now,
                steps,
                self._age(),
            )
        return self.time_to_target_s is not None or now >= self._task.seconds

    @property
    def is_warm(self) -> bool:
        """True from the observation at which the measurement of the rate begins."""
        return self._first is not None

    @property
    def training_s(self) -> float:
        """Seconds of training up to the last observation."""
        return self._last[0]

    @property
    def steps(self) -> int:
        """Environment steps up to the last observation. A step of a game with frame skip counts
        once.
        """
        return self._last[1]

    @property
    def steps_per_s(self) -> float | None:
        """Rate from the first observation after the warm-up to the last one, or from the start
        without a warm-up.
        """
        at, steps = (0.0, 0) if self._task.warm_s <= 0.0 else self._first or self._last
        seconds = self._last[0] - at
        return (self._last[1] - steps) / seconds if seconds > 0.0 else None


class Lag:
    """Policy lag as a peer reports it: the mean of its means, the largest of its maxima."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._sum, self._count = 0.0, 0
        self._max: float | None = None

    def add(self, mean: float, most: float) -> None:
        """Add one report. NaN is ignored."""
        if mean == mean and most == most:  # noqa: PLR0124 - False for NaN
            self._sum, self._count = self._sum + mean, self._count + 1
            self._max = most if self._max is None else max(self._max, most)

    def summary(self) -> dict[str, Any]:
        """Return the fields of the answer."""
        return {
            "lag_mean": self._sum / self._count if self._count else None,
            "lag_max": self._max,
            "lag_unit": self.unit,
        }


NO_LAG: dict[str, Any] = {"lag_mean": None, "lag_max": None, "lag_unit": None}
"""Fields of a peer that does not report its lag."""


class Reporter:
    """Reserves standard output for the answer. From now on, the output of libraries in any
    process goes to standard error.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def report(
        self,
        task: Task,
        progress: Progress,
        *,
        peer: str,
        clock_starts: str,
        settings: Mapping[str, object],
        packages: Iterable[str],
        lag: Mapping[str, Any] = NO_LAG,
        **more: Any,
    ) -> None:
        """Print the answer. ``packages``: packages whose versions it contains. ``clock_starts``:
        the event that started the clock of training.
        """
        answer = {
            "peer": peer,
            "env": task.env,
            "seed": task.seed,
            "env_steps": progress.steps,
            "training_s": progress.training_s,
            "env_steps_per_s": progress.steps_per_s,
            "time_to_target_s": progress.time_to_target_s,
            "start_to_target_s": progress.start_to_target_s,
            "steps_to_target": progress.steps_to_target,
            "mean_return": progress.mean_return,
            "clock_starts": clock_starts,
            **lag,
            "settings": dict(settings),
            "versions": versions(packages),
            **more,
        }
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def process_age_s() -> float:
    """Return the seconds since this process started, imports included, to a hundredth. It reads
    Linux's ``/proc``.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def tree_seconds() -> float:
    """Return the processor time in seconds of this process and of its living descendants, to a
    hundredth each. It reads Linux's ``/proc``.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= found
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")
