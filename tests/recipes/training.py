"""Tiny training runs in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tianflow.api import FinishedRun
from tianflow.api import train as train_run

UPDATES = 3
TINY: dict[str, dict[str, Any]] = {
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "actors": {"count": 1, "rollout_steps": 16},
    "placement": {"launcher": "inline"},
    "evaluation": {"episodes": 1, "num_envs": 1},
    "run": {"max_updates": UPDATES},
}


def train(folder: Path, **sections: dict[str, Any]) -> FinishedRun:
    """Train on CartPole with PPO for `UPDATES` updates; ``sections`` add and replace settings."""
    algorithm = sections.pop("algorithm", {"name": "ppo"})
    tables = {
        name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}
    }
    return train_run({**tables, "algorithm": algorithm}, runs_dir=folder / "runs")
