"""Rates that are derived from a run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.settings import cartpole
from tianflow.cli import main as cli
from tianflow.config.loading import CONFIG_FILE, to_toml
from tianflow.config.model import Config
from tianflow.errors import ConfigError
from tianflow.rundir.history import NAME, Row
from tianflow.simulation.calibration import LEAST_S, SHARES_S, rates_of, read_like
from tianflow.simulation.rates import make_rates
from tianflow.simulation.simulation import Simulation

SETTLED = int(SHARES_S)


def config(**sections: dict[str, Any]) -> Config:
    """Two actors of 4 environments and 16 steps: a trajectory has 64 steps."""
    return cartpole(actors={"count": 2, "hosts": 2}, **sections)


def history(
    seconds: int,
    *,
    start: int = 0,
    updates: int = 10,
    steps: int = 600,
    episodes: int = 40,
    learner: float = 0.5,
    actors: float = 0.8,
    turn: float = 0.1,
    state: str = "running",
) -> list[Row]:
    """One row a second, with constant growth of each counter."""
    shares = {
        "learner": {"busy": learner, "waiting:batch": 1 - learner},
        "actor": {"busy": actors, "waiting:turn": turn, "paused": 0.0},
    }
    return [
        {
            "t": float(t),
            "span_s": 1.0,
            "state": state,
            "updates": updates * t,
            "env_steps": steps * t,
            "episodes": episodes * t,
        }
        | {"shares": shares, "marks": []}
        for t in range(start, start + seconds)
    ]


def test_times_are_where_time_went_over_how_often_it_went_there() -> None:
    """640 steps a second, with resets, are 10 trajectories: two actors, busy for 0.8 of the time,
    take 0.16 s for each.
    """
    found = make_rates(rates_of(history(20), config()))
    assert 0.16 == pytest.approx(found.trajectory_s)
    assert 0.05 == pytest.approx(found.update_s)
    assert 0.02 == pytest.approx(found.turn_s)
    assert 60.0 == found.env_steps


def test_a_slowed_learner_is_distinguished_from_a_slow_one() -> None:
    found = make_rates(rates_of(history(20), config(learner={"slowdown": 4.0})))
    assert 0.01 == pytest.approx(found.update_s)


def test_actors_that_share_a_thread_give_no_time_of_the_way_to_it() -> None:
    assert "turn_s" not in rates_of(history(20), cartpole(actors={"count": 2, "hosts": 1}))


def varied(rows: list[Row], **learner: float) -> list[Row]:
    """Rows with durations, as runs write them."""
    actor = {"count": 10, "mean": 0.16, "spread": 0.5, "skew": 1.0, "apart": 0.3}
    return [
        row
        | {
            "durations": {
                "actor": actor,
                "learner": {"count": 10, "mean": 0.05, "spread": 1.0, "skew": 2.0} | learner,
            }
        }
        for row in rows
    ]


def test_spreads_are_derived_and_those_of_actors_differ_from_those_of_trajectories() -> None:
    found = make_rates(rates_of(varied(history(20)), config()))
    assert (pytest.approx(1.0), pytest.approx(2.0)) == (found.update_spread, found.update_skew)
    assert (pytest.approx(0.4), pytest.approx(0.3), pytest.approx(1.0)) == (
        found.trajectory_spread,
        found.actor_spread,
        found.trajectory_skew,
    )
    assert (
        rates_of(history(20), config()).items() <= rates_of(varied(history(20)), config()).items()
    )


def test_what_is_constant_stays_constant() -> None:
    assert 0.0 == rates_of(varied(history(20), spread=0.0, skew=0.0), config())["update_spread"]


@pytest.mark.parametrize(
    "durations", [None, {}, {"actor": None, "learner": {}}, {"learner": {"count": 0}}]
)
def test_a_history_without_durations_gives_no_spread(durations: Any) -> None:
    rows = [row | {"durations": durations} for row in history(20)]
    assert not {"update_spread", "trajectory_spread", "actor_spread"} & set(
        rates_of(rows, config())
    )


def test_rows_before_the_last_change_do_not_count() -> None:
    before, after = history(20, learner=0.1), history(20, start=20)
    after[0]["marks"] = [{"t": 20.0, "kind": "change"}]
    assert rates_of(history(20), config()) == pytest.approx(rates_of([*before, *after], config()))


@pytest.mark.parametrize("action", ["checkpoint", "pause", "stop"])
def test_saving_pausing_or_stopping_a_run_does_not_change_its_rates(action: str) -> None:
    rows = history(20)
    rows[-1]["marks"] = [{"t": 19.0, "kind": "change", "action": action, "paths": []}]
    assert rates_of(history(19), config()) == pytest.approx(rates_of(rows, config()), rel=0.02)


def test_shares_that_look_back_to_before_the_start_or_a_rest_are_left_out() -> None:
    starting = history(3, state="starting", updates=0, steps=0, episodes=0, learner=0.0, actors=0.0)
    settling = history(SETTLED, start=3, learner=0.1)
    assert rates_of(history(20), config()) == pytest.approx(
        rates_of([*starting, *settling, *history(20, start=3 + SETTLED)], config())
    )
    resting = history(3, start=30, state="paused", learner=0.0, actors=0.0)
    rows = [
        *history(30),
        *resting,
        *history(SETTLED, start=33, learner=0.1),
        *history(20, start=33 + SETTLED),
    ]
    assert rates_of(history(20), config()) == pytest.approx(rates_of(rows, config()))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        history(int(LEAST_S)),
        [*history(3, state="starting"), *history(SETTLED, start=3)],
        history(20, updates=0),
        history(20, steps=0),
        history(20, learner=0.0),
        [{"t": float(t), "state": "running"} for t in range(20)],
    ],
)
def test_a_run_that_has_not_trained_is_refused(rows: list[Row]) -> None:
    with pytest.raises(ConfigError, match="has not trained"):
        rates_of(rows, config())


def run_directory(folder: Path, settings: Config, rows: list[Row]) -> Path:
    directory = folder / "earlier"
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(to_toml(settings))
    (directory / NAME).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_counts_bounds_and_speeds_may_differ_from_those_of_the_run(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, config(), history(20))
    other = cartpole(
        actors={"count": 9},
        balance={"max_staleness": 4},
        learner={"slowdown": 2.0},
        algorithm={"learning_rate": 1e-5},
    )
    assert (rates_of(history(20), config()), {"latency_s", "learner_latency_s"}) == read_like(
        directory, other
    )


def test_an_update_of_twice_the_trajectories_is_assumed_to_take_twice_the_time(
    tmp_path: Path,
) -> None:
    directory, own = run_directory(tmp_path, config(), history(20)), config()
    twice = cartpole(algorithm={"batch_trajectories": 2 * own.algorithm.batch_trajectories})
    found, assumed = read_like(directory, twice)
    assert 2 * rates_of(history(20), own)["update_s"] == pytest.approx(found["update_s"])  # type: ignore[operator]
    assert "update_s" in assumed


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"env": {"num_envs": 8}}, "differs in env,"),
        ({"network": {"hidden": [32]}}, "differs in network,"),
        ({"algorithm": {"epochs": 3}}, "differs in algorithm,"),
        ({"actors": {"rollout_steps": 32}}, "differs in actors.rollout_steps,"),
    ],
)
def test_other_work_takes_another_time(
    tmp_path: Path, sections: dict[str, Any], named: str
) -> None:
    directory = run_directory(tmp_path, config(), history(20))
    with pytest.raises(ConfigError, match=named):
        read_like(directory, cartpole(**sections))


def test_a_simulation_reproduces_the_rates_of_its_history() -> None:
    """Ten trajectories and ten updates a second; the learner is busy for half of the time."""
    settings = config(balance={"max_staleness": 4})
    given = make_rates(rates_of(history(20, turn=0.0, actors=1.0), settings))
    outcome = Simulation(settings, given).run(updates=200, warmup=20)
    assert 600.0 == pytest.approx(outcome.steps_per_s, rel=0.03)
    assert 10.0 == pytest.approx(outcome.updates_per_s, rel=0.03)
    assert 0.5 == pytest.approx(outcome.learner["busy"], abs=0.02)


def test_the_command_takes_a_run_by_name_and_replaces_single_rates(tmp_path: Path) -> None:
    run_directory(tmp_path, config(), history(20))
    source = str(tmp_path / "earlier" / CONFIG_FILE)
    result = CliRunner().invoke(
        cli.app,
        [
            "simulate",
            source,
            "rates.update_s=0.25",
            "--like",
            "earlier",
            "--runs-dir",
            str(tmp_path),
            "--updates",
            "20",
            "--json",
        ],
    )
    assert 0 == result.exit_code, result.output
    found, assumed = (json.loads(result.stdout)[key] for key in ("rates", "assumed"))
    assert (0.25, pytest.approx(0.16)) == (found["update_s"], found["trajectory_s"])
    assert {
        "latency_s": 0.001,
        "learner_latency_s": 0.001,
        "trajectory_spread": 0.1,
        "update_spread": 0.0,
    } == assumed
    missing = CliRunner().invoke(
        cli.app, ["simulate", source, "--like", "erlier", "--runs-dir", str(tmp_path)]
    )
    assert (1, True) == (missing.exit_code, "did you mean 'earlier'?" in missing.stderr)


def test_the_command_names_its_assumptions_and_only_them(tmp_path: Path) -> None:
    directory = run_directory(tmp_path, config(), history(20))
    source = str(directory / CONFIG_FILE)

    def assumed(*more: str) -> str:
        result = CliRunner().invoke(
            cli.app,
            [
                "simulate",
                source,
                *more,
                "--like",
                "earlier",
                "--runs-dir",
                str(tmp_path),
                "--updates",
                "20",
            ],
        )
        assert 0 == result.exit_code, result.output
        return next((line for line in result.stdout.splitlines() if line.startswith("assumed")), "")

    assert assumed().endswith(
        ": latency_s = 0.001, learner_latency_s = 0.001, trajectory_spread = 0.1, update_spread = 0"
    )
    assert assumed("rates.latency_s=0", "rates.update_spread=1").endswith(
        ": learner_latency_s = 0.001, trajectory_spread = 0.1"
    )
    (directory / NAME).write_text("".join(json.dumps(row) + "\n" for row in varied(history(20))))
    assert assumed().endswith(": latency_s = 0.001, learner_latency_s = 0.001")
    assert "" == assumed("rates.latency_s=0", "rates.learner_latency_s=0")
