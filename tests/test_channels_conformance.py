"""Every form of every channel, against the one suite."""

from __future__ import annotations

from tests.conformance import GrantsConform, Soak, TrajectoriesConform
from tests.worlds import MemoryWorld, SharedWorld


class TestGrantsInMemory(GrantsConform):
    form = MemoryWorld


class TestGrantsOverLinks(GrantsConform):
    form = SharedWorld


class TestTrajectoriesInMemory(TrajectoriesConform):
    form = MemoryWorld


class TestTrajectoriesOverLinks(TrajectoriesConform):
    form = SharedWorld


class TestSoakInMemory(Soak):
    form = MemoryWorld


class TestSoakOverLinks(Soak):
    form = SharedWorld
