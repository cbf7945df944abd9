"""The matrix of bounds: what its cells are, and that the table says what was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.bound import ALGORITHMS, BALANCES, SLOWDOWNS, cases, expired_share, table, time_of
from benchmarks.learning import Record
from tianflow.config_loading import load_config
from tianflow.memory import slots_wanted


def summary(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "target_reached": True,
        "time_to_target_s": 7.0,
        "training_s": 9.0,
        "steps_per_s": 1000.0,
        "mean_return": 20.0,
        "evaluation": {"mean_return": 480.0},
        "staleness": {"mean": 2.0, "max": 4, "violations": 0},
        "trajectories": {"begun": 100, "trained": 60, "dropped": {"expired": 25, "stopped": 15}},
    }
    return {**given, **changes}


def test_every_cell_is_one_valid_config_of_its_own() -> None:
    found = {case.name: load_config(case.config, case.settings(1)) for case in cases()}
    assert len(found) == len(cases()) == len(ALGORITHMS) * len(BALANCES) * len(SLOWDOWNS)
    assert len({config.model_dump_json() for config in found.values()}) == len(found)


def test_who_is_not_paced_has_the_room_of_an_open_loop() -> None:
    rooms = {case.name: slots_wanted(load_config(case.config, case.settings(1))) for case in cases()}
    assert rooms["ppo, filter 4, slowdown 0"] == rooms["ppo, open loop, slowdown 0"] == 32
    assert rooms["ppo, bound 4, slowdown 0"] == 5 + 3


def test_only_what_was_too_old_counts_as_expired() -> None:
    assert expired_share(summary()) == 0.25


def test_a_run_that_met_the_target_in_its_last_evaluation_took_all_its_time() -> None:
    assert [7.0, 9.0] == [time_of(summary()), time_of(summary(time_to_target_s=None))]


def test_the_table_keeps_who_failed_out_of_the_time_and_in_the_return() -> None:
    case = cases()[0]
    failed = summary(target_reached=False, time_to_target_s=None, evaluation={})
    line = table([Record(case.name, 1, "", summary()), Record(case.name, 2, "", failed)], cases()).splitlines()[-1]
    assert line == f"| {case.name} | 1 of 2 | 7.0 | 250 | 1,000 | 2.00 | 4 | 0 | 25% |"
