"""A learner of two processes on two GPUs, joined by NCCL: they train as one, and end as one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.harness import LiveRun, run, until
from tests.e2e.test_ranks import ranks
from tests.e2e.test_replay import apex, sound

pytestmark = [pytest.mark.e2e, pytest.mark.gpu(2), pytest.mark.timeout(900)]
TIMES = int(os.environ.get("TIANFLOW_RANK_KILLS", "6"))
"""How often a rank is killed, stopped or slowed down."""
TWO_GPUS = {
    "learner__ranks": 2,
    "learner__device": "cuda",
    "algorithm__batch_trajectories": 2,
    "algorithm__minibatch_size": 64,
    "checkpoint__every_s": 0.5,
    "run__max_restarts": 100,
}
SLOW_S = 0.5
"""Seconds in which a slow rank stands still, each time."""


def contexts() -> set[tuple[str, int]]:
    """(GPU, pid) of all processes that use a GPU."""
    query = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return {(gpu, int(pid)) for gpu, pid in (line.split(", ") for line in done.stdout.splitlines())}


def gpus_of(pids: tuple[int | None, ...]) -> list[list[str]]:
    found = contexts()
    return [[gpu for gpu, owner in found if owner == pid] for pid in pids]


def each_has_one_gpu(live: LiveRun) -> bool:
    """Each rank has a context on one GPU, and no two on the same."""
    found = gpus_of(ranks(live))
    return [1, 1] == [len(gpus) for gpus in found] and found[0] != found[1]


def no_context(pids: set[int]) -> bool:
    return not {pid for _, pid in contexts()} & pids


def started_again(live: LiveRun, before: tuple[int | None, ...]) -> bool:
    return all(pid is not None for pid in ranks(live)) and not set(before) & set(ranks(live))


def lineage(live: LiveRun) -> int:
    return int(live.status()["versions"]["learner"]["lineage"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_on_gpus_that_die_or_do_not_answer_start_again_in_a_new_lineage(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Nothing of the old ones is left on the GPUs."""
    seen: set[int] = set()
    with run(tmp_path / "runs", **TWO_GPUS) as live:
        live.until_training(more=5)
        live.until("each rank has its GPU", lambda: each_has_one_gpu(live))
        for time_ in range(TIMES):
            before, lived = ranks(live), lineage(live)
            victim = before[1 - time_ % 2]
            assert victim is not None
            seen |= {pid for pid in before if pid is not None}
            os.kill(victim, number)
            live.until("two other processes", lambda b=before: started_again(live, b))
            live.until_training(more=5)
            assert lived + 1 == lineage(live)
            assert no_context(seen)
            assert 0 == live.status()["staleness"]["violations"]
        live.until("each rank has its GPU", lambda: each_has_one_gpu(live))
        seen |= {pid for pid in ranks(live) if pid is not None}
        assert 130 == live.interrupt(), live.output()
        assert 0 == live.result["trajectories"]["open"]
    until("no context is left", lambda: no_context(seen))


def test_a_slow_rank_on_a_gpu_delays_the_other_only(tmp_path: Path) -> None:
    with run(tmp_path / "runs", **TWO_GPUS) as live:
        live.until_training(more=5)
        before = ranks(live)
        for time_ in range(TIMES):
            victim = before[time_ % 2]
            assert victim is not None
            os.kill(victim, signal.SIGSTOP)
            time.sleep(SLOW_S)  # the time in which it stands still is the experiment
            os.kill(victim, signal.SIGCONT)
            live.until_training(more=5)
        assert before == ranks(live)
        assert (1, 0) == (lineage(live), live.restarts())
        assert 0 == live.status()["staleness"]["violations"]
        assert 130 == live.interrupt(), live.output()


@pytest.mark.parametrize("count", [1, 2])
def test_a_bound_that_is_lowered_while_batches_are_staged_holds(count: int, tmp_path: Path) -> None:
    with run(tmp_path / "runs", **{**TWO_GPUS, "learner__ranks": count}) as live:
        live.until_training(more=5)
        for time_ in range(4 * TIMES):
            live.patch("balance", max_staleness=(8, 0, 2)[time_ % 3])
            live.until_training(more=5)
            assert 0 == live.status()["staleness"]["violations"]
        assert (1, 0) == (lineage(live), live.restarts())
        assert 130 == live.interrupt(), live.output()
        trajectories = live.result["trajectories"]
        dropped = sum(trajectories["dropped"].values())
        assert trajectories["begun"] == trajectories["trained"] + dropped


def test_ranks_on_gpus_share_the_draws_of_four_shards(tmp_path: Path) -> None:
    settings = {"learner__ranks": 2, "learner__device": "cuda", "replay__shards": 4}
    with apex(tmp_path / "runs", **settings) as live:
        live.until_training(more=200)
        sound(live)
        assert each_has_one_gpu(live)
        assert 4.0 == live.metric("replay_shards")
        assert 130 == live.interrupt(), live.output()


@pytest.mark.parametrize(("index", "device"), [(0, "auto"), (0, "cuda"), (1, "cuda:1")])
def test_one_rank_trains_on_the_gpu_that_it_is_given(
    index: int, device: str, tmp_path: Path
) -> None:
    """Pinned memory and staged batches open no context on another GPU."""
    with run(tmp_path / "runs", learner__device=device) as live:
        live.until_training(more=5)
        pid = live.wait_for_pid("learner")
        (gpus,) = gpus_of((pid,))
        query = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        assert [done.stdout.split()[index]] == gpus
        assert 130 == live.interrupt(), live.output()
