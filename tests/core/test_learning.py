"""Statistics of algorithms and environments: exact means of any span, whatever a user returns."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tianflow.core.learning import (
    LONGEST_NAME,
    MOST_NAMES,
    LearningTally,
    StatisticSum,
    as_number,
    between,
    together,
)


def tally(**given: Any) -> LearningTally:
    return LearningTally(**{"group": "train", "source": "algorithm", **given})


def count(them: LearningTally, *updates: Mapping[str, object]) -> dict[str, StatisticSum]:
    for update in updates:
        them.add(them.accept(update))
    return them.read()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.__dict__) for record in caplog.records]


def test_a_mean_is_over_the_updates_between_two_moments() -> None:
    them = tally()
    before = count(them, {"loss": 8.0}, {"loss": 4.0})
    now = count(them, {"loss": 1.0}, {"loss": 2.0})
    assert 1.5 == between(before, now)["train/loss"].mean
    assert {} == between(now, now)
    assert (4, 3.75, 2.0) == (
        now["train/loss"].number,
        now["train/loss"].mean,
        now["train/loss"].last,
    )


def test_a_statistic_of_every_second_update_has_the_mean_of_its_own_values() -> None:
    sums = count(tally(), {"loss": 1.0, "policy_loss": 5.0}, {"loss": 3.0})
    assert {"train/loss": (2, 2.0), "train/policy_loss": (1, 5.0)} == {
        name: (values.number, values.mean) for name, values in sums.items()
    }


def test_a_name_with_a_group_keeps_it() -> None:
    assert ["mine/loss", "train/loss"] == list(count(tally(), {"mine/loss": 1.0, "loss": 1.0}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e301])
def test_a_value_that_is_not_finite_or_could_overflow_a_sum_is_not_counted(value: float) -> None:
    them = tally()
    assert 2.0 == count(them, {"loss": value}, {"loss": 2.0})["train/loss"].mean
    assert 0 == them.refused


def test_one_enormous_value_does_not_hide_those_after_it() -> None:
    them = tally()
    before = count(them, {"loss": 0.1}, {"loss": 1e20})
    now = count(them, *[{"loss": 0.3}] * 10)
    assert between(before, now)["train/loss"].mean == pytest.approx(0.3)
    restarted = together((now, count(tally(), {"loss": 0.5})))
    assert between(now, restarted)["train/loss"].mean == pytest.approx(0.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_sums_of_two_spans_are_those_of_both_together(
    first: list[float], second: list[float]
) -> None:
    parts = [count(tally(), *({"x": value} for value in values)) for values in (first, second)]
    whole = together(parts)["train/x"]
    expected = math.fsum(first + second) / len(first + second)
    assert (len(first) + len(second), second[-1]) == (whole.number, whole.last)
    assert whole.mean == pytest.approx(expected, abs=1e-6)


# What a user may return
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        2,
        True,
        np.float32(2.0),
        np.int64(2),
        np.array(2.0),
        np.array([2.0]),
        torch.tensor(2.0),
        torch.tensor([2.0], requires_grad=True),
        torch.tensor(2, dtype=torch.bfloat16),
    ],
)
def test_numbers_and_tensors_of_one_element_are_numbers(value: object) -> None:
    found = as_number(value)
    assert type(found) is float
    assert found in {1.0, 2.0}


@pytest.mark.parametrize(
    "value", ["2", None, [2.0], {"a": 1.0}, 1j, np.array(1j), torch.ones(2), np.ones(2), 10**400]
)
def test_a_value_that_is_not_a_number_is_refused_counted_and_logged_once(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tianflow")
    them = tally()
    assert {"loss": 1.0} == them.accept({"mine": value, "loss": 1.0})
    them.accept({"mine": value})
    assert 2 == them.refused
    (warning,) = warnings(caplog)
    assert "'mine' is " in warning
    assert "a number" in warning


@pytest.mark.parametrize(
    "name",
    ["", "a b", "/a", "a/", "a//b", "a/../b", "ä", "a\n", "{x}", 3, None, "a" * (LONGEST_NAME + 1)],
)
def test_a_name_that_a_sink_may_not_accept_is_refused_counted_and_logged_once(
    name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tianflow")
    them = tally()
    assert {"train/loss"} == set(count(them, *[{name: 1.0, "loss": 1.0}] * 3))
    assert 3 == them.refused
    (warning,) = warnings(caplog)
    assert "is not a valid name" in warning


def test_two_spellings_of_one_name_are_not_counted_twice() -> None:
    them = tally()
    assert 1 == count(them, {"loss": 1.0, "train/loss": 5.0})["train/loss"].number
    assert 1 == them.refused


def test_more_names_than_the_cap_are_refused_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tianflow")
    them = tally()
    for step in range(1000):
        count(them, {f"loss_{step}": 1.0})
    assert MOST_NAMES == len(them.read())
    assert 1000 - MOST_NAMES == them.refused
    (warning,) = warnings(caplog)
    assert "one name too many" in warning
    assert MOST_NAMES == len(together([them.read(), count(tally(), {"other": 1.0})]))
    assert {"loss_0": 2.0} == them.accept({"loss_0": 2.0}), "those that have a place keep it"


def test_a_name_whose_first_value_is_bad_takes_no_place() -> None:
    them = tally(most=1)
    them.accept({"mine": None})
    assert {"train/loss"} == set(count(them, {"loss": 1.0}))
