"""Runs whose nodes are actors of a real Ray, on two nodes of Ray on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness
from tests.e2e.harness import START_S, LiveRun, until
from tests.e2e.test_replay import APEX, sound
from tests.e2e.test_shards_on_nodes import shards
from tests.support.ray_cluster import RayCluster, ray_cluster, require_ray

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
PLACED = {"placement.launcher": "ray", "ray.nodes": 2, "cluster.expect": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    require_ray()
    with ray_cluster() as found:
        yield found


def nodes(live: LiveRun) -> set[str]:
    """Names of the nodes that the run has now."""
    return {key[1] for key, value in live.metrics().items() if key[0] == "node_up" and value == 1.0}


def settings(cluster: RayCluster, **more: object) -> dict[str, Any]:
    given = {**PLACED, "ray.address": cluster.address, **more}
    return {key.replace(".", "__"): value for key, value in given.items()}


def test_cartpole_reaches_its_target_by_changing_the_launcher(
    cluster: RayCluster, tmp_path: Path
) -> None:
    chosen = settings(cluster)
    live = LiveRun(
        tmp_path,
        {**{key.replace("__", "."): value for key, value in chosen.items()}, "run.name": "demo"},
        ("cartpole_ppo", "--require-target"),
        "demo",
    )
    assert 0 == live.end(240), live.output()
    assert live.result["target_reached"]
    assert 0 == live.result["staleness"]["violations"]
    until("no actor is left", lambda: cluster.actors == 0, within_s=30)


def test_a_node_whose_raylet_dies_is_lost_and_another_one_takes_its_place(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with harness.run(tmp_path, **settings(cluster, cluster__lease_s=3.0)) as live:
        live.until_training()
        assert {"ray-0", "ray-1"} == nodes(live)
        assert "killed" == cluster.ask("kill")
        live.until("a node is lost", lambda: len(nodes(live)) == 1, within_s=60)
        live.until_training()  # with the node that is left
        assert "added" == cluster.ask("add")
        live.until("there are two nodes", lambda: len(nodes(live)) == 2, within_s=START_S)
        live.until_training()
        assert 0 == live.metric("staleness_violations_total")
        assert "Ray has lost a node" in live.stderr
        assert 130 == live.interrupt(signal.SIGINT)
    until("no actor is left", lambda: cluster.actors == 0, within_s=30)


def test_apex_has_its_shards_on_the_nodes_and_a_killed_coordinator_leaves_no_actor(
    cluster: RayCluster, tmp_path: Path
) -> None:
    chosen = {**APEX, **settings(cluster, cluster__replay="nodes")}
    with harness.run(tmp_path, "cartpole_apex", **chosen) as live:
        live.until_training()
        live.until("each node has a shard", lambda: {"ray-0": 1, "ray-1": 1} == shards(live))
        sound(live)
        assert 2 == cluster.actors
        live.process.kill()
        live.end()
        until("no actor is left", lambda: cluster.actors == 0, within_s=60)


@pytest.mark.beside
def test_a_machine_without_a_cluster_is_refused_with_what_to_start(tmp_path: Path) -> None:
    require_ray()
    with harness.run(
        tmp_path, placement__launcher="ray", ray__address="127.0.0.1:1", cluster__lease_s=2.0
    ) as live:
        assert 1 == live.end(START_S), live.output()
        assert "ray.address = '127.0.0.1:1'" in live.stderr
        assert "ray start --head" in live.stderr
