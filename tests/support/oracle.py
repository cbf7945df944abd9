"""An algorithm that learns nothing and makes its data prove their own age: its policy's action *is*
the version of its weights.

Named ``tests.support.oracle:Oracle``. The learner counts its updates by itself and looks only at
actions, never at the labels that the system keeps; what it finds at each use is one line of the
file ``algorithm.record``. An action also tells which process's learner made the weights, so that
data of a lost learner cannot pass for those of its successor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from tests.support.fakes import VersionPolicy
from tianflow.config.model import AlgorithmSettings, Config
from tianflow.coordinator import Run
from tianflow.core.payloads import EnvironmentSpec, WeightsTable
from tianflow.interfaces import LearnerBatch, StepResult

T = TypeVar("T")
NBYTES = 64
"""Of the weights: one number and padding to a cache line."""
PER_LEARNER = 2**24
"""An action is ``pid * PER_LEARNER + updates``; below 2**52, so a float64 holds it, too."""


class OracleSettings(AlgorithmSettings):
    """How slow the fake is. Seconds are means of exponential distributions."""

    name: str = "tests.support.oracle:Oracle"
    record: str = ""
    update_s: float = 0.0
    load_s: float = 0.0


class EchoEnv(gymnasium.Env[NDArray[Any], Any]):
    """Takes any action and ends an episode after ``length`` steps, each of which sleeps ``seconds``
    on average.

    Environments whose seed lies in ``slow_seeds`` sleep ``factor`` times as long, as do episodes
    drawn with probability ``slow_share``.
    """

    def __init__(
        self,
        *,
        length: int = 7,
        seconds: float = 0.0,
        jitter: bool = True,
        slow_seeds: tuple[int, ...] = (),
        slow_share: float = 0.0,
        factor: float = 1.0,
    ) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (1,), np.float32)
        self.action_space = spaces.Discrete(2**52)
        self._length, self._seconds, self._jitter = length, seconds, jitter
        self._slow_seeds, self._slow_share, self._factor = frozenset(slow_seeds), slow_share, factor
        self._is_slow, self._pace, self._t = False, seconds, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._is_slow = seed in self._slow_seeds
        slow = self._is_slow or self.np_random.random() < self._slow_share
        self._pace = self._seconds * (self._factor if slow else 1.0)
        self._t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        if self._pace:
            time.sleep(self._pace * (self.np_random.exponential() if self._jitter else 1.0))
        self._t += 1
        return np.full(1, self._t, np.float32), 1.0, False, self._t >= self._length, {}


class OraclePolicy(VersionPolicy):
    """Acts by its weights; takes ``load_s`` to load them."""

    table = WeightsTable((), NBYTES)

    def __init__(self, config: Config, spec: EnvironmentSpec) -> None:
        super().__init__(spec.action)
        assert isinstance(config.algorithm, OracleSettings)
        self._load_s = config.algorithm.load_s

    def load(self, flat: NDArray[np.uint8]) -> None:
        time.sleep(self._load_s)
        super().load(flat)


class OracleLearner:
    """Counts its updates, and writes down how old what it is given is."""

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings
        self._number, self._me = 0, os.getpid()
        self._random = np.random.default_rng()
        self._record = os.open(settings.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def flat(self) -> NDArray[np.uint8]:
        words = np.zeros(NBYTES // 8, np.int64)
        words[0] = self._me * PER_LEARNER + self._number
        return words.view(np.uint8)

    def step(
        self, batch: LearnerBatch, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        found = [
            self._number - oldest if pid == self._me else f"of {pid}"
            for pid, oldest in self._oldest(batch)
        ]
        os.write(
            self._record,
            f"{self._me} {self._number} {time.monotonic()} {','.join(map(str, found))}\n".encode(),
        )
        if self._settings.update_s:
            time.sleep(self._random.exponential(self._settings.update_s))
        self._number += 1
        return StepResult(int(batch.arrays["valid"].sum()), True, {"number": float(self._number)})

    def _oldest(self, batch: LearnerBatch) -> list[tuple[int, int]]:
        """(pid, updates) of the oldest action of each trajectory. Rows that nobody acted in hold
        zeros.
        """
        trajectories = batch.arrays["version"].shape[1]
        action, valid = (
            batch.arrays[name].unflatten(1, (trajectories, -1)) for name in ("action", "valid")
        )
        assert not (valid & (action == 0)).any(), "a row is to be trained on that nobody acted in"
        labels = batch.arrays["version"].unsqueeze(2).expand_as(action)
        assert torch.equal(labels[action != 0], action[action != 0] % PER_LEARNER), (
            "a label is not that of the weights that acted"
        )
        oldest = action.masked_fill(action == 0, 2**62).amin((0, 2))
        return [divmod(value, PER_LEARNER) for value in oldest.tolist()]

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:
        """Nothing to change."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        return {"number": np.array([self._number])}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._number = int(state["number"][0])


class Oracle:
    """What ``algorithm.name`` names."""

    settings = OracleSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> OraclePolicy:
        return OraclePolicy(config, spec)

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> OracleLearner:
        assert isinstance(config.algorithm, OracleSettings)
        return OracleLearner(config.algorithm)


def oracle_config(
    record: Path, *, env: Mapping[str, object] | None = None, **sections: Mapping[str, object]
) -> dict[str, Any]:
    """A run of the oracle. ``env``: arguments of `EchoEnv`; other sections are merged into the
    defaults here.
    """
    tables: dict[str, dict[str, Any]] = {
        "env": {"id": "tests.support.oracle:EchoEnv", "num_envs": 2, "kwargs": dict(env or {})},
        "algorithm": {
            "name": "tests.support.oracle:Oracle",
            "record": str(record),
            "batch_trajectories": 2,
        },
        "actors": {"count": 3, "rollout_steps": 8},
        "balance": {"min_fragment_steps": 1},
        "placement": {"launcher": "inline"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "metrics": {"interval_s": 0.2},
    }
    return {
        name: {**tables.get(name, {}), **sections.get(name, {})} for name in {*tables, *sections}
    }


@dataclass(frozen=True, slots=True)
class Use:
    """One update as its learner saw it: its own number of updates before, when, and each
    trajectory's age by its actions.
    """

    pid: int
    number: int
    at: float
    ages: tuple[int, ...]


def uses(record: Path) -> list[Use]:
    """Everything written down. Fails if anything was of another learner."""
    lines = [line.split() for line in record.read_text().splitlines()]
    return [
        Use(int(pid), int(number), float(at), tuple(int(age) for age in ages.split(",")))
        for pid, number, at, ages in lines
    ]


async def until_true(run: Run, look: Callable[[], T], *, every_s: float = 0.01) -> T:
    """Look again and again until it is something; what it is. Raises what the run failed with."""
    while not (found := look()):
        if run.lifecycle.first_error is not None:
            raise run.lifecycle.first_error
        await asyncio.sleep(every_s)
    return found


async def until(run: Run, updates: int) -> None:
    """Wait for so many settled updates in all. Raises what the run failed with."""
    await until_true(run, lambda: run.exchange.ledger.snapshot().updates >= updates, every_s=0.005)


class Witness:
    """Notes which updates reached the ledger, so that what a killed learner did last and could not
    tell is known.

    Args:
        run: watched from now on.
        pid: that of the learner.
    """

    def __init__(self, run: Run, pid: Callable[[], int] = os.getpid) -> None:
        self._run, self._pid = run, pid
        self._settled: set[tuple[int, int]] = set()
        run.exchange.on_settled(self._note)

    def _note(self) -> None:
        self._settled.add((self._pid(), self._run.exchange.ledger.version.number - 1))

    def check(self, record: Path, *, kills: int = 0) -> Counter[int]:
        """Oracle and ledger agree exactly; the histogram. At most one update of each killed learner
        was never told.
        """
        seen = uses(record)
        assert len({(use.pid, use.number) for use in seen}) == len(seen)
        untold = [use for use in seen if (use.pid, use.number) not in self._settled]
        assert len(untold) <= kills
        assert len(self._settled) == len(seen) - len(untold)
        histogram = Counter(age for use in seen if use not in untold for age in use.ages)
        snapshot = self._run.exchange.ledger.snapshot()
        assert dict(histogram) == snapshot.staleness
        assert histogram.total() == snapshot.trained
        assert snapshot.begun == snapshot.trained + sum(snapshot.dropped.values()) + snapshot.open
        return histogram
