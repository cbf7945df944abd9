"""Processes are killed and stopped, disks fill, ports are taken: what the failure table promises,
seen from outside.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import tianflow
from tests.e2e import harness
from tests.e2e.harness import LiveRun, until
from tests.e2e.test_signals import SLOW_TO_SAVE
from tests.support.settings import cartpole
from tianflow.errors import ConfigError
from tianflow.rundir.checkpoints import STATE, CheckpointStore
from tianflow.rundir.history import NAME, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
CYCLES = int(os.environ.get("TIANFLOW_CYCLES", "4"))
"""Starts and kills of one run; with four, each of the moments has its turn. 20 take two and a half
minutes.
"""
KILLS = int(os.environ.get("TIANFLOW_KILLS", "3"))
"""How often each kind of process is killed in one run; more of them for a long look."""
MANY = {
    "run__max_restarts": 1000,
    "run__restart_window_s": 0.5,
    "checkpoint__every_s": 1.0,
    "checkpoint__keep": 2,
}
"""Restarts are not counted for long, so there is neither an end of the budget nor a back-off to
wait for.
"""


def random_moment(rng: random.Random) -> None:
    """Let a part of a few trajectories and updates pass."""
    time.sleep(rng.random() * 0.1)


def sound(live: LiveRun) -> dict[tuple[str, ...], float]:
    """The identities of the ledger hold at this scrape, and the bound was never broken."""
    metrics = live.metrics()
    dropped = sum(value for key, value in metrics.items() if key[0] == "trajectories_dropped_total")
    begun, trained, open_ = (
        metrics[f"trajectories_{key}",] for key in ("begun_total", "trained_total", "open")
    )
    assert begun == trained + dropped + open_
    assert 0.0 == metrics["staleness_violations_total",]
    assert metrics["credits_in_use",] <= metrics["slots",]
    return metrics


def kill_again_and_again(live: LiveRun, host: str, times: int, rng: random.Random) -> None:
    for _ in range(times):
        pid = live.wait_for_pid(host)
        random_moment(rng)
        os.kill(pid, signal.SIGKILL)
        live.until(f"{host} is reaped", lambda pid=pid: pid not in live.descendants())
        sound(live)
    live.until(
        "everyone is back", lambda: live.pid(host) and live.ready() and 2.0 == live.metric("actors")
    )


def learned(live: LiveRun) -> int:
    """Number of updates whose loss is in the history."""
    rows = read_rows(live.directory / NAME)
    return sum(row["learning"].get("train/loss", {}).get("count", 0) for row in rows)


def goes_on_in_a_new_lineage_from_the_last_checkpoint(live: LiveRun) -> None:
    """The learner is lost."""
    saved = CheckpointStore.load(live.until_checkpoint()).version
    live.until_training(more=30)
    before = live.status()["versions"]["learner"]
    assert (saved.lineage, 1) == (before["lineage"], 1)
    live.kill("learner")
    counted = learned(live)
    live.until("a new lineage", lambda: live.status()["versions"]["learner"]["lineage"] == 2)
    assert saved.number <= live.status()["versions"]["learner"]["number"]
    live.until_training(more=10)
    live.until("losses of the new lineage", lambda: learned(live) > counted + 5)
    # of the lost learner those that it had not reported are missing, and none counts twice
    assert learned(live) <= live.metric("learner_updates_total")
    assert 2 == CheckpointStore.load(live.until_checkpoint()).version.lineage
    sound(live)


def test_a_lost_learner_costs_a_lineage_and_a_full_disk_checkpoints_and_not_the_run(
    tmp_path: Path,
) -> None:
    with harness.run(tmp_path, **MANY | {"checkpoint__every_s": 3600.0}) as live:
        live.until_training(more=5)
        goes_on_in_a_new_lineage_from_the_last_checkpoint(live)
        goes_on_without_checkpoints_while_the_disk_is_full(live)
        assert 1 == live.interrupt()
        assert "Traceback" not in live.stderr


def goes_on_without_checkpoints_while_the_disk_is_full(live: LiveRun) -> None:
    before = live.checkpoints()
    learner = live.wait_for_pid("learner")
    unlimited = resource.prlimit(learner, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    live.act("checkpoint")
    live.until("a failure is counted", lambda: live.metric("checkpoint_failures_total") == 1.0)
    assert "a checkpoint failed" in live.stderr
    assert "File too large" in live.stderr
    live.until_training(more=10)
    assert before == live.checkpoints()
    assert [] == live.staged()
    resource.prlimit(learner, resource.RLIMIT_FSIZE, unlimited)
    live.until_checkpoint()
    shutil.rmtree(live.directory / "checkpoints")
    (live.directory / "checkpoints").touch()  # a file: root cannot write into it, either
    live.act("checkpoint")
    live.until(
        "another failure is counted", lambda: live.metric("checkpoint_failures_total") == 2.0
    )
    live.until_training(more=10)


def descriptors(live: LiveRun) -> Counter[str]:
    """What the coordinator and its hosts hold open, by kind."""
    found: Counter[str] = Counter()
    for pid in {live.process.pid, *live.descendants()}:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[re.sub(r"[0-9a-f]{32}|[\d\[\]]+", "", str(path.readlink()))] += 1
    return found


def kill_coordinator(live: LiveRun) -> None:
    live.process.kill()
    live.process.wait()
    harness.nothing_left(live, set())  # a fork server that imports PyTorch hears of it afterwards


# Standing still
# --------------------------------------------------------------------------------------------------


def resident(live: LiveRun) -> int:
    """Bytes of memory that the coordinator has to itself."""
    fields = Path(f"/proc/{live.process.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith("Private"))


def test_a_stopped_learner_paces_the_actors_and_readiness_says_why(tmp_path: Path) -> None:
    with harness.run(tmp_path, balance__max_staleness=2, run__grace_s=2.0) as live:
        live.until_training(more=10)
        pid = live.kill("learner", signal.SIGSTOP)
        reason = live.until("readiness says why", live.why_not_ready)
        assert "host 'learner' has said nothing" in reason
        live.until(
            "the queue is full",
            lambda: live.metric("credits_in_use") == live.metric("credits_limit"),
        )
        stuck = sound(live)
        memory = resident(live)
        lines = len(read_rows(live.directory / NAME))
        live.until(
            "the coordinator goes on", lambda: len(read_rows(live.directory / NAME)) >= lines + 2
        )
        later = sound(live)
        assert stuck["trajectories_begun_total",] == later["trajectories_begun_total",]
        assert later["credits_in_use",] <= later["credits_limit",]
        assert resident(live) - memory < 8 * 2**20
        assert 0.0 == live.restarts()
        os.kill(pid, signal.SIGCONT)
        live.until("it is ready again", live.ready)
        live.until_training(more=10)
        live.kill("learner", signal.SIGSTOP)
        live.until(
            "the queue is full",
            lambda: live.metric("credits_in_use") == live.metric("credits_limit"),
        )
        # the learner is never continued, so its last updates are lost
        assert 1 == live.interrupt()
        assert 0 < live.stderr.count("the end of the run skips a step")


def test_a_drain_does_not_wait_for_a_stopped_learner(tmp_path: Path) -> None:
    with harness.run(tmp_path, balance__max_staleness=2, run__grace_s=2.0) as live:
        live.until_training(more=10)
        live.kill("learner", signal.SIGSTOP)
        live.until(
            "the queue is full",
            lambda: live.metric("credits_in_use") == live.metric("credits_limit"),
        )
        live.act("drain")
        assert 1 == live.end()  # what it has learned could not be kept
        assert ("done", "drained") == (live.result["state"], live.result["reason"])
        assert (live.result["checkpoint"] or 0) < live.result["updates"]


def test_a_drain_trains_on_what_was_begun_and_ends_though_an_environment_never_closes(
    tmp_path: Path,
) -> None:
    """With an evaluation and a checkpoint."""
    with harness.run(
        tmp_path,
        env__id="tests.support.environments:UnclosableEnv",
        balance__max_staleness=4,
        learner__slowdown=20.0,
        evaluation__episodes=2,
    ) as live:
        live.until(
            "a queue", lambda: live.metric("queue_trajectories") >= 2, within_s=harness.START_S
        )
        assert "did not close within" in live.stderr
        live.act("drain")
        assert 0 == live.end(), live.output()
        kept = live.result["trajectories"]
        assert (kept["begun"], 0, {}) == (kept["trained"], kept["open"], kept["dropped"])
        assert live.result["updates"] == CheckpointStore.load(live.checkpoints()[-1]).version.number
        assert 5.0 == live.result["evaluation"]["mean_return"]
        harness.nothing_left(live, set())


# Disk and network
# --------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        harness.run(tmp_path, http__port=taken.getsockname()[1]) as live,
    ):
        assert 2 == live.end()
        assert f"http.port = {taken.getsockname()[1]}: is in use on 127.0.0.1" in live.stderr
        assert "Traceback" not in live.stderr


@pytest.mark.timeout(900)
@pytest.mark.beside
def test_a_killed_coordinator_leaves_nothing_and_its_run_goes_on_by_resume(tmp_path: Path) -> None:
    """It is killed at one moment after the other. What a killed one left half-written is gone once
    the next has started. Memory, descriptors and files are as they were.
    """
    rng = random.Random(CYCLES)
    with harness.run(tmp_path, **MANY, **SLOW_TO_SAVE) as first:
        first.until_training(more=5)
        first.until_checkpoint()
        first.until_checkpoint()
        first.until("everyone is there", lambda: first.pid("evaluator") and first.ready())
        opened = descriptors(first)
        first.patch("balance", max_staleness=3)  # no checkpoint will have seen it
        first.until_training(more=5)
        kill_coordinator(first)
    half_written = set(first.staged())
    for cycle in range(CYCLES):
        with harness.resumed(first) as live:
            moments = {
                "it answers, and imports": lambda live=live: (
                    live.control and live.pid("tianflow-forks")
                ),
                "a learner": lambda live=live: live.pid("learner"),
                "an actor": lambda live=live: live.pid("actors-0"),
                "a checkpoint is being written": live.staged,
            }
            what = list(moments)[cycle % len(moments)]
            live.until(what, moments[what], within_s=3 * harness.START_S)
            random_moment(rng)
            kill_coordinator(live)
        half_written |= set(first.staged())
    good, torn = first.checkpoints()[-2:]
    state = torn / STATE
    state.write_bytes(bytes([*state.read_bytes()[:-1], state.read_bytes()[-1] ^ 1]))
    whole = CheckpointStore.load(good)
    with harness.resumed(first) as again:
        again.until_training(more=5)
        assert torn.name in again.stderr
        assert "a checkpoint is skipped" in again.stderr
        status = again.status()
        assert whole.version.lineage < status["versions"]["learner"]["lineage"]
        assert whole.version.number < status["versions"]["learner"]["number"]
        assert whole.manifest["env_steps"] < status["progress"]["env_steps"]
        assert 3 == status["staleness"]["bound"]
        assert status["staleness"]["max"] <= 3
        sound(again)
        again.until("everyone is there", lambda: again.pid("evaluator") and again.ready())
        more = lambda: descriptors(again) - opened  # noqa: E731 - what a failure tells of, too
        until("no more descriptors than at first", lambda: not more(), tell=lambda: str(more()))
        assert half_written.isdisjoint(again.staged())
        assert 130 == again.interrupt()
    assert [] == first.staged()
    assert {
        "audit.jsonl",
        "checkpoints",
        "config.toml",
        "history.jsonl",
        "metrics.jsonl",
        "summary.json",
    } >= {path.name for path in first.directory.iterdir()}
    assert 2 == len(first.checkpoints())


def test_run_after_run_in_one_process_costs_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    """Runs that end well, and runs that cannot start because their port is taken."""
    few = {
        "placement": {"launcher": "processes", "affinity": "none"},
        "run": {"max_updates": 2},
        "evaluation": {"episodes": 1},
    }
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(2):
            tianflow.train(cartpole(**few), runs_dir=tmp_path, http=True)
            with pytest.raises(ConfigError, match="is in use"):
                tianflow.train(
                    cartpole(**few, http={"port": taken.getsockname()[1]}),
                    runs_dir=tmp_path,
                    http=True,
                )
            gc.collect()
            seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))  # noqa: PTH208 - a count is wanted
    assert 1 == len(set(seen)), seen


# One run
# --------------------------------------------------------------------------------------------------


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run for tests that leave it ready, with two actors and bound 2. They are the last ones, because
    it goes on until all tests have ended.
    """
    settings = {"balance__max_staleness": 2, "env__step_timeout_s": 3.0, **MANY}
    with harness.run(tmp_path_factory.mktemp("live"), **settings) as live:
        live.until_training(more=20)
        yield live
        assert 130 == live.interrupt()
        assert 0 == live.result["trajectories"]["open"]


def test_killed_and_stopped_hosts_come_back_and_the_ledger_stays_sound(live: LiveRun) -> None:
    """Actor hosts, the evaluator, the learner and the fork server, again and again in one run."""
    rng = random.Random(KILLS)
    before, descriptors = live.restarts(), live.descriptors()
    for _ in range(KILLS):
        harness.stop_and_continue(
            live, rng.choice(["actors-0", "actors-1"]), seconds=0.2 * rng.random()
        )
        random_moment(rng)
        sound(live)
    assert before == live.restarts()
    for host, times in {
        "actors-0": KILLS // 2,
        "actors-1": KILLS - KILLS // 2,
        "evaluator": KILLS // 3,
    }.items():
        kill_again_and_again(live, host, times, rng)
    live.until_training(more=20)
    live.until_checkpoint()
    kill_again_and_again(live, "learner", KILLS, rng)
    live.until_training(more=20)
    for _ in range(
        KILLS // 3
    ):  # one that dies three times before it has forked anybody ends the run
        kill_again_and_again(live, "tianflow-forks", 1, rng)
        live.until_training(more=20)
    # Whether one that is killed holds a trajectory is chance: on until both kinds of loss were
    # seen, and counted.
    for host, reason in {"learner": "learner_lost", "actors-0": "died"}.items():
        while not sound(live).get(("trajectories_dropped_total", reason)):
            kill_again_and_again(live, host, 1, rng)
    live.until("no descriptor is lost", lambda: live.descriptors() <= descriptors)


def test_a_stopped_actor_host_is_replaced_and_its_late_words_change_nothing(live: LiveRun) -> None:
    before = live.restarts()
    live.until(
        "it works", lambda: live.metric("steps_committed_total", "actor-0")
    )  # one that still starts has longer
    pid = live.kill("actors-0", signal.SIGSTOP)
    live.until("a restart", lambda: live.restarts() == before + 1.0)
    assert pid not in live.descendants()
    live.until_training(more=20)
    live.until("both actors", lambda: 2.0 == live.metric("actors"))
    sound(live)


def test_the_learner_idles_while_every_actor_is_dead_and_goes_on_when_they_return(
    live: LiveRun,
) -> None:
    def no_actor_is_alive() -> bool:
        """Kill each host of actors that is back."""
        for host in ("actors-0", "actors-1"):
            if (pid := live.pid(host)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return "no actor is alive" in live.why_not_ready()

    live.until("readiness says why", no_actor_is_alive)
    live.until("it is ready again", live.ready)
    live.until_training(more=10)
    live.until("both actors", lambda: 2.0 == live.metric("actors"))
    sound(live)


def test_actors_come_and_go_while_the_run_goes_on(live: LiveRun) -> None:
    before = live.restarts()
    live.patch("balance", max_staleness=8)
    for count in (6, 1, 0, 6, 3):
        live.patch("actors", count=count)
        if count in (0, 6, 3):
            live.until(f"{count} actors", lambda count=count: live.metric("actors") == count)
        if count == 0:
            live.until("readiness says why", lambda: "actors.count is 0" in live.why_not_ready())
    live.until("it is ready again", live.ready)
    live.until_training(more=20)
    assert before == live.restarts()
    assert {"actor-0", "actor-1", "actor-2"} == {
        c["name"] for c in live.status()["components"] if c["role"] == "actor"
    }
    sound(live)
    live.patch("actors", count=2)
    live.patch("balance", max_staleness=2)
    live.until("both actors", lambda: 2.0 == live.metric("actors"))


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_a_pickle_sent_to_the_only_open_port_runs_nothing(live: LiveRun, tmp_path: Path) -> None:
    control = live.control
    assert control is not None
    port = int(control.address.rsplit(":", 1)[1])
    assert {("127.0.0.1", port)} == harness.listening({live.process.pid, *live.descendants()})
    with socket.create_connection(("127.0.0.1", port), timeout=harness.PATIENCE_S) as connection:
        connection.sendall(pickle.dumps(Bomb(tmp_path / "exploded")) + b"\r\n\r\n")
        assert connection.recv(4096).startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert 400 <= live.post_bytes("pause", pickle.dumps(Bomb(tmp_path / "exploded"))) < 500
    live.until_training(more=5)
    assert not (tmp_path / "exploded").exists()
