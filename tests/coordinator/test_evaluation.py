"""Evaluations are due by time, by environment steps, or by both."""

from __future__ import annotations

from tianflow.config.model import EvaluationSettings
from tianflow.coordinator.evaluation import EvaluationSchedule


def due(
    schedule: EvaluationSchedule, settings: EvaluationSettings, *moments: tuple[float, int]
) -> list[bool]:
    return [schedule.take(settings, now=now, env_steps=steps) for now, steps in moments]


def test_without_an_interval_nothing_is_due() -> None:
    schedule = EvaluationSchedule(now=0.0, env_steps=0)
    assert [False, False] == due(schedule, EvaluationSettings(), (0.0, 0), (1e6, 10**9))


def test_by_time_the_first_one_is_due_at_once() -> None:
    schedule = EvaluationSchedule(now=5.0, env_steps=0)
    settings = EvaluationSettings(every_s=10.0)
    assert [True, False, False, True, False] == due(
        schedule, settings, (5.0, 0), (5.1, 0), (14.9, 0), (15.0, 0), (24.9, 0)
    )


def test_by_steps_one_is_due_at_each_multiple_that_was_passed() -> None:
    schedule = EvaluationSchedule(now=0.0, env_steps=0)
    settings = EvaluationSettings(every_steps=100)
    assert [False, True, False, False, True, True, False] == due(
        schedule,
        settings,
        *((0.0, steps) for steps in (99, 104, 105, 199, 200, 599, 599)),
    )


def test_a_resume_does_not_repeat_the_evaluation_of_a_multiple() -> None:
    schedule = EvaluationSchedule(now=0.0, env_steps=250)
    settings = EvaluationSettings(every_steps=100)
    assert [False, False, True] == due(schedule, settings, (0.0, 250), (0.0, 299), (0.0, 300))


def test_both_intervals_make_evaluations_due() -> None:
    schedule = EvaluationSchedule(now=0.0, env_steps=0)
    settings = EvaluationSettings(every_s=10.0, every_steps=100)
    assert [True, True, False, True, False] == due(
        schedule, settings, (0.0, 0), (1.0, 100), (2.0, 150), (10.0, 160), (11.0, 199)
    )


def test_an_interval_may_change_while_the_run_trains() -> None:
    schedule = EvaluationSchedule(now=0.0, env_steps=0)
    moments = [(0.0, 150)]
    assert [False] == due(schedule, EvaluationSettings(), *moments)
    assert [True] == due(schedule, EvaluationSettings(every_steps=100), *moments)
    assert [False] == due(schedule, EvaluationSettings(every_steps=100), *moments)
    assert [True] == due(schedule, EvaluationSettings(every_steps=50), (0.0, 200))
