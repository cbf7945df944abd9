"""PinnedSlots: slots that a GPU reads by itself, where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tianflow.logs import logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena


class PinnedSlots:
    """Pins the slots where they lie, so that the device copies out of them by itself.

    The slots are pinned for the thread's own device. Where the system refuses, a warning says so
    once.

    Args:
        arena: of the slots.
        component: whose copies are slower without it; names the log.
    """

    def __init__(self, arena: Arena, component: str) -> None:
        self._arena, self._slots, self._refused = arena, 0, False
        self._memory: NDArray[np.uint8] | None = None
        self._log = logger(component)

    def follow(self) -> bool:
        """Pin the slots that were added. No copy out of a slot may be in progress.

        False: the slots cannot be pinned.
        """
        slots = self._arena.slots
        if slots == self._slots or self._refused:
            return not self._refused
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if self._memory is not None:
            runtime.cudaHostUnregister(self._memory.ctypes.data)
        self._memory, self._slots = self._arena.memory(slots), slots
        refusal = runtime.cudaHostRegister(self._memory.ctypes.data, self._memory.nbytes, 0)
        if int(refusal):
            self._memory, self._refused = None, True
            self._log.warning(
                "the slots cannot be pinned, so copies are slower",
                error=int(refusal),
                bytes=self._arena.memory(slots).nbytes,
            )
        return not self._refused
