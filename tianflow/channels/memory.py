"""The in-memory form: every end lives on one loop, in one process. Used by the ``inline`` placement
and by tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.arena import Arena, arena_nbytes
from tianflow.channels.latest import LatestCell
from tianflow.core.payloads import (
    NO_VERSION,
    TrajectoryLayout,
    Version,
)
from tianflow.errors import BrokenChannelError


def heap_arena(layout: TrajectoryLayout, slots: int) -> Arena:
    """An arena in ordinary memory."""
    return Arena(
        layout=layout, buffer=np.zeros(arena_nbytes(layout, slots), np.uint8), capacity=slots
    )


class MemoryWeights:
    """Both ends of the weights channel in one process. Label and bytes are one value, so no thread
    sees one without the other.
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
        """Copy the newest weights out, and say which they are.

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
