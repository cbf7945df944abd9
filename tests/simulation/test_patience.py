"""A simulation is refused or ends, whatever its arguments are, and reports its progress."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.effort import examples
from tests.support.settings import cartpole
from tianflow.cli import main as cli
from tianflow.config.model import Config
from tianflow.errors import ConfigError
from tianflow.simulation.clock import AT_MOST, Clock
from tianflow.simulation.durations import Durations
from tianflow.simulation.patience import MOST_S, Patience, a_batch_s, require_an_end
from tianflow.simulation.progress import EVERY_S, Progress, ProgressState
from tianflow.simulation.rates import MeasuredRates
from tianflow.simulation.simulation import Simulation

ONE_EACH = ("rates.trajectory_s=1", "rates.update_s=1")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", "cartpole_ppo", *ONE_EACH, *arguments])


def config(*, count: int = 4, batch: int = 2, slowdown: float = 0.0) -> Config:
    return cartpole(
        algorithm={"batch_trajectories": batch},
        actors={"count": count},
        balance={"max_staleness": 1, "min_fragment_steps": 1},
        learner={"slowdown": slowdown},
    )


# Refused
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "trajectory_s",
        "update_s",
        "publish_s",
        "turn_s",
        "restart_s",
        "latency_s",
        "learner_latency_s",
    ],
)
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e300"])
def test_a_duration_outside_the_accepted_range_is_refused(name: str, value: str) -> None:
    result = run(f"rates.{name}={value}")
    assert 2 == result.exit_code
    assert result.stderr.startswith(f"rates.{name} = ")


@pytest.mark.parametrize(
    "given",
    [
        "trajectory_s=0",
        "trajectory_s=1e-12",
        "update_s=0",
        "update_s=1e-300",
        "trajectory_spread=1e200",
        "trajectory_skew=-1e200",
        "straggler_factor=1e308",
        "straggler_share=1.5",
        "failures_per_hour=1e300",
        "env_steps=1e300",
        "env_steps=0",
        "bandwidth=1e-300",
        "weights_bytes=1e300",
    ],
)
def test_an_impossible_rate_is_refused_by_name(given: str) -> None:
    result = run(f"rates.{given}")
    assert 2 == result.exit_code
    assert result.stderr.startswith(f"rates.{given.partition('=')[0]} = ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("actors=10000000",), "actors = '10000000'"),
        (("--updates", "0"), "--updates"),
        (("--updates", "1000000000000"), "--updates"),
        (("--warmup", "1000000000000"), "--warmup"),
        (("--seconds", "-1"), "--seconds"),
        (("--seconds", "nan"), "--seconds"),
        (
            ("learner.slowdown=1e300",),
            (
                "--updates = 220: would take 2.2e+302 s of virtual time: an update takes 1e+300 s "
                "(rates.update_s"
            ),
        ),
        (
            ("rates.trajectory_s=500000", "--seconds", "1e300"),
            "a batch of 1 takes 5e+05 s (rates.trajectory_s",
        ),
        (
            ("algorithm.batch_trajectories=1000000000",),
            "algorithm.batch_trajectories = 1000000000: exceeds the slots",
        ),
        (("algorithm.batch_trajectories=60000",), "a batch of 60000 takes 6e+04 s"),
        (
            ("rates.bandwidth=1", "rates.weights_bytes=1e9"),
            "rates.bandwidth = 1.0: a transfer over a link would take 1e+09 s",
        ),
    ],
)
def test_a_simulation_that_would_take_too_long_is_refused_by_name(
    arguments: tuple[str, ...], words: str
) -> None:
    result = run(*arguments)
    assert 2 == result.exit_code
    assert words in result.stderr


def test_a_long_simulation_may_run_up_to_a_limit() -> None:
    result = run("rates.trajectory_s=500000", "--seconds", "30", "--json")
    assert (0, "starting") == (result.exit_code, json.loads(result.stdout)["bottleneck"])


def test_the_slower_side_decides_how_long_a_simulation_would_take() -> None:
    slow = MeasuredRates(
        trajectory_s=MOST_S / 1e4, update_s=1.0, straggler_share=0.5, straggler_factor=2.0
    )
    whole = config(count=4, batch=3)
    assert pytest.approx(3 * slow.trajectory_s / (4 * 0.75)) == a_batch_s(whole, slow)
    require_an_end(whole, slow, updates=10_000, seconds=math.inf)
    for updates, refused in ((10_001, "rates.trajectory_s"), (10_000, "learner.slowdown")):
        held = config(count=4, batch=3, slowdown=0.0 if updates > 10_000 else 2000.0)
        with pytest.raises(ConfigError, match=refused):
            require_an_end(held, slow, updates=updates, seconds=math.inf)
        require_an_end(held, slow, updates=updates, seconds=MOST_S)


# Ended
# --------------------------------------------------------------------------------------------------


def test_a_clock_returns_though_time_stands_still() -> None:
    clock = Clock()

    def again() -> None:
        clock.at(0.0, again)

    again()
    assert clock.advance(until=1.0)
    assert (0.0, AT_MOST + 1) == (clock.now, clock.events)


def test_patience_is_over_after_many_events_or_much_time_without_an_update() -> None:
    rates = MeasuredRates(trajectory_s=1.0, update_s=1.0)
    for step in ({"now": 1e4}, {"events": 10**7}):
        patience = Patience(config(), rates)
        at = {"now": 0.0, "events": 0}
        for updates in range(1, 4):
            at = {
                "now": at["now"] + step.get("now", 0.0),
                "events": int(at["events"] + step.get("events", 0)),
            }
            assert not patience.is_over(updates=updates, now=at["now"], events=int(at["events"]))
        assert not patience.is_over(
            updates=3, now=at["now"] + 100.0, events=int(at["events"]) + 10**6
        )
        assert patience.is_over(
            updates=3,
            now=at["now"] + step.get("now", 0.0),
            events=int(at["events"] + step.get("events", 0)),
        )


def test_actors_that_fail_before_they_commit_are_reported_as_stalled() -> None:
    """Events remain and virtual time advances, but no trajectory is committed."""
    result = run("rates.failures_per_hour=360000", "rates.restart_s=0.1", "--json")
    assert (1, "stalled", 0) == (
        result.exit_code,
        json.loads(result.stdout)["bottleneck"],
        json.loads(result.stdout)["updates"],
    )


def test_a_simulation_that_ends_in_its_warm_up_says_so() -> None:
    assert "use more --seconds or less --warmup" in run("--seconds", "3").stdout


EXTREMES = st.fixed_dictionaries(
    {
        **dict.fromkeys(("trajectory_s", "update_s"), st.sampled_from([1e-6, 1e-3, 1.0, 1e6])),
        **dict.fromkeys(
            ("trajectory_spread", "update_spread", "actor_spread"), st.sampled_from([0.0, 1.0, 1e3])
        ),
        **dict.fromkeys(("trajectory_skew", "update_skew"), st.sampled_from([-1e6, 0.0, 1e6])),
        **dict.fromkeys(
            ("publish_s", "turn_s", "restart_s", "latency_s", "learner_latency_s"),
            st.sampled_from([0.0, 1e-9, 1e6]),
        ),
        "straggler_share": st.sampled_from([0.0, 0.5, 1.0]),
        "straggler_factor": st.sampled_from([1.0, 1e6]),
        "failures_per_hour": st.sampled_from([0.0, 3.6e6]),
        "bandwidth": st.sampled_from([None, 1e9]),
        "weights_bytes": st.sampled_from([0.0, 1e15]),
    }
)


@examples(25)
@given(
    rates=EXTREMES,
    bound=st.sampled_from([0, 2, "unbounded"]),
    patience=st.sampled_from([0.0, 1e300]),
)
def test_with_any_rates_a_simulation_ends_within_the_bound(
    rates: dict[str, Any], bound: int | str, patience: float
) -> None:
    whole = cartpole(
        algorithm={"batch_trajectories": 2},
        actors={"count": 3},
        balance={"max_staleness": bound, "min_fragment_steps": 1, "straggler_patience": patience},
    )
    outcome = Simulation(whole, MeasuredRates(**rates)).run(updates=3, seconds=2.0)
    assert outcome.updates == 3 or outcome.seconds <= 2.0 + 0.25 or outcome.bottleneck == "stalled"
    assert 0 == outcome.staleness.violations
    assert all(
        math.isfinite(value)
        for value in (outcome.steps_per_s, outcome.trained_steps_per_s, outcome.updates_per_s)
    )


def test_durations_are_positive_though_most_are_near_zero() -> None:
    drawn = Durations(mean=1.0, spread=1e3, skew=0.0, random=np.random.default_rng(1))
    assert 0.0 < min(drawn.draw() for _ in range(2048))


# Progress
# --------------------------------------------------------------------------------------------------


def test_a_long_simulation_reports_its_progress_and_the_time_to_go() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    for now[0], part in (
        (EVERY_S - 0.1, 0.1),
        (EVERY_S, 0.0),
        (EVERY_S + 1.0, 0.1),
        (4 * EVERY_S, 0.2),
        (8 * EVERY_S, 0.001),
    ):
        progress(lambda part=part: ProgressState(updates=7, now=12.5, fraction=part))  # type: ignore[misc]
    assert [
        "7 updates, 12.5 s of virtual time, 0.0%; time to go is unknown yet",
        "7 updates, 12.5 s of virtual time, 20.0%; about 80 s to go",
        "7 updates, 12.5 s of virtual time, 0.1%; about 11 hours to go",
    ] == lines


def test_progress_is_measured_against_the_limit_that_comes_first() -> None:
    parts = []
    rates = MeasuredRates(trajectory_s=1.0, update_s=1.0, trajectory_spread=0.0)
    for seconds in (10.0, math.inf):
        Simulation(config(), rates).run(
            updates=20, seconds=seconds, report=lambda progress: parts.append(progress().fraction)
        )
        assert sorted(parts) == parts
        assert 0.9 < parts[-1] <= 1.0
        parts.clear()
