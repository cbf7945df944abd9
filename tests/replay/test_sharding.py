"""Shard probabilities and weights agree with handed values, and a shard draws by priority^alpha.

Frequencies over several shards are tested where the parts of a draw come together, in
``tests/components/test_replay_shard.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.paths import cases
from tianflow.core.payloads import LeafSpec
from tianflow.replay import (
    Fragment,
    PrioritisedSelector,
    Selector,
    Shard,
    ShardSettings,
    StepStream,
)
from tianflow.replay.sharding import importance_weights, shard_probabilities

CASES = cases("replay")
ALPHA = 0.6
SETTINGS = ShardSettings(
    observation=(LeafSpec("", (), "int64"),), action=((), "int64"), capacity=61, length=1
)


class _Halved(PrioritisedSelector):
    """Wrong on purpose: a tenth of all draws ignores the priorities."""

    def draw(self, n: int, generator: np.random.Generator) -> Any:
        indices, _ = super().draw(n, generator)
        uniform, _ = self._present.draw(n, generator)
        indices = np.where(generator.random(n) < 0.1, uniform, indices)
        return indices, self._tree.leaves[indices] / self.mass


class Filled:
    """A shard, and the priority of each of its items by action, tracked by the test."""

    def __init__(self, selector: Callable[[int], Selector]) -> None:
        self.shard = Shard(settings=SETTINGS, selector=selector)
        self.priorities: dict[int, float] = {}
        self.generator = np.random.default_rng(11)

    def insert(self, fragments: int) -> None:
        for _ in range(fragments):
            known = self.priorities
            first = max(known, default=-1) + 1
            priority = float(self.generator.choice([0.5, 1.0, 4.0]))
            self.shard.insert(_line(0, first, 5), priority=priority)
            known |= dict.fromkeys(range(first, first + 5), priority)
            for gone in sorted(known)[: len(known) - len(self.shard)]:
                del known[gone]

    def reprioritise(self) -> None:
        """Draw, and set new priorities of the drawn items."""
        out = self.shard.make_batch(20)
        drawn = self.shard.draw(20, self.generator, out)
        new = self.generator.random(20) * 3.0 + 0.2
        assert 0 == self.shard.update_priorities(drawn.keys, new)
        self.priorities |= dict(zip(out["action"][0].tolist(), new.tolist(), strict=True))

    def expected(self) -> dict[int, float]:
        masses = {action: p**ALPHA for action, p in self.priorities.items()}
        total = sum(masses.values())
        return {action: mass / total for action, mass in masses.items()}


def _line(actor: int, first: int, steps: int) -> Fragment:
    numbers = np.arange(first, first + steps + 1)[:, None]
    arrays: dict[str, NDArray[Any]] = {
        name: np.zeros((steps + 1, 1), np.bool_) for name in ("terminated", "truncated", "start")
    }
    arrays |= {
        "obs/": numbers,
        "action": numbers[:-1],
        "reward": np.zeros((steps, 1), np.float32),
        "valid": np.ones((steps, 1), np.bool_),
    }
    return Fragment(
        arrays | {"version": np.zeros(steps, np.int64)}, steps, StepStream(actor, 0), first // 5
    )


def normal_score(chi_square: float, freedom: int) -> float:
    """Wilson and Hilferty's normal score of a chi-square value; 3.72 is p = 1e-4."""
    spread = 2.0 / (9.0 * freedom)
    return float(((chi_square / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / spread**0.5)


def draws_against(filled: Filled, seed: int, draws: int) -> float:
    """Normal score of ``draws`` draws, in batches, against ``p^alpha``. Reported probabilities are
    checked, too.
    """
    expected, generator = filled.expected(), np.random.default_rng(seed)
    counts, batch = dict.fromkeys(expected, 0), 2000
    out: dict[str, NDArray[Any]] = filled.shard.make_batch(batch)
    for _ in range(draws // batch):
        drawn = filled.shard.draw(batch, generator, out)
        assert len(expected) == drawn.count
        actions, times = np.unique(out["action"][0], return_counts=True)
        for action, count in zip(actions.tolist(), times.tolist(), strict=True):
            counts[action] += count
        np.testing.assert_allclose(
            [expected[action] for action in out["action"][0, :50].tolist()],
            drawn.probability[:50],
            rtol=1e-9,
        )
    total = draws // batch * batch
    return normal_score(
        sum((counts[a] - total * p) ** 2 / (total * p) for a, p in expected.items()),
        len(expected) - 1,
    )


STAGES = {"filling": 4, "full": 12, "wrapped": 31}


def at_stage(stage: str, selector: Callable[[int], Selector]) -> Filled:
    filled = Filled(selector)
    filled.insert(STAGES[stage])
    filled.reprioritise()
    if stage == "wrapped":
        filled.insert(3)
    return filled


@pytest.mark.parametrize("stage", STAGES)
def test_frequencies_are_those_of_priority_to_the_alpha(stage: str) -> None:
    filled = at_stage(stage, lambda n: PrioritisedSelector(n, alpha=ALPHA))
    assert {"filling": 20, "full": 60, "wrapped": 60}[stage] == len(filled.shard)
    for seed in (1, 2, 3):
        assert draws_against(filled, seed, 56_000) < 3.72


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_selector_fails_the_same_test(stage: str) -> None:
    filled = at_stage(stage, lambda n: _Halved(n, alpha=ALPHA))
    assert all(draws_against(filled, seed, 56_000) > 3.72 for seed in (1, 2, 3))


@pytest.mark.parametrize("name", ["per_alpha0.6_beta0.4", "per_alpha1.0_beta1.0"])
def test_weights_are_the_handed_ones(name: str) -> None:
    """Over all items the maximum is that of the buffer; over a batch, that of the batch."""
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    p = np.array(expected["probabilities"])
    whole = importance_weights(p, count=inputs["N"], beta=inputs["beta"])
    assert expected["weights_normalised_by_buffer_max"] == pytest.approx(whole.tolist(), abs=1e-9)
    assert expected["identity_p_over_pmin_to_minus_beta"] == pytest.approx(whole.tolist(), abs=1e-9)
    batch = importance_weights(p[[1, 3]], count=inputs["N"], beta=inputs["beta"])
    assert expected["weights_of_batch_1_3_normalised_by_batch_max"] == pytest.approx(
        batch.tolist(), abs=1e-9
    )


def two_shards() -> tuple[list[Shard], dict[str, Any], dict[str, Any]]:
    inputs, expected = (CASES["per_sharded_two_shards"][key] for key in ("inputs", "expected"))
    shards = []
    for index, priorities in enumerate(inputs["shard_priorities"]):
        shard = Shard(
            settings=SETTINGS, selector=lambda n: PrioritisedSelector(n, alpha=inputs["alpha"])
        )
        shard.insert(_line(index, 10 * index, len(priorities)))
        shard.update_priorities(np.arange(len(priorities)), np.array(priorities))
        shards.append(shard)
    return shards, inputs, expected


def test_an_item_of_two_shards_has_the_probability_and_weight_of_an_item_in_one() -> None:
    shards, inputs, expected = two_shards()
    counts = [len(shard) for shard in shards]
    chances = shard_probabilities([shard.mass for shard in shards], counts)
    assert expected["shard_probability_by_mass"] == pytest.approx(chances.tolist(), abs=1e-9)
    generator, probability = np.random.default_rng(0), dict[int, float]()
    for shard, chance in zip(shards, chances.tolist(), strict=True):
        out = shard.make_batch(3000)
        drawn = shard.draw(3000, generator, out)
        probability |= dict(
            zip(out["action"][0].tolist(), (drawn.probability * chance).tolist(), strict=True)
        )
    overall = np.array([probability[action] for action in (0, 1, 10, 11, 12, 13)])
    assert expected["global_P"] == pytest.approx(overall.tolist(), abs=1e-9)
    weights = importance_weights(overall, count=sum(counts), beta=inputs["beta"])
    handed = np.array(expected["weights_global"])
    np.testing.assert_allclose(handed / handed.max(), weights, atol=1e-9)
    wrong = np.array(expected["wrong_weights_local_P_and_local_N"])
    assert not np.allclose(wrong / wrong.max(), weights)


def test_a_batch_is_split_by_mass() -> None:
    _, _, expected = two_shards()
    shares = shard_probabilities([4.0, 16.0], [2, 4])
    assert expected["batch_split_by_mass_for_batch_20"] == pytest.approx((20 * shares).tolist())


def test_a_shard_without_mass_has_probability_0_while_another_has_mass() -> None:
    assert [0.0, 1.0, 0.0] == shard_probabilities([0.0, 1e-300, 0.0], [5, 1, 5]).tolist()


def test_probabilities_follow_the_number_of_items_while_no_shard_has_mass() -> None:
    assert [0.25, 0.75] == shard_probabilities([0.0, 0.0], [1, 3]).tolist()


def test_probabilities_are_0_while_no_shard_has_items() -> None:
    assert [0.0, 0.0] == shard_probabilities([0.0, 0.0], [0, 0]).tolist()
