"""A lost node, while something else happens to its run.

That a learner is lost at the same time is a fault of `tests.e2e.test_nodes`.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.e2e.test_replay import APEX, held_beyond, sound, total
from tests.e2e.test_serve import Service, service
from tests.support.nodes import NodeProcess, nodes
from tianflow.rundir.checkpoints import CheckpointStore
from tianflow.rundir.join_file import NAME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LEASE_S = 2.0
CLUSTER = {
    "placement__launcher": "nodes",
    "cluster__lease_s": LEASE_S,
    "cluster__listen": "tcp://127.0.0.1:*",
    "checkpoint__every_s": 3600.0,
}


def identity(live: LiveRun) -> None:
    """No trajectory is without an account, and none was too old."""
    metrics = live.metrics()
    dropped = total(metrics, "trajectories_dropped_total")
    begun, trained, open_ = (
        metrics[f"trajectories_{key}",] for key in ("begun_total", "trained_total", "open")
    )
    assert begun == trained + dropped + open_
    assert metrics["staleness_violations_total",] == 0.0


def works(live: LiveRun, *names: str) -> None:
    """The nodes ``names`` have hosts, and they alone."""

    def look() -> bool:
        metrics = live.metrics()
        hosts = {key[1]: value for key, value in metrics.items() if key[0] == "node_hosts"}
        return hosts.keys() == set(names) and all(hosts.values())

    live.until(f"the nodes {names} work", look, within_s=harness.START_S)


@contextmanager
def loses(live: LiveRun, node: NodeProcess) -> Iterator[None]:
    """``node`` is killed, and the run notices it before this ends."""
    node.kill()
    yield

    def look() -> bool:
        metrics = live.metrics()
        return bool(metrics) and ("node_hosts", node.name) not in metrics

    live.until("it is lost", look)


def test_a_node_is_lost_whatever_else_happens_to_its_run(tmp_path: Path) -> None:
    with harness.run(tmp_path, **CLUSTER) as live:
        join = live.directory / NAME
        live.until("the join file", join.exists)
        one, two = (NodeProcess(join, name, tmp_path / f"{name}.log") for name in ("one", "two"))
        with nodes(one, two):
            works(live, "one", "two")
            live.until_training(more=5)
            good = live.until_checkpoint()

            # The disk of the head is full, and the bound and the number of actors change.
            learner = live.wait_for_pid("learner")
            unlimited = resource.prlimit(
                learner, resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY)
            )
            live.patch("balance", max_staleness=4)
            live.patch("actors", count=4)
            with loses(live, one):
                live.act("checkpoint")
                live.patch("balance", max_staleness=0)
                live.patch("actors", count=3)
                live.until(
                    "a failure is counted", lambda: live.metric("checkpoint_failures_total") == 1.0
                )
            live.patch("balance", max_staleness=1)
            live.until("its actors work on the other node", lambda: actors(live) == 3)
            live.until_training(more=5)
            assert [good] == live.checkpoints()
            assert [] == live.staged()
            resource.prlimit(learner, resource.RLIMIT_FSIZE, unlimited)
            assert good != live.until_checkpoint()
            identity(live)
            one.start()
            works(live, "one", "two")

            # A checkpoint is being written.
            before = set(live.checkpoints())
            live.kill("learner", signal.SIGSTOP)
            live.act("checkpoint")
            live.until("it is being written", live.staged)
            with loses(live, two):
                pass
            assert live.staged()
            os.kill(learner, signal.SIGCONT)
            (written,) = live.until(
                "it is written", lambda: set(live.checkpoints()) - before or None
            )
            assert CheckpointStore.load(written).manifest["env_steps"] > 0
            live.until_training(more=5)
            identity(live)

            # The run pauses, and no node is left.
            with loses(live, one):
                live.act("pause")
            live.until("it rests", lambda: live.status()["state"] == "paused")
            updates = live.metric("learner_updates_total")
            one.start()
            two.start()
            works(live, "one", "two")
            assert updates == live.metric("learner_updates_total")
            live.act("resume")
            live.until_training(more=5)
            identity(live)

            # The run drains.
            two.kill()
            live.act("drain")
            assert 0 == live.end()
            assert ("done", "drained") == (live.result["state"], live.result["reason"])
            kept = live.result["trajectories"]
            assert 0 == kept["open"]
            assert kept["dropped"].keys() <= {"node_lost", "moved", "stopped", "expired"}
            assert live.result["updates"] == live.result["checkpoint"]
            assert "Traceback" not in live.stderr

            # The resumed run stops. Its join file is another one at the same place.
            with harness.resumed(live) as again:
                works(again, "one")
                again.until_training(more=5)
                one.kill()
                again.act("stop")
                again.end()
                assert 0 == again.result["trajectories"]["open"]
                assert again.result["updates"] == again.result["checkpoint"]
                assert "Traceback" not in again.stderr


def actors(live: LiveRun) -> int:
    return sum(component["role"] == "actor" for component in live.status()["components"])


@pytest.mark.beside
def test_a_lost_node_and_a_lost_shard_cost_what_they_had_and_checkpoints_keep_the_rest(
    tmp_path: Path,
) -> None:
    """Shards stay on the head: their contents are in its checkpoints."""
    with harness.run(
        tmp_path,
        "cartpole_apex",
        **{
            **APEX,
            **CLUSTER,
            "checkpoint__replay": True,
            "replay__samples_per_insert": 1.0,
            "replay__min_size": 100,
        },
    ) as live:
        join = live.directory / NAME
        live.until("the join file", join.exists)
        one, two = (NodeProcess(join, name, tmp_path / f"{name}.log") for name in ("one", "two"))
        with nodes(one, two):
            works(live, "one", "two")
            live.until("items", lambda: total(live.metrics(), "replay_items") > 1000)
            with loses(live, one):
                live.kill("replay-0")
            live.until("both shards", lambda: live.metric("replay_shards") == 2.0)
            live.until_training(more=20)
            sound(live)
            live.until("more items", lambda: total(live.metrics(), "replay_items") > 2000)
            live.until_checkpoint()
            live.process.kill()
            live.process.wait()
            harness.nothing_left(live, set())
            saved = CheckpointStore.load(live.checkpoints()[-1])
            with harness.resumed(live) as again:
                works(again, "two")
                again.until(
                    "what the shards bring back",
                    lambda: held_beyond(again.metrics(), saved.manifest["env_steps"]) > 500,
                )
                again.until_training(more=20)
                sound(again)
                assert 130 == again.interrupt()
            assert two.leave() == 0, two.output


@pytest.mark.beside
def test_two_runs_of_a_service_may_have_nodes_on_one_machine(tmp_path: Path) -> None:
    def start(name: str) -> NodeProcess:
        join = tmp_path / "runs" / name / NAME
        served.until(f"the join file of {name}", join.exists)
        return NodeProcess(join, "machine", tmp_path / f"{name}.log")

    with service(tmp_path / "runs", "--max-runs", "2") as served:
        for name in ("a", "b"):
            served.submit(name, **{**CLUSTER, "actors__count": 1, "actors__hosts": 1})
        pair = {name: start(name) for name in ("a", "b")}
        with nodes(*pair.values()):
            served.until_training("a", "b")
            pair["a"].kill()
            served.until("a has lost it", lambda: nodes_of(served, "a") == [])
            served.until_training("b", more=10)
            assert [node["name"] for node in nodes_of(served, "b")] == ["machine"]
            assert served.run("b")["restarts"] == []
            assert served.tell("stop", "a").returncode == 0
            served.until("a has ended", lambda: served.run("a").get("state") == "stopped")
            served.until_training("b", more=5)
            assert served.tell("stop", "b").returncode == 0
            served.until("b has ended", lambda: served.run("b").get("state") == "stopped")
            assert pair["b"].leave() == 0, pair["b"].output


def nodes_of(served: Service, name: str) -> list[dict[str, object]]:
    return list(served.get(f"/api/v1/runs/{name}/nodes")[1]["nodes"])
