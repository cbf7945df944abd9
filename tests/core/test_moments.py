"""Counts, means, spreads and skews that add up."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev

import pytest

from tianflow.core.moments import Moments, durations, spread_between
from tianflow.core.statistics import ComponentStatistics, HistogramBuilder, StateClock


def of(*values: float) -> Moments:
    histogram = HistogramBuilder()
    for value in values:
        histogram.add(value)
    return Moments.of(histogram.read())


def several(seed: int, count: int = 50, *, scale: float = 1.0) -> list[float]:
    source = random.Random(seed)
    return [scale * source.expovariate(1.0) for _ in range(count)]


def test_they_are_those_of_the_values() -> None:
    values = several(1)
    mean, deviation = fmean(values), pstdev(values)
    third = fmean([(value - mean) ** 3 for value in values])
    assert {
        "count": 50,
        "mean": mean,
        "spread": deviation / mean,
        "skew": third / deviation**3,
    } == pytest.approx(of(*values).summary())


def test_two_told_parts_are_one_whole() -> None:
    first, second = several(1), several(2, 20, scale=3.0)
    parts = [Moments.read(of(*part).summary()) for part in (first, second)]
    assert of(*first, *second).summary() == pytest.approx((parts[0] + parts[1]).summary())
    assert of(*second).summary() == pytest.approx(of(*first, *second).since(of(*first)).summary())


def test_who_counts_anew_after_a_restart_counts_from_its_own_start() -> None:
    assert of(1.0, 2.0) == of(1.0, 2.0).since(of(5.0, 5.0, 5.0))


def test_nothing_and_what_is_constant_vary_by_nothing() -> None:
    assert (
        {"count": 0, "mean": 0.0, "spread": 0.0, "skew": 0.0}
        == Moments().summary()
        == Moments.read({}).summary()
    )
    constant = of(*[0.1] * 1000)
    assert (pytest.approx(0.1), pytest.approx(0.0, abs=1e-6), 0.0) == (
        constant.mean,
        constant.spread,
        constant.skew,
    )


@pytest.mark.parametrize("key", ["count", "mean", "spread", "skew"])
@pytest.mark.parametrize("value", [1e31, -1e200, 10**400, float("inf"), float("nan")])
def test_a_summary_that_no_durations_have_is_as_none(key: str, value: float) -> None:
    summary = {"count": 3, "mean": 1.0, "spread": 0.5, "skew": 1.0}
    assert Moments() == Moments.read(summary | {key: value})


@pytest.mark.parametrize("mean", [1e-110, 1e-200, 1e30, -1e30])
@pytest.mark.parametrize("spread", [1.0, 1e30, -1e30])
@pytest.mark.parametrize("count", [1, 10**30, -3])
def test_the_smallest_and_greatest_values_have_a_summary(
    mean: float, spread: float, count: int
) -> None:
    summary = {"count": count, "mean": mean, "spread": spread, "skew": 1e30}
    assert all(math.isfinite(value) for value in Moments.read(summary).summary().values())


def test_actors_that_differ_are_told_from_trajectories_that_do() -> None:
    alike = [of(*several(seed, 400)) for seed in range(4)]
    assert spread_between(alike) < 0.1
    steady = [of(*[pace] * 10) for pace in (0.9, 1.0, 1.1)]
    assert pytest.approx(0.1) == spread_between(steady)
    assert 0.0 == spread_between(
        [of(1.0, 3.0), of(2.0, 4.0)]
    )  # so few of such a spread differ as much by chance
    assert 0.0 == spread_between(steady[:1]) == spread_between([])


def component(name: str, *values: float) -> ComponentStatistics:
    histogram = HistogramBuilder()
    for value in values:
        histogram.add(value)
    role = name.partition("-")[0]
    timed = {"actor": "trajectory_seconds", "learner": "update_seconds", "replay": "draw_seconds"}[
        role
    ]
    return ComponentStatistics(
        name, role, "host", StateClock().read(), distributions={timed: histogram.read()}
    )


def test_durations_between_two_looks_are_of_what_ended_in_the_meantime() -> None:
    before = [
        component("learner", 1.0),
        component("actor-0", 0.5),
        component("actor-1", 0.5),
        component("replay-0", 9.0),
    ]
    now = [
        component("learner", 1.0, 3.0, 5.0),
        component("actor-0", 0.5),
        component("actor-1", 0.5, 0.7),
        component("actor-2", 0.9),
    ]
    told = durations(before, now)
    assert {"count": 2, "mean": 4.0, "spread": 0.25, "skew": 0.0} == pytest.approx(told["learner"])
    assert (2, pytest.approx(0.8)) == (told["actor"]["count"], told["actor"]["mean"])
    assert {} == durations(now, now)
    assert {"learner", "actor"} == set(durations([], now))
    assert (
        0.0
        < durations([], [component("actor-0", 1.0, 1.0), component("actor-1", 2.0, 2.0)])["actor"][
            "apart"
        ]
    )
