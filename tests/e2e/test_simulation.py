"""A real run, and its simulation from what its own history tells."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.e2e.harness import run
from tests.e2e.test_live import tianflow
from tianflow.history import NAME, Row, read_rows

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTLED_S = 6.0
"""After the first trained line: what shares of time look back to is over then."""
MEASURED_S = 15.0
SETTINGS: dict[str, object] = {
    "algorithm__update_s": 0.06,
    "algorithm__batch_trajectories": 4,
    "env__kwargs": {"seconds": 0.005, "jitter": True, "length": 50},
    "env__num_envs": 1,
    "actors__count": 4,
    "actors__hosts": 4,
    "actors__rollout_steps": 16,
    "balance__min_fragment_steps": 1,
    "balance__max_staleness": 2,
    "evaluation__episodes": 1,
    "evaluation__num_envs": 1,
}
"""Four actors whose environments sleep 80 ms a trajectory on average, a learner that sleeps 60 ms an update: load matters little.

Sleeps differ from step to step, as a simulation supposes: actors that all take the same time fall into step, which no history tells."""


def settled(rows: list[Row]) -> list[Row]:
    """Lines of steady training, the first of which only marks where the others begin."""
    running = [row for row in rows if row["state"] == "running" and row["updates"] > 0]
    return [row for row in running if row["t"] >= running[0]["t"] + SETTLED_S]


def test_a_steady_run_is_foretold_within_a_tenth(tmp_path: Path) -> None:
    """Throughput and mean staleness, from where its time went alone: nothing of either is told to the simulation."""
    config = tmp_path / "oracle.toml"
    config.write_text("[env]\nid = 'tests.oracle:EchoEnv'\n[algorithm]\nname = 'tests.e2e.steady:SteadyOracle'\n")
    settings = {"algorithm__record": str(tmp_path / "record"), "env__id": "tests.oracle:EchoEnv", **SETTINGS}
    with run(tmp_path / "runs", str(config), algorithm__epochs=None, algorithm__minibatch_size=None, **settings) as live:

        def rows() -> list[Row]:
            found = settled(read_rows(live.directory / NAME))
            return found if found and found[-1]["t"] - found[0]["t"] >= MEASURED_S else []

        seen = live.until("it has trained for long enough", rows, within_s=90.0)
        told = tianflow(live, "simulate", str(live.directory / "config.toml"), "--like", live.name, "--updates", "1000", "--json")
    assert 0 == told.returncode, told.stderr
    outcome = json.loads(told.stdout)
    first, last = seen[0], seen[-1]
    pace = (last["env_steps"] - first["env_steps"]) / (last["t"] - first["t"])
    trained = sum(row["staleness"]["count"] for row in seen[1:])
    age = sum(row["staleness"]["mean"] * row["staleness"]["count"] for row in seen[1:] if row["staleness"]["count"]) / trained
    foretold = outcome["steps_per_s"], outcome["staleness"]["mean"]
    log.info("steps/s: %.0f, foretold %.0f; staleness: %.3f, foretold %.3f", pace, foretold[0], age, foretold[1])
    assert (pytest.approx(pace, rel=0.1), pytest.approx(age, rel=0.1)) == foretold
