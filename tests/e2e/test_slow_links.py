"""Nodes with bad links: no trajectory of theirs is dropped for its age, and they are named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.harness import LiveRun, run
from tests.support import machines as support
from tests.support.machines import machines, require_machines
from tests.support.nodes import NodeProcess, nodes
from tests.support.oracle import oracle_config, uses
from tests.support.relay import relay
from tianflow.config.loading import load_config, to_toml
from tianflow.rundir.join_file import NAME, JoinFile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SLOW, FAR = "slow", "far"
"""Nodes: one whose cable carries `RATE`, one behind a relay that is late and stalls."""
RATE = "10mbit"
BAD = {"delay_s": 0.05, "stall_s": 2.0, "every_s": 20.0}
STEPS, WIDTH = 16, 3000
"""A trajectory has 408 kB, which take a third of a second at `RATE`: four times as long as its
steps.
"""
PAIR = 2
"""Actors on each node. They take turns, so one steps while the trajectory of the other is on its way.
"""


@contextmanager
def cluster(
    folder: Path, names: tuple[str, ...], record: Path, **sections: Mapping[str, object]
) -> Iterator[LiveRun]:
    """A run of the oracle on the nodes ``names``, with credits for all its actors."""
    actors = PAIR * len(names)
    tables = oracle_config(
        record,
        env={"seconds": 0.0025, "jitter": False, "width": WIDTH},
        algorithm={"batch_trajectories": 1},
        actors={"count": actors, "hosts": len(names), "rollout_steps": STEPS},
        balance={"max_staleness": actors, "min_fragment_steps": 1},
        placement={"launcher": "nodes", "affinity": "none"},
        cluster={"expect": len(names), "lease_s": 30.0, **sections.pop("cluster", {})},
        **sections,
    )
    tables["env"]["id"] = "tests.support.oracle:WideEchoEnv"
    config = folder / "links.toml"
    config.write_text(to_toml(load_config(tables), only_changed=True))
    with (
        machines("head", *names) as network,
        run(folder, str(config), machine=network["head"], base={}) as live,
        ExitStack() as relays,
    ):
        join = live.directory / NAME
        live.until("the join file", join.exists)
        joins = dict.fromkeys(names, join)
        if FAR in names:
            host, _, port = JoinFile.read(join).address.removeprefix("tcp://").rpartition(":")
            near = relays.enter_context(relay(network[FAR], host, int(port), **BAD))
            joins[FAR] = folder / "far.toml"
            replace(JoinFile.read(join), address=f"tcp://127.0.0.1:{near}").write(joins[FAR])
        made = [
            NodeProcess(joins[name], name, folder / f"{name}.log", wrap=network[name].command)
            for name in names
        ]
        with nodes(*made):
            live.until("nodes work", lambda: live.metric("actors") == actors, within_s=180.0)
            if SLOW in names:
                network[SLOW].limit(RATE)
            yield live
            live.interrupt()


def trained(live: LiveRun, name: str) -> float:
    """Steps of the actors of node ``name`` that were trained on."""
    answer = json.loads(live.request(f"/api/v1/runs/{live.name}/nodes")[1])
    (node,) = [node for node in answer["nodes"] if node["name"] == name]
    seen = live.metrics()
    return sum(seen.get(("steps_trained_total", actor), 0.0) for actor in node["actors"])


def test_a_slow_and_a_stalling_link_cost_no_trajectory_and_are_named(tmp_path: Path) -> None:
    require_machines()
    if reason := support.cannot_limit():
        pytest.skip(reason)
    record = tmp_path / "record"
    with cluster(tmp_path, ("near", SLOW, FAR), record) as live:
        live.until_training(more=10)
        live.until("diagnosis", lambda: live.status()["diagnosis"]["verdict"] == "transport-bound")
        live.until("its node", lambda: f"node {SLOW} " in live.status()["diagnosis"]["advice"])
        before = {name: trained(live, name) for name in ("near", SLOW, FAR)}
        live.until(
            "some of each",
            lambda: all(trained(live, name) >= before[name] + 5 * STEPS for name in before),
        )
        live.until_training(more=50)
        assert live.metric("trajectories_dropped_total", "expired") == 0
        assert live.metric("trajectories_dropped_total", "straggler") == 0
        assert live.metric("staleness_violations_total") == 0
    staleness = [age for use in uses(record) for age in use.ages]
    assert max(staleness) <= 3 * PAIR
