"""A slow environment keeps its share, and nobody waits for it."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.oracle import oracle_config, until_true
from tianflow import api
from tianflow.coordinator import Run
from tianflow.core.statistics import LedgerSnapshot
from tianflow.envs.make import environment_seed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS, SEED = 32, 1
SLOW = "actor-3"
WAITING = 3.0
"""Under bound 1, actors that wait until a slow one is done make two trajectories at most while it
makes one as long.
"""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Actors, each in a process of its own; one environment of `SLOW` is ``factor`` times slower
    than all others.
    """

    actors: int
    num_envs: int
    factor: float
    step_s: float

    @property
    def pace(self) -> float:
        """How many times slower the whole vector of `SLOW` is: its environments take their steps
        one after the other.
        """
        return (self.num_envs - 1 + self.factor) / self.num_envs

    def config(self, record: Path) -> dict[str, object]:
        """Bound 1, and as many actors as it can keep busy."""
        slow = environment_seed(SEED, int(SLOW.removeprefix("actor-")), self.num_envs)
        tables = oracle_config(
            record,
            env={
                "seconds": self.step_s,
                "jitter": False,
                "slow_seeds": [slow],
                "factor": self.factor,
            },
            algorithm={"batch_trajectories": self.actors, "update_s": 0.05},
            actors={"count": self.actors, "hosts": self.actors, "rollout_steps": STEPS},
            balance={"max_staleness": 1, "min_fragment_steps": 1, "straggler_patience": 60.0},
            placement={"launcher": "processes", "affinity": "none"},
            run={"seed": SEED},
        )
        tables["env"]["num_envs"] = self.num_envs
        return tables


def commits(run: Run) -> int:
    """Of the slow actor."""
    shares = run.exchange.ledger.snapshot().shares
    return shares[SLOW].trajectories if SLOW in shares else 0


def ledger_after(folder: Path, crowd: Crowd, slow_commits: int) -> LedgerSnapshot:
    """The ledger once all take part and the slow actor has made so many trajectories more."""

    async def whole() -> LedgerSnapshot:
        async with api.open_run(crowd.config(folder / "record"), runs_dir=folder) as handle:
            run = handle.run
            await until_true(
                run, lambda: len(run.exchange.ledger.snapshot().shares) == crowd.actors
            )
            wanted = commits(run) + slow_commits
            await until_true(run, lambda: commits(run) >= wanted)
            return run.exchange.ledger.snapshot()

    return asyncio.run(whole())


@pytest.mark.parametrize(
    ("crowd", "slow_commits"),
    [
        pytest.param(
            Crowd(actors=8, num_envs=1, factor=10.0, step_s=0.010),
            8,
            id="one of 8 environments 10 times slower",
        ),
        pytest.param(
            Crowd(actors=12, num_envs=4, factor=60.0, step_s=0.0025),
            6,
            id="one of 48 environments 60 times slower",
        ),
    ],
)
def test_a_slow_environment_keeps_its_share_and_nobody_waits_for_it(
    tmp_path: Path, crowd: Crowd, slow_commits: int
) -> None:
    ledger = ledger_after(tmp_path, crowd, slow_commits)
    assert 0 == ledger.late_commits  # steps that were begun and never committed
    kept = {
        holder: share.trained_steps / (share.trained_steps + share.dropped_steps)
        for holder, share in ledger.shares.items()
    }
    slow, others = kept.pop(SLOW), statistics.mean(kept.values())
    assert slow == pytest.approx(others, rel=0.1)
    trained = {holder: share.trained_steps for holder, share in ledger.shares.items()}
    slow_steps, fast_steps = trained.pop(SLOW), statistics.mean(trained.values())
    assert slow_steps >= 0.66 * fast_steps / crowd.pace
    assert fast_steps >= WAITING * slow_steps
    assert 0 == ledger.violations
