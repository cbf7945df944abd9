"""The in-memory transport (``memory://``): every end lives on one loop, in one process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.arena import Arena, arena_nbytes
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.latest import LatestCell
from tianflow.core.payloads import NO_VERSION, TrajectoryLayout, Version
from tianflow.errors import BrokenChannelError


def heap_arena(layout: TrajectoryLayout, slots: int) -> Arena:
    """An arena in ordinary memory."""
    return Arena(
        layout=layout, buffer=np.zeros(arena_nbytes(layout, slots), np.uint8), capacity=slots
    )


class HeapSlots:
    """`tianflow.interfaces.SlotOwner` in ordinary memory. The system allocates the pages of a slot
    when they are first touched.

    Args:
        layout: of a trajectory.
        capacity: slots of the arena.
        draws: with replay, the layout of a draw.
        draw_slots: slots of draws.
        bells: number of doorbells.
    """

    def __init__(
        self,
        *,
        layout: TrajectoryLayout,
        capacity: int,
        draws: TrajectoryLayout | None = None,
        draw_slots: int = 0,
        bells: int = 0,
    ) -> None:
        self.arena = heap_arena(layout, capacity)
        self.draws = None if draws is None else heap_arena(draws, draw_slots)
        if self.draws is not None:
            self.draws.slots = draw_slots
        self._bell = Doorbell.create() if bells else None
        self.bells = () if self._bell is None else (self._bell,) * bells
        """The same one again and again: one compute thread asks and serves."""

    def add_slots(self, count: int) -> None:
        """Count them: touching a page allocates it."""
        self.arena.slots += count

    def close(self) -> None:
        """Close the doorbell. The memory goes with its last view."""
        if self._bell is not None:
            self._bell.close()


class MemoryWeights:
    """Both ends of the weights channel. Label and bytes are one value, so no thread sees one
    without the other.
    """

    def __init__(self) -> None:
        self._cell: LatestCell[tuple[Version, NDArray[np.uint8]], Version] = LatestCell(
            (NO_VERSION, np.zeros(0, np.uint8)), NO_VERSION
        )

    @property
    def version(self) -> Version:
        """Newest published version."""
        return self._cell.value[0]

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None:
        """Overwrite; an older version than the newest is ignored."""
        self._cell.put((version, flat.copy()), version)

    def read_into(self, flat: NDArray[np.uint8]) -> Version:
        """Copy the newest weights out. Returns their version.

        Raises:
            BrokenChannelError: nothing was published yet.
        """
        version, value = self._cell.value
        if version == NO_VERSION:
            raise BrokenChannelError("no weights were published yet")
        flat[:] = value
        return version

    async def wait_newer_than(self, version: Version) -> Version:
        """Wait for a newer version."""
        return await self._cell.wait_newer_than(version)
