"""The oracle of `benchmarks.lib.oracle` in tests: a config, waiting, and a witness that compares its
record with the ledger.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.lib.oracle import (
    NBYTES,
    PER_LEARNER,
    EchoEnv,
    Oracle,
    OracleLearner,
    OraclePolicy,
    OracleSettings,
    Use,
    uses,
)
from tianflow.coordinator import Run

__all__ = [
    "NBYTES",
    "PER_LEARNER",
    "EchoEnv",
    "Oracle",
    "OracleLearner",
    "OraclePolicy",
    "OracleSettings",
    "Use",
    "WideEchoEnv",
    "Witness",
    "oracle_config",
    "until",
    "until_true",
    "uses",
]

T = TypeVar("T")


class WideEchoEnv(EchoEnv):
    """`EchoEnv` with observations of ``width`` numbers, so that trajectories have a size."""

    def __init__(self, *, width: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.observation_space = spaces.Box(-1.0, 1e6, (width,), np.float32)
        self._observation = np.zeros(width, np.float32)

    def reset(self, **arguments: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(**arguments)
        return self._observation, {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return (self._observation, *rest)


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
