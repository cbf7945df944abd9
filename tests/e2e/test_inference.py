"""Central inference in runs of several processes: servers are killed, stopped and slow, weights
change within trajectories, and every label stays true.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.e2e.test_failures import MANY, random_moment, sound
from tests.e2e.test_oracle import change, shaken
from tests.e2e.test_replay import apex
from tests.e2e.test_replay import kill as replay_kill
from tests.e2e.test_replay import sound as sound_with_replay
from tests.e2e.test_serve import service
from tests.support.oracle import oracle_config, until
from tianflow import api
from tianflow.coordinator import Run
from tianflow.core.process_table import carries, processes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
KILLS = int(os.environ.get("TIANFLOW_KILLS", "3"))
"""How often each fault happens in one run; more of them for a long look."""
STOPPED_S = float(os.environ.get("TIANFLOW_STOPPED_S", "7"))
"""How long a server is stopped that is replaced meanwhile; it is silent after 5 s."""
FLOW_S = 5.0
"""From the start of a server to the first steps that it chose."""
TRAJECTORIES = int(os.environ.get("TIANFLOW_ORACLE_TRAJECTORIES", "500"))
"""Trajectories of the oracle's shaken run at least; 20,000 for a long look."""
Metrics = Mapping[tuple[str, ...], float]
CENTRAL = {
    "actors__inference": "central",
    "inference__servers": 2,
    "inference__device": "cpu",
    "actors__count": 4,
    "balance__max_staleness": 4,
}


def reasons_of_drops(metrics: Metrics, before: Metrics = MappingProxyType({})) -> set[str]:
    """Why trajectories were dropped since the scrape ``before``."""
    return {
        key[1]
        for key, value in metrics.items()
        if key[0] == "trajectories_dropped_total" and value > before.get(key, 0.0)
    }


def servers_are_back(live: LiveRun, before: dict[str, int]) -> None:
    """Every server is another process than before, and steps flow within `FLOW_S`."""
    live.until(
        "the servers are back",
        lambda: all(live.pid(name) not in (None, pid) for name, pid in before.items()),
    )
    live.until("the run is ready", live.ready)
    steps = live.metric("run_env_steps")
    live.until("steps flow", lambda: live.metric("run_env_steps") > steps, within_s=FLOW_S)


def only_servers_failed(live: LiveRun, hosts: dict[str, int], before: Metrics) -> None:
    """No trajectory was lost, and each of ``hosts`` is the same process as before."""
    assert reasons_of_drops(sound(live), before) <= {"stopped"}
    assert hosts == {name: live.wait_for_pid(name) for name in hosts}


def other_hosts(live: LiveRun) -> dict[str, int]:
    return {name: live.wait_for_pid(name) for name in ("actors-0", "actors-1", "learner")}


def all_hosts(live: LiveRun) -> dict[str, int]:
    return other_hosts(live) | {name: live.wait_for_pid(name) for name in SERVERS}


SERVERS = ("inference-0", "inference-1")
PATIENT = CENTRAL | {"balance__straggler_patience": 120.0, "balance__max_staleness": 64}
"""Every server returns within this time, also on a machine that has other things to do. Updates take
milliseconds here, so under a small bound an actor that gets no core for a moment loses its
trajectory: it expires between the choice of the first action and the report of it.
"""


def failures(live: LiveRun) -> list[float]:
    """Batches that have failed, of each server."""
    return [live.metric("inference_failures_total", name) for name in SERVERS]


def actors_and_slots_that_are_added_are_served(live: LiveRun) -> None:
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
            for updates in range(12, 400, 4):  # actors in step with the learner may need more
                await until(run, updates)
                for slot in range(run.exchange.arena.slots):
                    versions = run.exchange.arena.views(slot)["version"]
                    spread.append(int(versions.max() - versions.min()))
                if max(spread) > 0:
                    break
            run.lifecycle.end("done", "test")
            await handle.wait()

    asyncio.run(whole())
    assert max(spread) > 0


def test_batches_that_fail_are_computed_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """The first ones for any reason, later ones for want of memory."""
    full = tmp_path / "full"
    settings = {
        "algorithm__name": "tests.e2e.troubled_ppo:ServerTroublePPO",
        "algorithm__full": str(full),
    }
    with harness.run(tmp_path, **MANY, **PATIENT, **settings) as live:
        live.until_training(more=20)
        start, descriptors, hosts = live.metrics(), live.descriptors(), all_hosts(live)

        def failed(more: int) -> None:
            before = failures(live)
            live.until(
                f"{more} more batches have failed at each server",
                lambda: all(
                    now >= then + more for now, then in zip(failures(live), before, strict=True)
                ),
            )

        failed(KILLS)
        live.until_training(more=20)
        only_servers_failed(live, hosts, start)
        full.touch()
        failed(KILLS + 1)  # the first one may be of the other kind
        earlier = live.metrics()
        live.until_training(more=20)
        only_servers_failed(live, hosts, start)
        assert 0.0 == live.restarts()
        now = live.metrics()
        requests, batches = (
            now[f"inference_batch_requests_{part}", SERVERS[0]]
            - earlier[f"inference_batch_requests_{part}", SERVERS[0]]
            for part in ("sum", "count")
        )
        assert requests == batches > 0  # every batch is the smallest then
        live.until("no descriptor is lost", lambda: live.descriptors() <= descriptors)


def test_replay_is_fed_by_servers_and_both_ledgers_stay_sound(tmp_path: Path) -> None:
    """Servers record the columns from which first priorities follow, so draws follow them."""
    with apex(tmp_path, **CENTRAL | {"balance__max_staleness": "unbounded"}) as live:
        live.until_training(more=20)
        for name in SERVERS:
            servers_are_back(live, {name: live.kill(name)})
            live.until_training(more=20)
            assert reasons_of_drops(sound_with_replay(live)) <= {"stopped", "died"}
        replay_kill(live, "replay-0", random.Random(1))
        metrics = sound_with_replay(live)
        assert metrics["trajectories_inserted_total",] > 0
        # Trajectories on their way to the shard are lost with it.
        assert reasons_of_drops(metrics) <= {"stopped", "died", "shard_lost"}


def test_two_runs_of_a_service_do_not_share_a_server(tmp_path: Path) -> None:
    """The loss of a server of one run delays that run only."""

    def server(run: str) -> int | None:
        mine = (entry.pid for entry in processes() if carries(entry.pid, "TIANFLOW_RUN", run))
        return next((pid for pid in mine if harness.command_of(pid) == "inference-0"), None)

    names = [f"{tmp_path.name}-{letter}" for letter in "ab"]
    with service(tmp_path / "runs", "--max-runs", "2") as served:
        for name in names:
            served.submit(name, **{**CENTRAL, "inference__servers": 1})
        served.until_training(*names)
        before = {
            name: served.until(f"a server of {name}", lambda n=name: server(n)) for name in names
        }
        assert before[names[0]] != before[names[1]]
        os.kill(before[names[0]], signal.SIGKILL)
        served.until("another server", lambda: server(names[0]) not in (None, before[names[0]]))
        served.until_training(*names)
        assert before[names[1]] == server(names[1])
        for name in names:
            assert 0 == served.run(name)["staleness"]["violations"]
        assert {} == served.run(names[1])["trajectories"]["dropped"]


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run with two servers, for tests that leave it ready, with the same actors and learner. It goes
    on until all tests have ended; only the outcomes of tests beside it come later.
    """
    with harness.run(tmp_path_factory.mktemp("live"), **MANY, **PATIENT) as live:
        live.until_training(more=20)
        yield live


def test_servers_that_are_stopped_for_a_moment_delay_their_actors_only(live: LiveRun) -> None:
    rng = random.Random(8)
    before, restarts, hosts = live.metrics(), live.restarts(), all_hosts(live)
    for _ in range(KILLS):
        random_moment(rng)
        harness.stop_and_continue(live, rng.choice(SERVERS), seconds=1.0)
        live.until_training(more=5)
    only_servers_failed(live, hosts, before)
    assert restarts == live.restarts()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("names", [SERVERS[:1], SERVERS], ids=["one", "all"])
def test_lost_servers_come_back_and_nothing_else_is_lost(
    live: LiveRun, names: tuple[str, ...], number: signal.Signals
) -> None:
    """A server that is stopped is replaced once it is silent, and is continued as a dead one.
    Readiness names servers that are missing.
    """
    rng = random.Random(7)
    dropped, descriptors, hosts = live.metrics(), live.descriptors(), other_hosts(live)
    for _ in range(KILLS if number == signal.SIGKILL else max(1, KILLS // 6)):
        random_moment(rng)
        before = {name: live.kill(name, number) for name in names}
        reason = live.until("it is not ready", live.why_not_ready)
        assert any(name in reason for name in names)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_S)  # how long they stand still is the experiment
            for pid in before.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        servers_are_back(live, before)
        live.until_training(more=5)
        sound(live)
    only_servers_failed(live, hosts, dropped)
    assert live.metric("inference_requests_total", "inference-0") > 0
    live.until("no descriptor is lost", lambda: live.descriptors() <= descriptors)


def test_a_server_that_is_slower_than_patience_costs_trajectories_only(live: LiveRun) -> None:
    """At most those whose actions it chooses: they block the batches of the others."""
    before, restarts, hosts = live.metrics(), live.restarts(), all_hosts(live)
    live.patch("balance", straggler_patience=0.2, max_staleness=4)
    for _ in range(2):
        harness.stop_and_continue(live, SERVERS[0], seconds=2.0)
        live.until_training(more=20)
        sound(live)
    assert reasons_of_drops(live.metrics(), before) <= {"straggler", "expired", "stopped"}
    assert restarts == live.restarts()
    assert hosts == all_hosts(live)
    patient = {key: PATIENT[f"balance__{key}"] for key in ("straggler_patience", "max_staleness")}
    live.patch("balance", **patient)


@pytest.mark.beside
def test_central_inference_is_exact_over_kills_cuts_and_live_changes(tmp_path: Path) -> None:
    dice = random.Random(3)
    config = oracle_config(
        tmp_path / "record",
        env={"seconds": 0.002, "slow_share": 0.05, "factor": 20.0, "length": 12},
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
        if dice.random() < 0.2:
            run.control.pause(source="test")
            asyncio.get_running_loop().call_later(0.3, lambda: run.control.resume(source="test"))

    run = asyncio.run(
        shaken(tmp_path, config, victims, dice, change_waits, trajectories=TRAJECTORIES)
    )
    ledger = run.exchange.ledger.snapshot()
    assert 0 == ledger.violations
    assert ledger.cuts > 0
    assert ledger.trained >= TRAJECTORIES


@pytest.mark.beside
def test_more_actors_a_new_lineage_and_a_resumed_run_are_served(tmp_path: Path) -> None:
    with harness.run(tmp_path, **MANY, **CENTRAL) as first:
        first.until_training(more=20)
        actors_and_slots_that_are_added_are_served(first)
        first.patch("actors", count=4)
        first.until_checkpoint()
        first.kill("learner")
        first.until("a new lineage", lambda: 2 == first.status()["versions"]["learner"]["lineage"])
        first.until_training(more=20)
        sound(first)
        assert 130 == first.interrupt()
        updates = first.result["updates"]
    with harness.resumed(first) as again:
        again.until_training(more=20)
        found = again.status()["versions"]["learner"]
        assert 3 == found["lineage"]
        assert updates < found["number"]
        assert again.metric("inference_requests_total", "inference-1") > 0
        servers_are_back(again, {"inference-1": again.kill("inference-1")})
        again.until_training(more=20)
        sound(again)
