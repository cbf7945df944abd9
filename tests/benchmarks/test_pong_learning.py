"""Tests of the study of learning on a GPU: its runs and its table."""

from __future__ import annotations

import pytest

from benchmarks.lib import matrix
from benchmarks.lib.matrix import Record
from benchmarks.studies.pong_learning import CASES, CORES, SECONDS, table
from tianflow.config.loading import load_config


def test_the_runs_keep_their_bound_with_every_actor_at_work() -> None:
    """What the actors hold, and the batch that is trained on, are no more than the bound allows."""
    impala = [case for case in CASES if case.name.startswith("IMPALA")]
    assert 3 == len(impala)
    for case in impala:
        config = load_config(case.config, case.settings(1))
        size = config.algorithm.batch_trajectories
        assert 2 * CORES == config.actors.count
        assert 2 * CORES + size <= (config.balance.max_staleness + 1) * size
        assert (SECONDS, None) == (config.run.max_seconds, config.run.target_return)
    assert {"fp32", "tf32", "bf16"} == {
        load_config(case.config, case.settings(1)).learner.precision for case in impala
    }


def test_runs_at_once_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix.os, "sched_getaffinity", lambda _: set(range(9)))
    parts = matrix._parts(2, CORES)
    assert [{0, 1, 2, 3}, {4, 5, 6, 7}] == [parts.get_nowait() for _ in range(2)]
    with pytest.raises(SystemExit, match="--jobs 3 needs 12 cores; there are 9"):
        matrix._parts(3, CORES)


def test_the_table_shows_returns_over_time_and_the_time_to_the_goal() -> None:
    curve = [(5.0, 900, None), (100.0, 9_000, -20.0), (200.0, 20_000, 3.0), (400.0, 40_000, 16.0)]
    summary = {
        "env_steps": 51_000,
        "steps_per_s": 100.0,
        "updates": 70,
        "staleness": {"mean": 2.5, "max": 4, "violations": 0},
        "curve": curve,
    }
    (line,) = table([Record("IMPALA, fp32", 2, "", summary)], CASES).splitlines()[-1:]
    assert line == (
        "| IMPALA, fp32 | 2 | 51,000 | 100 | 70 | -20.0 | 3.0 | 3.0 | 16.0 | 400 | 2.50 | 4 | 0 |"
    )
    never = {**summary, "curve": curve[:3]}
    (line,) = table([Record("Ape-X", 1, "", never)], CASES).splitlines()[-1:]
    assert " | 3.0 | – | 2.50 | " in line
