"""Every form of every channel, against the one suite."""

from __future__ import annotations

import asyncio

from tests.support.conformance import (
    EventsConform,
    GrantsConform,
    OpenWorld,
    Soak,
    TrajectoriesConform,
    WeightsConform,
)
from tests.support.worlds import (
    FIRST,
    MemoryEventsLink,
    MemoryWeightsLink,
    MemoryWorld,
    SharedEventsLink,
    SharedWeightsLink,
    SharedWorld,
    turns,
)
from tianflow.core.payloads import Version


class TestGrantsInMemory(GrantsConform):
    form = MemoryWorld


class TestGrantsOverLinks(GrantsConform):
    form = SharedWorld

    async def test_the_version_of_a_grant_is_announced_before_the_grant_is_there(
        self, open_world: OpenWorld
    ) -> None:
        world = open_world(bound=3)
        assert isinstance(world, SharedWorld)
        sender = world.sender("a")
        asking = asyncio.ensure_future(sender.acquire())
        asking.add_done_callback(lambda _: world.hosts["a"].announced.append(Version(9, 9)))
        await asking
        await turns(1)
        assert [FIRST, Version(9, 9)] == world.hosts["a"].announced


class TestTrajectoriesInMemory(TrajectoriesConform):
    form = MemoryWorld


class TestTrajectoriesOverLinks(TrajectoriesConform):
    form = SharedWorld


class TestSoakInMemory(Soak):
    form = MemoryWorld


class TestSoakOverLinks(Soak):
    form = SharedWorld


class TestWeightsInMemory(WeightsConform):
    form = MemoryWeightsLink


class TestWeightsInSharedMemory(WeightsConform):
    form = SharedWeightsLink


class TestEventsInMemory(EventsConform):
    form = MemoryEventsLink


class TestEventsOverLinks(EventsConform):
    form = SharedEventsLink
