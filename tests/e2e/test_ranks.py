"""A learner of several processes: they train as one, and end as one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.harness import LiveRun, run
from tests.e2e.test_oracle import shaken
from tests.e2e.test_replay import apex, sound
from tests.support.oracle import oracle_config, uses
from tianflow.coordinator import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
KILLS = int(os.environ.get("TIANFLOW_RANK_KILLS", "3"))
"""Processes that are killed, one of each kind; 20 take three minutes."""
TWO = {"learner__ranks": 2, "algorithm__batch_trajectories": 2, "algorithm__minibatch_size": 64}


def change(live: Run, dice: random.Random) -> None:
    options: list[Mapping[str, Mapping[str, object]]] = [
        {"balance": {"max_staleness": dice.choice([0, 1, 2, 8])}},
        {"algorithm": {"batch_trajectories": dice.choice([2, 4])}},
        {"weights": {"publish_interval_updates": dice.choice([1, 3])}},
    ]
    live.control.change(dice.choice(options), source="test")


def ranks(live: LiveRun) -> tuple[int | None, int | None]:
    return live.pid("learner"), live.pid("learner-1")


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run of two ranks for three tests; the last of them ends it."""
    with run(tmp_path_factory.mktemp("ranks"), checkpoint__every_s=0.5, **TWO) as live:
        live.until_training(more=5)
        yield live


def test_a_rank_that_is_stopped_for_a_moment_delays_the_others_only(live: LiveRun) -> None:
    before = ranks(live)
    assert before[1] is not None
    os.kill(before[1], signal.SIGSTOP)
    live.until("no update ends", lambda: stands_still(live))
    os.kill(before[1], signal.SIGCONT)
    live.until_training(more=5)
    assert before == ranks(live)
    assert 0 == live.status()["staleness"]["violations"]


def stands_still(live: LiveRun) -> bool:
    """No update has ended for a second. Before, one took milliseconds."""
    before = live.status()["progress"]["updates"]
    time.sleep(1.0)  # the absence of updates is what is looked for
    return bool(live.status()["progress"]["updates"] == before)


def test_a_rank_that_does_not_answer_ends_the_group_which_starts_again(live: LiveRun) -> None:
    live.until_checkpoint()
    before = ranks(live)
    assert before[1] is not None
    os.kill(before[1], signal.SIGSTOP)
    live.until(
        "two other processes",
        lambda: all(pid is not None for pid in ranks(live)) and not set(before) & set(ranks(live)),
    )
    live.until_training(more=5)
    assert 0 == live.status()["staleness"]["violations"]


def test_a_resumed_run_may_have_another_number_of_ranks(live: LiveRun) -> None:
    """A checkpoint does not depend on it."""
    assert 130 == live.interrupt()
    updates = live.result["updates"]
    for count in (1, 2):
        arguments = ("--resume", live.name, f"learner.ranks={count}")
        again = LiveRun(live.folder, {}, arguments, live.name)
        try:
            again.until_training(more=5)
            assert (count == 2) == (again.pid("learner-1") is not None)
            assert 130 == again.interrupt()
        finally:
            again.process.kill()
        assert again.result["updates"] > updates
        updates = again.result["updates"]


@pytest.mark.beside
def test_ranks_share_a_draw_and_return_its_priorities(tmp_path: Path) -> None:
    with apex(tmp_path / "runs", learner__ranks=2) as live:
        live.until_training(more=30)
        sound(live)
        assert all(pid is not None for pid in ranks(live))
        assert 130 == live.interrupt()


@pytest.mark.beside
def test_no_trajectory_is_lost_or_too_old_while_ranks_are_killed(tmp_path: Path) -> None:
    """Under live bounds and sizes of batches; the record of the oracle agrees with the ledger."""
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.002, "slow_share": 0.05, "factor": 20.0, "length": 12},
        algorithm={
            "name": "tests.e2e.ranked:RankedOracle",
            "update_s": 0.004,
            "batch_trajectories": 2,
        },
        learner={"ranks": 2},
        actors={"count": 4, "hosts": 2, "rollout_steps": 8, "refresh": "step"},
        balance={"max_staleness": 2, "min_fragment_steps": 1},
        placement={"launcher": "processes", "affinity": "none"},
        checkpoint={"every_s": 1.0},
        run={"max_restarts": 100},
    )
    victims = [("learner-1", "learner", "actors-0")[kill % 3] for kill in range(KILLS)]

    live = asyncio.run(shaken(tmp_path, config, victims, random.Random(1), change))
    lost = sum(victim.startswith("learner") for victim in victims)
    assert 0 == live.exchange.ledger.snapshot().violations
    assert 1 + lost == len({use.pid for use in uses(tmp_path / "record")})
    restarts = live.hosts.restarts
    assert lost == sum(
        count
        for (host, reason), count in restarts.items()
        if host.startswith("learner") and reason == "rank_lost"
    )
