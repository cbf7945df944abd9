"""Selectors: handed values, one contract for all, frequencies, and a sum tree without drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.paths import cases
from tianflow.replay.selection import Fifo, Lifo, PrioritisedSelector, Selector, Uniform
from tianflow.replay.sum_tree import FEW, SumTree

CASES = cases("replay")
KINDS: dict[str, Callable[[int], Selector]] = {
    "fifo": Fifo,
    "lifo": Lifo,
    "uniform": Uniform,
    "prioritised": lambda capacity: PrioritisedSelector(capacity, alpha=0.6),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def filled(selector: Selector, priorities: list[float]) -> Selector:
    selector.insert(np.arange(len(priorities)), np.array(priorities))
    return selector


def probabilities(selector: Selector, n: int) -> list[float]:
    """Number of draws of each of the items 0 .. n - 1."""
    indices, chances = selector.draw(4000, np.random.default_rng(0))
    return [float(chances[indices == i][0]) if (indices == i).any() else 0.0 for i in range(n)]


@pytest.mark.parametrize(
    "name", ["sum_tree_prefix_search_capacity3", "sum_tree_prefix_search_capacity4"]
)
def test_a_mass_belongs_to_the_handed_leaf(name: str) -> None:
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    tree = SumTree(inputs["capacity"])
    tree.set(np.arange(inputs["capacity"]), np.array(inputs["leaves"]))
    assert expected["total"] == tree.total
    assert expected["indices"] == tree.find(np.array(inputs["masses"])).tolist()


@given(
    masses=st.lists(
        st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 1.0, 3.0, 1e9]), min_size=1, max_size=40
    ).filter(any),
    at=st.lists(st.floats(0.0, 1.0), max_size=20),
)
def test_a_leaf_without_mass_is_never_found_at_any_capacity(
    masses: list[float], at: list[float]
) -> None:
    """At the boundaries of all leaves and at the total, for any rounding of the sums."""
    tree = SumTree(len(masses))
    tree.set(np.arange(len(masses)), np.array(masses))
    ends = np.cumsum(masses)
    found = tree.find(
        np.concatenate(
            ([0.0, tree.total], ends, np.nextafter(ends, np.inf), np.array(at) * tree.total)
        )
    )
    assert (found < len(masses)).all()
    assert (np.array(masses)[found] > 0.0).all()


@given(masses=st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any))
def test_the_found_leaf_is_the_first_whose_prefix_sum_exceeds_the_mass(masses: list[int]) -> None:
    tree = SumTree(len(masses))
    tree.set(np.arange(len(masses)), np.array(masses, np.float64))
    owners = [i for i, mass in enumerate(masses) for _ in range(mass)]
    assert owners == tree.find(np.arange(sum(masses)) + 0.5).tolist()
    assert owners == tree.find(np.arange(sum(masses), dtype=np.float64)).tolist()


@pytest.mark.parametrize("at_once", [FEW // 2, 5000])
@pytest.mark.parametrize("capacity", [1, 5, 1000, 4096])
def test_after_a_million_updates_the_root_is_still_the_sum_of_the_leaves(
    capacity: int, at_once: int
) -> None:
    """Masses from 1e-6 to 1e6, with repeated leaves in a batch: running sums would drift by far
    more.
    """
    generator, tree, model = np.random.default_rng(1), SumTree(capacity), np.zeros(capacity)
    for _ in range(1_000_000 // at_once):
        indices = generator.integers(0, capacity, at_once)
        masses = 10.0 ** generator.uniform(-6.0, 6.0, at_once)
        tree.set(indices, masses)
        model[indices] = masses
    np.testing.assert_array_equal(model, tree.leaves)
    assert abs(tree.total - math.fsum(model)) <= 1e-9 * tree.total
    tree.set(np.arange(capacity), np.zeros(capacity))
    assert 0.0 == tree.total


@pytest.mark.parametrize("name", ["per_alpha0.6_beta0.4", "per_alpha1.0_beta1.0"])
def test_probabilities_are_the_handed_ones(name: str) -> None:
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    selector = filled(PrioritisedSelector(4, alpha=inputs["alpha"]), inputs["priorities"])
    assert expected["tree_total"] == pytest.approx(selector.mass, abs=1e-9)
    assert expected["tree_leaves"] == pytest.approx(
        selector.snapshot()["leaves"].tolist(), abs=1e-9
    )
    assert expected["probabilities"] == pytest.approx(probabilities(selector, 4), abs=1e-9)


def test_a_priority_of_zero_has_no_mass_for_any_alpha() -> None:
    case = CASES["per_zero_priorities"]
    priorities, expected = case["inputs"]["priorities"], case["expected"]
    assert expected["probabilities"] == probabilities(
        filled(PrioritisedSelector(4, alpha=1.0), priorities), 4
    )
    assert expected["alpha0_probabilities"] == probabilities(
        filled(PrioritisedSelector(4, alpha=0.0), priorities), 4
    )
    assert expected["all_zero_probabilities"] == probabilities(
        filled(PrioritisedSelector(4, alpha=1.0), [0.0] * 4), 4
    )


@pytest.mark.parametrize("bad", [math.nan, -0.5, math.inf, -math.inf])
@every_kind
def test_an_invalid_priority_is_refused_and_nothing_changes(
    make: Callable[[int], Selector], bad: float
) -> None:
    selector = filled(make(6), [1.0, 2.0])
    before = selector.mass
    with pytest.raises(ValueError, match=f"priority 1 of 2 is {bad}"):
        selector.insert(np.array([2, 3]), np.array([1.0, bad]))
    with pytest.raises(ValueError, match=f"priority 1 of 2 is {bad}"):
        selector.update(np.array([0, 1]), np.array([3.0, bad]))
    assert (2, before) == (len(selector), selector.mass)


def test_a_power_beyond_float64_is_refused() -> None:
    selector = PrioritisedSelector(2, alpha=3.0)
    with pytest.raises(ValueError, match="exceeds the range of float64"):
        selector.insert(np.array([0]), np.array([1e200]))
    assert 0 == len(selector)
    for alpha in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="alpha"):
            PrioritisedSelector(2, alpha=alpha)


@every_kind
def test_a_draw_from_an_empty_selector_is_refused(make: Callable[[int], Selector]) -> None:
    selector = filled(make(3), [1.0])
    selector.remove(np.array([0]))
    assert (0, 0.0) == (len(selector), selector.mass)
    with pytest.raises(IndexError):
        selector.draw(1, np.random.default_rng(0))


def order_of(kind: str, present: list[int], n: int) -> list[int]:
    """The model of draws in order."""
    ordered = present if kind == "fifo" else present[::-1]
    return [ordered[i % len(ordered)] for i in range(n)]


@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**32), capacity=st.integers(1, 12))
@examples(30)
def test_a_selector_holds_the_inserted_items_that_were_not_removed(
    kind: str, seed: int, capacity: int
) -> None:
    """Against a list, over enough batches that the log of ordered selectors is compacted
    repeatedly.
    """
    generator, selector = np.random.default_rng(seed), KINDS[kind](capacity)
    present: list[int] = []
    for _ in range(40):
        absent = generator.permutation([i for i in range(capacity) if i not in present])
        coming = absent[: generator.integers(0, len(absent) + 1)].astype(np.int64)
        selector.insert(coming, generator.random(len(coming)) + 0.1)
        present += coming.tolist()
        going = generator.permutation(present)[: generator.integers(0, len(present) + 1)].astype(
            np.int64
        )
        selector.remove(going)
        present = [i for i in present if i not in going]
        again = generator.choice(present, 3) if present else np.zeros(0, np.int64)
        selector.update(again.astype(np.int64), generator.random(len(again)) + 0.1)
        assert len(present) == len(selector)
        if generator.random() < 0.2:
            restored = KINDS[kind](capacity)
            restored.insert(np.array([0]), np.array([1.0]))
            restored.restore({name: array.copy() for name, array in selector.snapshot().items()})
            selector = restored
        if present:
            n = int(generator.integers(1, 2 * capacity + 1))
            drawn, chances = selector.draw(n, generator)
            assert n == len(drawn) == len(chances)
            assert set(drawn.tolist()) <= set(present)
            if kind in ("fifo", "lifo"):
                assert order_of(kind, present, n) == drawn.tolist()


class _Slipped(PrioritisedSelector):
    """Wrong on purpose: 2 % of draws use the probability of the neighbour."""

    def draw(self, n: int, generator: np.random.Generator) -> Any:
        indices, chances = super().draw(n, generator)
        return np.where(generator.random(n) < 0.02, (indices + 1) % len(self), indices), chances


def chi_square(
    selector: Selector, leaves: list[float], draws: int, seed: int
) -> tuple[float, float]:
    """Chi-square against the masses, and the largest deviation of a count in standard
    deviations.
    """
    indices, _ = selector.draw(draws, np.random.default_rng(seed))
    expected = np.array(leaves) / sum(leaves) * draws
    counts = np.bincount(indices, minlength=len(leaves))
    deviation = np.abs(counts - expected) / np.sqrt(expected * (1.0 - expected / draws))
    return float(((counts - expected) ** 2 / expected).sum()), float(deviation.max())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_handed_recipe_of_chi_square_is_passed_and_fails_a_wrong_selector(seed: int) -> None:
    case = CASES["per_chi_square_recipe"]
    leaves, draws, limit = (
        case["inputs"]["leaves"],
        case["inputs"]["draws"],
        case["expected"]["chi2_limit_df3_p0_001"],
    )
    right, deviation = chi_square(
        filled(PrioritisedSelector(4, alpha=1.0), leaves), leaves, draws, seed
    )
    wrong, _ = chi_square(filled(_Slipped(4, alpha=1.0), leaves), leaves, draws, seed)
    assert right < limit < wrong
    assert deviation < 5.0
