"""The rate limiter against handed traces, against a plain model, and against deadlock."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.effort import examples, some
from tests.support.paths import cases
from tianflow.core.limits import RateLimits
from tianflow.replay.rate_limiter import Limiter

CASES = cases("replay")
TRACES = [
    name
    for name, case in CASES.items()
    if case["group"] == "rate_limiter" and "trace" in case["expected"]
]
LIMITS = RateLimits(
    samples_per_insert=2.0,
    min_size=10,
    min_diff=-20.0,
    max_diff=60.0,
    capacity=1000,
    insert_size=8,
    draw_size=16,
)


@pytest.mark.parametrize("name", TRACES)
def test_a_handed_trace_is_followed(name: str) -> None:
    inputs, trace = CASES[name]["inputs"], CASES[name]["expected"]["trace"]
    limits = RateLimits(
        samples_per_insert=inputs["samples_per_insert"],
        min_size=inputs["min_size_to_sample"],
        min_diff=inputs["min_diff"],
        max_diff=inputs["max_diff"],
        capacity=100,
    )
    limiter = Limiter(limits=limits)
    for op, row in zip(inputs["ops"], trace, strict=True):
        ask, count = {
            "insert": (limiter.may_insert, limiter.inserted),
            "sample": (limiter.may_draw, limiter.drawn),
            "delete": (lambda n: True, limiter.deleted),
        }[op]
        assert (row["op"], row["allowed"]) == (op, ask(1))
        if row["allowed"]:
            count(1)
        found = limiter.statistics()
        assert (row["inserts"], row["samples"], row["deletes"]) == (
            found.inserts,
            found.samples,
            found.deletes,
        )
        assert row["diff"] == pytest.approx(found.diff, abs=1e-9)


def verdict(spi: float, min_size: int, error_buffer: Any) -> str:
    try:
        if isinstance(error_buffer, list):
            limits = RateLimits(spi, min_size, error_buffer[0], error_buffer[1], capacity=100)
        else:
            limits = RateLimits.around(
                samples_per_insert=spi, min_size=min_size, error_buffer=error_buffer, capacity=100
            )
    except ValueError as error:
        return "error (deadlock)" if "first draw stays forbidden" in str(error) else "error"
    return "ok with warning" if limits.remarks else "ok"


def test_handed_settings_get_the_handed_verdicts() -> None:
    case = CASES["rate_limiter_error_buffer_validation"]
    assert case["expected"]["verdict"] == [verdict(**given_) for given_ in case["inputs"]["cases"]]


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ({"samples_per_insert": 0.0}, "the learner would wait for ever"),
        ({"samples_per_insert": math.nan}, "the learner would wait for ever"),
        ({"min_diff": 20.5}, "the learner would wait for ever"),
        ({"capacity": 9}, "the learner would wait for ever"),
        ({"max_diff": 11.5}, "actors and learner would wait for each other for ever"),
        ({"max_diff": math.nan}, "actors and learner would wait for each other for ever"),
        ({"draw_size": 65}, "actors and learner would wait for each other for ever"),
        ({"min_size": 0}, "each must be at least 1"),
    ],
)
def test_settings_that_would_block_for_ever_are_refused_and_the_message_names_the_side(
    change: dict[str, Any], who: str
) -> None:
    with pytest.raises(ValueError, match=who):
        replace(LIMITS, **change)


def test_both_ends_of_the_band_are_inclusive() -> None:
    limits = RateLimits(
        samples_per_insert=1.0,
        min_size=1,
        min_diff=0.0,
        max_diff=4.0,
        capacity=10,
        insert_size=2,
        draw_size=2,
    )
    limiter = Limiter(limits=limits)
    limiter.inserted(2)
    assert limiter.may_insert(2)
    limiter.inserted(2)
    assert not limiter.may_insert(1)
    limiter.drawn(2)
    assert limiter.may_draw(2)
    limiter.drawn(2)
    assert not limiter.may_draw(1)


def test_more_items_at_once_than_the_checked_limits_are_refused() -> None:
    limiter = Limiter(limits=LIMITS)
    with pytest.raises(ValueError, match="insert of 9"):
        limiter.may_insert(9)
    with pytest.raises(ValueError, match="draw of 17"):
        limiter.may_draw(17)


SIZES = list(product((0.25, 1.0, 1.5, 8.0), (1, 7, 100), (1, 16, 640), (1, 8, 32)))


@pytest.mark.parametrize("eager", ["actors", "learner", "in turn"])
def test_no_sizes_deadlock(eager: str) -> None:
    """The narrowest accepted band, at both of its ends, with full inserts and draws."""
    for spi, min_size, n, m in some(SIZES):
        width = max(2.0 * max(1.0, spi), spi * n + m)
        for low in (spi * min_size, spi * min_size - width / 2.0, spi * min_size - width):
            limits = RateLimits(
                spi, min_size, low, low + width, capacity=min_size, insert_size=n, draw_size=m
            )
            limiter = Limiter(limits=limits)
            drawn = 0
            for turn in range(600):
                may = (limiter.may_insert(n), limiter.may_draw(m))
                assert any(may), (limits, limiter.statistics())
                insert_first = {"actors": True, "learner": False, "in turn": turn % 2 == 0}[eager]
                if may[0] and (insert_first or not may[1]):
                    limiter.inserted(n)
                    limiter.deleted(
                        max(0, limiter.statistics().size - min_size)
                    )  # a full shard of the smallest possible size
                else:
                    limiter.drawn(m)
                    drawn += 1
            assert 0 < drawn


def test_a_change_of_the_ratio_after_many_inserts_moves_only_diff_into_the_band() -> None:
    """``inserts * spi - samples`` would apply the new ratio to the past: a million draws would be
    due.
    """
    limiter = Limiter(limits=LIMITS)
    for _ in range(50_000):
        limiter.inserted(8)
        limiter.drawn(16)
    before = limiter.statistics()
    limiter.change(replace(LIMITS, samples_per_insert=4.0, min_diff=0.0, max_diff=100.0))
    assert before == limiter.statistics()
    limiter.inserted(1)
    assert before.diff + 4.0 == limiter.statistics().diff
    limiter.change(replace(LIMITS, min_diff=-100.0, max_diff=-50.0))
    assert -50.0 == limiter.statistics().diff
    assert (before.inserts + 1, before.samples, before.deletes) == (400_001, 800_000, 0)
    assert limiter.may_draw(16)


def test_a_change_of_neither_ratio_nor_band_keeps_diff() -> None:
    limits = replace(LIMITS, min_diff=10.0)
    limiter = Limiter(limits=limits)
    limiter.inserted(8)
    limiter.inserted(2)
    limiter.drawn(5)
    limiter.change(replace(limits, capacity=500))
    assert 15.0 == limiter.statistics().diff
    limiter.change(replace(limits, min_diff=16.0))
    assert 16.0 == limiter.statistics().diff


@pytest.mark.parametrize("ratio", [2.0, 4.0])
def test_a_change_while_the_table_fills_permits_no_more_draws_than_a_new_table(
    ratio: float,
) -> None:
    """``diff`` is below the band until then: raised to the band, it would permit draws twice."""
    changed = replace(LIMITS, samples_per_insert=ratio, min_diff=10.0, max_diff=70.0)
    live, resumed, new = (Limiter(limits=limits) for limits in (LIMITS, changed, changed))
    live.inserted(2)
    resumed.restore(live.snapshot())
    live.change(changed)
    new.inserted(2)
    assert new.statistics() == live.statistics() == resumed.statistics()


def test_a_learner_without_actors_stops_at_its_ratio_and_continues_when_they_return() -> None:
    limiter = Limiter(limits=LIMITS)
    for _ in range(3):
        limiter.inserted(8)
    while limiter.may_draw(16):
        limiter.drawn(16)
    found = limiter.statistics()
    assert (
        found.samples
        <= found.inserts * LIMITS.samples_per_insert - LIMITS.min_diff
        < found.samples + 16
    )
    limiter.inserted(8)
    assert limiter.may_draw(16)


def test_a_lost_shard_permits_inserts_until_min_size_is_reached_again() -> None:
    limiter = Limiter(limits=LIMITS)
    for _ in range(5):
        limiter.inserted(8)
    assert not limiter.may_insert(8)
    limiter.deleted(38)
    assert not limiter.may_draw(1)
    assert limiter.may_insert(8)
    limiter.inserted(8)
    assert limiter.may_draw(16)
    assert not limiter.may_insert(8)
    with pytest.raises(ValueError, match="the table holds 10"):
        limiter.deleted(11)


def draws_before_an_insert(limiter: Limiter, size: int) -> int:
    """Draws that a table of ``min_size`` items permits after it was filled."""
    for _ in range(limiter.limits.min_size // size):
        assert limiter.may_insert(size)
        limiter.inserted(size)
    count = 0
    while limiter.may_draw(64):
        limiter.drawn(64)
        count += 64
    return count


def test_a_table_that_was_lost_permits_as_many_draws_as_a_new_one() -> None:
    limits = RateLimits.around(
        samples_per_insert=8.0,
        min_size=10_000,
        error_buffer=128.0,
        capacity=100_000,
        insert_size=8,
        draw_size=64,
    )
    limiter, expected = Limiter(limits=limits), draws_before_an_insert(Limiter(limits=limits), 8)
    assert 128 == expected == draws_before_an_insert(limiter, 8)
    for lost in (10_000, 4_000):
        limiter.lost(lost)
        before = limiter.statistics()
        assert before.diff == 8.0 * before.size
        while limiter.statistics().size < limits.min_size:
            assert not limiter.may_draw(64)
            limiter.inserted(8)
        drawn = 0
        while limiter.may_draw(64):
            limiter.drawn(64)
            drawn += 64
        assert expected == drawn


def test_a_loss_above_the_least_size_changes_no_permission() -> None:
    limiter = Limiter(limits=LIMITS)
    for _ in range(3):
        limiter.inserted(8)
    before = limiter.statistics()
    limiter.lost(14)
    assert before.diff == limiter.statistics().diff
    limiter.deleted(10)  # not a loss: the items were drawn as often as they may be
    assert before.diff == limiter.statistics().diff
    with pytest.raises(ValueError, match="the table holds 0"):
        limiter.lost(1)


def test_a_resumed_limiter_continues_unchanged() -> None:
    """Also below the band, while the table fills."""
    limiter = Limiter(limits=replace(LIMITS, min_diff=10.0))
    limiter.inserted(3)
    resumed = Limiter(limits=limiter.limits)
    resumed.restore(limiter.snapshot())
    assert limiter.statistics() == resumed.statistics()


def test_a_limiter_without_a_band_continues_from_a_json_manifest() -> None:
    """A manifest is strict JSON, which has no infinity."""
    limiter = Limiter(limits=replace(LIMITS, min_diff=-math.inf, max_diff=math.inf))
    limiter.inserted(3)
    limiter.drawn(2)
    resumed, banded = Limiter(limits=limiter.limits), Limiter(limits=LIMITS)
    for other in (resumed, banded):
        other.restore(json.loads(json.dumps(limiter.snapshot(), allow_nan=False)))
    assert limiter.statistics() == resumed.statistics()
    assert LIMITS.min_diff <= banded.statistics().diff <= LIMITS.max_diff


def test_counts_come_from_the_checkpoint_and_limits_from_the_settings() -> None:
    limiter = Limiter(limits=LIMITS)
    limiter.inserted(8)
    limiter.inserted(8)
    resumed = Limiter(limits=replace(LIMITS, max_diff=21.0, draw_size=8))
    resumed.restore(limiter.snapshot())
    assert (16, 21.0, 21.0) == (
        resumed.statistics().inserts,
        resumed.statistics().diff,
        resumed.limits.max_diff,
    )


class LimiterModel(RuleBasedStateMachine):
    """Against two running sums in exact arithmetic: all numbers are multiples of a quarter."""

    @initialize(
        spi=st.integers(1, 12),
        n=st.integers(1, 9),
        m=st.integers(1, 9),
        min_size=st.integers(1, 20),
        extra=st.integers(0, 40),
    )
    def begin(self, spi: int, n: int, m: int, min_size: int, extra: int) -> None:
        ratio = spi / 4.0
        width = max(2.0 * max(1.0, ratio), ratio * n + m) + extra
        low = ratio * min_size - width / 2.0
        self.limits = RateLimits(
            ratio, min_size, low, low + width, capacity=min_size + 10, insert_size=n, draw_size=m
        )
        self.limiter = Limiter(limits=self.limits)
        self.inserts = self.samples = self.deletes = 0
        self.diff = 0.0

    @rule(share=st.floats(0.0, 1.0))
    def insert(self, share: float) -> None:
        n = math.ceil(share * self.limits.insert_size)
        small = self.inserts - self.deletes < self.limits.min_size
        allowed = small or self.diff + n * self.limits.samples_per_insert <= self.limits.max_diff
        assert allowed == self.limiter.may_insert(n)
        if allowed:
            self.limiter.inserted(n)
            self.inserts, self.diff = (
                self.inserts + n,
                self.diff + n * self.limits.samples_per_insert,
            )

    @rule(share=st.floats(0.0, 1.0))
    def draw(self, share: float) -> None:
        m = math.ceil(share * self.limits.draw_size)
        allowed = (
            self.inserts - self.deletes >= self.limits.min_size
            and self.diff - m >= self.limits.min_diff
        )
        assert allowed == self.limiter.may_draw(m)
        if allowed:
            self.limiter.drawn(m)
            self.samples, self.diff = self.samples + m, self.diff - m

    @precondition(lambda self: self.inserts > self.deletes)
    @rule(share=st.floats(0.0, 1.0))
    def delete(self, share: float) -> None:
        deleted = math.ceil(share * (self.inserts - self.deletes))
        self.limiter.deleted(deleted)
        self.deletes += deleted

    @precondition(lambda self: self.inserts > self.deletes)
    @rule(share=st.floats(0.0, 1.0))
    def lose(self, share: float) -> None:
        lost = math.ceil(share * (self.inserts - self.deletes))
        self.limiter.lost(lost)
        self.deletes += lost
        if lost and self.inserts - self.deletes < self.limits.min_size:
            self.diff = self.limits.samples_per_insert * (self.inserts - self.deletes)

    @rule(spi=st.integers(1, 12), lift=st.integers(0, 5))
    def change(self, spi: int, lift: int) -> None:
        ratio = spi / 4.0
        width = max(2.0 * max(1.0, ratio), ratio * self.limits.insert_size + self.limits.draw_size)
        low = ratio * self.limits.min_size - lift
        new = replace(self.limits, samples_per_insert=ratio, min_diff=low, max_diff=low + width)
        if new != self.limits:
            fills = self.inserts - self.deletes < self.limits.min_size
            self.diff = (
                ratio * (self.inserts - self.deletes)
                if fills
                else min(max(self.diff, low), low + width)
            )
        self.limits = new
        self.limiter.change(new)

    @rule()
    def resume(self) -> None:
        resumed = Limiter(limits=self.limits)
        resumed.restore(self.limiter.snapshot())
        self.limiter = resumed

    @invariant()
    def one_side_may_always_go_on(self) -> None:
        assert self.limiter.may_insert(self.limits.insert_size) or self.limiter.may_draw(
            self.limits.draw_size
        )

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        found = self.limiter.statistics()
        assert (self.inserts, self.samples, self.deletes, self.diff) == (
            found.inserts,
            found.samples,
            found.deletes,
            found.diff,
        )


TestLimiterModel = LimiterModel.TestCase
TestLimiterModel.settings = examples(15, stateful_step_count=40)


@given(spi=st.floats(0.01, 100.0), n=st.integers(1, 1000), ops=st.lists(st.booleans(), max_size=60))
@examples(10)
def test_without_changes_diff_is_inserts_times_ratio_minus_samples(
    spi: float, n: int, ops: list[bool]
) -> None:
    limits = RateLimits.around(
        samples_per_insert=spi, min_size=1, error_buffer=spi * n + 2.0, capacity=10, insert_size=n
    )
    limiter = Limiter(limits=limits)
    for is_insert in ops:
        if is_insert and limiter.may_insert(n):
            limiter.inserted(n)
        if not is_insert and limiter.may_draw(1):
            limiter.drawn(1)
    found = limiter.statistics()
    assert found.inserts * spi - found.samples == pytest.approx(
        found.diff, abs=1e-6 * (1.0 + abs(found.inserts * spi))
    )


def test_items_in_transit_count_as_inserted() -> None:
    """An admitted insert that is not stored yet must not admit a second one in its place."""
    limits = RateLimits(2.0, 10, 0.0, 60.0, 1000, insert_size=10, draw_size=4)
    asked, told = Limiter(limits=limits), Limiter(limits=limits)
    asked.inserted(10)
    told.inserted(10)
    for ahead in range(30):
        assert told.may_insert(5) is asked.may_insert(5, ahead=ahead)
        told.inserted(1)
    assert not asked.may_insert(5, ahead=29)
    empty = Limiter(limits=limits)
    assert empty.may_insert(10, ahead=9)
    assert empty.may_insert(10, ahead=20)
    assert not empty.may_insert(10, ahead=21)
