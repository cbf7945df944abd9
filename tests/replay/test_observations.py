"""Frames are stored once, and every stack is read back unchanged."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.effort import examples
from tests.support.replay_worlds import LEAVES, STACKS, World, everything
from tianflow.core.payloads import LeafSpec
from tianflow.replay import Fifo, Fragment, Shard, ShardSettings, StepStream, find_stacks
from tianflow.replay.observations import LeafArrays, NewRows, PlainLeaf, StackedLeaf
from tianflow.replay.rings import gather

CAMERA = LeafSpec("", (4, 12, 12), "uint8")
ATARI = ShardSettings(
    observation=(CAMERA,), action=((), "int64"), capacity=2000, length=3, stacks=frozenset({""})
)


def game(
    steps: int,
    environments: int,
    *,
    fragment: int,
    episode: int,
    rng: np.random.Generator,
    leaf: LeafSpec = CAMERA,
) -> list[Fragment]:
    """Fragments of stacked frames; the first stack of an episode repeats its first frame."""
    depth, frame = leaf.shape[0], leaf.shape[1:]
    obs = np.zeros((steps + 1, environments, *leaf.shape), leaf.dtype)
    start = np.zeros((steps + 1, environments), np.bool_)
    born = rng.integers(0, episode, environments)
    for t in range(steps + 1):
        frames = rng.integers(0, 256, (environments, *frame), dtype=np.uint8)
        start[t] = (t + born) % episode == 0
        if t:
            obs[t, :, :-1] = obs[t - 1, :, 1:]
        obs[t, :, -1] = frames
        start[0] = True
        obs[t, start[t]] = np.repeat(frames[start[t], None], depth, axis=1)
    fragments = []
    for number, begin in enumerate(range(0, steps, fragment)):
        rows, more = slice(begin, begin + fragment), slice(begin, begin + fragment + 1)
        arrays: dict[str, NDArray[Any]] = {
            "obs/": obs[more],
            "start": start[more],
            "terminated": start[1:][rows],
        }
        arrays |= {
            "final_obs/": obs[1:][rows],
            "truncated": np.zeros((fragment, environments), np.bool_),
        }
        arrays |= {
            "valid": np.ones((fragment, environments), np.bool_),
            "version": np.zeros(fragment, np.int64),
        }
        arrays |= {
            "action": np.zeros((fragment, environments), np.int64),
            "reward": np.zeros((fragment, environments), np.float32),
        }
        fragments.append(Fragment(arrays, fragment, StepStream(0, 0), number))
    return fragments


def camera_of(shard: Shard) -> StackedLeaf:
    leaf = shard._store._leaves["obs/"]
    assert isinstance(leaf, StackedLeaf)
    return leaf


def test_every_frame_is_stored_once_also_across_fragments() -> None:
    """One frame per step, one after the newest step, and three more for the first stack of an
    episode.
    """
    shard = Shard(settings=ATARI)
    fragments = game(120, 4, fragment=10, episode=50, rng=np.random.default_rng(0))
    for fragment in fragments:
        shard.insert(fragment)
    episodes = int(sum(fragment.arrays["start"][:-1].sum() for fragment in fragments))
    open_rows = int(4 - fragments[-1].arrays["terminated"][-1].sum())
    assert 4 * 120 + open_rows + 3 * episodes == camera_of(shard).frames_in_use


def test_memory_exceeds_the_frames_by_at_most_a_fifth_and_never_grows() -> None:
    """At a smaller scale. The overhead per row is constant, so the share is lower at full size."""
    leaf = LeafSpec("", (4, 42, 42), "uint8")
    shard = Shard(settings=replace(ATARI, observation=(leaf,)))
    before = shard.statistics().nbytes
    for fragment in game(800, 8, fragment=20, episode=200, rng=np.random.default_rng(0), leaf=leaf):
        shard.insert(fragment)
    found = shard.statistics()
    assert found.nbytes == before
    assert 2000 - 8 <= found.steps.resident
    frames = 2000 * (1.0 + 3.0 / 200.0) * 42 * 42
    assert found.nbytes <= 1.2 * frames
    full = 100_000 * 84 * 84
    per_row = (found.nbytes - 1.1 * 2000 * 42 * 42) / 2000
    assert 1.1 * full + 100_000 * per_row <= 1.2 * full


@pytest.mark.parametrize("capacity", [2000, 30])
def test_nothing_refers_to_a_fragment_that_was_inserted_or_refused(capacity: int) -> None:
    """Its arrays are in memory that is reused or unmapped later."""
    shard = Shard(settings=replace(ATARI, capacity=capacity))
    fragments = game(20, 2, fragment=20, episode=7, rng=np.random.default_rng(0))
    arrays = {name: array.copy() for name, array in fragments[0].arrays.items()}
    alive = [weakref.ref(array) for array in arrays.values()]
    with (
        contextlib.nullcontext()
        if capacity == 2000
        else pytest.raises(ValueError, match="larger than the shard")
    ):
        shard.insert(replace(fragments.pop(), arrays=arrays))
    del arrays
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_uint8_stays_uint8() -> None:
    shard = Shard(settings=replace(ATARI, stacks=frozenset()))
    assert {np.dtype(np.uint8)} == {
        shard.make_batch(2)["obs/"].dtype,
        shard.snapshot()["leaf/obs//data"].dtype,
    }
    assert np.dtype(np.uint8) == Shard(settings=ATARI).snapshot()["leaf/obs//frames"].dtype


@given(
    seed=st.integers(0, 2**32),
    odd=st.floats(0.0, 1.0),
    ends=st.floats(0.0, 0.9),
    mode=st.sampled_from(["next_step", "same_step"]),
)
@examples(15)
def test_observations_read_back_are_the_same_whether_stored_as_stacks_or_plain(
    seed: int, odd: float, ends: float, mode: Any
) -> None:
    """Random stacks, resets, breaks and wrap-around, with several leaves. Only the memory
    differs.
    """
    kept = []
    for stacks in (frozenset[str](), STACKS):
        s = ShardSettings(
            observation=LEAVES,
            action=((), "int64"),
            capacity=50,
            length=2,
            stacks=stacks,
            frames_per_row=3.0,
        )
        shard = Shard(settings=s, selector=Fifo)
        world = World(environments=3, steps=6, mode=mode, seed=seed, odd=odd, ends=ends)
        for length in (6, 1, 6, 4, 6, 6):
            shard.insert(world.fragment(length))
        kept.append(everything(shard)[1])
    for name, array in kept[0].items():
        np.testing.assert_array_equal(array, kept[1][name])


@given(seed=st.integers(0, 2**32), depth=st.integers(2, 5), frames=st.integers(12, 30))
@examples(10)
def test_no_frame_is_lost_or_freed_twice(seed: int, depth: int, frames: int) -> None:
    """The leaf against a list: rows continue any resident row, and the oldest rows are evicted."""
    rng, rows = np.random.default_rng(seed), 10
    leaf = StackedLeaf(LeafSpec("", (depth, 2), "int16"), rows=rows, frames=frames)
    model: dict[int, NDArray[Any]] = {}
    tail = head = 0
    for _ in range(30):
        count = int(rng.integers(1, 4))
        obs = np.zeros((count + 1, 1, depth, 2), np.int16)
        before = (
            int(rng.integers(max(tail, head - 3), head))
            if head > tail and rng.random() < 0.8
            else -1
        )
        obs[0, 0] = model[before] if before >= 0 else rng.integers(0, 9, (depth, 2))
        for t in range(1, count + 1):
            obs[t, 0] = rng.integers(0, 9, (depth, 2))
            if rng.random() < 0.7:
                obs[t, 0, :-1] = obs[t - 1, 0, 1:]
        first = 0 if before < 0 else 1
        after = np.array(
            [
                before if k == 1 and first else (-1 if k == first else head + k - first - 1)
                for k in range(first, count + 1)
            ]
        )
        new = NewRows(
            head, np.arange(first, count + 1), np.zeros(count + 1 - first, np.bool_), after
        )
        arrays = LeafArrays(obs, None)
        leaf.inspect(arrays)
        room = max(leaf.required_tail(new, arrays, tail, head), head + len(new) - rows)
        if room > head or before >= 0 > before - room:
            continue
        leaf.evict(tail, room)
        tail = room
        leaf.write(new, arrays)
        model |= {head + k: obs[index, 0].copy() for k, index in enumerate(new.index.tolist())}
        head += len(new)
        there = np.arange(tail, head)
        out = np.zeros((len(there), depth, 2), np.int16)
        leaf.read(there, out)
        np.testing.assert_array_equal(np.stack([model[row] for row in there.tolist()]), out)
        shown = np.unique(leaf.snapshot()["shown"][there % rows])
        assert len(shown) == leaf.frames_in_use
        assert not set(shown.tolist()) & set(leaf.snapshot()["free"].tolist())


def test_when_frames_run_out_no_more_rows_than_necessary_are_evicted() -> None:
    s = replace(
        ATARI,
        observation=(LeafSpec("", (4, 2, 2), "uint8"),),
        capacity=1000,
        frames_per_row=0.25,
        length=1,
    )
    shard = Shard(settings=s)
    for fragment in game(
        600, 1, fragment=10, episode=1000, rng=np.random.default_rng(3), leaf=s.observation[0]
    ):
        shard.insert(fragment)
    assert 254 - 3 == shard.statistics().steps.resident + 1
    assert 254 == camera_of(shard).frames_in_use


def test_stacked_leaves_are_detected() -> None:
    world = World(environments=4, steps=20, mode="next_step", seed=1, odd=0.1, ends=0.05)
    fragment = world.fragment()
    assert {"camera"} == find_stacks(LEAVES, fragment.arrays, fragment.length)
    world = World(environments=4, steps=20, mode="next_step", seed=1, odd=0.95)
    fragment = world.fragment()
    assert set() == find_stacks(LEAVES, fragment.arrays, fragment.length)


def test_a_leaf_that_is_not_a_stack_is_refused() -> None:
    for shape in ((4,), (1, 84, 84), ()):
        with pytest.raises(ValueError, match="is not a stack"):
            StackedLeaf(LeafSpec("x", shape, "uint8"), rows=4, frames=4)


def test_a_part_of_a_batch_is_written_in_place() -> None:
    data, indices = np.arange(20).reshape(10, 2), np.array([[1, 2], [3, 4]])
    out = np.zeros((2, 5, 2), np.int64)
    gather(data, indices, out[:, 1:3])
    np.testing.assert_array_equal(data[indices], out[:, 1:3])
    assert 0 == out[:, 0].sum() == out[:, 3:].sum()
    across = np.zeros((2, 2, 2), np.int64)
    gather(data, indices, across.transpose(1, 2, 0).transpose(0, 2, 1))
    np.testing.assert_array_equal(data[indices], across.transpose(1, 0, 2))


def test_a_plain_leaf_holds_as_many_observations_as_it_has_rows() -> None:
    leaf = PlainLeaf(LeafSpec("", (2,), "float32"), rows=10)
    new = NewRows(4, np.zeros(8, np.int64), np.zeros(8, np.bool_), np.full(8, -1))
    arrays = LeafArrays(np.zeros((2, 1, 2), np.float32), None)
    assert 2 == leaf.required_tail(new, arrays, 0, 4)
    assert 3 == leaf.required_tail(new, arrays, 3, 4)
