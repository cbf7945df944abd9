"""Tests of the benchmark of nodes: its costs, and the simulation of a head with two cores."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import head_cores
from benchmarks.lib.harness import BenchmarkError, Plan, Side, Values
from benchmarks.lib.head_cores import Head, Load, OneCore, ProcessCost
from benchmarks.suites import nodes
from benchmarks.workers import nodes as worker
from tianflow.config.loading import load_config
from tianflow.simulation.clock import Clock

FREE = ProcessCost(0.0)
LOAD = Load(actors=4, rate=8.0)
NODES = 10
BURNED_S = 0.2
ONE: Values = {"coordinator_us": 300.0, "trajectories_per_s": 50.0, "coordinator_paused": 0.004}
FOUR: Values = {
    "coordinator_us": 330.0,
    "gateway_us": 500.0,
    "trajectories_per_s": 100.0,
    "coordinator_paused": 0.012,
    "gateway_paused": 0.02,
}


# Costs
# --------------------------------------------------------------------------------------------------


def test_what_a_paused_run_costs_belongs_to_nodes_and_the_rest_to_trajectories() -> None:
    found = nodes.costs(ONE, FOUR)
    assert pytest.approx((210e-6, 0.002, 0.004)) == astuple(found.coordinator)
    assert pytest.approx((300e-6, 0.005, 0.0)) == astuple(found.gateway)


def test_nodes_take_a_core_by_themselves_and_by_their_trajectories() -> None:
    cost = ProcessCost(trajectory_s=1e-3, node_s=0.01, own_s=0.1)
    assert pytest.approx(0.9 / 0.02) == cost.most_nodes(10.0)
    assert math.inf == FREE.most_nodes(10.0)
    assert cost.most_nodes(10.0) == Head(FREE, cost).most_nodes(10.0)
    # At that size trajectories come as fast as they are handled.
    busy = ProcessCost(trajectory_s=1e-3, node_s=0.01, own_s=0.1).busy_s(45)
    assert pytest.approx(1.0 / (45 * 10.0)) == busy
    assert math.inf == cost.busy_s(90)


def test_images_cost_the_gateway_more() -> None:
    load, head = nodes.pong(Head(FREE, ProcessCost(1e-4, 0.01)))
    assert Load(16, 75.0) == load
    assert head.gateway.trajectory_s > 2e-3
    assert 0.01 == head.gateway.node_s
    assert head.coordinator is FREE


def test_ratios_compare_nodes_with_one_machine(tmp_path: Path) -> None:
    made = nodes.make(Plan(quick=True, rounds=1, scratch=tmp_path))
    one, four = nodes.one_of(nodes.TURNS), nodes.four_of(nodes.TURNS)
    values: Mapping[str, Values] = {
        one: {"committed_per_s": 100.0, "coordinator_us": 130.0},
        four: {"committed_per_s": 95.0, "coordinator_us": 169.0},
    }
    assert pytest.approx([0.95, 1 / 1.3]) == [ratio.of(values) for ratio in made.ratios]
    assert pytest.approx([0.95, 1 / 1.3]) == [ratio.aim for ratio in made.ratios]


def test_a_simulation_needs_what_was_measured(tmp_path: Path) -> None:
    made = nodes.make(Plan(quick=True, rounds=1, scratch=tmp_path))
    side = made.sides[-1]
    assert isinstance(side, Side)
    with pytest.raises(BenchmarkError, match="one machine, 4 hosts, T = 16"):
        side.measure(0)


@pytest.mark.parametrize("crowd", nodes.CROWDS, ids=lambda crowd: crowd.name)
def test_no_actor_idles_for_its_credit(crowd: nodes.Crowd) -> None:
    config = load_config(nodes.CONFIG, nodes.overrides(crowd))
    assert config.bound is not None
    assert config.bound * config.algorithm.batch_trajectories >= config.actors.count
    assert 256 == config.algorithm.batch_trajectories * config.actors.rollout_steps
    assert config.actors.hosts is not None
    assert 0 == config.actors.hosts % len(nodes.NAMES)
    assert 0 == config.actors.count % config.actors.hosts


# The worker
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    actors: tuple[str, ...]


@dataclass(frozen=True)
class _Seen:
    nodes: Mapping[str, _Node]


def test_nodes_with_unequal_numbers_of_actors_are_refused() -> None:
    even: Any = _Seen({"a": _Node(("0", "1")), "b": _Node(("2", "3"))})
    worker.require_even(even)
    uneven: Any = _Seen({"a": _Node(("0", "1", "2")), "b": _Node(("3",))})
    with pytest.raises(RuntimeError, match="unequal"):
        worker.require_even(uneven)


def test_the_cpu_time_of_a_process_is_that_of_all_its_threads() -> None:
    burned, over = threading.Event(), threading.Event()

    def burn() -> None:
        while time.thread_time() < BURNED_S:
            pass
        burned.set()
        over.wait()

    before = worker.exact_cpu_seconds(os.getpid())
    thread = threading.Thread(target=burn)
    thread.start()
    burned.wait()
    spent = worker.exact_cpu_seconds(os.getpid()) - before
    over.set()
    thread.join()
    assert spent == pytest.approx(BURNED_S, rel=0.5)


# The simulated head
# --------------------------------------------------------------------------------------------------


def test_a_core_does_one_thing_after_the_other() -> None:
    clock = Clock()
    core, seen = OneCore(clock), list[tuple[str, float]]()

    def act(name: str) -> None:
        seen.append((name, clock.now))

    core.handle(2.0, act, "first")
    core.handle(0.0, act, "second")
    core.handle(1.0, act, "third")
    clock.advance(10.0)
    assert [("first", 2.0), ("second", 2.0), ("third", 3.0)] == seen


def share(coordinator: ProcessCost = FREE, gateway: ProcessCost = FREE) -> float:
    return head_cores.share_of_steps(nodes.CONFIG, LOAD, NODES, Head(coordinator, gateway))


def test_a_head_that_takes_no_time_costs_no_steps() -> None:
    assert 1.0 == share()
    assert pytest.approx(1.0, abs=0.03) == share(ProcessCost(1e-6), ProcessCost(1e-6))


@pytest.mark.parametrize("process", ["coordinator", "gateway"])
def test_a_core_that_is_too_slow_limits_the_steps_to_what_it_handles(process: str) -> None:
    slow = ProcessCost(trajectory_s=2.0 / (NODES * LOAD.rate))
    assert pytest.approx(0.5, abs=0.05) == share(**{process: slow})


def test_nodes_that_take_the_whole_core_leave_no_steps() -> None:
    assert 0.0 == share(ProcessCost(1e-6, node_s=0.1))


@pytest.mark.parametrize("guess", [1.0, 137.0, 300.0, math.inf])
def test_the_search_finds_the_largest_number_of_nodes(guess: float) -> None:
    found = head_cores.most_nodes(lambda count: count <= 137, guess, 1000)
    assert 130 <= found <= 137
    assert 0 == head_cores.most_nodes(lambda _: False, guess, 1000)
    assert 1000 == head_cores.most_nodes(lambda _: True, guess, 1000)
