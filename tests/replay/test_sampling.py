"""Several shards drawn from as one: handed figures, frequencies at every stage, lost shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.paths import cases
from tianflow.core.payloads import LeafSpec
from tianflow.errors import WouldBlock
from tianflow.replay import (
    Fragment,
    Prioritised,
    Selector,
    Shard,
    ShardSettings,
    StepStream,
    Uniform,
    draw_over,
    split,
)
from tianflow.replay.sharding import importance_weights, shard_probabilities

CASES = cases("replay")
ALPHA = 0.6
SETTINGS = ShardSettings(
    observation=(LeafSpec("", (), "int64"),), action=((), "int64"), capacity=61, length=1
)


class _Halved(Prioritised):
    """Wrong on purpose: the exponent is lost in a tenth of all draws."""

    def draw(self, n: int, generator: np.random.Generator) -> Any:
        indices, _ = super().draw(n, generator)
        uniform, _ = self._present.draw(n, generator)
        indices = np.where(generator.random(n) < 0.1, uniform, indices)
        return indices, self._tree.leaves[indices] / self.mass


class Filled:
    """Shards, and the priority of every item that is in them by its action, kept by the test."""

    def __init__(self, shards: int, selector: Callable[[int], Selector]) -> None:
        self.shards = [Shard(settings=SETTINGS, selector=selector) for _ in range(shards)]
        self.priorities: list[dict[int, float]] = [{} for _ in range(shards)]
        self.generator = np.random.default_rng(11)

    def insert(self, fragments: int) -> None:
        for _ in range(fragments):
            for index, shard in enumerate(self.shards):
                known = self.priorities[index]
                first = max(known, default=index * 1_000_000 - 1) + 1
                priority = float(self.generator.choice([0.5, 1.0, 4.0]))
                shard.insert(_line(index, first, 5), priority=priority)
                known |= dict.fromkeys(range(first, first + 5), priority)
                for gone in sorted(known)[: len(known) - len(shard)]:
                    del known[gone]

    def reprioritise(self) -> None:
        """Draw, and write other priorities back for some."""
        for index, shard in enumerate(self.shards):
            out = shard.make_batch(20)
            drawn = shard.draw(20, self.generator, out)
            new = self.generator.random(20) * 3.0 + 0.2
            assert 0 == shard.update_priorities(drawn.keys, new)
            self.priorities[index] |= dict(
                zip(out["action"][0].tolist(), new.tolist(), strict=True)
            )

    def expected(self) -> dict[int, float]:
        masses = {action: p**ALPHA for known in self.priorities for action, p in known.items()}
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
    """Normal score of so many draws, in batches, against ``p^alpha``; the probabilities told are
    checked on the way.
    """
    expected, generator, counts = (
        filled.expected(),
        np.random.default_rng(seed),
        dict.fromkeys(filled.expected(), 0),
    )
    batch = 2000
    out: dict[str, NDArray[Any]] = filled.shards[0].make_batch(batch)
    for _ in range(draws // batch):
        drawn = draw_over(filled.shards, batch, generator, out)
        assert len(expected) == drawn.count
        actions, times = np.unique(out["action"][0], return_counts=True)
        for action, count in zip(actions.tolist(), times.tolist(), strict=True):
            counts[action] += count
        np.testing.assert_allclose(
            [expected[action] for action in out["action"][0, :50].tolist()],
            drawn.probability[:50],
            rtol=1e-9,
        )
        np.testing.assert_array_equal(out["action"][0] // 1_000_000, drawn.shard)
    total = draws // batch * batch
    return normal_score(
        sum((counts[a] - total * p) ** 2 / (total * p) for a, p in expected.items()),
        len(expected) - 1,
    )


STAGES = {"filling": 4, "full": 12, "wrapped": 31}


def at_stage(stage: str, shards: int, selector: Callable[[int], Selector]) -> Filled:
    filled = Filled(shards, selector)
    filled.insert(STAGES[stage])
    filled.reprioritise()
    if stage == "wrapped":
        filled.insert(3)
    return filled


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_frequencies_are_those_of_priority_to_the_alpha(stage: str, shards: int) -> None:
    """A million draws over all stages, numbers of shards and seeds."""
    filled = at_stage(stage, shards, lambda n: Prioritised(n, alpha=ALPHA))
    assert {"filling": 20, "full": 60, "wrapped": 60}[stage] == len(filled.shards[0])
    for seed in (1, 2, 3):
        assert draws_against(filled, seed, 56_000) < 3.72


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_selector_fails_the_same_test(stage: str, shards: int) -> None:
    filled = at_stage(stage, shards, lambda n: _Halved(n, alpha=ALPHA))
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
        shard = Shard(settings=SETTINGS, selector=lambda n: Prioritised(n, alpha=inputs["alpha"]))
        shard.insert(_line(index, 10 * index, len(priorities)))
        shard.update_priorities(np.arange(len(priorities)), np.array(priorities))
        shards.append(shard)
    return shards, inputs, expected


def test_over_two_shards_an_item_has_the_probability_and_weight_that_it_would_have_in_one() -> None:
    shards, inputs, expected = two_shards()
    chances = shard_probabilities(
        [shard.mass for shard in shards], [len(shard) for shard in shards]
    )
    assert expected["shard_probability_by_mass"] == pytest.approx(chances.tolist(), abs=1e-9)
    out = shards[0].make_batch(3000)
    drawn = draw_over(shards, 3000, np.random.default_rng(0), out)
    firsts = [
        int(np.flatnonzero(out["action"][0] == action)[0]) for action in (0, 1, 10, 11, 12, 13)
    ]
    assert expected["global_P"] == pytest.approx(drawn.probability[firsts].tolist(), abs=1e-9)
    assert [0, 0, 1, 1, 1, 1] == drawn.shard[firsts].tolist()
    weights = importance_weights(drawn.probability, count=drawn.count, beta=inputs["beta"])[firsts]
    handed = np.array(expected["weights_global"])
    np.testing.assert_allclose(handed / handed.max(), weights, atol=1e-9)
    wrong = np.array(expected["wrong_weights_local_P_and_local_N"])
    assert not np.allclose(wrong / wrong.max(), weights)


def test_a_batch_is_split_by_mass() -> None:
    _, _, expected = two_shards()
    generator = np.random.default_rng(3)
    parts = np.array([split(20, [4.0, 16.0], [2, 4], generator) for _ in range(4000)])
    assert (parts.sum(axis=1) == 20).all()
    np.testing.assert_allclose(
        expected["batch_split_by_mass_for_batch_20"], parts.mean(axis=0), atol=0.15
    )


def test_priorities_go_back_to_the_shard_that_the_item_is_from() -> None:
    shards, _, _ = two_shards()
    drawn = draw_over(shards, 200, np.random.default_rng(0), shards[0].make_batch(200))
    for index, shard in enumerate(shards):
        keys = drawn.keys[drawn.shard == index]
        assert 0 == shard.update_priorities(keys, np.ones(len(keys)))
    assert 6.0 == sum(shard.mass for shard in shards)


def test_a_lost_shard_is_simply_not_there_and_an_empty_one_gives_nothing() -> None:
    shards, _, _ = two_shards()
    empty = Shard(settings=SETTINGS, selector=lambda n: Prioritised(n, alpha=1.0))
    out = shards[0].make_batch(500)
    drawn = draw_over([shards[0], empty], 500, np.random.default_rng(0), out)
    assert {0} == set(drawn.shard.tolist())
    assert {0.25, 0.75} == set(drawn.probability.tolist())
    assert 2 == drawn.count
    with pytest.raises(WouldBlock, match="2 shards hold no item"):
        draw_over([empty, empty], 1, np.random.default_rng(0), out)


def test_what_has_no_mass_is_drawn_from_no_shard_while_another_has_some_and_else_by_number() -> (
    None
):
    assert [0.0, 1.0, 0.0] == shard_probabilities([0.0, 1e-300, 0.0], [5, 1, 5]).tolist()
    assert [0, 7, 0] == split(7, [0.0, 1e-300, 0.0], [5, 1, 5], np.random.default_rng(0)).tolist()
    assert [0.25, 0.75] == shard_probabilities([0.0, 0.0], [1, 3]).tolist()


def test_uniform_shards_weigh_as_many_items_as_they_hold() -> None:
    shards = [Shard(settings=SETTINGS, selector=Uniform) for _ in range(2)]
    shards[0].insert(_line(0, 0, 2))
    shards[1].insert(_line(1, 10, 6))
    drawn = draw_over(shards, 400, np.random.default_rng(0), shards[0].make_batch(400))
    np.testing.assert_allclose(1.0 / 8.0, drawn.probability)


def test_states_and_versions_lie_beside_the_steps_of_their_shard() -> None:
    s = replace(SETTINGS, state=(("h", (2,)),))
    shards = [Shard(settings=s, selector=Uniform) for _ in range(2)]
    for index, shard in enumerate(shards):
        line = _line(index, 10 * index, 4)
        states = np.repeat(line.arrays["action"][:, :, None], 2, axis=2).astype(np.float32)
        shard.insert(
            replace(
                line,
                arrays={
                    **line.arrays,
                    "state/h": states,
                    "version": line.arrays["action"][:, 0] + 100,
                },
            )
        )
    out = shards[0].make_batch(64)
    draw_over(shards, 64, np.random.default_rng(0), out)
    np.testing.assert_array_equal(out["action"][0] + 100, out["version"])
    np.testing.assert_array_equal(out["action"][0], out["state/h"][:, 1])
    np.testing.assert_array_equal(out["action"][0], out["obs/"][0])


def test_what_a_shard_has_not_draws_enough_left_for_falls_to_the_others() -> None:
    """By mass nearly all would be of the shard that has only two. A tenth of nine is refused before
    anything is drawn.
    """
    s = replace(SETTINGS, max_samples=1)
    shards = [Shard(settings=s, selector=lambda n: Prioritised(n, alpha=1.0)) for _ in range(3)]
    for index, (count, priority) in enumerate(((2, 1000.0), (4, 1.0), (3, 0.0))):
        shards[index].insert(_line(index, 10 * index, count), priority=priority)
    with pytest.raises(WouldBlock, match="3 shards have 9 draws left"):
        draw_over(shards, 10, np.random.default_rng(0), shards[0].make_batch(10))
    assert [2, 4, 3] == [len(shard) for shard in shards]
    taken: list[int] = []
    for wanted in ([0, 0, 1, 1, 1], [1, 2, 2, 2]):
        out = shards[0].make_batch(len(wanted))
        drawn = draw_over(shards, len(wanted), np.random.default_rng(0), out)
        assert wanted == drawn.shard.tolist()
        taken += out["action"][0].tolist()
    assert [0, 1, 10, 11, 12, 13, 20, 21, 22] == sorted(taken)
