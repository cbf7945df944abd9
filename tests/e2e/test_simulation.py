"""Real runs, and their simulation from what a history tells: their own, or that of a run with other settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import LiveRun, run
from tests.e2e.test_live import tianflow
from tianflow.history import NAME, Row, read_rows

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SETTLED_S = 6.0
"""After the first trained line: what shares of time look back to is over then."""
MEASURED_S = 15.0
UPDATES = 1000
SETTINGS: dict[str, object] = {
    "algorithm__update_s": 0.06,
    "algorithm__batch_trajectories": 4,
    "algorithm__epochs": None,
    "algorithm__minibatch_size": None,
    "env__id": "tests.oracle:EchoEnv",
    "env__kwargs": {"seconds": 0.005, "jitter": True, "length": 50},
    "env__num_envs": 1,
    "actors__count": 4,
    "actors__hosts": 8,
    "actors__rollout_steps": 16,
    "balance__min_fragment_steps": 1,
    "balance__max_staleness": 2,
    "evaluation__episodes": 1,
    "evaluation__num_envs": 1,
}
"""Four actors whose environments sleep 80 ms a trajectory on average, a learner that sleeps 60 ms an update: load matters little."""
STEADY = {"seconds": 0.005, "jitter": False, "length": 1600}
"""Environments that all take the same time, and seldom reset, which takes none: their actors fall into step."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How a run goes on: environment steps per second, and the mean staleness of what was trained on.

    ``before`` updates it was not looked at, ``updates`` it was.
    """

    pace: float
    age: float
    before: int = 0
    updates: int = 0

    def near(self) -> tuple[object, object]:
        """Within a tenth."""
        return pytest.approx(self.pace, rel=0.1), pytest.approx(self.age, rel=0.1)


def settled(rows: list[Row]) -> list[Row]:
    """Lines of steady training, the first of which only marks where the others begin."""
    running = [row for row in rows if row["state"] == "running" and row["updates"] > 0]
    return [row for row in running if row["t"] >= running[0]["t"] + SETTLED_S]


def measured(live: LiveRun) -> Seen:
    """Once it has trained for long enough."""

    def rows() -> list[Row]:
        found = settled(read_rows(live.directory / NAME))
        return found if found and found[-1]["t"] - found[0]["t"] >= MEASURED_S else []

    seen = live.until("it has trained for long enough", rows, within_s=90.0)
    first, last = seen[0], seen[-1]
    trained = sum(row["staleness"]["count"] for row in seen[1:])
    age = sum(row["staleness"]["mean"] * row["staleness"]["count"] for row in seen[1:] if row["staleness"]["count"]) / trained
    pace = (last["env_steps"] - first["env_steps"]) / (last["t"] - first["t"])
    return Seen(pace, age, first["updates"], last["updates"] - first["updates"])


def foretold(live: LiveRun, *changes: str, updates: int = UPDATES, warmup: int = UPDATES // 10) -> Seen:
    """What the history of ``live`` tells of it, with ``changes``."""
    config = str(live.directory / "config.toml")
    told = tianflow(live, "simulate", config, *changes, "--like", live.name, "--updates", str(updates), "--warmup", str(warmup), "--json")
    assert 0 == told.returncode, told.stderr
    outcome = json.loads(told.stdout)
    log.info("foretold%s: %s", "".join(f" {change}" for change in changes), {**outcome, "histogram": None})
    return Seen(outcome["steps_per_s"], outcome["staleness"]["mean"])


def oracle(
    folder: Path, changes: Mapping[str, object], *, algorithm: str = "tests.e2e.steady:SteadyOracle", place: str = "runs"
) -> LiveRun:
    config = folder / "oracle.toml"
    config.write_text(f"[env]\nid = 'tests.oracle:EchoEnv'\n[algorithm]\nname = '{algorithm}'\n")
    settings = {**SETTINGS, "algorithm__record": str(folder / f"record-{place}"), **changes}
    return run(folder / place, str(config), **settings)


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [
        ("tests.e2e.steady:SteadyOracle", SETTINGS["env__kwargs"]),
        ("tests.e2e.steady:SteadyOracle", STEADY),
        ("tests.oracle:Oracle", SETTINGS["env__kwargs"]),
    ],
    ids=["trajectories vary", "nothing varies", "updates vary, too"],
)
def test_a_steady_run_is_foretold_within_a_tenth(tmp_path: Path, algorithm: str, kwargs: dict[str, object]) -> None:
    """Throughput and mean staleness, from where its time went alone: nothing of either is told to the simulation."""
    with oracle(tmp_path, {"env__kwargs": kwargs}, algorithm=algorithm) as live:
        seen = measured(live)
        # What is in step at first is so for less than a long simulation.
        told = foretold(live, updates=seen.updates, warmup=seen.before) if kwargs is STEADY else foretold(live)
    log.info("seen %s, foretold %s", seen, told)
    assert seen.near() == (told.pace, told.age)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"actors__count": 6}, ["actors.count=6"]),
        ({"actors__count": 6, "balance__max_staleness": 1}, ["actors.count=6", "balance.max_staleness=1"]),
        ({"actors__count": 6, "learner__slowdown": 1.0}, ["actors.count=6", "learner.slowdown=1"]),
    ],
    ids=["more actors", "more actors, a tighter bound", "more actors, a slower learner"],
)
def test_a_run_foretells_another_within_a_tenth(tmp_path: Path, changes: dict[str, object], overrides: list[str]) -> None:
    """What happens with other counts, bounds and speeds is told by a run of two actors that never had them."""
    with oracle(tmp_path, {"actors__count": 2}, place="few") as few:
        measured(few)
        told = foretold(few, *overrides)
    with oracle(tmp_path, changes, place="many") as many:
        seen = measured(many)
    log.info("seen %s, foretold %s", seen, told)
    assert seen.near() == (told.pace, told.age)
