"""A cell keeps the newest value, wakes who waits for it, and never goes back."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.worlds import turns
from tianflow.channels.latest import LatestCell
from tianflow.core.payloads import Version


def test_a_newer_value_replaces_an_older_one() -> None:
    cell = LatestCell("first", 1)
    assert cell.put("third", 3)
    assert ("third", 3) == (cell.value, cell.key)


@pytest.mark.parametrize("key", [7, 6, -1])
def test_what_is_not_newer_changes_nothing(key: int) -> None:
    cell, changes = LatestCell("seventh", 7), list[str]()
    cell.on_change(lambda: changes.append(cell.value))
    assert not cell.put("late", key)
    assert ("seventh", 7, []) == (cell.value, cell.key, changes)


def test_versions_are_ordered_by_lineage_first() -> None:
    cell = LatestCell("old", Version(1, 137))
    assert cell.put("new", Version(2, 100))
    assert not cell.put("late", Version(1, 138))
    assert "new" == cell.value


def test_observers_see_the_new_value_until_they_end_it() -> None:
    cell, seen = LatestCell(0, 0), list[tuple[str, int]]()
    forget = cell.on_change(lambda: seen.append(("a", cell.value)))
    cell.on_change(lambda: seen.append(("b", cell.value)))
    cell.put(1, 1)
    forget()
    cell.put(2, 2)
    assert [("a", 1), ("b", 1), ("b", 2)] == seen


def test_an_observer_that_ends_its_own_observing_hides_the_change_from_nobody() -> None:
    cell, seen = LatestCell(0, 0), list[str]()

    def once() -> None:
        seen.append("once")
        forget()

    forget = cell.on_change(once)
    cell.on_change(lambda: seen.append("other"))
    cell.put(1, 1)
    cell.put(2, 2)
    assert ["once", "other", "other"] == seen


async def test_waiting_ends_with_the_newest_key() -> None:
    cell = LatestCell("", 1)
    waiting = asyncio.ensure_future(cell.wait_newer_than(1))
    await turns(2)
    cell.put("", 2)
    cell.put("", 5)
    assert 5 == await waiting


async def test_who_asks_for_less_than_there_is_does_not_wait() -> None:
    assert 4 == await LatestCell("", 4).wait_newer_than(3)


async def test_who_waits_for_more_is_not_woken_by_less() -> None:
    cell = LatestCell("", 1)
    waiting = asyncio.ensure_future(cell.wait_newer_than(5))
    for key in (2, 5):
        await turns(2)
        cell.put("", key)
    await turns(2)
    assert not waiting.done()
    cell.put("", 6)
    assert 6 == await waiting


async def test_who_is_cancelled_is_forgotten_and_the_others_are_woken() -> None:
    cell = LatestCell("", 1)
    waiting = [asyncio.ensure_future(cell.wait_newer_than(1)) for _ in range(3)]
    await turns(2)
    waiting[1].cancel()
    await turns(2)
    assert 2 == len(cell._waiters)
    waiting[0].cancel()
    cell.put("", 2)
    assert 2 == await waiting[2]
    assert waiting[0].cancelled()
    assert [] == cell._waiters
