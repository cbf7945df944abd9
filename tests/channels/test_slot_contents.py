"""A slot of a node never has data of an earlier ticket than the newest that it has heard of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.replay_exchange_worlds import DRAWN, DRAWS
from tests.support.worlds import small_layout
from tianflow.channels.frames import MalformedMessageError
from tianflow.channels.memory import heap_arena
from tianflow.channels.slot_contents import SlotContents
from tianflow.core.layout import written_rows

LAYOUT = small_layout()
SLOTS, CAPACITY = 3, 5


class World:
    def __init__(self) -> None:
        self.slots, self.draws = heap_arena(LAYOUT, CAPACITY), heap_arena(DRAWS, 2)
        self.slots.slots, self.draws.slots = SLOTS, 2
        self.contents = SlotContents(self.slots, self.draws, "plain")

    def sent(self, value: int) -> dict[str, Any]:
        """A trajectory of 2 steps that consists of ``value``."""
        rows, views = written_rows(LAYOUT, 2), self.slots.views(0)
        return {name: np.full_like(views[name][: rows[name]], value) for name in views}

    def reward(self, slot: int) -> float:
        return float(self.slots.views(slot)["reward"][0, 0])


@pytest.fixture
def world() -> World:
    return World()


def test_a_trajectory_of_another_node_is_written_once(world: World) -> None:
    assert world.contents.store(4, 1, 2, world.sent(7))
    assert not world.contents.store(4, 1, 2, world.sent(8))
    assert 7.0 == world.reward(1)
    assert world.contents.store(5, 1, 2, world.sent(9))
    assert 9.0 == world.reward(1)


def test_a_late_trajectory_does_not_overwrite_one_that_is_written_here(world: World) -> None:
    """Its ticket was dropped, and the slot was granted again."""
    world.contents.granted(1, 5)
    world.slots.views(1)["reward"][:] = 3.0
    assert not world.contents.store(4, 1, 2, world.sent(7))
    world.contents.write(4, 1, 2, world.sent(7))
    assert 3.0 == world.reward(1)


def test_what_the_head_sends_counts_although_another_node_has_sent_it(world: World) -> None:
    """The connection of that node was lost in the meantime, and what it has sent may be damaged."""
    assert world.contents.store(4, 1, 2, world.sent(7))
    world.contents.write(4, 1, 2, world.sent(8))
    assert 8.0 == world.reward(1)
    assert not world.contents.store(4, 1, 2, world.sent(7))
    assert 8.0 == world.reward(1)


def test_a_slot_that_was_not_announced_yet_is_no_mistake(world: World) -> None:
    assert not world.contents.store(4, SLOTS, 2, world.sent(7))
    world.slots.slots += 1
    assert world.contents.store(4, SLOTS, 2, world.sent(7))


@pytest.mark.parametrize("slot", [-1, CAPACITY, 2**70])
def test_a_slot_that_cannot_exist_is_refused(world: World, slot: int) -> None:
    with pytest.raises(MalformedMessageError, match="there is no slot"):
        world.contents.store(4, slot, 2, world.sent(7))
    with pytest.raises(MalformedMessageError, match="there is no slot"):
        world.contents.write(4, slot, 2, world.sent(7))


@pytest.mark.parametrize("values", [("1",), (True,), (1, -1), (1, 2**63), (1, 1.0)])
def test_what_is_no_number_is_refused(world: World, values: tuple[Any, ...]) -> None:
    with pytest.raises(MalformedMessageError, match="there is no slot"):
        world.contents.require(*values)


def test_a_malformed_trajectory_leaves_the_slot_to_the_next_one(world: World) -> None:
    with pytest.raises(MalformedMessageError):
        world.contents.store(4, 1, 2, {})
    assert world.contents.store(4, 1, 2, world.sent(7))


def test_what_is_read_is_what_others_write(world: World) -> None:
    other = World()
    other.slots.views(1)["reward"][:] = 6.0
    assert world.contents.store(4, 2, 2, other.contents.trajectory(1, 2))
    assert 6.0 == world.reward(2)
    world.draws.views(1)["priority"][:] = np.arange(DRAWN)
    world.contents.write_priorities(0, 1, 2, {"priority": world.draws.views(1)["priority"][1:3]})
    assert [0.0, 1.0, 2.0, 0.0] == world.draws.views(0)["priority"][:4].tolist()
    assert world.contents.drawn(0, 1, 2)["priority"].tolist() == [1.0, 2.0]


def test_a_node_without_shards_has_no_draws() -> None:
    slots = heap_arena(LAYOUT, CAPACITY)
    contents = SlotContents(slots, None, "plain")
    with pytest.raises(MalformedMessageError, match="no replay shard"):
        contents.write_priorities(0, 0, 1, {})
    with pytest.raises(MalformedMessageError, match="no replay shard"):
        contents.require_draw(0)


@pytest.mark.parametrize("slot", [-1, 2, True, "0", None])
def test_a_slot_of_draws_that_does_not_exist_is_refused(world: World, slot: Any) -> None:
    world.contents.require_draw(1)
    with pytest.raises(MalformedMessageError, match="of draws"):
        world.contents.require_draw(slot)
