"""A run with replay in real processes: whoever dies or stands still comes back, and draws keep to
their ratio.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tianflow.rundir.checkpoints import CheckpointStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
KILLS = int(os.environ.get("TIANFLOW_KILLS", "6"))
"""How often processes are killed in one run; more of them for a long look."""
APEX: dict[str, Any] = {
    "env__kwargs": {"length": 20},
    "env__num_envs": 4,
    "algorithm__epochs": None,
    "algorithm__minibatch_size": None,
    "algorithm__batch_size": 64,
    "replay__shards": 2,
    "replay__capacity": 8000,
    "replay__min_size": 500,
    "replay__samples_per_insert": 4.0,
    "run__max_restarts": 1000,
    "run__restart_window_s": 0.5,
    "checkpoint__every_s": 3600.0,
}
"""A small run whose shards fill within seconds, and whose environments wait most of the time.
Restarts are not counted for long.
"""
BAND = 2 * (4.0 * (16 + 3 + 1) * 4 + 64)
"""Draws between the two ends of the narrowest band."""


def apex(folder: Path, **settings: object) -> Any:
    return harness.run(folder, "cartpole_apex", **{**APEX, **settings})


def sound(live: LiveRun) -> dict[tuple[str, ...], float]:
    """The identities of both ledgers hold at this scrape."""
    metrics = live.metrics()
    dropped, discarded = (
        total(metrics, "trajectories_dropped_total"),
        total(metrics, "replay_items_discarded_total"),
    )
    begun, inserted, open_ = (
        metrics[f"trajectories_{key}",] for key in ("begun_total", "inserted_total", "open")
    )
    assert begun == inserted + dropped + open_
    drawn, trained, held = (
        metrics[f"replay_items_{key}",] for key in ("drawn_total", "trained_total", "held")
    )
    assert drawn == trained + discarded + held
    assert metrics["replay_items_inserted_total",] - metrics[
        "replay_items_removed_total",
    ] == total(metrics, "replay_items")
    assert 0.0 == metrics["staleness_violations_total",]
    assert metrics["credits_in_use",] <= metrics["slots",]
    return metrics


def total(metrics: dict[tuple[str, ...], float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key[0] == name)


def kill(live: LiveRun, host: str, rng: random.Random) -> None:
    """At a random moment; back again, and training."""
    pid = live.wait_for_pid(host)
    time.sleep(0.2 * rng.random())  # the moment is to be any
    os.kill(pid, signal.SIGKILL)
    live.until(f"{host} is reaped", lambda: pid not in live.descendants())
    sound(live)
    live.until(
        f"{host} is back",
        lambda: live.pid(host) and live.ready() and live.metric("replay_shards") == 2.0,
    )
    live.until_training(more=10)
    sound(live)


def test_lost_and_stopped_processes_come_back_and_both_ledgers_stay_sound(tmp_path: Path) -> None:
    """Shards, learners and actors of one run, which ends with a shard that stands still."""
    rng = random.Random(KILLS)
    settings = {"balance__max_staleness": 30, "replay__min_size": 100}
    with apex(tmp_path, env__step_timeout_s=1.0, run__grace_s=2.0, **settings) as live:
        live.until_training(more=20)
        killed_shards_cost_their_items_only(live, rng)
        nothing_of_a_lost_lineage_is_trained_on(live, rng)
        kill(live, "actors-0", rng)
        live.patch("balance", max_staleness="unbounded")
        training_waits_while_no_shard_is_left(live)
        a_shard_that_stands_still_for_long_is_replaced(live)
        live.kill("replay-0", signal.SIGSTOP)
        assert 130 == live.interrupt()  # the grace time for leaving, and for being reaped
        assert 0 == live.result["trajectories"]["open"]
        assert 0 == live.result["replay"]["held"]
        assert "Traceback" not in live.stderr
        assert CheckpointStore.load(live.checkpoints()[-1]).version.number == live.result["updates"]


def killed_shards_cost_their_items_only(live: LiveRun, rng: random.Random) -> None:
    for _ in range(KILLS // 2):
        kill(live, rng.choice(["replay-0", "replay-1"]), rng)
    assert 1 == live.status()["versions"]["learner"]["lineage"]
    assert KILLS // 2 == restarts_of_shards(live)


def restarts_of_shards(live: LiveRun) -> float:
    return sum(
        value
        for key, value in live.metrics().items()
        if key[0] == "component_restarts_total" and "replay" in str(key)
    )


def nothing_of_a_lost_lineage_is_trained_on(live: LiveRun, rng: random.Random) -> None:
    """Under a bound. Its numbers begin again at that of the checkpoint, so that old items would look
    young.
    """
    live.until_checkpoint()
    live.until_training(more=50)
    before = lost_with_lineages(sound(live))
    kill(live, "learner", rng)
    assert 2 == live.status()["versions"]["learner"]["lineage"]
    live.until_training(more=50)
    assert lost_with_lineages(sound(live)) > before
    live.patch("balance", max_staleness=3)
    live.until_training(more=20)
    live.patch("balance", max_staleness="unbounded")
    live.until_training(more=20)
    # Which version of which lineage an item is of, no shard knows any more.
    live.patch("balance", max_staleness=30)
    live.until_training(more=20)
    sound(live)


def lost_with_lineages(metrics: dict[tuple[str, ...], float]) -> float:
    return metrics["trajectories_dropped_total", "lineage"] + metrics["replay_items_removed_total",]


def training_waits_while_no_shard_is_left(live: LiveRun) -> None:
    for host in ("replay-0", "replay-1"):
        os.kill(live.wait_for_pid(host), signal.SIGKILL)
    live.until("both are back", lambda: live.metric("replay_shards") == 2.0 and live.ready())
    live.until_training(more=20)
    sound(live)


def a_shard_that_stands_still_for_long_is_replaced(live: LiveRun) -> None:
    """One that does so for a moment only holds training up."""
    before = live.restarts()
    harness.stop_and_continue(live, "replay-0", seconds=1.0)
    live.until_training(more=20)
    assert before == live.restarts()
    sound(live)
    pid = live.kill("replay-1", signal.SIGSTOP)
    live.until("a restart", lambda: live.restarts() == before + 1.0)
    assert pid not in live.descendants()
    live.until_training(more=20)
    sound(live)


def test_a_killed_coordinator_leaves_nothing_and_its_run_goes_on_by_resume_with_what_was_kept_of_replay(
    tmp_path: Path,
) -> None:
    settings = {"checkpoint__replay": True, "replay__samples_per_insert": 1.0}
    with apex(tmp_path, **settings, replay__min_size=100, replay__capacity=4000) as first:
        first.until(
            "full shards",
            lambda: total(first.metrics(), "replay_items") > 3500,
            within_s=harness.START_S,
        )
        first.until_checkpoint()
        first.kill("replay-0")  # what is kept is of the checkpoint, not of the end
        first.process.kill()
        first.process.wait()
        harness.nothing_left(first, set())
    saved = CheckpointStore.load(first.checkpoints()[-1])
    with harness.resumed(first) as again:
        again.until(
            "both shards", lambda: again.metric("replay_shards") == 2.0, within_s=harness.START_S
        )
        again.until(
            "what they bring back",
            lambda: held_beyond(again.metrics(), saved.manifest["env_steps"]) > 2000,
        )
        again.until_training(more=20)
        status = again.status()
        assert saved.version.lineage < status["versions"]["learner"]["lineage"]
        assert saved.version.number < status["versions"]["learner"]["number"]
        assert saved.manifest["env_steps"] < status["progress"]["env_steps"]
        sound(again)
        kill(
            again, "replay-1", random.Random(0)
        )  # it begins empty now, or what it holds would not be what was inserted
        assert 130 == again.interrupt()


def held_beyond(metrics: dict[tuple[str, ...], float], steps: int) -> float:
    """Items in the shards but for those that can be of steps made since there were ``steps`` of
    them.
    """
    return total(metrics, "replay_items") - (metrics.get(("run_env_steps",), float("inf")) - steps)


def ratio(live: LiveRun, *, inserts: int) -> tuple[float, float]:
    """Draws for each insert, from now on over so many inserts, and what the band may add to that or
    take from it.
    """
    before = sound(live)

    def over() -> dict[tuple[str, ...], float] | None:
        now = live.metrics()
        return (
            now
            if now["replay_items_inserted_total",] - before["replay_items_inserted_total",]
            >= inserts
            else None
        )

    now = live.until(f"{inserts} inserts", over)
    drawn, inserted = (
        now[f"replay_items_{key}_total",] - before[f"replay_items_{key}_total",]
        for key in ("drawn", "inserted")
    )
    return drawn / inserted, BAND / inserted


@pytest.mark.beside
def test_draws_keep_to_their_ratio_whoever_is_faster_and_to_another_one_at_once(
    tmp_path: Path,
) -> None:
    faster = {"length": 20, "seconds": 0.0005}  # thousands of inserts are counted
    with apex(tmp_path, env__kwargs=faster, actors__hosts=1) as live:
        live.until_training(more=20)
        for changes in (
            {},
            {"actors": {"count": 1}},
            {"actors": {"count": 3}},
            {"learner": {"slowdown": 2.0}},
            {"learner": {"slowdown": 0.0}},
        ):
            for section, values in changes.items():
                live.patch(section, **values)
            found, band = ratio(live, inserts=3000)
            assert 4.0 - band <= found <= 4.0 + band
        live.patch("replay", samples_per_insert=1.0)
        found, band = ratio(live, inserts=6000)
        assert 1.0 - band <= found <= 1.0 + band
        live.act("pause")
        live.until("everyone rests", lambda: live.status()["state"] == "paused")
        before = live.until("nothing moves", lambda: still(live))
        assert before == live.metric("learner_updates_total")
        live.act("resume")
        live.until_training(more=20)
        # A retired actor gives back what it had begun; the drain drops nothing.
        given_back = {
            key[1]: int(n)
            for key, n in sound(live).items()
            if key[0] == "trajectories_dropped_total" and n
        }
        live.act("drain")
        assert 0 == live.end()
        kept = live.result["trajectories"]
        assert (0, given_back) == (kept["open"], kept["dropped"])
        assert set(given_back) <= {"stopped"}
        assert kept["begun"] == kept["inserted"] + sum(given_back.values())


def still(live: LiveRun) -> float | None:
    before = live.metric("learner_updates_total")
    time.sleep(0.5)  # that nothing happens meanwhile is the fact
    return before if before == live.metric("learner_updates_total") else None
