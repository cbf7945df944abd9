"""A shard against a plain model of the same streams; insertion, update and removal of its items."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.effort import examples
from tests.support.paths import cases
from tests.support.replay_worlds import LEAVES, STACKS, Mode, Step, World, assert_window, everything
from tianflow.core.payloads import PRIORITY_EPSILON, LeafSpec
from tianflow.errors import WouldBlock
from tianflow.replay import (
    ActorError,
    Fifo,
    Fragment,
    Lifo,
    PrioritisedSelector,
    Shard,
    ShardSettings,
    StepStream,
    Uniform,
)
from tianflow.replay.items import Items

CASES = cases("replay")
Array = NDArray[Any]
WORLD = ShardSettings(
    observation=LEAVES,
    action=((), "int64"),
    capacity=100_000,
    length=3,
    stacks=STACKS,
    state=(("h", (2,)),),
    frames_per_row=3.0,
)
LINE = ShardSettings(
    observation=(LeafSpec("", (), "int64"),), action=((), "int64"), capacity=64, length=1
)


def line(
    first: int,
    steps: int,
    *,
    number: int = 0,
    actor: int = 0,
    incarnation: int = 0,
    end: str = "",
    **more: Any,
) -> Fragment:
    """Steps ``first .. first + steps - 1`` of one environment; observation and action are the
    number of the step.
    """
    arrays: dict[str, Array] = {
        name: np.zeros((steps, 1), np.bool_) for name in ("terminated", "truncated")
    }
    if end:
        arrays[end][-1] = True
    numbers = np.arange(first, first + steps + 1)[:, None]
    arrays |= {
        "obs/": numbers,
        "action": numbers[:-1],
        "reward": numbers[:-1].astype(np.float32),
        "valid": np.ones((steps, 1), np.bool_),
    }
    arrays |= {"start": numbers == 0, "version": np.zeros(steps, np.int64)}
    return Fragment(arrays | more, steps, StepStream(actor, incarnation), number)


def windows(shard: Shard) -> list[list[int]]:
    """Actions of all items of a first-in-first-out shard."""
    _, out = everything(shard)
    return [out["action"][out["valid"][:, i], i].tolist() for i in range(len(shard))]


def play(world: World, shard: Shard, script: list[int]) -> None:
    """Insert fragments: 0 stands for a lost one, -1 for a restart, else a length. The last one
    arrives.
    """
    for op in [*script, world.t]:
        world.version += int(world.rng.integers(0, 2))
        if op == 0:
            world.lose()
        elif op < 0:
            world.restart()
        else:
            shard.insert(world.fragment(min(op, world.t)))


def expected_windows(world: World, s: ShardSettings) -> dict[int, list[Step]]:
    """All complete windows of the model by their first action."""
    return {
        window[0].action: window
        for stretch in world.stretches
        for window in stretch.windows(s.length, s.period)
    }


scripts = st.lists(st.integers(-1, 6), max_size=8)
modes = st.sampled_from(["next_step", "same_step"])


@given(
    mode=modes,
    script=scripts,
    length=st.integers(1, 9),
    period=st.integers(1, 5),
    environments=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@example(mode="next_step", script=[3, 3, 3], length=9, period=1, environments=2, seed=5)
@examples(25)
def test_items_are_exactly_the_complete_windows_of_the_model(
    *, mode: Mode, script: list[int], length: int, period: int, environments: int, seed: int
) -> None:
    world = World(environments=environments, steps=6, mode=mode, seed=seed)
    s = replace(WORLD, length=length, period=period)
    shard = Shard(settings=s, selector=Fifo)
    play(world, shard, script)
    expected = expected_windows(world, s)
    assert len(expected) == len(shard) == shard.statistics().items.inserted
    if expected:
        _, out = everything(shard)
        assert expected.keys() == set(out["action"][0].tolist())
        for i, first in enumerate(out["action"][0].tolist()):
            assert_window(expected[first], out, i)


@given(
    mode=modes,
    script=scripts,
    length=st.integers(1, 7),
    period=st.integers(1, 4),
    frames=st.floats(0.3, 3.0),
    seed=st.integers(0, 2**32),
)
@examples(12)
def test_when_rows_frames_or_items_run_out_the_oldest_are_evicted_and_the_rest_stays_correct(
    *, mode: Mode, script: list[int], length: int, period: int, frames: float, seed: int
) -> None:
    """Two streams in turn, with memory for far fewer steps than they deliver."""
    s = replace(
        WORLD,
        length=length,
        period=period,
        capacity=60,
        frames_per_row=frames + 1.0,
        items=20 if seed % 2 else None,
    )
    shard = Shard(settings=s, selector=Fifo)
    worlds = [
        World(environments=2, steps=6, mode=mode, seed=seed + actor, actor=actor, ends=0.1)
        for actor in (0, 1)
    ]
    nbytes = shard.statistics().nbytes
    for ops in zip([*script, 6, 2], [6, *script, 6], strict=True):
        for world, op in zip(worlds, ops, strict=True):
            play(world, shard, [op])
    steps = {
        step.action: (stretch, k)
        for world in worlds
        for stretch in world.stretches
        for k, step in enumerate(stretch.steps)
    }
    found = shard.statistics()
    assert nbytes == found.nbytes
    assert_balanced(shard)
    inserted = sum(len(stretch.steps) for world in worlds for stretch in world.stretches)
    assert inserted == found.steps.inserted
    if not len(shard):
        return
    _, out = everything(shard)
    assert len(shard) == len(set(out["action"][0].tolist()))
    for i, first in enumerate(out["action"][0].tolist()):
        stretch, k = steps[first]
        window = stretch.steps[k : k + length]
        assert len(window) == length or stretch.closed
        assert_window(window, out, i)


def assert_balanced(shard: Shard) -> None:
    found = shard.statistics()
    for tally in (found.steps, found.items):
        assert tally.inserted == tally.resident + sum(tally.removed.values())
        assert 0 <= tally.removed_unsampled <= sum(tally.removed.values())
        assert 0 <= tally.resident


def test_a_full_shard_holds_as_many_steps_as_it_has_rows_but_the_open_one() -> None:
    shard = Shard(settings=replace(LINE, capacity=10, length=2), selector=Fifo)
    for k in range(7):
        shard.insert(line(5 * k, 5, number=k))
    found = shard.statistics()
    assert (35, 9) == (found.steps.inserted, found.steps.resident)
    assert [[k, k + 1] for k in range(26, 34)] == windows(shard)


def test_a_window_is_complete_only_with_its_last_step_also_across_fragments() -> None:
    shard = Shard(settings=replace(LINE, length=4), selector=Fifo)
    assert 0 == shard.insert(line(0, 3, number=0)).items
    assert 1 == shard.insert(line(3, 1, number=1)).items
    assert [[0, 1, 2, 3]] == windows(shard)
    assert 3 == shard.insert(line(4, 3, number=2)).items


def test_long_sequences_overlap_and_the_last_one_of_an_episode_is_shorter() -> None:
    case = CASES["r2d2_sequence_windows_T200_m80_overlap40"]
    m, overlap, steps = (
        case["inputs"]["m"],
        case["inputs"]["overlap"],
        case["inputs"]["episode_length"],
    )
    shard = Shard(
        settings=replace(LINE, capacity=1000, length=m, period=m - overlap), selector=Fifo
    )
    for k in range(0, steps, 20):
        shard.insert(line(k, 20, number=k // 20, end="truncated" if k + 20 == steps else ""))
    found = sorted(windows(shard))
    tail = case["expected"]["tail_start"]
    assert [list(range(*ends)) for ends in case["expected"]["full_windows"]] == found[:-1]
    assert list(range(tail, tail + case["expected"]["tail_length"])) == found[-1]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_transitions_at_the_end_of_an_episode_have_fewer_steps(end: str) -> None:
    shard = Shard(settings=replace(LINE, length=3), selector=Fifo)
    shard.insert(line(0, 4, end=end))
    assert [[0, 1, 2], [1, 2, 3], [2, 3], [3]] == sorted(windows(shard))
    _, out = everything(shard)
    assert (end == "terminated", end == "truncated") == (
        out["terminated"].any(),
        out["truncated"].any(),
    )
    if end == "truncated":
        last = [out["obs/"][out["valid"][:, i].sum(), i] for i in range(4)]
        assert [3, 4, 4, 4] == sorted(last)


def test_the_reset_steps_of_next_step_autoreset_are_in_no_item() -> None:
    """The counting environment, whose observation 3 ends an episode: no window contains 3 and 0."""
    obs = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0])[:, None]
    valid = obs[:-1] != 3
    shard = Shard(settings=LINE, selector=Fifo)
    arrays = {
        "obs/": obs,
        "action": obs[:-1],
        "reward": valid.astype(np.float32),
        "terminated": obs[:-1] == 2,
        "valid": valid,
    }
    arrays |= {
        "truncated": np.zeros((8, 1), np.bool_),
        "start": obs == 0,
        "version": np.zeros(8, np.int64),
    }
    shard.insert(Fragment(arrays, 8, StepStream(0, 0), 0))
    assert [[0], [1], [2], [0], [1], [2]] == windows(shard)
    assert 6 == shard.statistics().steps.inserted


@pytest.mark.parametrize(
    ("following", "breaks"),
    [
        (line(3, 3, number=1), 0),
        (line(3, 3, number=2), 1),
        (line(3, 3, number=1, incarnation=1), 1),
        (line(7, 3, number=1), 1),
        (line(3, 3, number=1, start=np.arange(4)[:, None] == 0), 1),
    ],
    ids=["goes on", "gap", "incarnation", "another observation", "begins anew"],
)
def test_windows_never_cross_a_break_and_the_steps_before_it_are_not_lost(
    following: Fragment, breaks: int
) -> None:
    shard = Shard(settings=replace(LINE, length=3), selector=Fifo)
    shard.insert(line(0, 3))
    shard.insert(following)
    found = sorted(windows(shard))
    first = int(following.arrays["action"][0, 0])
    whole = [[0, 1, 2], [first, first + 1, first + 2]]
    assert breaks == shard.statistics().breaks
    assert sorted([*whole, *([[1, 2], [2]] if breaks else [[1, 2, 3], [2, 3, 4]])]) == found
    _, out = everything(shard)
    assert not out["truncated"].any()


def test_a_stream_whose_newest_observation_was_evicted_starts_again_without_a_break() -> None:
    shard = Shard(settings=replace(LINE, capacity=10, length=2), selector=Fifo)
    shard.insert(line(0, 3))
    shard.insert(line(100, 9, actor=1))
    shard.insert(line(3, 3, number=1))
    found = windows(shard)
    assert [[k, k + 1] for k in (104, 105, 106, 107, 3, 4)] == found
    assert 0 == shard.statistics().breaks
    assert_balanced(shard)


def test_closing_a_stream_completes_windows_in_progress() -> None:
    shard = Shard(settings=replace(LINE, length=3), selector=Fifo)
    shard.insert(line(0, 4))
    assert 2 == shard.close_stream(0)
    assert 0 == shard.close_stream(0)
    assert [[0, 1, 2], [1, 2, 3], [2, 3], [3]] == sorted(windows(shard))


def test_a_refused_fragment_changes_nothing_and_completes_nothing_twice() -> None:
    shard = Shard(settings=replace(LINE, capacity=10, length=3), selector=Fifo)
    shard.insert(line(0, 4))
    with pytest.raises(ValueError, match="larger than the shard"):
        shard.insert(line(4, 20, number=1))
    with pytest.raises(ValueError, match="priority = nan"):
        shard.insert(line(4, 2, number=1), priority=math.nan)
    bad = line(4, 3, number=1)
    bad.arrays["terminated"][1] = True
    with pytest.raises(
        ValueError, match="after step 1 of environment 0 an episode continues after its end"
    ):
        shard.insert(bad)
    with pytest.raises(KeyError, match="reward"):
        shard.insert(
            replace(
                bad, arrays={name: array for name, array in bad.arrays.items() if name != "reward"}
            )
        )
    assert 4 == shard.statistics().steps.inserted
    shard.insert(line(4, 2, number=1))
    assert [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]] == sorted(windows(shard))


def test_two_refused_fragments_after_a_gap_complete_its_windows_once() -> None:
    shard = Shard(settings=replace(LINE, capacity=10, length=3), selector=Fifo)
    shard.insert(line(0, 4))
    for _ in range(2):
        with pytest.raises(ValueError, match="larger than the shard"):
            shard.insert(line(4, 20, number=5))
    assert [[0, 1, 2], [1, 2, 3], [2, 3], [3]] == sorted(windows(shard))


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        (slice(0, 1), "begins before the previous one ended"),
        (slice(1, 2), "begins right after the end"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(steps: slice, what: str) -> None:
    bad = line(1, 3)
    bad.arrays["start"][1 + steps.start] = True
    bad.arrays["truncated"][1] = steps.start == 1
    with pytest.raises(ValueError, match=what):
        Shard(settings=LINE).insert(bad)


def test_the_version_of_an_item_is_that_of_its_oldest_step() -> None:
    shard = Shard(settings=replace(LINE, length=3), selector=Fifo)
    shard.insert(line(0, 2, version=np.array([7, 6])))
    shard.insert(line(2, 3, number=1, version=np.array([8, 9, 9])))
    _, out = everything(shard)
    assert [6, 6, 8] == out["version"].tolist()


def test_items_beyond_the_oldest_version_are_excluded_before_drawing_with_the_steps_that_only_they_need() -> (
    None
):
    shard = Shard(settings=replace(LINE, length=3), selector=Uniform)
    for k in range(3):
        shard.insert(
            line(3 * k, 3, number=k, version=np.full(3, k), end="terminated" if k == 2 else "")
        )
    assert 0 == shard.exclude_older_than(0)
    assert 3 == shard.exclude_older_than(1)
    assert 0 == shard.exclude_older_than(1)
    out = shard.make_batch(200)
    drawn = shard.draw(200, np.random.default_rng(1), out)
    assert {3, 4, 5, 6, 7, 8} == set(out["action"][0].tolist())
    assert 6 == drawn.count == len(shard)
    found = shard.statistics()
    assert {"capacity": 0, "age": 3, "max_samples": 0} == found.items.removed == found.steps.removed
    assert (3, 3) == (found.items.removed_unsampled, found.steps.removed_unsampled)
    assert_balanced(shard)
    assert 6 == shard.exclude_older_than(100)
    with pytest.raises(WouldBlock, match="the shard holds 0 items"):
        shard.draw(1, np.random.default_rng(1), out)
    assert 0 == shard.statistics().steps.resident
    assert 0 == shard.insert(line(0, 2, incarnation=1)).items
    assert 2 == shard.statistics().steps.resident


def test_an_item_that_is_complete_later_is_as_old_as_its_oldest_step() -> None:
    shard = Shard(settings=replace(LINE, length=3))
    shard.insert(line(0, 3, version=np.full(3, 1)))
    assert 1 == shard.exclude_older_than(2)
    shard.insert(line(3, 3, number=1, version=np.full(3, 2)))
    assert 3 == len(shard)
    assert 2 == shard.exclude_older_than(2)
    assert 1 == len(shard)


@pytest.mark.parametrize(
    "selector", [Fifo, Lifo, Uniform, lambda n: PrioritisedSelector(n, alpha=1.0)]
)
def test_no_item_is_drawn_more_often_than_max_samples(selector: Callable[[int], Any]) -> None:
    shard = Shard(settings=replace(LINE, max_samples=3), selector=selector)
    shard.insert(line(0, 10))
    generator, counts = np.random.default_rng(2), np.zeros(10, np.int64)
    for n in (7, 11, 1, 11):
        out = shard.make_batch(n)
        shard.draw(n, generator, out)
        np.add.at(counts, out["action"][0], 1)
        assert counts.max() <= 3
        assert 10 - np.count_nonzero(counts == 3) == len(shard)
        assert_balanced(shard)
    assert [3] * 10 == counts.tolist()
    found = shard.statistics()
    assert (10, 10, 0) == (
        found.items.removed["max_samples"],
        found.steps.removed["max_samples"],
        found.items.removed_unsampled,
    )
    with pytest.raises(WouldBlock):
        shard.draw(1, generator, shard.make_batch(1))


def test_more_draws_than_max_samples_permits_are_refused_before_anything_changes() -> None:
    shard = Shard(settings=replace(LINE, max_samples=2))
    shard.insert(line(0, 3))
    with pytest.raises(WouldBlock, match="6 draws left"):
        shard.draw(7, np.random.default_rng(0), shard.make_batch(7))
    assert 3 == len(shard)
    shard.exclude_older_than(1)
    with pytest.raises(WouldBlock):
        shard.draw(1, np.random.default_rng(0), shard.make_batch(1))


def test_draws_with_max_samples_have_the_distribution_of_sequential_draws() -> None:
    """Two of three items, drawn once each, so the probability of every pair is known."""
    p = np.array([1.0, 2.0, 3.0])
    counts = dict.fromkeys(((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)), 0)
    generator, numbers = np.random.default_rng(3), np.arange(3)
    for _ in range(3000):
        items = Items(
            3, selector=lambda n: PrioritisedSelector(n, alpha=1.0), state={}, max_samples=1
        )
        items.complete(items.begin(numbers), np.ones(3, np.int64), np.zeros(3, np.int64), p)
        drawn, _, _ = items.draw(2, generator)
        counts[tuple(drawn.tolist())] += 1  # type: ignore[index]
    expected = {(i, j): 3000 * p[i] / 6.0 * p[j] / (6.0 - p[i]) for i, j in counts}
    assert (
        sum((counts[pair] - expected[pair]) ** 2 / expected[pair] for pair in counts) < 25.7
    )  # 5 degrees of freedom, p = 1e-4


def prioritised(capacity: int = 5, alpha: float = 1.0) -> Shard:
    return Shard(
        settings=replace(LINE, capacity=capacity),
        selector=lambda n: PrioritisedSelector(n, alpha=alpha),
    )


def probability_of(shard: Shard, action: int) -> float:
    out = shard.make_batch(1000)
    drawn = shard.draw(1000, np.random.default_rng(0), out)
    found = drawn.probability[out["action"][0] == action]
    return float(found[0]) if len(found) else 0.0


def test_a_priority_for_an_overwritten_item_changes_nothing() -> None:
    expected = CASES["per_stale_priority_update"]["expected"]
    shard = prioritised()
    shard.insert(line(0, 4), priority=1.0)
    out = shard.make_batch(200)
    drawn = shard.draw(200, np.random.default_rng(0), out)
    keys = np.array([drawn.keys[out["action"][0] == action][0] for action in (0, 3)])
    shard.update_priorities(keys[1:], np.array([7.0]))
    shard.insert(line(4, 1, number=1))
    assert 7.0 + 1.0 + 1.0 + 7.0 == shard.mass
    assert expected["stale_updates"] == shard.update_priorities(keys, np.array([0.5, 9.0]))
    assert expected["stale_updates"] == shard.statistics().stale_updates
    mass = 7.0 + 1.0 + 1.0 + expected["leaf3_after"]
    assert mass == shard.mass
    assert 7.0 / mass == probability_of(shard, 4)
    assert 9.0 / mass == probability_of(shard, 3)
    shard.insert(line(5, 1, number=2))
    before = shard.mass
    assert 2 == shard.update_priorities(np.array([0, 1]), np.array([50.0, 50.0])), (
        "though others are in their places"
    )
    assert before == shard.mass


def test_keys_of_expired_or_future_items_are_stale() -> None:
    shard = prioritised()
    shard.insert(line(0, 3))
    shard.exclude_older_than(1)
    assert 3 == shard.update_priorities(np.array([0, 4, 5]), np.full(3, 2.0))
    assert 0.0 == shard.mass


def test_the_last_of_several_priorities_for_one_item_counts_and_an_invalid_one_refuses_all() -> (
    None
):
    shard = prioritised()
    shard.insert(line(0, 2))
    shard.update_priorities(np.array([0, 1, 0]), np.array([5.0, 1.0, 3.0]))
    assert 4.0 == shard.mass
    for bad in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="priority 1 of 2"):
            shard.update_priorities(np.array([0, 1]), np.array([9.0, bad]))
    assert 4.0 == shard.mass


def test_a_new_item_gets_the_largest_priority_so_far_and_alpha_once() -> None:
    case = CASES["per_new_item_priority_single_transform"]
    shard = prioritised(alpha=case["inputs"]["alpha"])
    shard.insert(line(0, 1))
    assert 1.0 == shard.mass
    shard.update_priorities(np.array([0]), np.array([case["inputs"]["running_max_raw"]]))
    assert case["expected"]["correct_leaf"] == pytest.approx(shard.mass, abs=1e-9)
    shard.insert(line(1, 1, number=1))
    assert 2.0 * case["expected"]["correct_leaf"] == pytest.approx(shard.mass, abs=1e-9)
    shard.insert(line(2, 1, number=2), priority=0.0)
    assert 2.0 * case["expected"]["correct_leaf"] == pytest.approx(shard.mass, abs=1e-9)


def test_a_priority_given_with_a_fragment_counts_for_the_largest() -> None:
    shard = prioritised()
    shard.insert(line(0, 1), priority=5.0)
    shard.insert(line(1, 1, number=1))
    assert 10.0 == shard.mass


def test_draws_of_an_item_are_not_counted_for_its_successor() -> None:
    shard = Shard(settings=replace(LINE, capacity=4), selector=Fifo)
    shard.insert(line(0, 3))
    everything(shard)
    unsampled = []
    for number in (1, 2):
        shard.insert(line(3 * number, 3, number=number))
        found = shard.statistics()
        unsampled.append((found.steps.removed_unsampled, found.items.removed_unsampled))
    assert [(0, 0), (3, 3)] == unsampled
    assert_balanced(shard)


def test_last_observations_of_episodes_use_no_item() -> None:
    shard = Shard(settings=replace(LINE, capacity=20, items=10), selector=Fifo)
    for number in range(10):
        shard.insert(line(0, 1, number=number, end="truncated"))
    assert 10 == len(shard)


def test_a_step_that_is_not_valid_ends_windows_anywhere() -> None:
    shard, fragment = Shard(settings=replace(LINE, length=3), selector=Fifo), line(0, 6)
    fragment.arrays["valid"][2] = False
    shard.insert(fragment)
    assert [[0, 1], [1], [3, 4, 5]] == sorted(windows(shard))
    _, out = everything(shard)
    assert [[0, 1, 2, 2], [1, 2, 2, 2], [3, 4, 5, 6]] == sorted(out["obs/"].T.tolist())


def test_an_item_keeps_the_recurrent_state_before_its_first_observation() -> None:
    """A toy network's states as its actor had them: burn-in from the stored one gives the handed
    state.
    """
    case = CASES["r2d2_burn_in_toy_rnn"]
    inputs, expected = case["inputs"], case["expected"]
    observations, (wh, wx) = inputs["obs"], inputs["learner_wh_wx"]
    s = replace(
        LINE,
        observation=(LeafSpec("", (), "float64"),),
        length=inputs["burn_in"],
        state=(("h", ()),),
    )
    shard = Shard(settings=s, selector=Fifo)
    obs = np.array([*observations, 0.0])[:, None]
    for k, number in ((0, 0), (2, 1), (4, 2)):
        states = np.array(expected["acting_states_before_each_obs"])[k : k + 2, None].astype(
            np.float32
        )
        shard.insert(line(k, 2, number=number, **{"obs/": obs[k : k + 3], "state/h": states}))
    _, out = everything(shard)
    start = out["action"][0].tolist().index(inputs["sequence_start"])
    assert expected["stored_state_at_1"] == pytest.approx(out["state/h"][start], abs=1e-7)
    state = float(out["state/h"][start])
    for k in range(inputs["burn_in"]):
        state = math.tanh(wh * state + wx * out["obs/"][k, start])
    assert expected["state_after_burn_in_from_stored"] == pytest.approx(state, abs=1e-7)


def test_a_state_known_only_at_row_0_is_stored_there_zero_at_an_episode_start_and_counted_as_unknown_elsewhere() -> (
    None
):
    s = replace(LINE, state=(("h", ()),))
    shard = Shard(settings=s, selector=Fifo)
    shard.insert(line(5, 2, **{"state/h": np.array([0.5], np.float32)}, end="terminated"))
    following = line(0, 1, number=1, **{"state/h": np.array([0.0], np.float32)})
    shard.insert(following)
    _, out = everything(shard)
    assert [0.5, 0.0, 0.0] == out["state/h"].tolist()
    assert 1 == shard.statistics().unknown_states


def test_action_masks_and_extra_columns_are_drawn_and_an_unknown_mask_allows_all_actions() -> None:
    s = replace(LINE, mask_size=2, extras=(("log_prob", (), "float32"),))
    shard = Shard(settings=s, selector=Fifo)
    mask = np.array([[[True, False]], [[False, True]], [[False, True]]])
    log_prob = np.array([[-1.0], [-2.0]], np.float32)
    final = np.array([[1], [2]])
    shard.insert(
        line(0, 2, end="truncated", action_mask=mask, log_prob=log_prob, **{"final_obs/": final})
    )
    _, out = everything(shard)
    assert [-1.0, -2.0] == out["log_prob"][0].tolist()
    assert [[[True, False], [False, True]], [[False, True], [True, True]]] == out[
        "action_mask"
    ].tolist()


@given(mode=modes, script=scripts, length=st.integers(1, 7), seed=st.integers(0, 2**32))
@examples(12)
def test_a_draw_of_ends_has_the_first_and_the_last_observation_of_each_item(
    mode: Mode, script: list[int], length: int, seed: int
) -> None:
    drawn = []
    for ends_only in (False, True):
        world = World(environments=2, steps=6, mode=mode, seed=seed)
        shard = Shard(settings=replace(WORLD, length=length, ends_only=ends_only), selector=Fifo)
        play(world, shard, script)
        if not len(shard):
            return
        drawn.append(everything(shard)[1])
    whole, ends = drawn
    item, steps = np.arange(len(whole["version"])), whole["valid"].sum(0)
    goes_on = ~whole["terminated"].any(0)
    for name, expected in whole.items():
        observed = name.startswith("obs/")
        np.testing.assert_array_equal(expected[[0, -1]] if observed else expected, ends[name])
        if observed:
            after = expected[steps, item]
            np.testing.assert_array_equal(after[goes_on], ends[name][1][goes_on])


def test_a_draw_of_ends_has_the_masks_of_its_observations() -> None:
    s = replace(LINE, mask_size=2, length=2, ends_only=True)
    shard = Shard(settings=s, selector=Fifo)
    mask = np.array([[[True, False]], [[False, True]], [[True, True]], [[False, True]]])
    shard.insert(line(0, 3, action_mask=mask))
    _, out = everything(shard)
    assert [[0, 1], [2, 3]] == out["obs/"].tolist()
    assert [[[True, False], [False, True]], [[True, True], [False, True]]] == out[
        "action_mask"
    ].tolist()


def test_the_initial_priority_is_the_actors_own_error() -> None:
    case = CASES["apex_initial_priority_on_actor"]
    inputs = case["inputs"]
    s = replace(LINE, length=inputs["n"])
    shard = Shard(
        settings=s,
        selector=lambda n: PrioritisedSelector(n, alpha=1.0),
        initial_priority=ActorError(inputs["gamma"]),
    )
    rewards = np.array([*inputs["rewards"], 0.0], np.float32)[:, None]
    taken = np.array([inputs["q_at_t"][inputs["action"]], 0.0, 0.0, 0.0], np.float32)[:, None]
    greatest = np.array(
        [max(inputs["q_at_t"]), 0.0, 0.0, max(inputs["q_at_t_plus_n"])], np.float32
    )[:, None]
    shard.insert(line(0, 4, reward=rewards, q_taken=taken, q_max=greatest))
    assert 2 == len(shard)
    out = shard.make_batch(50)
    drawn = shard.draw(50, np.random.default_rng(0), out)
    first = drawn.probability[out["action"][0] == 0][0] * shard.mass
    assert case["expected"]["priority"] + PRIORITY_EPSILON == pytest.approx(first, abs=1e-6)


def copied(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}


@pytest.mark.parametrize(
    "selector", [Fifo, Lifo, Uniform, lambda n: PrioritisedSelector(n, alpha=0.7)]
)
@pytest.mark.parametrize("max_samples", [None, 40])
def test_a_restored_shard_draws_and_continues_as_the_saved_one(
    selector: Callable[[int], Any], max_samples: int | None
) -> None:
    s = replace(WORLD, length=4, period=2, capacity=90, max_samples=max_samples)
    shard, world = (
        Shard(settings=s, selector=selector),
        World(environments=3, steps=6, mode="same_step", seed=4),
    )
    play(world, shard, [6, 3, 0, 6, -1, 6, 6])
    out = shard.make_batch(32)
    drawn = shard.draw(32, np.random.default_rng(5), out)
    shard.update_priorities(drawn.keys, np.random.default_rng(6).random(32))
    saved = copied(shard.snapshot())
    assert all(array.dtype.kind in "biuf" for array in saved.values())
    resumed = Shard(settings=s, selector=selector)
    resumed.insert(World(environments=1, steps=6, mode="same_step", seed=5).fragment())
    resumed.restore(saved)
    assert shard.statistics() == resumed.statistics()
    following = [world.fragment() for _ in range(4)]
    for one in (shard, resumed):
        generator = np.random.default_rng(7)
        batches = []
        for fragment in following:
            one.insert(fragment)
            batch = one.make_batch(32)
            drawn = one.draw(32, generator, batch)
            one.update_priorities(drawn.keys, generator.random(32))
            batches.append((copied(batch), drawn))
        if one is shard:
            expected = batches
    for (want, drew), (found, drew_too) in zip(expected, batches, strict=True):
        np.testing.assert_array_equal(drew.keys, drew_too.keys)
        np.testing.assert_array_equal(drew.probability, drew_too.probability)
        for name, array in want.items():
            np.testing.assert_array_equal(array, found[name])
    assert shard.statistics() == resumed.statistics()


def test_a_snapshot_of_other_settings_is_refused_and_changes_nothing() -> None:
    shard = Shard(settings=LINE, selector=Fifo)
    shard.insert(line(0, 5))
    other = Shard(settings=replace(LINE, capacity=65), selector=Fifo).snapshot()
    with pytest.raises(ValueError, match="a shard with other settings"):
        shard.restore(other)
    assert [[k] for k in range(5)] == windows(shard)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"length": 65}, "no item would ever be complete"),
        ({"length": 0}, "no item would ever be complete"),
        ({"period": 0}, "at least one step apart"),
        ({"items": 0}, "no item would ever fit"),
        ({"max_samples": 0}, "no item could ever be drawn"),
        ({"stacks": frozenset({"sonar"})}, "'sonar'"),
    ],
)
def test_settings_with_which_no_item_could_be_drawn_are_refused(
    change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        replace(LINE, **change)


def test_a_fragment_larger_than_the_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted is 1 to the number of rows, 3"):
        Shard(settings=LINE).insert(replace(line(0, 3), length=4))


def test_the_arrays_of_an_inserted_fragment_may_be_overwritten() -> None:
    shard, fragment = Shard(settings=LINE, selector=Fifo), line(0, 3)
    shard.insert(fragment)
    fragment.arrays["obs/"][:] = -1
    _, out = everything(shard)
    assert [0, 1, 2] == out["obs/"][0].tolist()
