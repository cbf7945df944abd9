"""The selection of open tickets that block a batch agrees with an exhaustive search."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tianflow.ledger.batch_selection import must_wait_for


def waited_for(committed: list[int], open_: list[int], batch: int) -> int:
    return must_wait_for(Counter(committed), Counter(open_), batch)


slacks = st.lists(st.integers(0, 4), max_size=7).map(sorted)
"""Slack: last admissible use minus the version of this batch."""


def lost(left: list[int], batch: int) -> int:
    """Number of tickets in ``left`` that expire with ``batch`` places at each coming version, earliest
    deadline first.
    """
    waiting, late = sorted(left), 0
    for version in range(1, max(left, default=0) + 1):
        in_time = [slack for slack in waiting if slack >= version]
        late += len(waiting) - len(in_time)
        waiting = in_time[batch:]
    return late + len(waiting)


def best(committed: list[int], open_: list[int], batch: int) -> tuple[int, int]:
    """(fewest lost tickets, fewest open tickets in such a batch), over every possible batch."""
    candidates = [(slack, False) for slack in committed] + [(slack, True) for slack in open_]
    found = []
    for chosen in combinations(range(len(candidates)), batch):
        left = [candidates[index][0] for index in range(len(candidates)) if index not in chosen]
        found.append((lost(left, batch), sum(candidates[index][1] for index in chosen)))
    return min(found)


@examples(75)
@given(committed=slacks, open_=slacks, batch=st.integers(1, 4))
def test_the_fewest_tickets_are_lost_and_the_fewest_are_waited_for(
    committed: list[int], open_: list[int], batch: int
) -> None:
    if len(committed) < batch:
        return
    fewest_lost, fewest_open = best(committed, open_, batch)
    waited = waited_for(committed, open_, batch)
    assert fewest_lost == lost([*committed[batch - waited :], *open_[waited:]], batch)
    if fewest_lost == 0:
        assert fewest_open == waited


@examples(75)
@given(
    slacks=st.lists(st.integers(0, 4), min_size=1, max_size=9).map(sorted), batch=st.integers(1, 4)
)
def test_admission_leaves_enough_room_for_what_has_been_granted_and_not_begun(
    slacks: list[int], batch: int
) -> None:
    """Granted tickets begin with the newest version, so they have the highest slack.

    With C <= (highest slack + 1) * B tickets, adding them to the open ones changes nothing.
    """
    highest = 4
    committed, open_ = slacks[::2], slacks[1::2]
    if len(committed) < batch:
        return
    granted = [highest] * ((highest + 1) * batch - len(slacks))
    assert waited_for(committed, open_, batch) == waited_for(committed, [*open_, *granted], batch)


@pytest.mark.parametrize(
    ("expected", "committed", "open_"),
    [
        (0, [0, 1], []),
        (0, [0, 1], [1]),
        (1, [0, 1], [0]),
        (1, [1, 1], [0, 1]),
        (2, [1, 1], [0, 0]),
    ],
)
def test_with_two_places_a_batch(expected: int, committed: list[int], open_: list[int]) -> None:
    assert expected == waited_for(committed, open_, 2)


def test_it_looks_beyond_the_coming_update() -> None:
    """Three tickets with slack 1 and two places per batch: one must be used now, although none
    expires now.
    """
    assert 1 == waited_for([2, 2], [1, 1, 1], 2)


def test_a_ticket_whose_place_is_needed_by_one_just_as_urgent_is_passed_over() -> None:
    assert 0 == waited_for([0, 0], [0], 2)


def test_no_ticket_is_waited_for_when_the_remaining_ones_have_time() -> None:
    assert 0 == waited_for([0] * 8, [1] * 8, 8)


def test_a_bound_of_a_million_costs_no_more_than_a_small_one() -> None:
    """Slack is as large as the bound; the work depends on the number of tickets only."""
    began = time.perf_counter()
    assert 0 == waited_for([10**7] * 8, [10**7] * 8, 8)
    assert time.perf_counter() - began < 0.1


def one_at_a_time(committed: list[int], open_: list[int], batch: int) -> int:
    """The rule applied step by step: while too many tickets remain for some version, the open ticket
    with the earliest deadline takes a place.
    """
    chosen, left, open_ = committed[:batch], [*committed[batch:], *open_], list(open_)
    forced = 0
    while open_ and chosen:
        tight = next(
            (
                j
                for j in range(max(left, default=0) + 1)
                if sum(slack <= j for slack in left) > j * batch
            ),
            None,
        )
        if tight is None or chosen[-1] <= tight or open_[0] > tight:
            break
        left.remove(open_.pop(0))
        left.append(chosen.pop())
        forced += 1
    return forced


@examples(62)
@given(
    committed=st.lists(st.integers(0, 7), max_size=20).map(sorted),
    open_=st.lists(st.integers(0, 7), max_size=20).map(sorted),
    batch=st.integers(1, 6),
)
def test_many_at_once_give_the_same_result_as_one_at_a_time(
    committed: list[int], open_: list[int], batch: int
) -> None:
    assert one_at_a_time(committed, open_, batch) == waited_for(committed, open_, batch)
