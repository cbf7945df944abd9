"""Schedules of settings: their values, their place in a config, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tianflow.config import describe
from tianflow.config.imports import require_allowed, require_trusted
from tianflow.config.loading import load_config, to_toml, with_changes
from tianflow.config.model import Config
from tianflow.config.schedules import (
    SCHEDULED,
    STATISTICS,
    Elapsed,
    Schedule,
    schedules_of,
    settings_at,
    value_at,
)
from tianflow.errors import ConfigError, Problem, RunError

RATE = "algorithm.learning_rate"
START = Elapsed(0, 0, 0.0)


def config(value: object, *, path: str = RATE, **run: Any) -> Config:
    """PPO with ``value`` at ``path``; DQN with prioritised draws where it is of replay."""
    section, _, key = path.partition(".")
    tables: dict[str, Any] = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn" if section == "replay" else "ppo"},
        "run": run,
    }
    if section == "replay":
        tables["replay"] = {"selector": "prioritised"}
    if value is not None:
        tables.setdefault(section, {})[key] = value
    return load_config(tables)


def refused(value: object, *, path: str = RATE, **run: Any) -> Problem:
    """The only problem."""
    with pytest.raises(ConfigError) as error:
        config(value, path=path, **run)
    (problem,) = error.value.problems
    return problem


def schedule(name: str = "linear", **settings: Any) -> dict[str, Any]:
    return {"schedule": name, **settings}


def halved(progress: float) -> float:
    return 1.0 - progress / 2.0


def negative(progress: float) -> float:
    return -progress


def late(progress: float) -> float:
    """Fails at a progress at which no check calls it."""
    if progress == 0.1:
        raise ZeroDivisionError
    return 1.0


def spiked(progress: float) -> float:
    return -1.0 if progress == 0.1 else 1.0


HERE = __name__

# Values
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (schedule(start=1.0, end=0.0, over=100), (1.0, 0.75, 0.5, 0.0, 0.0)),
        (schedule(start=0.2, end=0.6, over=100), (0.2, 0.3, 0.4, 0.6, 0.6)),
        (schedule("constant", start=0.3), (0.3,) * 5),
        (
            schedule("cosine", start=1.0, end=0.0, over=100),
            (1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.0, 0.0),
        ),
        (schedule("exponential", start=1.0, end=0.0001, over=100), (1, 0.1, 0.01, 1e-4, 1e-4)),
        (
            schedule("piecewise", points=[[25, 1.0], [50, 0.5], [100, 0.1]]),
            (1.0, 1.0, 0.5, 0.1, 0.1),
        ),
        (schedule(f"{HERE}:halved", over=100), (1.0, 0.875, 0.75, 0.5, 0.5)),
        (0.7, (0.7,) * 5),
    ],
)
def test_a_schedule_has_its_value_at_each_position_and_holds_the_last(
    given: object, values: tuple[float, ...]
) -> None:
    made = config(given)
    found = [value_at(made, RATE, Elapsed(at, 1e9, 1e9)) for at in (0, 25, 50, 100, 1e6)]
    assert found == [pytest.approx(value) for value in values]


@pytest.mark.parametrize(
    ("unit", "limit", "elapsed"),
    [
        ("steps", "max_env_steps", Elapsed(25, 0, 0.0)),
        ("updates", "max_updates", Elapsed(0, 25, 0.0)),
        ("seconds", "max_seconds", Elapsed(0, 0, 25.0)),
    ],
)
def test_without_a_length_a_schedule_ends_at_the_limit_of_the_run_in_its_unit(
    unit: str, limit: str, elapsed: Elapsed
) -> None:
    ends = {"start": 1.0, "end": 0.0}
    for given in (schedule(unit=unit, **ends), schedule(**ends)):
        assert 0.75 == value_at(config(given, **{limit: 100}), RATE, elapsed)


def test_the_unit_of_a_length_is_steps() -> None:
    made = config(schedule(start=1.0, end=0.0, over=100), max_updates=10)
    assert 0.75 == value_at(made, RATE, Elapsed(25, 10, 0.0))


def test_the_older_form_of_a_schedule_has_the_same_values_and_a_table_takes_precedence() -> None:
    tables: dict[str, Any] = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {
            "name": "ppo",
            "learning_rate": 3e-4,
            "learning_rate_schedule": "linear",
        },
        "run": {"max_env_steps": 1000},
    }
    for steps in (0, 333, 1000, 2000):
        found = value_at(load_config(tables), RATE, Elapsed(steps, 0, 0.0))
        assert 3e-4 * max(0.0, 1.0 - steps / 1000.0) == found
    tables["algorithm"]["learning_rate"] = schedule("constant", start=0.5)
    assert 0.5 == value_at(load_config(tables), RATE, Elapsed(999, 0, 0.0))


def test_algorithms_receive_numbers() -> None:
    tables = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {
            "name": "ppo",
            "learning_rate": schedule(start=1.0, end=0.0, over=10),
            "entropy_cost": schedule(start=0.4, end=0.2, over=10),
            "clip": schedule(start=0.3, end=0.1, over=10),
        },
    }
    found: Any = settings_at(load_config(tables), Elapsed(5, 0, 0.0))
    assert (0.5, pytest.approx(0.3), pytest.approx(0.2)) == (
        found.learning_rate,
        found.entropy_cost,
        found.clip,
    )
    plain = config(1e-3)
    assert plain.algorithm is settings_at(plain, START)


def test_beta_grows_to_1_over_the_limit_of_the_run_and_is_constant_without_one() -> None:
    path = "replay.beta"
    for limit in ("max_env_steps", "max_updates", "max_seconds"):
        made = config(None, path=path, **{limit: 100})
        found = [value_at(made, path, Elapsed(at, at, at)) for at in (0, 50, 100, 200)]
        assert found == [0.4, pytest.approx(0.7), 1.0, 1.0]
    assert 0.4 == value_at(config(None, path=path), path, Elapsed(9, 9, 9.0))
    assert 0.5 == value_at(config(0.5, path=path, max_updates=9), path, Elapsed(9, 9, 9.0))


def test_beta_of_r2d2_is_constant_as_in_its_paper() -> None:
    tables: dict[str, Any] = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "r2d2"},
        "network": {"lstm": 8},
        "replay": {"selector": "prioritised"},
        "run": {"max_updates": 100},
    }
    assert 0.6 == value_at(load_config(tables), "replay.beta", Elapsed(0, 100, 0.0))


def test_an_algorithm_without_a_setting_has_no_value_of_it() -> None:
    replayed = config(None, path="replay.beta")
    assert value_at(replayed, "algorithm.entropy_cost", START) is None
    assert value_at(replayed, "algorithm.clip", START) is None


@pytest.mark.parametrize(
    ("name", "words"), [("late", "ZeroDivisionError"), ("spiked", "a number >= 0")]
)
def test_a_function_that_fails_later_ends_the_run_with_its_name(name: str, words: str) -> None:
    made = config(schedule(f"{HERE}:{name}", over=10))
    with pytest.raises(RunError, match=f"{HERE}:{name}") as error:
        value_at(made, RATE, Elapsed(1, 0, 0.0))
    assert RATE == error.value.component
    assert words in error.value.details


# Configs
# --------------------------------------------------------------------------------------------------


def test_a_schedule_survives_toml_and_json(tmp_path: Path) -> None:
    for given in (
        schedule(start=1e-3, end=1e-5, over=1_000_000, unit="updates"),
        schedule("piecewise", points=[[0, 3e-4], [500_000, 1e-4]]),
    ):
        made = config(given)
        (tmp_path / "one.toml").write_text(to_toml(made))
        assert made == load_config(tmp_path / "one.toml")
        assert made == load_config(json.loads(made.model_dump_json()))


def test_a_number_or_another_schedule_replaces_a_schedule() -> None:
    first = config(schedule(start=1e-3, end=0.0, over=100))
    assert (
        1e-4 == with_changes(first, {"algorithm": {"learning_rate": 1e-4}}).algorithm.learning_rate
    )
    points = schedule("piecewise", points=[[0, 1.0]])
    second: object = with_changes(first, {"algorithm": {"learning_rate": points}})
    assert isinstance(second, Config)
    assert Schedule(**points) == second.algorithm.learning_rate
    overridden = load_config(
        json.loads(first.model_dump_json()),
        [f'{RATE}={{schedule="piecewise", points=[[0, 1.0]]}}'],
    )
    assert Schedule(**points) == overridden.algorithm.learning_rate


def test_one_entry_of_a_schedule_can_change() -> None:
    first = config(schedule(start=1e-3, end=0.0, over=100))
    changed = with_changes(first, {"algorithm": {"learning_rate": {"end": 1e-5}}})
    expected = Schedule(schedule="linear", start=1e-3, end=1e-5, over=100)
    assert expected == changed.algorithm.learning_rate


def test_the_description_names_both_forms() -> None:
    (setting,) = describe.find(RATE)
    assert ("number from 0, or table of a schedule", True) == (setting.accepted, setting.live)


# Refusals
# --------------------------------------------------------------------------------------------------

LINE = {"start": 1.0, "end": 0.5, "over": 10}


@pytest.mark.parametrize(
    ("given", "path", "accepted"),
    [
        (schedule(**{**LINE, "end": -1.0}), "end", "a number >= 0"),
        (schedule(**{**LINE, "start": -1.0}), "start", "a number >= 0"),
        (
            schedule("exponential", **{**LINE, "end": 0.0}),
            "end",
            "a number > 0, or linear or cosine",
        ),
        (schedule("exponential", **{**LINE, "start": 0.0}), "start", "linear or cosine"),
        (schedule(**LINE, unit="frames"), "unit", "'steps', 'updates' or 'seconds'"),
        (schedule(**{**LINE, "over": 0}), "over", "a number > 0"),
        (schedule(start=1.0, over=10), "end", "a number >= 0"),
        (schedule("linaer", **LINE), "schedule", "did you mean 'linear'"),
        (schedule("constant", start=1.0, end=0.5), "end", "without it"),
        (schedule(**LINE, points=[[0, 1.0]]), "points", "without it"),
        (schedule(**LINE, speed=1), "speed", "one of end, over, points, schedule, start, unit"),
        (schedule("piecewise"), "points", "[[position, value], ...]"),
        (schedule("piecewise", points=[]), "points", "[[position, value], ...]"),
        (schedule("piecewise", points=[[5, 1.0], [5, 2.0]]), "points.1.0", "a position > 5"),
        (schedule("piecewise", points=[[-1, 1.0]]), "points.0.0", "a position >= 0"),
        (schedule("piecewise", points=[[0, -1.0]]), "points.0.1", "a number >= 0"),
        (schedule("piecewise", points=[[0, "fast"]]), "points.0.1", "a number"),
        (schedule("no_such_module:f", over=10), "schedule", "a module in the current directory"),
        (schedule(f"{HERE}:halve", over=10), "schedule", "did you mean 'halved'"),
        (schedule(f"{HERE}:HERE", over=10), "schedule", "a function of the progress"),
        (
            schedule(f"{HERE}:negative", over=10),
            "schedule",
            "a function that returns a number >= 0",
        ),
        (schedule("math:log", over=10), "schedule", "a function that returns a number >= 0"),
        (schedule("not-a-module:f", over=10), "schedule", "module:attribute"),
    ],
)
def test_a_schedule_that_has_no_meaning_is_refused_by_path(
    given: dict[str, Any], path: str, accepted: str
) -> None:
    problem = refused(given)
    assert f"{RATE}.{path}" == problem.path
    assert accepted in str(problem)


@pytest.mark.parametrize(
    ("path", "end", "accepted"),
    [
        ("algorithm.clip", 0.0, "a number > 0"),
        ("algorithm.entropy_cost", -0.1, "a number >= 0"),
        ("replay.beta", 1.5, "a number from 0 to 1"),
    ],
)
def test_ends_are_values_that_the_setting_accepts(path: str, end: float, accepted: str) -> None:
    problem = refused(schedule(**{**LINE, "end": end}), path=path)
    assert (f"{path}.end", accepted) == (problem.path, problem.accepted)


@pytest.mark.parametrize(
    ("unit", "run", "accepted"),
    [
        ("seconds", {"max_updates": 5}, "a number of seconds, or a run with run.max_seconds"),
        (None, {}, "a number of steps, or a run with one of run.max_env_steps, run.max_updates"),
    ],
)
def test_a_schedule_without_a_length_needs_a_limit_of_the_run(
    unit: str | None, run: dict[str, Any], accepted: str
) -> None:
    given = schedule(start=1.0, end=0.0) | ({} if unit is None else {"unit": unit})
    problem = refused(given, **run)
    assert f"{RATE}.over" == problem.path
    assert accepted in problem.accepted


@pytest.mark.parametrize(
    ("given", "run"),
    [
        (schedule(**LINE, unit="seconds"), {}),
        (schedule(start=1.0, end=0.0), {"max_seconds": 10.0}),
        (schedule("piecewise", points=[[0, 1.0]], unit="seconds"), {}),
    ],
)
def test_a_deterministic_run_follows_no_clock(given: dict[str, Any], run: dict[str, Any]) -> None:
    tables: dict[str, Any] = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo", "learning_rate": given},
        "actors": {"count": 1},
        "balance": {"max_staleness": 0},
        "run": {"deterministic": True, **run},
    }
    with pytest.raises(ConfigError, match="could not repeat bit for bit") as error:
        load_config(tables)
    assert [f"{RATE}.unit"] == [problem.path for problem in error.value.problems]
    tables["run"]["deterministic"] = False
    load_config(tables)


def test_a_live_change_is_refused_like_a_config() -> None:
    with pytest.raises(ConfigError) as error:
        with_changes(config(1e-3), {"algorithm": {"learning_rate": schedule(start=1.0, end=0.0)}})
    assert [f"{RATE}.over"] == [problem.path for problem in error.value.problems]


@pytest.mark.parametrize("name", ["os:getcwd", "os.path:basename", "os:path.basename"])
def test_every_function_that_a_schedule_accepts_is_subject_to_trust(name: str) -> None:
    tables = {"algorithm": {"learning_rate": schedule(name, over=10)}}
    for check in (lambda: require_allowed(tables, ()), lambda: require_trusted(tables, False)):
        with pytest.raises(ConfigError) as error:
            check()
        assert [f"{RATE}.schedule"] == [problem.path for problem in error.value.problems]


def test_schedules_of_a_run_are_found_also_where_a_default_makes_them() -> None:
    linear = {"schedule": "linear", "start": 1e-3, "end": 0.0, "over": 10.0}
    assert {} == schedules_of(config(1e-3))
    assert [RATE] == list(schedules_of(config(linear)))
    older = config("linear", path="algorithm.learning_rate_schedule", max_updates=10)
    assert [RATE] == list(schedules_of(older))
    assert ["replay.beta"] == list(schedules_of(config(None, path="replay.beta", max_updates=10)))
    assert {} == schedules_of(config(0.4, path="replay.beta", max_updates=10))
    uniform = load_config(
        {
            "env": {"id": "CartPole-v1"},
            "algorithm": {"name": "dqn"},
            "replay": {"selector": "uniform"},
            "run": {"max_updates": 10},
        }
    )
    assert {} == schedules_of(uniform), "an exponent without prioritised draws has no effect"


def test_every_scheduled_setting_has_a_statistic() -> None:
    assert set(SCHEDULED) == set(STATISTICS)
