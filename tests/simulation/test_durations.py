"""Durations that a simulation draws."""

from __future__ import annotations

from statistics import fmean, pstdev

import numpy as np
import pytest

from tianflow.simulation.durations import Durations


def drawn(
    count: int = 40_000, *, mean: float = 0.2, spread: float, skew: float = 0.0, seed: int = 0
) -> list[float]:
    durations = Durations(mean=mean, spread=spread, skew=skew, random=np.random.default_rng(seed))
    return [durations.draw() for _ in range(count)]


def test_without_a_spread_all_take_the_same_time() -> None:
    assert {0.2} == set(drawn(5000, spread=0.0, skew=3.0)) == set(drawn(5000, spread=1e-12))


@pytest.mark.parametrize(
    ("spread", "skew"), [(0.02, 0.0), (0.3, 0.6), (1.0, 0.0), (0.3, 4.0), (1.5, 9.0)]
)
def test_times_have_the_mean_spread_and_skew_that_were_asked_for(
    spread: float, skew: float
) -> None:
    times = drawn(spread=spread, skew=skew)
    mean, deviation = fmean(times), pstdev(times)
    assert 0.2 == pytest.approx(mean, rel=0.05)
    assert spread == pytest.approx(deviation / mean, rel=0.1)
    assert max(skew, 2 * spread) == pytest.approx(
        fmean([(time - mean) ** 3 for time in times]) / deviation**3, rel=0.25, abs=0.05
    )
    assert min(times) > 0.0


def test_a_spread_of_one_is_exponential() -> None:
    times = drawn(spread=1.0)
    for part in (0.1, 0.5, 0.9):
        assert -0.2 * np.log(1 - part) == pytest.approx(np.quantile(times, part), rel=0.05)


def test_what_is_seldom_much_longer_is_never_much_shorter() -> None:
    """40 ms, and one time in a hundred 1 s longer: the median is what nearly all take."""
    seldom = [0.04] * 99 + [1.04]
    mean, deviation = fmean(seldom), pstdev(seldom)
    skew = fmean([(time - mean) ** 3 for time in seldom]) / deviation**3
    times = drawn(mean=mean, spread=deviation / mean, skew=skew)
    assert 0.028 < min(times)
    assert 0.028 < np.median(times) < 0.04


def test_the_same_seed_draws_the_same() -> None:
    assert drawn(2000, spread=0.5) == drawn(2000, spread=0.5)
    assert drawn(2000, spread=0.5) != drawn(2000, spread=0.5, seed=1)
