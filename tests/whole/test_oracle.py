"""Data that prove their own age agree with the ledger, exactly, in whole runs in one process."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.fakes import VersionPolicy
from tests.support.oracle import NBYTES, Witness, oracle_config, until, uses
from tianflow import api
from tianflow.channels.memory import MemoryWeights
from tianflow.components import learner
from tianflow.components.weights import PolicyWeights
from tianflow.coordinator import Run
from tianflow.core.payloads import ActionSpec, Version
from tianflow.core.statistics import LedgerSnapshot
from tianflow.ledger.ledger import Ledger
from tianflow.rundir.checkpoints import CheckpointStore, write_state

pytestmark = pytest.mark.e2e

Drive = Callable[[Run], Awaitable[None]]


def watched(
    config: Mapping[str, Any], tmp_path: Path, drive: Drive
) -> tuple[Counter[int], LedgerSnapshot]:
    """Run, let ``drive`` meddle, stop; the histogram on which oracle and ledger agree, and the
    ledger at the end.
    """

    async def whole() -> tuple[Counter[int], LedgerSnapshot]:
        async with api.open_run(config, runs_dir=tmp_path) as handle:
            run = handle.run
            witness = Witness(run)
            await drive(run)
        return witness.check(tmp_path / "record"), run.exchange.ledger.snapshot()

    return asyncio.run(whole())


def plain(updates: int) -> Drive:
    return lambda run: until(run, updates)


@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("bound", [0, 1, 4])
def test_oracle_and_ledger_agree_under_every_bound_and_autoreset(
    tmp_path: Path, bound: int, autoreset: str
) -> None:
    config = oracle_config(
        tmp_path / "record",
        env={"vector_kwargs": {"autoreset_mode": autoreset}},
        balance={"max_staleness": bound, "min_fragment_steps": 1},
    )
    histogram, ledger = watched(config, tmp_path, plain(30))
    assert 0 <= min(histogram) <= max(histogram) <= bound
    assert bound in histogram
    assert ledger.violations == 0


@pytest.mark.parametrize("interval", [2, 5])
def test_oracle_and_ledger_agree_when_not_every_version_is_published(
    tmp_path: Path, interval: int
) -> None:
    config = oracle_config(
        tmp_path / "record",
        weights={"publish_interval_updates": interval},
        balance={"max_staleness": 4},
    )
    histogram, ledger = watched(config, tmp_path, plain(60))
    assert max(histogram) <= 4
    assert ledger.unpublished_updates > 20
    assert ledger.violations == 0


@pytest.mark.parametrize("nats", [0.05, 0.5, 0.95, 9.0])
@pytest.mark.parametrize("bound", [0, 2, 6])
def test_oracle_and_ledger_agree_when_versions_are_published_by_divergence(
    tmp_path: Path, bound: int, nats: float
) -> None:
    """The oracle measures random divergences up to 1 nat: 9 nats are never exceeded."""
    config = oracle_config(
        tmp_path / "record",
        actors={"count": 2},
        weights={"publish": "divergence", "divergence_nats": nats},
        balance={"max_staleness": bound},
    )
    histogram, ledger = watched(config, tmp_path, plain(60))
    assert 0 <= min(histogram) <= max(histogram) <= bound
    assert ledger.violations == 0
    # B = 2 and two actors take two batches of credits, so the largest lag is bound - 1.
    if bound < 2:
        assert ledger.unpublished_updates == 0
    elif nats >= 0.5:  # below it, all of 60 divergences may be larger
        assert ledger.unpublished_updates > 0
    if nats > 1.0 and bound:
        assert ledger.publishes - 1 == ledger.updates // bound


def test_oracle_and_ledger_agree_when_loading_weights_takes_long(tmp_path: Path) -> None:
    histogram, ledger = watched(
        oracle_config(
            tmp_path / "record", algorithm={"load_s": 0.003}, balance={"max_staleness": 3}
        ),
        tmp_path,
        plain(40),
    )
    assert max(histogram) <= 3
    assert ledger.violations == 0


async def meddle(run: Run, dice: random.Random) -> None:
    """Change everything that shapes balance, at random moments."""
    batches = 2
    for _ in range(25):
        await until(run, run.exchange.ledger.snapshot().updates + dice.randrange(6))
        match dice.randrange(7):
            case 0 | 1 | 2:
                run.control.change(
                    {"balance": {"max_staleness": dice.choice([0, 1, 2, 8, "unbounded"])}},
                    source="test",
                )
            case 3:
                run.control.change(
                    {
                        "weights": {
                            "publish_interval_updates": dice.choice([1, 3, 7]),
                            "divergence_nats": dice.choice([0.1, 0.9, 9.0]),
                        }
                    },
                    source="test",
                )
            case 4:
                batches = dice.choice([1, 2, 4])
                run.control.change(
                    {"balance": {"credits": None}, "algorithm": {"batch_trajectories": batches}},
                    source="test",
                )
            case 5:
                run.control.change(
                    {"balance": {"credits": dice.choice([None, batches, 3 * batches])}},
                    source="test",
                )
            case 6:
                run.control.change(
                    {
                        "balance": {
                            "controller": dice.choice(
                                ["staleness", "freshest", "open_loop", "lockstep"]
                            )
                        }
                    },
                    source="test",
                )
    await until(run, run.exchange.ledger.snapshot().updates + 10)


@pytest.mark.parametrize("publish", ["interval", "divergence"])
@pytest.mark.parametrize("seed", range(3))
def test_oracle_and_ledger_agree_over_delays_and_live_changes(
    tmp_path: Path, seed: int, publish: str
) -> None:
    dice = random.Random(seed)
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.0002, "length": 5},
        algorithm={"update_s": dice.choice([0.0, 0.002, 0.005])},
        actors={"count": 4, "rollout_steps": 6, "refresh": dice.choice(["step", "trajectory"])},
        balance={"max_staleness": 2, "min_fragment_steps": 2},
        weights={"publish": publish},
    )
    histogram, ledger = watched(config, tmp_path, lambda run: meddle(run, dice))
    assert min(histogram) >= 0
    assert len(histogram) > 2
    assert ledger.violations == 0


def test_violations_rise_when_the_check_at_use_and_the_sweep_are_bypassed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "admissible", lambda batch, version, bound: True)
    monkeypatch.setattr(Ledger, "_drop_expired", lambda ledger, at: None)

    async def lower(run: Run) -> None:
        await until(run, 20)
        run.control.change({"balance": {"max_staleness": 0}}, source="test")
        await until(run, run.exchange.ledger.snapshot().updates + 5)

    config = oracle_config(
        tmp_path / "record", algorithm={"update_s": 0.005}, balance={"max_staleness": 8}
    )
    histogram, ledger = watched(config, tmp_path, lower)
    assert max(histogram) > 0
    assert ledger.violations > 0


def test_a_run_resumed_at_version_10000_keeps_the_bound_and_goes_on_counting_from_there(
    tmp_path: Path,
) -> None:
    config = oracle_config(
        tmp_path / "record", balance={"max_staleness": 2}, run={"name": "long", "max_updates": 3}
    )
    api.train(config, runs_dir=tmp_path)
    store = CheckpointStore(tmp_path / "long" / "checkpoints", keep=9)
    staged, newest = store.stage(), store.newest()
    assert newest is not None
    manifest = {
        key: value
        for key, value in newest.manifest.items()
        if key not in ("format", "version", "created", "state")
    }
    file = write_state(staged, {"number": np.array([10_000])})
    store.publish(
        staged, version=Version(newest.version.lineage, 10_000), state=file, manifest=manifest
    )

    config = oracle_config(
        tmp_path / "later",
        balance={"max_staleness": 2},
        run={"name": "long", "max_updates": 10_030},
    )
    finished = api.train(config, resume=tmp_path / "long", runs_dir=tmp_path)
    seen = uses(tmp_path / "later")
    assert list(range(10_000, 10_030)) == [use.number for use in seen]
    assert (0, 0) == seen[0].ages
    assert 2 == max(age for use in seen for age in use.ages)
    assert (
        Counter(age for use in seen for age in use.ages).total()
        == finished.summary["trajectories"]["trained"]
    )
    assert (10_030, 0) == (finished.summary["updates"], finished.summary["staleness"]["violations"])


class PausedPolicy(VersionPolicy):
    """Does something in the middle of every load."""

    def __init__(self, action: ActionSpec) -> None:
        super().__init__(action)
        self.meanwhile: Callable[[], object] = lambda: None

    def load(self, flat: NDArray[np.uint8]) -> None:
        self.meanwhile()
        super().load(flat)


def words(number: int) -> NDArray[np.uint8]:
    return np.full(NBYTES // 8, number, np.int64).view(np.uint8)


def test_label_is_the_old_one_until_the_new_weights_act() -> None:
    policy, store = PausedPolicy(ActionSpec("discrete", (), "int64", (10,), (0,))), MemoryWeights()
    weights = PolicyWeights(reader=store, policy=policy, nbytes=NBYTES)
    store.publish(Version(1, 6), words(6))
    assert Version(1, 6) == weights.refresh()
    store.publish(Version(1, 7), words(7))
    seen = []
    policy.meanwhile = lambda: seen.append(
        (weights._version, policy.act({"": torch.zeros(1, 1)}, {}, None).action.tolist())
    )
    assert Version(1, 7) == weights.refresh()
    assert [(Version(1, 6), [6])] == seen
    assert [7] == policy.act({"": torch.zeros(1, 1)}, {}, None).action.tolist()
