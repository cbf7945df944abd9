"""Real runs, and their simulation from what a history tells: their own, or that of a run with other
settings.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import LiveRun, assignment, run
from tests.e2e.test_live import tianflow
from tianflow.rundir.history import NAME, Row, read_rows

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SETTLED_S = 6.0
"""After the first updates: what shares of time look back to is over then."""
MEASURED_S = 15.0
UPDATES = ("--updates", "1000", "--warmup", "100")
BOUND = 2
SETTINGS: dict[str, object] = {
    "algorithm__update_s": 0.06,
    "algorithm__batch_trajectories": 4,
    "algorithm__epochs": None,
    "algorithm__minibatch_size": None,
    "env__id": "tests.support.oracle:EchoEnv",
    "env__kwargs": {"seconds": 0.005, "jitter": True, "length": 50},
    "env__num_envs": 1,
    "actors__count": 4,
    "actors__hosts": 8,
    "actors__rollout_steps": 16,
    "balance__min_fragment_steps": 1,
    "balance__max_staleness": BOUND,
    "evaluation__episodes": 1,
    "evaluation__num_envs": 1,
}
"""Four actors whose environments sleep 80 ms a trajectory on average, a learner that sleeps 60 ms
an update: load matters little.
"""
STEADY = {"seconds": 0.005, "jitter": False, "length": 1600}
"""Environments that all take the same time, and seldom reset, which takes none: their actors fall
into step.
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """How a run goes on: environment steps per second, and the mean staleness of what was trained
    on.
    """

    pace: float
    age: float

    def near(self) -> tuple[object, object]:
        """Within a tenth."""
        return pytest.approx(self.pace, rel=0.1), pytest.approx(self.age, rel=0.1)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and what was seen of it."""

    live: LiveRun
    seen: Seen


def settled(rows: list[Row], since: float) -> list[Row]:
    """Lines of steady training, the first of which only marks where the others begin. ``since``:
    seconds of the run after which it has the machine as it has it later.
    """
    return [row for row in rows if row["state"] == "running" and row["t"] >= since + SETTLED_S]


def newest(live: LiveRun) -> float:
    """Seconds of its run, at the newest line."""
    return float(read_rows(live.directory / NAME)[-1]["t"])


def measured(live: LiveRun, since: float) -> Seen:
    """Once it has trained for long enough."""

    def rows() -> list[Row]:
        found = settled(read_rows(live.directory / NAME), since)
        return found if found and found[-1]["t"] - found[0]["t"] >= MEASURED_S else []

    seen = live.until("it has trained for long enough", rows)
    first, last = seen[0], seen[-1]
    trained = sum(row["staleness"]["count"] for row in seen[1:])
    age = (
        sum(
            row["staleness"]["mean"] * row["staleness"]["count"]
            for row in seen[1:]
            if row["staleness"]["count"]
        )
        / trained
    )
    pace = (last["env_steps"] - first["env_steps"]) / (last["t"] - first["t"])
    return Seen(pace, age)


def forecast(live: LiveRun, *changes: str) -> Seen:
    """What the history of ``live`` tells of it, with ``changes``."""
    config = str(live.directory / "config.toml")
    result = tianflow(live, "simulate", config, *changes, "--like", live.name, *UPDATES, "--json")
    assert 0 == result.exit_code, result.output
    outcome = json.loads(result.stdout)
    log.info(
        "forecast%s: %s",
        "".join(f" {change}" for change in changes),
        {**outcome, "histogram": None},
    )
    return Seen(outcome["steps_per_s"], outcome["staleness"]["mean"])


def oracle(folder: Path, changes: Mapping[str, object]) -> AbstractContextManager[LiveRun]:
    config = folder / "oracle.toml"
    config.write_text(
        "[env]\nid = 'tests.support.oracle:EchoEnv'\n"
        "[algorithm]\nname = 'tests.e2e.steady:SteadyOracle'\n"
    )
    settings: dict[str, Any] = {**SETTINGS, "algorithm__record": str(folder / "record"), **changes}
    return run(folder / "runs", str(config), **settings)


def side_by_side(folder: Path, changes: Mapping[str, Mapping[str, object]]) -> dict[str, Measured]:
    """Runs with these changes, by the same names. They rest most of the time, so they leave each
    other the cores. What they did while one of them still started is not measured.
    """
    with ExitStack() as stack:
        lives = {}
        for place, (name, changed) in enumerate(changes.items()):
            (folder / str(place)).mkdir()
            lives[name] = stack.enter_context(oracle(folder / str(place), changed))
        for live in lives.values():
            live.until_training()
        since = {name: newest(live) for name, live in lives.items()}
        seen = {name: measured(live, since[name]) for name, live in lives.items()}
    return {name: Measured(live, seen[name]) for name, live in lives.items()}


STEADY_RUNS: Mapping[str, Mapping[str, object]] = {
    "trajectories vary": {},
    "updates vary, too": {"algorithm__name": "tests.support.oracle:Oracle"},
    "nothing varies": {"env__kwargs": STEADY},
    "few actors": {"actors__count": 2},
}
OTHERS: Mapping[str, Mapping[str, object]] = {
    "more actors": {"actors__count": 6},
    "more actors, a tighter bound": {"actors__count": 6, "balance__max_staleness": 1},
    "more actors, a slower learner": {"actors__count": 6, "learner__slowdown": 1.0},
}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """Measured runs that have ended."""
    return side_by_side(tmp_path_factory.mktemp("steady"), STEADY_RUNS)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """Measured runs with changes that a run of few actors forecasts; they have ended."""
    return side_by_side(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.parametrize("name", ["trajectories vary", "updates vary, too"])
def test_a_steady_run_is_forecast_within_a_tenth(steady: dict[str, Measured], name: str) -> None:
    """Throughput and mean staleness, from where its time went alone: nothing of either is result to
    the simulation.
    """
    seen, result = steady[name].seen, forecast(steady[name].live)
    log.info("seen %s, forecast %s", seen, result)
    assert seen.near() == (result.pace, result.age)


def test_the_pace_of_a_run_in_which_nothing_varies_is_forecast_within_a_tenth(
    steady: dict[str, Measured],
) -> None:
    """How its actors fall into step, which makes 1.0 or 1.5 of the mean staleness, hangs on which
    of them was up first.
    """
    seen, result = steady["nothing varies"].seen, forecast(steady["nothing varies"].live)
    log.info("seen %s, forecast %s", seen, result)
    assert (seen.near()[0], True) == (result.pace, 0 < seen.age <= BOUND >= result.age > 0)


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_forecasts_another_within_a_tenth(
    steady: dict[str, Measured], others: dict[str, Measured], name: str
) -> None:
    """The history of a run of two actors forecasts other counts, bounds and speeds."""
    overrides = [assignment(path.replace("__", "."), value) for path, value in OTHERS[name].items()]
    predicted, seen = forecast(steady["few actors"].live, *overrides), others[name].seen
    log.info("seen %s, forecast %s", seen, predicted)
    assert seen.near() == (predicted.pace, predicted.age)


def test_a_simulation_that_takes_long_says_how_long_and_ends_when_it_is_interrupted() -> None:
    endless = ("rates.trajectory_s=1", "rates.update_s=1", "--updates", "9000000", "--json")
    command = [sys.executable, "-m", "tianflow", "simulate", "cartpole_ppo", *endless]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "to go" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=120.0)
    assert (130, "", "interrupted") == (process.returncode, said, complaint.splitlines()[-1])
    assert "Traceback" not in complaint
