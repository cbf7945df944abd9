"""Replay shards on nodes: trajectories go straight to them, and what they hold is all that a lost
machine costs.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import LiveRun, run
from tests.e2e.test_replay import APEX, held_beyond, sound, total
from tests.support.machines import Machine, machines, require_machines
from tests.support.nodes import NodeProcess, nodes
from tests.support.oracle import uses
from tianflow.config.loading import load_config, to_toml
from tianflow.rundir.checkpoints import CheckpointStore
from tianflow.rundir.join_file import NAME

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
LEASE_S = 6.0
"""A node that imports PyTorch on a loaded machine is not heard for some seconds."""
STEPS, WIDTH, BATCH = 16, 3000, 32
"""A trajectory of two environments has 408 kB, and a draw 770 kB."""
ON_NODES: dict[str, Any] = {
    "placement__launcher": "nodes",
    "cluster__replay": "nodes",
    "cluster__expect": 2,
    "cluster__lease_s": LEASE_S,
}
TRAJECTORIES = ("trajectories", "far"), ("trajectories", "store")


def started(live: LiveRun, name: str, roles: str, machine: Machine | None = None) -> NodeProcess:
    wrap = {} if machine is None else {"wrap": machine.command}
    log = live.folder / f"{name}.log"
    return NodeProcess(live.directory / NAME, name, log, arguments=["--roles", roles], **wrap)


def shards(live: LiveRun) -> dict[str, int]:
    """Shards by node. Those that are not there are on the head."""
    code, body = live.request(f"/api/v1/runs/{live.name}/nodes")
    if code != 200:
        return {}
    return {node["name"]: len(node["shards"]) for node in json.loads(body)["nodes"]}


def both_work(live: LiveRun, **where: int) -> None:
    """Both shards work, on these nodes, or on the head."""

    def look() -> bool:
        found = {name: count for name, count in shards(live).items() if count}
        return found == where and live.metric("replay_shards") == 2.0

    live.until(f"shards are at {where}", look, within_s=harness.START_S)


@contextmanager
def wide_run(
    folder: Path, record: Path, network: Mapping[str, Machine]
) -> Iterator[tuple[LiveRun, dict[str, NodeProcess]]]:
    """A run whose learner knows each item that it draws, with actors on "far" and both shards on
    "store".
    """
    tables: dict[str, Any] = {
        "env": {
            "id": "tests.support.oracle:WideEchoEnv",
            "num_envs": 2,
            "kwargs": {"width": WIDTH, "seconds": 0.002, "jitter": False},
        },
        "algorithm": {
            "name": "benchmarks.lib.oracle:ReplayOracle",
            "record": str(record),
            "batch_size": BATCH,
        },
        "actors": {"count": 2, "hosts": 2, "rollout_steps": STEPS},
        "replay": {
            "shards": 2,
            "capacity": 2000,
            "min_size": 200,
            "samples_per_insert": 0.25,
        },
        "placement": {"launcher": "nodes", "affinity": "none"},
        "cluster": {"expect": 2, "lease_s": LEASE_S, "replay": "nodes"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "checkpoint": {"every_s": 3600.0},
        "metrics": {"interval_s": 0.2},
        "run": {"grace_s": 5.0},
    }
    config = folder / "wide.toml"
    config.write_text(to_toml(load_config(tables), only_changed=True))
    with run(folder, str(config), machine=network["head"], base={}) as live:
        live.until("the join file", (live.directory / NAME).exists)
        pair = {
            "far": started(live, "far", "actors", network["far"]),
            "store": started(live, "store", "replay", network["store"]),
        }
        with nodes(*pair.values()):
            yield live, pair


def committed(live: LiveRun) -> float:
    """Trajectories that are committed and not stored yet."""
    metrics = live.metrics()
    return metrics["trajectories_committed_total",] - metrics["trajectories_inserted_total",]


CHECKPOINTS = "checkpoint_attempts_total", "checkpoint_seconds_count"
"""Checkpoints that were begun, and that were written. The states of evaluated versions do not count."""
COUNTED = {
    "direct": ("node_direct_received_bytes_total", "store"),
    "draws": ("node_received_bytes_total", "draws", "store"),
}


def reported(live: LiveRun) -> dict[str, float]:
    """What the run counts as `COUNTED`, in reports that were made after this moment. Counters of
    cables are up to date; those of a run come with reports, and late on a busy machine.
    """

    def after_now(name: str) -> float:
        seen = [live.metric(*COUNTED[name])]

        def twice() -> float:
            if seen[-1] != (now := live.metric(*COUNTED[name])):
                seen.append(now)
            return seen[2] if len(seen) > 2 else 0.0

        return live.until(f"two reports of {name}", twice)

    return {name: after_now(name) for name in COUNTED}


def carried(live: LiveRun, network: Mapping[str, Machine]) -> dict[str, float]:
    """Bytes so far: of the machines' cables, and what the run counts on them."""
    seen = live.metrics()
    return {
        **{f"{name} sent": network[name].traffic.sent for name in ("far", "store")},
        **{f"{name} received": network[name].traffic.received for name in ("head", "store")},
        **{name: seen[key] for name, key in COUNTED.items()},
        "relayed": sum(
            seen.get((f"node_{way}_bytes_total", *key), 0.0)
            for way in ("received", "sent")
            for key in TRAJECTORIES
        ),
    }


def test_trajectories_go_straight_to_the_node_of_their_shard_and_its_loss_costs_its_items(
    tmp_path: Path,
) -> None:
    """The counters of the interfaces show it: the cable of the head carries draws, and that between
    the nodes trajectories. The learner compares the label of each item with the action that made
    it.
    """
    require_machines()
    record = tmp_path / "record"
    with (
        machines("head", "far", "store") as network,
        wide_run(tmp_path, record, network) as (live, pair),
    ):
        both_work(live, store=2)
        live.until_training(more=20)
        live.until("a link", lambda: live.metric("node_direct_received_bytes_total", "store"))
        sound(live)
        before = carried(live, network)
        live.until_training(more=40)
        after = carried(live, network)
        later = reported(live)
        found = {name: after[name] - before[name] for name in before}
        assert 0 == found["relayed"]
        assert found["direct"] > 20 * 408_000
        slack = 0.1 * found["direct"]
        assert found["far sent"] <= later["direct"] - before["direct"] + slack
        assert found["store received"] >= found["direct"] - slack
        assert found["head received"] <= later["draws"] - before["draws"] + slack
        metrics = sound(live)
        assert metrics["trajectories_dropped_total", "shard_lost"] == 0

        # The two nodes do not hear each other for a while. The head passes trajectories on.
        ways = list(itertools.permutations((network["far"], network["store"])))
        for speaker, hearer in ways:
            speaker.mute(hearer)
        live.until("it relays them", lambda: carried(live, network)["relayed"] > 2e6)
        for speaker, hearer in ways:
            speaker.unmute(hearer)
        direct = carried(live, network)["direct"]
        live.until("it need not", lambda: carried(live, network)["direct"] > direct + 2e6)
        metrics = sound(live)
        assert metrics["trajectories_dropped_total", "shard_lost"] == 0
        assert live.restarts() == 0

        # Its machine is lost. What it held is lost with it, and so is what its shards did not store
        # yet. They start on the head.
        for pid in shards_of(live):
            os.kill(pid, signal.SIGSTOP)
        there = live.until(
            "some are on their way", lambda: committed(live) >= 4 and committed(live)
        )
        network["store"].kill()
        pair["store"].kill()  # it is gone already, and is reaped
        lost = live.until(
            "it is lost",
            lambda: (found := live.metrics()) and ("node_hosts", "store") not in found and found,
        )
        assert lost["trajectories_committed_total",] > 0
        both_work(live)
        live.until_training(more=10)
        metrics = sound(live)
        assert metrics["trajectories_dropped_total", "shard_lost"] >= there
        assert metrics["replay_items_removed_total",] > 0
        restarts = {
            key[1]: value
            for key, value in metrics.items()
            if key[0] == "component_restarts_total" and key[-1] == "node_lost"
        }
        assert {"replay-0": 1.0, "replay-1": 1.0} == restarts
        assert metrics["node_received_bytes_total", "trajectories", "far"] > 0

        # A shard that ends goes to the node once that is back.
        pair["store"].start()
        live.until("it is back", lambda: live.metric("node_ready", "store"))
        os.kill(live.wait_for_pid("replay-0"), signal.SIGKILL)
        both_work(live, store=1)
        before = carried(live, network)
        live.until_training(more=20)
        after = carried(live, network)
        assert after["direct"] > before["direct"]
        sound(live)
        live.interrupt()
        kept = live.result["trajectories"]
        assert 0 == kept["open"]
        assert kept["begun"] == kept["inserted"] + sum(kept["dropped"].values())
        assert kept["dropped"].keys() <= {"shard_lost", "stopped", "cancelled"}
        assert "Traceback" not in live.stderr
        for node in pair.values():
            assert node.leave() == 0, node.output
    assert len(uses(record)) >= 90


def test_apex_learns_with_its_shards_on_a_node(tmp_path: Path) -> None:
    """It reaches 200. The 475 of its config take twice as long."""
    require_machines()
    with (
        machines("head", "far", "store") as network,
        run(
            tmp_path,
            "cartpole_apex",
            machine=network["head"],
            base={"placement.affinity": "none"},
            **ON_NODES,
            replay__shards=2,
            run__target_return=200.0,
            evaluation__every_s=2.0,
            evaluation__episodes=20,
        ) as live,
    ):
        live.until("the join file", (live.directory / NAME).exists)
        pair = [
            started(live, name, roles, network[name])
            for name, roles in (("far", "actors"), ("store", "replay"))
        ]
        with nodes(*pair):
            both_work(live, store=2)
            live.until_training(more=20)
            sound(live)
            assert 0 == live.end(within_s=600.0)
            assert live.result["target_reached"]
            assert live.result["trajectories"]["dropped"].keys() <= {"stopped"}


@pytest.mark.beside
def test_a_node_of_shards_is_lost_whatever_else_happens_to_its_run(tmp_path: Path) -> None:
    """The number of actors changes, a checkpoint is written, the run pauses, drains and stops."""
    settings = {**APEX, **ON_NODES, "cluster__listen": "tcp://127.0.0.1:*"}
    settings |= {"checkpoint__replay": True, "replay__min_size": 100}
    settings["env__kwargs"] = {"length": 20, "seconds": 0.005}  # most of the time nodes start
    with run(tmp_path, "cartpole_apex", **settings) as live:
        live.until("the join file", (live.directory / NAME).exists)
        far, one = started(live, "far", "actors"), started(live, "one", "replay")
        with nodes(far, one):
            both_work(live, one=2)
            live.until_training(more=20)
            sound(live)

            # The gateway is lost. Nothing else is.
            live.kill("gateway")
            live.until_training(more=20)
            assert {"one": 2, "far": 0} == shards(live)
            assert 0.0 == live.restarts()
            sound(live)
            two = started(live, "two", "actors,replay")
            with nodes(two):
                live.until("it works", lambda: live.metric("node_ready", "two"))

                # A checkpoint is being written, and waits for a shard of the lost node. Meanwhile the
                # number of actors changes. The other node takes the shards.
                for pid in shards_of(live):
                    os.kill(pid, signal.SIGSTOP)
                begun, written = (live.metric(name) for name in CHECKPOINTS)
                live.act("checkpoint")
                live.until("it is being written", lambda: live.metric(CHECKPOINTS[0]) > begun)
                assert written == live.metric(CHECKPOINTS[1])
                one.kill()
                live.patch("actors", count=4)
                both_work(live, two=2)
                live.until("it is not waited for", lambda: live.metric(CHECKPOINTS[1]) > written)
                live.until_training(more=20)
                sound(live)

                # A checkpoint has what the shards hold.
                live.until("items", lambda: total(live.metrics(), "replay_items") > 1000)
                live.until_checkpoint()

                # The run pauses. No node is left for the shards.
                live.act("pause")
                live.until("it rests", lambda: live.status()["state"] == "paused")
                two.kill()
                both_work(live)
                updates = live.metric("learner_updates_total")
                one.start()
                live.until("it is back", lambda: live.metric("node_ready", "one"))
                assert updates == live.metric("learner_updates_total")
                live.act("resume")
                live.until_training(more=20)
                sound(live)

            # The run drains when a shard is on a node that dies.
            os.kill(live.wait_for_pid("replay-1"), signal.SIGKILL)
            both_work(live, one=1)
            live.until_training(more=20)
            one.kill()
            live.act("drain")
            assert 0 == live.end()
            assert ("done", "drained") == (live.result["state"], live.result["reason"])
            exact(live)

            # The resumed run has the contents of the shards, and stops without their node.
            saved = CheckpointStore.load(live.checkpoints()[-1])
            with harness.resumed(live) as again:
                one.start()
                both_work(again, one=2)
                again.until(
                    "what the shards bring back",
                    lambda: held_beyond(again.metrics(), saved.manifest["env_steps"]) > 500,
                )
                again.until_training(more=20)
                sound(again)
                one.kill()
                again.act("stop")
                again.end()
                exact(again)


def shards_of(live: LiveRun) -> list[int]:
    """Processes of shards on this machine."""
    return [pid for pid, name in live.descendants().items() if name.startswith("replay-")]


def exact(live: LiveRun) -> None:
    """No trajectory of the run is without an account."""
    kept = live.result["trajectories"]
    assert 0 == kept["open"]
    assert kept["begun"] == kept["inserted"] + sum(kept["dropped"].values())
    assert kept["dropped"].keys() <= {"shard_lost", "node_lost", "moved", "stopped", "cancelled"}
    assert "Traceback" not in live.stderr
