"""Learner and inference servers compute the same policy from the same weights, in whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.oracle import until_true
from tianflow import api

OWN = "tests.support.environments:"
KINDS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "mlp": {},
    "lstm": {"network": {"hidden": [16], "lstm": 8, "previous_step": True}},
    "normalised": {
        "env": {"normalisation": {"observations": True}},
        "algorithm": {"name": "impala"},
    },
    "masks": {"env": {"id": f"{OWN}MaskedEnv"}},
    "dict": {"env": {"id": f"{OWN}DictEnv"}},
    "continuous": {"env": {"id": "Pendulum-v1"}},
    "cnn": {
        "env": {"id": "tests.components.test_central_inference:pixels", "num_envs": 2},
        "network": {"name": "nature_cnn"},
    },
}


def config(kind: str) -> dict[str, Any]:
    """Two actors and two servers in one process, with staleness 0 and learning rate 0."""
    tables: dict[str, Mapping[str, Any]] = {
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": {"name": "a2c", "batch_trajectories": 2},
        "network": {"hidden": [16]},
        "actors": {"count": 2, "rollout_steps": 16, "inference": "central"},
        "inference": {"servers": 2, "device": "cpu"},
        "balance": {"max_staleness": 0},
        "placement": {"launcher": "inline"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "metrics": {"interval_s": 0.2},
    }
    given = KINDS[kind]
    found = {name: {**table, **given.get(name, {})} for name, table in tables.items()}
    found["algorithm"]["learning_rate"] = 0.0
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_at_staleness_0_and_learning_rate_0_log_ratios_are_rounding(
    tmp_path: Path, kind: str
) -> None:
    ratios: set[float] = set()

    async def whole() -> None:
        async with api.open_run(config(kind), runs_dir=tmp_path) as handle:

            def enough() -> bool:
                statistics = handle.control.statistics()
                for component in statistics.components:
                    ratio = component.gauges.get("fresh_log_ratio")
                    if component.role == "learner" and ratio is not None:
                        ratios.add(ratio)
                return bool(ratios) and statistics.ledger.updates >= 8

            await until_true(handle.run, enough)
            handle.run.lifecycle.end("done", "test")
            await handle.wait()

    asyncio.run(whole())
    assert max(ratios) <= 1e-5
