"""Transport of TorchRL's inference server that counts the time from each request to its answer.

It needs torchrl, so only `benchmarks.peers.torchrl_served` imports it. Its class is at module level
because processes receive it by name.
"""

from __future__ import annotations

import multiprocessing
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from torchrl.modules.inference_server import ProcessSlotTransport


class TimedTransport(ProcessSlotTransport):  # type: ignore[misc]  # Any: not installed
    """Slots in shared memory, as the collector's ``transport="auto"`` makes them.

    A request begins when an environment's process has written it, and ends when the server has
    written its answer and has set the event of that process. `tianflow` counts the same time. The
    server's process counts, and every process can read the counts.

    Args:
        request: one request.
        response: one answer.
        count: number of slots, one for each environment.
        edges: upper edges of the histogram in seconds, in ascending order.
    """

    def __init__(self, request: Any, response: Any, *, count: int, edges: Sequence[float]) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(request, response, num_slots=count, ctx=context)
        self._edges = tuple(edges)
        self._submitted = [0.0] * count
        self._counts = context.Array("L", len(self._edges) + 1, lock=False)
        self._batches = context.Value("L", 0, lock=False)

    def drain_slots(self, max_items: int) -> tuple[list[int], list[float]]:
        """Claim requests, and note when each was made."""
        slots, submitted = super().drain_slots(max_items)
        for slot, at in zip(slots, submitted, strict=True):
            self._submitted[slot] = at
        return slots, submitted

    def resolve_batch(self, slots: list[int], results: Any) -> None:
        """Answer requests, and count their times."""
        super().resolve_batch(slots, results)
        ended = time.monotonic()  # the clock of the requests
        for slot in slots:
            self._counts[bisect_left(self._edges, ended - self._submitted[slot])] += 1
        self._batches.value += 1

    def read(self) -> tuple[int, list[int]]:
        """Return the number of batches, and the number of requests up to each edge and beyond the
        last one.
        """
        return self._batches.value, list(self._counts)
