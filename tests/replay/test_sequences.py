"""Priorities of windows: handed values, a plain model, and unknown values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.effort import examples
from tests.support.paths import cases
from tianflow.core.payloads import LeafSpec
from tianflow.replay import (
    ActorError,
    Fragment,
    PrioritisedSelector,
    SequenceError,
    Shard,
    ShardSettings,
    StepStream,
    sequence_priority,
)
from tianflow.replay.sequences import InitialPriority, WindowSteps, n_step_errors

CASES = cases("replay")
GAMMA = 0.9


def test_the_priority_of_a_sequence_is_the_handed_mixture_without_padding() -> None:
    case = CASES["r2d2_sequence_priority_eta0.9"]
    errors, eta, expected = case["inputs"]["td_errors"], case["inputs"]["eta"], case["expected"]
    padded = np.array([*errors, 0.0, 0.0])[:, None]
    trained = np.arange(6)[:, None] < 4

    def of(mask: NDArray[np.bool_], share: float) -> float:
        return float(sequence_priority(padded, mask, eta=share)[0])

    assert expected["priority"] == pytest.approx(of(trained, eta), abs=1e-9)
    assert expected["with_two_zero_padded_steps_wrong"] == pytest.approx(
        of(np.ones_like(trained), eta), abs=1e-9
    )
    assert expected["eta1_is_max"] == pytest.approx(of(trained, 1.0), abs=1e-9)
    assert expected["eta0_is_mean"] == pytest.approx(of(trained, 0.0), abs=1e-9)
    assert 0.0 == of(np.zeros_like(trained), eta)


def model_error(
    r: list[float], taken: list[float], following: list[float], k: int, n: int
) -> float:
    """One n-step error of a window in plain Python."""
    usable = len(r) - math.isnan(following[-1])
    m = min(n, usable - k)
    if m < 1:
        return math.nan
    return abs(
        sum(GAMMA**i * r[k + i] for i in range(m)) + GAMMA**m * following[k + m - 1] - taken[k]
    )


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    n=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
@examples(15)
def test_n_step_errors_are_those_of_a_plain_model(lengths: list[int], n: int, seed: int) -> None:
    rng, rows, count = np.random.default_rng(seed), max(lengths), len(lengths)
    reward, taken, following = rng.standard_normal((3, rows, count))
    last = np.array(lengths) - 1
    following[last, np.arange(count)] = rng.choice([0.0, np.nan, 1.5], count)
    found = n_step_errors(
        WindowSteps(reward, taken, following, last + 1, np.zeros(len(last), np.bool_)),
        discount=GAMMA,
        n=n,
    )
    for w, length in enumerate(lengths):
        columns = [column[:length, w].tolist() for column in (reward, taken, following)]
        expected = [model_error(*columns, k, n) for k in range(length)]
        np.testing.assert_allclose(expected + [math.nan] * (rows - length), found[:, w], atol=1e-12)


def steps(count: int, *, number: int = 0, end: str = "", first: int = 0) -> Fragment:
    """Fragments of one environment whose numbers follow from the number of the step."""
    k = np.arange(first, first + count + 1, dtype=np.float32)[:, None]
    arrays: dict[str, NDArray[Any]] = {
        name: np.zeros((count, 1), np.bool_) for name in ("terminated", "truncated")
    }
    if end:
        arrays[end][-1] = True
    arrays |= {
        "obs/": k,
        "reward": k[:-1] + 1.0,
        "q_taken": k[:-1] / 10.0,
        "q_max": k[:-1] / 2.0 + 3.0,
    }
    arrays |= {
        "action": k[:-1].astype(np.int64),
        "valid": np.ones((count, 1), np.bool_),
        "start": k == 0,
    }
    return Fragment(
        arrays | {"version": np.zeros(count, np.int64)}, count, StepStream(0, 0), number
    )


def priorities(
    length: int, initial: InitialPriority, *fragments: Fragment, period: int = 1
) -> dict[int, float]:
    """Priority of every item by its first action."""
    s = ShardSettings(
        observation=(LeafSpec("", (), "float32"),),
        action=((), "int64"),
        capacity=50,
        length=length,
        period=period,
    )
    shard = Shard(
        settings=s, selector=lambda n: PrioritisedSelector(n, alpha=1.0), initial_priority=initial
    )
    for fragment in fragments:
        shard.insert(fragment)
    out = shard.make_batch(500)
    drawn = shard.draw(500, np.random.default_rng(0), out)
    found = dict(
        zip(out["action"][0].tolist(), (drawn.probability * shard.mass).tolist(), strict=True)
    )
    assert len(found) == len(shard)
    return found


def reward(k: int) -> float:
    return k + 1.0


def greatest(k: int) -> float:
    return k / 2.0 + 3.0


@pytest.mark.parametrize(
    "initial", [ActorError(GAMMA), SequenceError(GAMMA, n=2), SequenceError(GAMMA, n=2, burn_in=1)]
)
def test_an_item_without_error_keeps_an_initial_priority_above_zero(
    initial: InitialPriority,
) -> None:
    fragment = steps(3, end="terminated")
    zero = {name: np.zeros((3, 1), np.float32) for name in ("reward", "q_taken", "q_max")}
    fragment = replace(fragment, arrays={**fragment.arrays, **zero})
    found = priorities(3, initial, fragment, period=3)
    assert {0: pytest.approx(1e-6)} == found


def test_a_window_without_trained_steps_has_initial_priority_zero() -> None:
    zeros = np.zeros((2, 1))
    window = WindowSteps(zeros, zeros, zeros, np.array([2]), np.array([False]))
    assert [0.0] == SequenceError(GAMMA, n=1, burn_in=2)(window).tolist()
    assert [pytest.approx(1e-6)] == SequenceError(GAMMA, n=1, burn_in=1)(window).tolist()


def test_a_window_inside_a_fragment_is_bootstrapped_from_the_step_after_it() -> None:
    found = priorities(2, ActorError(GAMMA), steps(5))
    for k in range(3):
        expected = abs(reward(k) + GAMMA * reward(k + 1) + GAMMA**2 * greatest(k + 2) - k / 10.0)
        assert expected == pytest.approx(found[k], rel=1e-6)


def test_a_window_that_ends_with_its_fragment_is_bootstrapped_one_step_earlier() -> None:
    """The actor has not continued yet, so later values are unknown."""
    found = priorities(2, ActorError(GAMMA), steps(5))
    assert abs(reward(3) + GAMMA * greatest(4) - 3 / 10.0) == pytest.approx(found[3], rel=1e-6)


def test_a_window_over_two_fragments_uses_the_values_of_both() -> None:
    found = priorities(3, ActorError(GAMMA), steps(2), steps(2, number=1, first=2))
    expected = reward(0) + GAMMA * reward(1) + GAMMA**2 * reward(2) + GAMMA**3 * greatest(3)
    assert expected == pytest.approx(found[0], rel=1e-6)


def test_nothing_is_bootstrapped_from_a_termination() -> None:
    found = priorities(2, ActorError(GAMMA), steps(3, end="terminated"))
    assert abs(reward(1) + GAMMA * reward(2) - 1 / 10.0) == pytest.approx(found[1], rel=1e-6)
    assert abs(reward(2) - 2 / 10.0) == pytest.approx(found[2], rel=1e-6)


def test_where_no_value_is_known_the_largest_priority_is_used() -> None:
    """A single step before a truncation: the value after it is unknown, and no step precedes it."""
    found = priorities(2, ActorError(GAMMA), steps(3, end="truncated"))
    assert abs(reward(1) + GAMMA * greatest(2) - 1 / 10.0) == pytest.approx(found[1], rel=1e-6)
    assert max(found.values()) == found[2]


@pytest.mark.parametrize("burn_in", [0, 2])
def test_a_sequence_mixes_errors_after_burn_in_or_all_errors_at_an_episode_start(
    burn_in: int,
) -> None:
    initial = SequenceError(GAMMA, n=2, eta=0.8, burn_in=burn_in)
    found = priorities(4, initial, steps(8, end="terminated"), period=4)
    for begin, first in ((0, 0), (4, burn_in)):
        r, taken = (
            [reward(k) for k in range(begin, begin + 4)],
            [k / 10.0 for k in range(begin, begin + 4)],
        )
        following = [greatest(k + 1) if k < 7 else 0.0 for k in range(begin, begin + 4)]
        errors = [model_error(r, taken, following, k, 2) for k in range(first, 4)]
        assert 0.8 * max(errors) + 0.2 * sum(errors) / len(errors) == pytest.approx(
            found[begin], rel=1e-6
        )


def test_a_sequence_that_ends_within_its_burn_in_is_never_drawn() -> None:
    initial = SequenceError(GAMMA, n=2, burn_in=2)
    s = ShardSettings(
        observation=(LeafSpec("", (), "float32"),),
        action=((), "int64"),
        capacity=50,
        length=4,
        period=4,
    )
    shard = Shard(
        settings=s, selector=lambda n: PrioritisedSelector(n, alpha=1.0), initial_priority=initial
    )
    shard.insert(steps(6, end="terminated"))
    out = shard.make_batch(100)
    shard.draw(100, np.random.default_rng(0), out)
    assert 2 == len(shard)
    assert {0} == set(out["action"][0].tolist())


def test_a_value_that_is_not_finite_counts_as_unknown() -> None:
    fragment = steps(3)
    fragment.arrays["q_taken"][0] = np.inf
    found = priorities(2, ActorError(GAMMA), fragment)
    assert max(found.values()) == found[0]


def test_a_given_priority_overrides_the_computed_one() -> None:
    s = ShardSettings(
        observation=(LeafSpec("", (), "float32"),), action=((), "int64"), capacity=50, length=1
    )
    shard = Shard(
        settings=s,
        selector=lambda n: PrioritisedSelector(n, alpha=1.0),
        initial_priority=ActorError(GAMMA),
    )
    shard.insert(replace(steps(3), number=0), priority=2.5)
    assert 7.5 == shard.mass
