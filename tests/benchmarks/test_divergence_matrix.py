"""Tests of the study of publication by divergence: its cases and its table."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.matrix import Record
from benchmarks.studies.divergence import (
    BOUND,
    LARGEST_LAG,
    RATES,
    RULES,
    cases,
    published_share,
    table,
)
from tianflow.config.loading import load_config
from tianflow.config.rules import largest_publish_lag


def summary(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "target_reached": True,
        "training_s": 7.0,
        "env_steps": 90_000,
        "updates": 80,
        "steps_per_s": 1000.0,
        "staleness": {"mean": 2.0, "max": 4, "violations": 0},
        "weights": {"published": 21, "skipped": 60},
    }
    return {**given, **changes}


def test_every_cell_is_one_valid_config_of_its_own() -> None:
    found = {case.name: load_config(case.config, case.settings(1)) for case in cases()}
    assert len(found) == len(cases()) == len(RATES) * len(RULES)
    assert len({config.model_dump_json() for config in found.values()}) == len(found)


def test_the_smallest_share_of_the_head_is_that_of_the_settings() -> None:
    for case in cases():
        config = load_config(case.config, case.settings(1))
        measured = config.weights.publish == "divergence"
        assert largest_publish_lag(config, BOUND) == (LARGEST_LAG if measured else BOUND)


def test_the_first_version_is_no_update_that_was_published() -> None:
    assert 0.25 == published_share(summary())
    assert 0.0 == published_share(summary(updates=0))


def test_the_table_has_times_of_runs_that_reached_the_target_only() -> None:
    case = cases()[0]
    failed = summary(target_reached=False, training_s=30.0, steps_per_s=3000.0)
    lines = table(
        [Record(case.name, 1, "", summary()), Record(case.name, 2, "", failed)], cases()
    ).splitlines()
    assert (
        "| 5e-4 | every update | 2 | 25% (25% – 25%) | 1 of 2 | 90,000 (90,000 – 90,000) | "
        "7.0 (7.0 – 7.0) | 2,000 (1,000 – 3,000) | 2.00 | 4 | 0 |"
    ) == lines[-1]
    lost = table([Record(case.name, 2, "", failed)], cases()).splitlines()[-1]
    assert "| 0 of 1 | – | – |" in lost
