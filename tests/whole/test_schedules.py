"""Schedules of whole runs: with replay, in one process and in several, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tianflow import api
from tianflow.config.loading import load_config
from tianflow.config.model import Config

E2E = [pytest.mark.e2e, pytest.mark.timeout(300)]
UPDATES = 200


def replayed(launcher: str, updates: int) -> Config:
    """DQN whose learning rate falls with updates. Beta grows over ``run.max_updates``."""
    rate = {"schedule": "linear", "start": 1e-3, "end": 0.0, "over": 2 * UPDATES, "unit": "updates"}
    tables: dict[str, Any] = {
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": {"name": "dqn", "batch_size": 16, "learning_rate": rate},
        "network": {"hidden": [16]},
        "actors": {"count": 1, "rollout_steps": 8},
        "replay": {
            "selector": "prioritised",
            "capacity": 10_000,
            "min_size": 64,
            "samples_per_insert": 16.0,
        },
        "run": {"max_updates": updates},
        "evaluation": {"episodes": 1},
        "placement": {"launcher": launcher},
        "http": {"enabled": False},
    }
    return load_config(tables)


def totals(directory: Path) -> dict[str, tuple[int, float]]:
    """Number of values and mean of all rows, by the name of the statistic."""
    found: dict[str, tuple[int, float]] = {}
    for line in (directory / "history.jsonl").read_text().splitlines():
        for name, values in json.loads(line)["learning"].items():
            number, total = found.get(name, (0, 0.0))
            found[name] = number + values["count"], total + values["count"] * values["mean"]
    return {name: (number, total / number) for name, (number, total) in found.items()}


@pytest.mark.parametrize("launcher", ["inline", pytest.param("processes", marks=E2E)])
def test_schedules_of_a_run_with_replay_reach_their_ends_and_go_on_after_a_resume(
    tmp_path: Path, launcher: str
) -> None:
    """The mean of a straight line is the middle of its ends."""
    first = api.train(replayed(launcher, UPDATES), runs_dir=tmp_path)
    found = totals(first.directory)
    assert (UPDATES, pytest.approx(0.75e-3, rel=0.01)) == found["train/learning_rate"]
    assert (UPDATES, pytest.approx(0.7, rel=0.01)) == found["train/beta"]
    second = api.train(replayed(launcher, 2 * UPDATES), resume=first.directory, runs_dir=tmp_path)
    assert 2 * UPDATES == second.summary["updates"]
    found = totals(second.directory)
    # the history has both parts
    assert (2 * UPDATES, pytest.approx(0.5e-3, rel=0.01)) == found["train/learning_rate"]
    # 0.4 to 1, then 0.7 to 1: the longer limit stretches the schedule of beta
    assert (2 * UPDATES, pytest.approx(0.775, rel=0.01)) == found["train/beta"]
