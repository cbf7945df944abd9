"""Slots never overlap, and a word about one ticket means nothing to another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.effort import examples
from tests.support.worlds import FIRST, small_layout
from tianflow.channels.arena import Arena, arena_nbytes
from tianflow.channels.memory import heap_arena
from tianflow.core.payloads import ALIGNMENT, Field, Grant, TrajectoryLayout, aligned

DTYPES = ("uint8", "bool", "int8", "float32", "int64", "float64")


@st.composite
def layouts(draw: st.DrawFn) -> TrajectoryLayout:
    """Any fields, each on a cache line of its own; the last byte of a slot need not end one."""
    fields, offset, end = [], 0, 0
    shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    for number in range(draw(st.integers(1, 6))):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        fields.append(Field(f"field-{number}", shape, dtype, offset, nbytes))
        end = offset + nbytes
        offset += aligned(nbytes)
    return TrajectoryLayout(4, 2, tuple(fields), end)


def bounds(array: NDArray[np.generic]) -> tuple[int, int]:
    return np.lib.array_utils.byte_bounds(array)


@examples(15)
@given(layout=layouts(), capacity=st.integers(1, 9))
def test_nothing_in_an_arena_overlaps(layout: TrajectoryLayout, capacity: int) -> None:
    arena = heap_arena(layout, capacity)
    pieces = [
        bounds(array)
        for slot in range(capacity)
        for array in arena.views(slot).values()
        if array.nbytes
    ]
    words = bounds(arena.words)
    pieces = sorted([*pieces, words])
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(pieces))
    start, end = bounds(arena._buffer)
    assert arena_nbytes(layout, capacity) == end - start
    assert start <= pieces[0][0]
    assert pieces[-1][1] <= end


@examples(15)
@given(layout=layouts(), capacity=st.integers(1, 5))
def test_every_array_has_its_shape_and_starts_on_a_cache_line_of_the_buffer(
    layout: TrajectoryLayout, capacity: int
) -> None:
    arena = heap_arena(layout, capacity)
    for slot in range(capacity):
        views = arena.views(slot)
        assert {field.name: (field.shape, np.dtype(field.dtype)) for field in layout.fields} == {
            name: (array.shape, array.dtype) for name, array in views.items()
        }
        for array in views.values():
            if array.nbytes:
                assert 0 == (bounds(array)[0] - bounds(arena._buffer)[0]) % ALIGNMENT


def test_what_is_written_in_one_slot_is_seen_in_no_other() -> None:
    arena = heap_arena(small_layout(), 5)
    for slot in range(5):
        for array in arena.views(slot).values():
            array[...] = slot % 2 if array.dtype == bool else slot
    for slot in range(5):
        arena.request_cut(slot, 100 + slot)
        arena.lease(Grant(200 + slot, slot, FIRST)).progress(4)
    for slot in range(5):
        for array in arena.views(slot).values():
            assert (array == (slot % 2 if array.dtype == bool else slot)).all()


def test_a_lease_is_a_view_of_its_slot() -> None:
    arena = heap_arena(small_layout(), 2)
    arena.lease(Grant(7, 1, FIRST)).arrays["reward"][2, 1] = 3.5
    assert 3.5 == arena.views(1)["reward"][2, 1]
    assert arena.views(1) is arena.views(1), "views are made once"


def test_a_buffer_that_is_too_small_is_refused_with_what_is_needed() -> None:
    layout = small_layout()
    needed = arena_nbytes(layout, 3)
    with pytest.raises(
        ValueError, match=f"3 slots need {needed} bytes, the buffer has {needed - 1}"
    ):
        Arena(layout=layout, buffer=np.zeros(needed - 1, np.uint8), capacity=3)


def test_a_slot_that_does_not_exist_is_an_error() -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        heap_arena(small_layout(), 2).views(2)


# Words
# --------------------------------------------------------------------------------------------------


def test_a_cut_is_seen_by_the_ticket_it_is_about() -> None:
    arena = heap_arena(small_layout(), 3)
    slot = arena.lease(Grant(5, 1, FIRST))
    assert not slot.cut_requested()
    arena.request_cut(1, 5)
    assert slot.cut_requested()


def test_a_cut_requested_for_an_earlier_ticket_of_the_slot_cuts_no_later_one() -> None:
    arena = heap_arena(small_layout(), 3)
    arena.request_cut(1, 5)
    assert not arena.lease(Grant(6, 1, FIRST)).cut_requested()
    assert not arena.lease(Grant(5, 2, FIRST)).cut_requested()


def test_ticket_zero_is_not_cut_by_memory_that_is_zero() -> None:
    assert not heap_arena(small_layout(), 1).lease(Grant(0, 0, FIRST)).cut_requested()


def test_progress_is_that_of_the_ticket_asked_about() -> None:
    arena = heap_arena(small_layout(), 3)
    assert -1 == arena.progress(0, 0), "memory that is zero says nothing of ticket zero"
    arena.lease(Grant(5, 0, FIRST)).progress(3)
    assert (3, -1, -1) == (arena.progress(0, 5), arena.progress(0, 6), arena.progress(1, 5))
    arena.lease(Grant(6, 0, FIRST)).progress(0)
    assert (-1, 0) == (arena.progress(0, 5), arena.progress(0, 6))
