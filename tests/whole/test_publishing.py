"""Publishing by divergence in whole runs of real algorithms, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.settings import cartpole
from tianflow import api
from tianflow.config.loading import load_config
from tianflow.config.model import Config

pytestmark = pytest.mark.e2e

UPDATES = 12
FIRST_AND_LAST = 2
"""Publications without any move: the first version, and the newest for the last evaluation."""


def ppo(*, rate: float, resumed: int = 0, **sections: dict[str, Any]) -> Config:
    tables: dict[str, dict[str, Any]] = {
        "algorithm": {"learning_rate": rate},
        "balance": {"max_staleness": "unbounded"},
        "run": {"name": "moving", "max_updates": UPDATES + resumed},
        "weights": {"publish": "divergence"},
    }
    return cartpole(
        **{name: {**tables.get(name, {}), **sections.get(name, {})} for name in tables | sections}
    )


def sac(*, rate: float, **weights: Any) -> Config:
    return load_config(
        {
            "env": {"id": "Pendulum-v1", "num_envs": 2},
            "algorithm": {"name": "sac", "batch_size": 16, "learning_rate": rate},
            "network": {"hidden": [16]},
            "actors": {"rollout_steps": 8},
            "replay": {"min_size": 32, "capacity": 10_000},
            "placement": {"launcher": "inline"},
            "evaluation": {"episodes": 1, "num_envs": 1},
            "run": {"max_updates": UPDATES},
            "weights": {"publish": "divergence", **weights},
        }
    )


def publications(config: Config, runs: Path, **options: Any) -> tuple[int, int]:
    """Published and skipped versions of one process of a run, which trained to its end."""
    summary = api.train(config, runs_dir=runs, **options).summary
    assert config.run.max_updates == summary["updates"]
    assert 0 == summary["staleness"]["violations"]
    return summary["weights"]["published"], summary["weights"]["skipped"]


@pytest.mark.parametrize("lstm", [0, 8])
def test_at_learning_rate_0_no_update_is_published_also_in_a_resumed_run(
    tmp_path: Path, lstm: int
) -> None:
    """No update is published. The learner publishes at rest, before the last evaluation."""
    small = {"network": {"lstm": lstm}, "evaluation": {"episodes": 1, "num_envs": 1}}
    first = publications(ppo(rate=0.0, **small), tmp_path)
    assert (FIRST_AND_LAST, UPDATES) == first
    resumed = publications(
        ppo(rate=0.0, resumed=UPDATES, **small), tmp_path, resume=tmp_path / "moving"
    )
    assert (FIRST_AND_LAST, UPDATES) == resumed


def test_a_policy_that_moves_is_published_more_often_the_lower_the_threshold(
    tmp_path: Path,
) -> None:
    counts = [
        publications(ppo(rate=3e-3, weights={"divergence_nats": nats}), tmp_path / str(nats))[0]
        for nats in (1e-9, 1e-3, 1e3)
    ]
    assert UPDATES + 1 == counts[0]
    assert counts[0] > counts[1] > counts[2] == FIRST_AND_LAST


def test_sac_is_published_when_its_actor_has_moved(tmp_path: Path) -> None:
    assert (FIRST_AND_LAST, UPDATES) == publications(sac(rate=0.0), tmp_path / "a")
    assert (UPDATES + 1, 0) == publications(sac(rate=1e-2, divergence_nats=1e-9), tmp_path / "b")


def test_the_bound_publishes_a_policy_that_does_not_move(tmp_path: Path) -> None:
    """With one actor and B = 1, a bound of 4 permits a lag of 3."""
    config = ppo(rate=0.0, balance={"max_staleness": 4})
    assert (1 + UPDATES // 4, UPDATES - UPDATES // 4) == publications(config, tmp_path)
