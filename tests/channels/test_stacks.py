"""Stacks of images arrive bit for bit, whatever an environment does, in a third of the bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tianflow.channels.frames import MalformedMessageError, decode, encode
from tianflow.channels.stacks import is_stacked, restack, unstacked

K, SIDE = 4, 40


def played(rows: int, num_envs: int, resets: set[tuple[int, int]], seed: int = 0) -> Any:
    """Stacks [rows, N, K, side, side] as an environment makes them, with a new episode at
    ``resets``.
    """
    dice = np.random.default_rng(seed)
    images = dice.integers(0, 256, (rows + K, num_envs, SIDE, SIDE), np.uint8)
    stacks = np.stack([images[k : rows + k] for k in range(K)], axis=2)
    for row, env in sorted(resets):
        first = dice.integers(0, 256, (SIDE, SIDE), np.uint8)
        stacks[row, env] = first
        for later in range(row + 1, rows):
            stacks[later, env, :-1] = stacks[later - 1, env, 1:]
    return stacks


def nbytes(sent: dict[str, Any]) -> int:
    return sum(len(frame) for frame in encode("x", 0, sent))


def test_the_images_of_stacks_cross_once() -> None:
    stacks = played(21, 8, {(7, 3), (15, 0)})
    sent = unstacked(stacks)
    assert sent is not None
    assert nbytes(sent) <= 0.35 * stacks.nbytes
    place = np.zeros_like(stacks)
    restack(place, decode(encode("x", 0, sent)).body)
    assert (place == stacks).all()


@settings(deadline=None)
@given(
    rows=st.integers(1, 6),
    num_envs=st.integers(1, 3),
    resets=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=12),
)
def test_any_trajectory_arrives_as_it_is(
    rows: int, num_envs: int, resets: set[tuple[int, int]]
) -> None:
    inside = {(row, env) for row, env in resets if row < rows and env < num_envs}
    stacks = played(rows, num_envs, inside)
    sent = unstacked(stacks)
    if sent is not None:
        place = np.zeros_like(stacks)
        restack(place, sent)
        assert (place == stacks).all()


def test_images_that_do_not_repeat_are_not_worth_it() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 2, K, SIDE, SIDE), np.uint8)
    assert unstacked(noise) is None
    assert unstacked(noise[:1]) is None


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("obs/", (21, 8, 4, 84, 84), "uint8", True),
        ("obs/", (21, 8, 84, 84), "uint8", False),
        ("obs/", (21, 8, 1, 84, 84), "uint8", False),
        ("obs/", (21, 8, 4, 84, 84), "float32", False),
        ("obs/", (21, 8, 4, 2, 2), "uint8", False),
        ("final_obs/", (21, 8, 4, 84, 84), "uint8", False),
    ],
)
def test_which_fields_may_hold_stacks(
    name: str, shape: tuple[int, ...], dtype: str, *, expected: bool
) -> None:
    assert is_stacked(name, shape, dtype) == expected


def changed(**parts: Any) -> dict[str, Any]:
    sent = unstacked(played(4, 2, {(2, 1)}))
    assert sent is not None
    found = {**sent, **parts}
    return {name: part for name, part in found.items() if part is not None}


@pytest.mark.parametrize(
    "sent",
    [
        {},
        changed(at=None),
        changed(more=1),
        changed(at=np.array([[9, 0]], np.int32)),
        changed(at=np.array([[0, -1]], np.int32)),
        changed(at=np.zeros((1, 3), np.int32)),
        changed(at=np.zeros((1, 2), np.int64)),
        changed(at=[[0, 0]]),
        changed(at=np.zeros((2**22, 2), np.int32)),
        changed(whole=np.zeros((1, K, SIDE, SIDE), np.int8)),
        changed(new=np.zeros((1, 2, SIDE, SIDE), np.uint8)),
        changed(first=np.zeros((2, SIDE), np.uint8)),
        changed(first=3),
    ],
    ids=range(13),
)
def test_stacks_that_do_not_fit_are_refused(sent: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessageError):
        restack(np.zeros((4, 2, K, SIDE, SIDE), np.uint8), sent)


def test_stacks_that_a_trajectory_cannot_have_reserve_no_memory() -> None:
    sent = changed(at=np.zeros((2**22, 2), np.int32))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError, match="more stacks are sent"):
            restack(np.zeros((4, 2, K, SIDE, SIDE), np.uint8), sent)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
