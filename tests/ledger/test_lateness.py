"""Late holders rest until the time that they cost others is made up for, and return one by one."""

from __future__ import annotations

import pytest

from tianflow.ledger.lateness import Lateness


def lose(lateness: Lateness, *holders: str, begin: float, end: float, share: float = 0.1) -> None:
    """The learner waits for ``holders``, and another one needs a credit meanwhile."""
    lateness.waits(holders)
    lateness.costs(begin)
    lateness.ends(end, share)


def late(*holders: str) -> Lateness:
    """Two losses of a second each: to 1, and to 6. All are made up for at 1 + 10 * n."""
    lateness = Lateness()
    lose(lateness, *holders, begin=0.0, end=1.0)
    lose(lateness, *holders, begin=5.0, end=6.0)
    return lateness


@pytest.mark.parametrize("share", [0.1, 0.5, 0.25])
def test_a_loss_is_made_up_for_since_the_one_before(share: float) -> None:
    lateness = Lateness()
    lose(lateness, "a", begin=0.0, end=1.0, share=share)
    assert not lateness.rests("a", 1.0)
    lose(lateness, "a", begin=1.5, end=3.5, share=share)
    until = lateness.next_end(3.5)
    assert until is not None
    assert share == pytest.approx(2.0 / (until - 1.0))
    assert (True, False) == (lateness.rests("a", until - 0.01), lateness.rests("a", until))
    assert not lateness.rests("b", until - 0.01)


def test_losses_of_a_holder_add_up() -> None:
    lateness = late("a")
    lose(lateness, "a", begin=8.0, end=9.0)
    assert 1.0 + 10.0 + 10.0 == lateness.next_end(9.0)


def test_each_of_several_late_holders_has_a_part_of_the_share() -> None:
    lateness = late("a")
    lose(lateness, "b", begin=8.0, end=9.0)
    assert lateness.rests("a", 10.9)
    assert not lateness.rests("a", 11.0)
    assert lateness.rests("b", 6.0 + 2 * 10.0 - 0.1)
    assert not lateness.rests("b", 6.0 + 2 * 10.0)
    assert (11.0, 26.0, None) == tuple(map(lateness.next_end, (9.0, 11.0, 26.0)))


def test_rare_losses_let_no_holder_rest() -> None:
    lateness = late("a")
    lose(lateness, "a", begin=100.0, end=101.0)
    assert not lateness.rests("a", 101.0)


def test_a_share_of_everything_lets_no_holder_rest() -> None:
    lateness = Lateness()
    lose(lateness, "a", begin=0.0, end=1.0, share=1.0)
    lose(lateness, "a", begin=1.0, end=9.0, share=1.0)
    assert set() == lateness.late


def test_a_wait_that_no_other_holder_notices_costs_nothing() -> None:
    lateness = Lateness()
    lateness.waits(["a"])
    assert {"a"} == lateness.blocking
    lateness.ends(100.0, 0.1)
    assert (set(), set()) == (lateness.late, lateness.blocking)


def test_one_loss_lasts_from_its_beginning_and_is_that_of_all_whom_the_learner_waited_for() -> None:
    lateness = Lateness()
    lose(lateness, "c", begin=0.0, end=0.0)
    lateness.waits(["a"])
    lateness.costs(1.0)
    lateness.waits(["b"])
    lateness.costs(2.0)
    lateness.ends(3.0, 0.5)
    assert {"a", "b", "c"} == lateness.late
    assert [True, True, False] == [lateness.rests(name, 11.9) for name in "abc"]
    assert [False] * 3 == [lateness.rests(name, 12.0) for name in "abc"]


def test_late_holders_return_one_after_the_other_once_they_are_in_time() -> None:
    lateness = late("a", "b", "c")
    lateness.granted("a")
    assert [True] * 3 == [lateness.rests(name, 31.0) for name in "abc"]
    lateness.arrived("a")
    assert [False] * 3 == [lateness.rests(name, 31.0) for name in "abc"]
    assert {"b", "c"} == lateness.late
    lateness.granted("b")
    assert [False, True, True] == [lateness.rests(name, 31.0) for name in "abc"]


def test_a_holder_that_is_late_again_lets_another_one_return() -> None:
    lateness = late("a", "b")
    lateness.granted("a")
    lateness.waits(["a"])
    lateness.costs(21.5)
    lateness.arrived("a")
    lateness.ends(22.0, 0.1)
    assert {"a", "b"} == lateness.late
    assert [True, False] == [lateness.rests(name, 22.0) for name in "ab"]


def test_a_wait_that_costs_nothing_lets_another_one_return() -> None:
    lateness = late("a", "b")
    lateness.granted("a")
    lateness.waits(["a"])
    lateness.arrived("a")
    lateness.ends(22.0, 0.1)
    assert {"a", "b"} == lateness.late
    assert not lateness.rests("b", 22.0)


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_holder_leaves_nothing_to_another_one_with_its_name(returns: bool) -> None:
    lateness = late("a", "b")
    if returns:
        lateness.granted("a")
    lateness.lost("a")
    assert {"b"} == lateness.late
    assert not lateness.rests("b", 21.0)
    lateness.waits(["a"])
    lateness.costs(21.0)
    lateness.lost("a")
    lateness.ends(100.0, 0.1)
    assert ({"b"}, None) == (lateness.late, lateness.next_end(100.0))


def test_a_wait_without_its_learner_has_no_consequence() -> None:
    lateness = Lateness()
    lateness.waits(["a"])
    lateness.costs(0.0)
    lateness.cancel()
    lateness.ends(5.0, 0.1)
    assert set() == lateness.late
