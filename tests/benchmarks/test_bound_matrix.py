"""Tests of the study of bounds: its cases and its table."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.matrix import Record
from benchmarks.studies.bound import (
    ACTORS,
    ALGORITHMS,
    HOLDERS,
    SECONDS,
    SLOTS,
    SLOWDOWNS,
    cases,
    seconds_to_target,
    table,
)
from tianflow.config.loading import load_config
from tianflow.planning.memory import slots_wanted


def summary(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "target_reached": True,
        "time_to_target_s": 7.0,
        "training_s": 9.0,
        "steps_per_s": 1000.0,
        "evaluation": {"mean_return": 480.0},
        "staleness": {"mean": 2.0, "max": 4, "violations": 0},
        "trajectories": {"begun": 100, "trained": 60, "dropped": {"expired": 25, "stopped": 15}},
    }
    return {**given, **changes}


def test_every_cell_is_one_valid_config_of_its_own() -> None:
    found = {case.name: load_config(case.config, case.settings(1)) for case in cases()}
    assert len(found) == len(cases()) == len(ALGORITHMS) * len(HOLDERS) * len(SLOWDOWNS)
    assert len({config.model_dump_json() for config in found.values()}) == len(found)


def test_actors_that_are_not_paced_have_the_slots_of_an_open_loop() -> None:
    rooms = {
        case.name: slots_wanted(load_config(case.config, case.settings(1))) for case in cases()
    }
    assert rooms["PPO, slowed 0, filter at 4"] == rooms["PPO, slowed 0, open loop"] == SLOTS
    assert rooms["PPO, slowed 0, η = 4"] == 5 + ACTORS


def test_a_run_that_reached_the_target_too_late_or_never_counts_as_the_whole_time() -> None:
    late = summary(time_to_target_s=None)
    never = summary(target_reached=False)
    assert [7.0, SECONDS, SECONDS] == [seconds_to_target(each) for each in (summary(), late, never)]


def test_the_table_counts_failed_runs_and_dropped_trajectories() -> None:
    case = cases()[0]
    failed = summary(target_reached=False, time_to_target_s=None, evaluation={"mean_return": 20.0})
    line = table(
        [Record(case.name, 1, "", summary()), Record(case.name, 2, "", failed)], cases()
    ).splitlines()[-1]
    assert line == "| PPO | no | η = 1 | 1 of 2 | 18.5 (7.0 – 30.0) | 250 | 600 | 2.00 | 4 | 40% |"
