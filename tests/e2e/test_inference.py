"""Central inference in runs of several processes: servers are killed, stopped and slow, weights
change within trajectories, and every label stays true.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.e2e.test_failures import MANY, random_moment, sound
from tests.e2e.test_oracle import change, shaken
from tests.support.oracle import oracle_config, until
from tianflow import api
from tianflow.coordinator import Run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
KILLS = int(os.environ.get("TIANFLOW_KILLS", "3"))
CENTRAL = {
    "actors__inference": "central",
    "inference__servers": 2,
    "inference__device": "cpu",
    "actors__count": 4,
    "balance__max_staleness": 4,
}


def servers_are_back(live: LiveRun, before: dict[str, int]) -> None:
    """Every server is another process than before, and steps flow."""
    live.until(
        "the servers are back",
        lambda: all(live.pid(name) not in (None, pid) for name, pid in before.items()),
    )
    live.until("the run is ready", live.ready)
    live.until_training(more=20)


def test_killed_servers_come_back_and_nothing_else_is_lost(tmp_path: Path) -> None:
    rng = random.Random(7)
    with harness.run(tmp_path, **MANY, **CENTRAL) as live:
        live.until_training(more=20)
        descriptors = live.descriptors()
        hosts = {name: live.wait_for_pid(name) for name in ("actors-0", "actors-1", "learner")}
        for number in range(KILLS):
            names = ["inference-0", "inference-1"][: 1 + number % 2]  # one, or all at once
            random_moment(rng)
            before = {name: live.kill(name) for name in names}
            servers_are_back(live, before)
            sound(live)
        # a server that is stopped for a moment delays its actors, and one that stays so is replaced
        harness.stop_and_continue(live, "inference-1", seconds=1.0)
        live.until_training(more=20)
        servers_are_back(live, {"inference-0": live.kill("inference-0", signal.SIGSTOP)})
        metrics = sound(live)
        assert {} == {
            key: value
            for key, value in metrics.items()
            if key[0] == "trajectories_dropped_total" and value and key[1] != "stopped"
        }
        assert hosts == {name: live.wait_for_pid(name) for name in hosts}
        assert metrics["inference_requests_total", "inference-0"] > 0
        live.until("no descriptor is lost", lambda: live.descriptors() <= descriptors)


def test_readiness_names_the_servers_that_are_missing(tmp_path: Path) -> None:
    with harness.run(tmp_path, **MANY, **CENTRAL) as live:
        live.until_training(more=5)
        for name in ("inference-0", "inference-1"):
            live.kill(name, signal.SIGSTOP)
        reason = live.until("it is not ready", live.why_not_ready)
        assert "inference-" in reason
        # actors that wait for a server do not count as hung environments
        servers_are_back(live, {})
        assert 0 == sum(
            value
            for key, value in live.metrics().items()
            if key[0] == "component_restarts_total" and "env_hang" in key
        )


def test_actors_and_slots_that_are_added_are_served(tmp_path: Path) -> None:
    with harness.run(tmp_path, **MANY, **CENTRAL) as live:
        live.until_training(more=20)
        slots = live.metric("slots")
        live.patch("actors", count=12)
        live.patch("balance", max_staleness=16)
        live.until("twelve actors report", lambda: 12.0 == live.metric("actors"))
        live.until("there are more slots", lambda: live.metric("slots") > slots)

        def all_have_worked() -> bool:
            counted = live.metrics()
            return all(
                counted.get(("actor_trajectories_total", f"actor-{index}"), 0.0) > 0.0
                for index in range(12)
            )

        live.until("each of them has made a trajectory", all_have_worked)
        sound(live)
        live.patch("actors", count=1)
        live.until("one is left", lambda: 1.0 == live.metric("actors"))
        live.until_training(more=20)
        sound(live)


def test_a_server_that_is_slower_than_patience_costs_trajectories_only(tmp_path: Path) -> None:
    settings = {**CENTRAL, "inference__servers": 1, "balance__straggler_patience": 0.2}
    with harness.run(tmp_path, **MANY, **settings) as live:
        live.until_training(more=20)
        for _ in range(2):
            harness.stop_and_continue(live, "inference-0", seconds=2.0)
            live.until_training(more=20)
            sound(live)
        assert 0.0 == live.restarts()


def test_central_inference_is_exact_over_kills_cuts_and_live_changes(tmp_path: Path) -> None:
    dice = random.Random(3)
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.001, "slow_share": 0.05, "factor": 20.0, "length": 12},
        algorithm={"update_s": 0.004},
        actors={"count": 4, "hosts": 2, "rollout_steps": 8, "inference": "central"},
        inference={"servers": 2, "device": "cpu"},
        balance={"max_staleness": 2, "min_fragment_steps": 1},
        placement={"launcher": "processes", "affinity": "none"},
        checkpoint={"every_s": 1.0},
        run={"max_restarts": 100},
    )
    victims = ["inference-0", "learner", "actors-1", "inference-1"]

    def change_waits(run: Run, dice: random.Random) -> None:
        change(run, dice)
        waits = {"inference": {"max_wait_s": dice.choice([0.0, 0.001, 0.01])}}
        run.control.change(waits, source="test")

    run = asyncio.run(shaken(tmp_path, config, victims, dice, change_waits))
    assert 0 == run.exchange.ledger.snapshot().violations


def test_rows_of_one_trajectory_have_the_versions_of_their_batches(tmp_path: Path) -> None:
    """The oracle checks each label against its action; here versions change within trajectories."""
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.002, "jitter": False},
        actors={"count": 2, "rollout_steps": 64, "inference": "central"},
        inference={"device": "cpu"},
        balance={"max_staleness": 16, "min_fragment_steps": 1},
        placement={"launcher": "inline"},
    )
    spread: list[int] = []

    async def whole() -> None:
        async with api.open_run(config, runs_dir=tmp_path) as handle:
            run = handle.run
            await until(run, 30)
            for slot in range(run.exchange.arena.slots):
                versions = run.exchange.arena.views(slot)["version"]
                spread.append(int(versions.max() - versions.min()))
            run.lifecycle.end("done", "test")
            await handle.wait()

    asyncio.run(whole())
    assert max(spread) > 0
