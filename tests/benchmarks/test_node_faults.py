"""Tests of the benchmark of faults on several machines: its plan, its measures and its judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.lib.harness import Plan
from benchmarks.lib.live_run import Scrape
from benchmarks.lib.node_faults import faults
from benchmarks.lib.node_faults.frames import (
    Frames,
    FramesEnv,
    FramesLearner,
    FramesSettings,
    count_frames,
)
from benchmarks.lib.node_faults.recovery import (
    Look,
    gained,
    is_whole,
    look_at,
    pace,
    paced_again,
)
from benchmarks.lib.node_faults.striker import Recoveries
from benchmarks.lib.node_faults.watcher import judge_document
from benchmarks.lib.oracle import PER_LEARNER
from benchmarks.studies import node_faults
from tianflow.interfaces import LearnerBatch

# The plan
# --------------------------------------------------------------------------------------------------

OUTAGES = (
    "cable out for 10 s",
    "cable out for 60 s",
    "machine gone for good",
    "machine paused for 30 s",
)
LOST_SHARDS = ("machine of a shard paused for 10 s", "machine of a shard gone for good")


def test_every_row_of_the_failure_table_happens_ten_times() -> None:
    times = Counter(
        fault.name
        for kinds in faults.RUNS.values()
        for fault, _ in faults.rounds(kinds, quick=False)
    )
    assert {fault.name: fault.times for kinds in faults.RUNS.values() for fault in kinds} == times
    for alike in (OUTAGES, LOST_SHARDS):
        assert 10 <= sum(times.pop(name) for name in alike)
    crossings = {name: times.pop(name) for name in ("half-open link for 10 s", faults.CLOCK)}
    assert 2 <= min(crossings.values())  # each direction, and each sign
    assert {10} == set(times.values())


@pytest.mark.parametrize("kinds", faults.RUNS.values(), ids=faults.RUNS)
def test_kinds_of_faults_take_turns_and_a_quick_benchmark_has_each_once(
    kinds: Sequence[faults.Fault],
) -> None:
    names = [fault.name for fault in kinds]
    assert names == [fault.name for fault, _ in faults.rounds(kinds, quick=False)[: len(names)]]
    quick = faults.rounds(kinds, quick=True)
    assert [fault.name for fault in kinds if not fault.slow] == [fault.name for fault, _ in quick]


def test_a_pause_of_a_machine_with_a_shard_is_longer_than_the_lease() -> None:
    assert faults.LEASE_S < faults.PAUSE_S


def test_every_kind_of_fault_is_a_side_and_every_measure_has_a_unit() -> None:
    assert set(Recoveries().values()) <= set(node_faults.units())
    made = node_faults.make(Plan(quick=True, rounds=1, scratch=Path()))
    for run, kinds in faults.RUNS.items():
        assert {run, *(fault.name for fault in kinds)} <= set(made.names)


# Recovery
# --------------------------------------------------------------------------------------------------


def looks(*steps: float) -> list[Look]:
    """Looks one second apart, from 0 on."""
    return [Look(float(at), 1, number, {}, 0, {}, {}) for at, number in enumerate(steps)]


def test_the_pace_is_that_of_the_looks_since_a_moment() -> None:
    seen = looks(0, 100, 120, 140, 160)
    assert 20.0 == pace(seen, 1.0)
    assert 0.0 == pace(seen, 3.5)


@pytest.mark.parametrize(
    ("steps", "after"),
    [
        ((0, 10, 20, 30), 0.0),
        ((0, 10, 10, 10, 18, 28), 3.0),
        ((0, 8, 16), 0.0),
        ((0, 0, 0, 0), None),
        ((0, 10), None),
        ((900, 2, 12, 22), 1.0),
    ],
    ids=["no dip", "a stall", "a little slower", "no steps", "too early", "resumed"],
)
def test_a_run_has_its_pace_again_when_it_keeps_it_for_two_seconds(
    steps: tuple[float, ...], after: float | None
) -> None:
    assert after == paced_again(looks(*steps), 0.0, 10.0)


def test_the_time_to_pace_counts_from_the_fault() -> None:
    assert 1.5 == paced_again(looks(0, 10, 20, 20, 30, 40, 50), 1.5, 10.0)


@pytest.mark.parametrize(
    ("hosts", "actors", "whole"),
    [
        ({"a": 3.0, "b": 3.0}, 6, True),
        ({"a": 3.0, "b": 3.0}, 5, False),
        ({"a": 4.0, "b": 2.0}, 6, False),
        ({"a": 3.0, "b": 2.0}, 5, False),
        ({"a": 6.0}, 6, False),
        ({"a": 2.0, "b": 2.0, "c": 2.0}, 6, False),
        ({}, 0, False),
    ],
)
def test_a_run_is_whole_with_all_hosts_evenly_on_its_nodes(
    hosts: dict[str, float], actors: int, *, whole: bool
) -> None:
    assert whole == is_whole(Look(0.0, 1, 0.0, hosts, actors, {}, {}), ("a", "b"), 6)


def test_a_run_with_shards_is_whole_with_them_on_its_nodes() -> None:
    look = Look(0.0, 1, 0.0, {"a": 4.0, "b": 4.0}, 6, {}, {}, shards=2)
    assert is_whole(look, ("a", "b"), 6, 2)
    assert not is_whole(look, ("a", "b"), 8)
    assert not is_whole(replace(look, hosts={"a": 3.0, "b": 4.0}), ("a", "b"), 6, 2)
    assert not is_whole(replace(look, shards=1), ("a", "b"), 6, 2)


def test_a_look_counts_nodes_that_work_and_sums_up_reasons() -> None:
    series = {
        "run_env_steps": 7.0,
        "replay_shards": 2.0,
        "node_ready{node=a}": 1.0,
        "node_ready{node=b}": 0.0,
        "node_hosts{node=a}": 2.0,
        "node_hosts{node=b}": 1.0,
        "trajectories_dropped_total{reason=node_lost}": 3.0,
        "component_restarts_total{component=actors-0,reason=node_lost}": 1.0,
        "component_restarts_total{component=actors-1,reason=node_lost}": 1.0,
        "component_restarts_total{component=actors-1,reason=moved}": 1.0,
    }
    found = look_at(Scrape(5.0, series, frozenset()), life=2, actors=2)
    restarts = {"node_lost": 2.0, "moved": 1.0}
    assert Look(5.0, 2, 7.0, {"a": 2.0}, 2, {"node_lost": 3.0}, restarts, 2) == found


def test_counters_of_a_later_coordinator_begin_at_zero() -> None:
    before = Look(0.0, 1, 0.0, {}, 0, {"died": 5.0}, {})
    for life, count in ((1, 2.0), (2, 7.0)):
        after = Look(1.0, life, 0.0, {}, 0, {"died": 7.0, "expired": 0.0}, {})
        assert {"died": count} == gained(before, after, "dropped")


# Frames
# --------------------------------------------------------------------------------------------------


def test_no_two_observations_are_alike() -> None:
    seen = set()
    for _ in range(3):
        env = FramesEnv(length=3)
        for _ in range(2):
            observation, _ = env.reset()
            over = False
            while not over:
                seen.add(int(observation[0]))
                observation, _, _, over, _ = env.step(0)
            seen.add(int(observation[0]))
    assert 3 * 2 * 4 == len(seen)


def batch(observations: list[int], *, valid: list[bool]) -> LearnerBatch:
    """One trajectory of one environment."""
    steps = len(valid)
    return LearnerBatch(
        {
            "obs/": torch.tensor([*observations, 0], dtype=torch.int64).reshape(-1, 1, 1),
            "action": torch.full((steps, 1), PER_LEARNER, dtype=torch.int64),
            "valid": torch.tensor(valid).reshape(-1, 1),
            "version": torch.zeros((steps, 1), dtype=torch.int64),
        }
    )


def test_a_frame_that_is_trained_on_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    settings = FramesSettings(record=str(tmp_path / "record"), frames=str(path))
    assert isinstance(settings, Frames.settings)
    learner = FramesLearner(settings)
    learner.step(batch([5, 6, 7], valid=[True, True, False]))
    assert (2, 0) == count_frames(path)
    learner.step(batch([7, 8, 6], valid=[True, True, True]))
    assert (5, 1) == count_frames(path)
    assert [5, 6, 7, 8, 6] == np.fromfile(path, np.int64).tolist()


# Judges
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begun", "found"), [(10, 0), (11, 1)])
def test_the_account_closes_in_the_run_document(begun: int, found: int) -> None:
    counts = {"trained": 4, "inserted": 0, "dropped": {"died": 2, "expired": 1}, "open": 3}
    assert found == len(judge_document({"trajectories": {"begun": begun, **counts}}))
