"""Runs on several machines: what arrives is what was sent, once, whatever fails between them."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.storm.clock import UnavailableError, WallClock
from tests.e2e.harness import LiveRun, run
from tests.e2e.test_oracle import LOOK_S, Scraper, change, pid_of
from tests.support.machines import Machine, machines, require_machines
from tests.support.nodes import END_S, NodeProcess, nodes
from tests.support.oracle import Witness, oracle_config, until, until_true
from tianflow import api
from tianflow.coordinator import Run
from tianflow.core.process_table import carries, processes
from tianflow.rundir.join_file import NAME

LEASE_S = 3.0
CABLE_LEASE_S, OUTAGE_S = 9.0, 7.0
"""TCP alone sends again 12 seconds after the begin of such an outage, and ZeroMQ ends a connection
without heartbeats after 10 seconds. Both are too late.
"""
FAULTS = {
    "local": ("leave", "gateway", "pause", "lose", "both"),
    "central": ("kill", "gateway", "server"),
}
"""By inference. A fault "both" is a lost node and a lost learner."""
TROUBLES = int(os.environ.get("TIANFLOW_NODE_TROUBLES", "1"))
"""How often each fault happens in one run; more of them for a long look."""


pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600 * TROUBLES)]


def clustered(record: Path, inference: str) -> dict[str, Any]:
    return oracle_config(
        record,
        env={"seconds": 0.006, "slow_share": 0.05, "factor": 10.0, "length": 12},
        algorithm={"update_s": 0.004},
        actors={"count": 4, "hosts": 4, "rollout_steps": 8, "inference": inference},
        inference={"servers": 2, "device": "cpu"},
        balance={"max_staleness": 2, "min_fragment_steps": 1},
        placement={"launcher": "nodes", "affinity": "none"},
        cluster={"expect": 2, "lease_s": LEASE_S, "listen": "tcp://127.0.0.1:*"},
        checkpoint={"every_s": 5.0},
        run={"max_restarts": 100},
    )


def gateway_pid(run: Run) -> int:
    """Pid of the gateway; 0 while it does not run."""
    return next(
        (
            entry.pid
            for entry in processes()
            if entry.state != "Z"
            and carries(entry.pid, "TIANFLOW_RUN", run.id)
            and Path(f"/proc/{entry.pid}/comm").read_text().strip() == "gateway"
        ),
        0,
    )


async def disturb(run: Run, fault: str, node: NodeProcess) -> None:
    """One fault, until the run has dealt with it."""
    lost = run.hosts.restarts
    match fault:
        case "kill":
            node.kill()
            await until_true(run, lambda: gone(run, "node_lost") > gone_in(lost, "node_lost"))
            node.start()
        case "both":
            learner = pid_of(run, "learner")
            node.kill()
            os.kill(learner, signal.SIGKILL)
            await until_true(run, lambda: gone(run, "node_lost") > gone_in(lost, "node_lost"))
            await until_true(run, lambda: pid_of(run, "learner") not in (0, learner))
            node.start()
        case "leave":
            assert await asyncio.to_thread(node.leave) == 0
            node.start()
        case "gateway":
            victim = gateway_pid(run)
            os.kill(victim, signal.SIGKILL)
            await until_true(run, lambda: gateway_pid(run) not in (0, victim), every_s=LOOK_S)
        case "server":
            victim = pid_of(run, "inference-0")
            os.kill(victim, signal.SIGKILL)
            await until_true(run, lambda: pid_of(run, "inference-0") not in (0, victim))
        case "pause":
            node.stop()
            await asyncio.sleep(LEASE_S / 3)  # its length is the experiment
            node.resume()
        case "lose":
            node.stop()
            await until_true(run, lambda: gone(run, "node_lost") > gone_in(lost, "node_lost"))
            node.resume()
    await until_true(run, lambda: works(run, node.name), every_s=LOOK_S)


def gone_in(restarts: Mapping[tuple[str, str], int], reason: str) -> int:
    return sum(count for (_, why), count in restarts.items() if why == reason)


def gone(run: Run, reason: str) -> int:
    """How many hosts have ended because of ``reason``."""
    return gone_in(run.hosts.restarts, reason)


def works(run: Run, name: str) -> bool:
    """True if the node has two hosts, and every actor of the run works."""
    seen = run.control.statistics()
    node, actors = seen.nodes.get(name), [c for c in seen.components if c.role == "actor"]
    return node is not None and node.ready and node.hosts == 2 and len(actors) == 4


@pytest.mark.parametrize("inference", ["local", "central"])
def test_oracle_and_ledger_agree_over_the_faults_of_nodes_and_gateway(
    tmp_path: Path, inference: str
) -> None:
    """Every trajectory that is trained on is one that an actor has made, whole, once."""
    dice = random.Random(5)
    troubles = TROUBLES * FAULTS[inference]

    async def scenario() -> Run:
        config = clustered(tmp_path / "record", inference)
        async with api.open_run(config, runs_dir=tmp_path, http=True) as h:
            run = h.run
            join = run.directory / NAME
            pair = [NodeProcess(join, name, tmp_path / f"{name}.log") for name in ("a", "b")]
            with nodes(*pair):
                witness = Witness(run, lambda: pid_of(run, "learner"))
                await until(run, 5)
                await until_true(run, lambda: works(run, "a") and works(run, "b"), every_s=LOOK_S)
                scraper = Scraper(run)
                scraping = asyncio.create_task(scraper.run())
                for fault in troubles:
                    change(run, dice)
                    await until(run, run.exchange.ledger.snapshot().updates + 20)
                    await disturb(run, fault, dice.choice(pair))
                    await until(run, run.exchange.ledger.snapshot().updates + 20)
                await until_true(run, lambda: scraper.looks > 10 or scraping.done())
                if scraping.done():
                    scraping.result()
                scraping.cancel()
                run.lifecycle.end("done", "test")
                await h.wait()
                began = time.monotonic()
                for node in pair:
                    assert await asyncio.to_thread(node.leave) == 0
                assert time.monotonic() - began < 10.0
                witness.check(tmp_path / "record", kills=troubles.count("both"))
            return run

    run = asyncio.run(scenario())
    ledger = run.exchange.ledger.snapshot()
    assert ledger.violations == 0
    # A lost node has two hosts. Whether one of them has an open trajectory then is chance; the
    # witness has compared every trajectory.
    assert gone(run, "node_lost") >= 2 * sum(map(troubles.count, ("kill", "lose", "both")))
    assert {"died", "silent", "env_hang"}.isdisjoint(
        why for host, why in run.hosts.restarts if host.startswith("actors")
    )
    assert not (run.directory / NAME).exists()


@contextmanager
def cluster(
    folder: Path,
    *,
    lease_s: float = CABLE_LEASE_S,
    spare: Sequence[str] = (),
    clock: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[tuple[LiveRun, Mapping[str, Machine], list[NodeProcess]]]:
    """A run on a head with two nodes, each a machine with a cable. Nodes that are not lost have to
    leave in order at its end.

    Args:
        folder: for the run and for logs.
        lease_s: ``cluster.lease_s``.
        spare: further machines, without nodes.
        clock: environment variables of the node "two".
        settings: of the run.
    """
    require_machines()
    with (
        machines("head", "one", "two", *spare) as network,
        run(
            folder,
            machine=network["head"],
            placement__launcher="nodes",
            cluster__expect=2,
            cluster__lease_s=lease_s,
            **settings,
        ) as live,
    ):
        live.until("the join file", (live.directory / NAME).exists)
        pair = [
            node_on(network[name], live, environment=clock if name == "two" else None)
            for name in ("one", "two")
        ]
        with nodes(*pair):
            yield live, network, pair
            for node in pair:
                assert node.leave() == 0, node.output


def node_on(
    machine: Machine, live: LiveRun, environment: Mapping[str, str] | None = None
) -> NodeProcess:
    return NodeProcess(
        live.directory / NAME,
        machine.name,
        live.folder / f"{machine.name}.log",
        wrap=machine.command,
        environment=environment,
    )


@pytest.mark.beside
def test_machines_train_over_cables_that_may_be_down_for_less_than_the_lease(
    tmp_path: Path,
) -> None:
    with cluster(
        tmp_path,
        env__id="CartPole-v1",
        env__num_envs=16,
        network__hidden=[64, 64],
        actors__rollout_steps=128,
        actors__count=2,
        algorithm__epochs=4,
        algorithm__minibatch_size=256,
        algorithm__batch_trajectories=1,
    ) as (live, network, _):
        weights_cross_each_cable_once(live, network)
        live.until("it has learned", lambda: live.status()["returns"]["mean"] >= 475.0)
        assert reasons_of_drops(live) <= {"stopped"}
        live.patch("learner", slowdown=3.0)  # it leaves the cores to others
        nothing_is_lost_with_a_link_that_is_down_for_less_than_the_lease(live, network)
        a_node_is_lost_with_a_link_that_is_down_for_longer(live, network)


def reasons_of_drops(live: LiveRun) -> set[str]:
    return {
        key[1]
        for key, value in live.metrics().items()
        if key[0] == "trajectories_dropped_total" and value
    }


def weights_cross_each_cable_once(live: LiveRun, network: Mapping[str, Machine]) -> None:
    """Each published version crosses each cable once: the bytes that its interface has counted are
    those of the weights that its node was sent, and little else.
    """
    live.until_training()
    before = counted(live, network)
    updates = live.until_training(more=100)
    after = counted(live, network)
    version = after["learner"][0] / (updates + 1)
    slack = 10 * version + 100_000  # the gateway reports what it has sent each second
    for name in ("one", "two"):
        crossed, weights, messages = (
            after[name][place] - before[name][place] for place in range(3)
        )
        published = after["learner"][0] - before["learner"][0]
        assert 0.2 * published < weights <= 1.1 * published + slack
        assert crossed <= 1.1 * (weights + messages) + slack


def version_of(live: LiveRun, node: str) -> float:
    """The version of the weights that a node has; each update makes one."""
    metrics = live.metrics()
    return metrics["learner_updates_total",] - metrics["node_weights_lag", node]


def nothing_is_lost_with_a_link_that_is_down_for_less_than_the_lease(
    live: LiveRun, network: Mapping[str, Machine]
) -> None:
    ways = list(itertools.permutations((network["head"], network["one"])))
    for speaker, hearer in ways:  # as if a router on the way lost all packets
        speaker.mute(hearer)
    time.sleep(OUTAGE_S)  # its length is the experiment
    before = live.metric("learner_updates_total")
    for speaker, hearer in ways:
        speaker.unmute(hearer)
    live.until("newer weights arrive", lambda: version_of(live, "one") > before)
    live.until_training(more=5)
    assert hosts(live) == {"one": 1, "two": 1}
    assert live.restarts() == 0
    assert live.metric("trajectories_dropped_total", "node_lost") == 0


def a_node_is_lost_with_a_link_that_is_down_for_longer(
    live: LiveRun, network: Mapping[str, Machine]
) -> None:
    """Its actors work elsewhere until it is back."""
    network["one"].unplug()
    live.until("it is lost", lambda: live.metric("node_hosts", "two") == 2)
    live.until_training(more=5)
    assert restarted(live, "node_lost") >= 1
    network["one"].plug()
    live.until("it is back", lambda: live.metric("node_hosts", "one") == 1)
    live.until_training(more=5)
    assert live.metric("staleness_violations_total") == 0


@pytest.mark.beside
def test_links_may_be_half_open_clocks_wrong_and_nodes_come_and_go_at_once(tmp_path: Path) -> None:
    """A half-open link costs the hosts of its node. A clock that is an hour off costs nothing."""
    try:
        clock = WallClock(tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))
    clock.shift(3600.0)
    spare = ("three", "four")
    with cluster(tmp_path, lease_s=LEASE_S, spare=spare, clock=clock.environment) as (
        live,
        network,
        (first, _),
    ):
        live.until_training()
        for speaker, hearer in itertools.permutations((network["head"], network["one"])):
            speaker.mute(hearer)
            live.until("the node is lost", lambda: live.metric("node_hosts", "two") == 2)
            live.until_training(more=5)
            speaker.unmute(hearer)
            live.until("it is back", lambda: hosts(live) == {"one": 1, "two": 1})
            live.until("its actor works", lambda: live.status()["actors"]["reporting"] == 2)
        live.until_training(more=5)
        assert restarted(live, "node_lost") == 2
        first.process.terminate()
        added = [node_on(network[name], live) for name in spare]
        with nodes(*added):
            live.until("two others have the hosts", lambda: hosts(live) in SHARED)
            live.until_training(more=5)
            assert first.process.wait(END_S) == 0
            assert [node.leave() for node in added] == [0, 0]
        live.until("one node has them", lambda: hosts(live) == {"two": 2})
        live.until_training(more=5)
        assert restarted(live, "node_lost") == 2
        assert live.metric("staleness_violations_total") == 0


SHARED: tuple[dict[str, float], ...] = (
    {"two": 1, "three": 1, "four": 0},
    {"two": 1, "three": 0, "four": 1},
    {"two": 0, "three": 1, "four": 1},
)
"""Hosts by node, when two hosts are on two of three nodes."""


def hosts(live: LiveRun) -> dict[str, float]:
    """Hosts by node."""
    return {key[1]: value for key, value in live.metrics().items() if key[0] == "node_hosts"}


def restarted(live: LiveRun, reason: str) -> float:
    """How often hosts have started again because of ``reason``."""
    return sum(
        value
        for key, value in live.metrics().items()
        if key[0] == "component_restarts_total" and key[-1] == reason
    )


def test_a_node_that_cannot_make_the_environment_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "only_on_the_head.py").write_text("from tests.support.oracle import EchoEnv as Env")
    monkeypatch.syspath_prepend(tmp_path)
    config = clustered(tmp_path / "record", "local")
    config["env"]["id"] = "only_on_the_head:Env"

    async def scenario() -> NodeProcess:
        async with api.open_run(config, runs_dir=tmp_path) as handle:
            run = handle.run
            join = run.directory / NAME
            await until_true(run, join.exists)
            node = NodeProcess(join, "a", tmp_path / "a.log")
            with nodes(node):
                await until_true(run, lambda: node.process.poll() is not None)
            assert run.control.statistics().nodes == {}
            assert run.control.statistics().nodes_refused == 1
            run.lifecycle.end("done", "test")
            await handle.wait()
            return node

    node = asyncio.run(scenario())
    assert node.process.returncode == 2
    assert "No module named 'only_on_the_head'" in node.output
    assert "a node cannot take part" in caplog.text


def counted(live: LiveRun, network: Mapping[str, Machine]) -> dict[str, tuple[float, ...]]:
    """Bytes so far: for each node, those that its interface has received, and of weights and
    messages what the gateway has sent; what the learner has published.
    """
    seen = live.metrics()
    found = {
        name: (
            float(network[name].traffic.received),
            seen["node_sent_bytes_total", "weights", name],
            seen["node_sent_bytes_total", "messages", name],
        )
        for name in ("one", "two")
    }
    published = [value for key, value in seen.items() if key[0].endswith("weights_bytes_total")]
    return {**found, "learner": (sum(published),)}
