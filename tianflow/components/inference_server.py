"""open requests, weights, settings -> InferenceServer -> answers in slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tianflow.channels.arena import place_of, row_of
from tianflow.components.turns import Turns, Wait
from tianflow.core.statistics import (
    LATENCY_BUCKETS,
    ROWS_BUCKETS,
    ComponentStatistics,
    HistogramBuilder,
    InferenceMeasures,
    StateClock,
)
from tianflow.errors import RunError
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.channels.arena import SlotRequests
    from tianflow.components.inference_batch import BatchInference
    from tianflow.core.payloads import Version
    from tianflow.hosts.compute import Compute
    from tianflow.interfaces import Bell, SettingsReader

ABSENT_S = 1.0
"""An actor that has not asked for so long is not waited for."""
MOST_FAILURES = 10
"""After more failed batches in a row the run ends: no restart would help."""
BACKOFF_S = 0.01
"""After a failed batch; it doubles with each further one."""
OUT_OF_MEMORY = ("out of memory", "MemoryError", "can't allocate memory")
"""What errors say when a device has no memory, which may be for a moment only."""
GROW_AFTER = 200
"""Batches in a row after which a batch that the device's memory has limited may be twice as large
again: another process may have used the memory.
"""

log = logger("inference")


class Computing(NamedTuple):
    """The half of a server that computes."""

    batch: BatchInference
    load_weights: Callable[[], Version]
    """Loads the newest weights. Returns their version."""


class InferenceServer:
    """Chooses the actions of actors on other hosts, in batches, with the newest weights.

    A batch is what waits when the device is free: at once when every actor that could ask has
    asked or ``inference.max_batch`` rows wait, else ``inference.max_wait_s`` after the oldest
    request. Weights are loaded between two batches. A server remembers nothing of a trajectory, so
    that a restarted one continues where another stopped.

    Consumes: requests, weights, settings. Produces: answers.
    Waits: for requests. Unblocked by: its doorbell.

    Args:
        name: name of the component, e.g. ``"inference-0"``.
        host: name of its host process.
        requests: those that this server answers.
        steps: rows of a whole trajectory.
        bells: doorbells of the run.
        settings: live settings.
        compute: compute thread of the host.
        make: builds policy and batch, on the compute thread.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        requests: SlotRequests,
        steps: int,
        bells: Sequence[Bell],
        settings: SettingsReader,
        compute: Compute,
        make: Callable[[], Computing],
    ) -> None:
        self.name = name
        self._host, self._requests, self._steps, self._bells = host, requests, steps, bells
        self._settings, self._compute, self._make = settings, compute, make
        self._open: list[tuple[int, int]] = []
        self._since: dict[int, float] = {}
        """When each open request was made."""
        self._expected: dict[int, float] = {}
        """Slots whose trajectory goes on, with the time of the last answer."""
        self._failures, self._limit, self._since_limit = 0, 0, 0
        self._version: Version | None = None
        self._clock = StateClock()
        self._counters = {"requests": 0.0, "padding": 0.0, "weight_loads": 0.0, "failures": 0.0}
        self._batches = HistogramBuilder(ROWS_BUCKETS)
        self._waits = HistogramBuilder(LATENCY_BUCKETS)
        self._seconds = HistogramBuilder(LATENCY_BUCKETS)

    async def run(self, started: Callable[[], None]) -> None:
        """Run until cancelled."""
        computing = await self._compute.run(self._make)
        started()
        # Requests that an earlier server left open wait already.
        self._compute.wake()
        await self._compute.run(lambda: self._serve(computing))

    def statistics(self) -> ComponentStatistics:
        """Times and counters."""
        return ComponentStatistics(
            name=self.name,
            role="inference",
            host=self._host,
            time=self._clock.read(),
            generation=self._settings.value.generation,
        ).with_measures(
            InferenceMeasures(
                **self._counters,
                batch_rows=self._batches.read(),
                wait_seconds=self._waits.read(),
                compute_seconds=self._seconds.read(),
            )
        )

    # On the compute thread
    # ----------------------------------------------------------------------------------------------

    def _serve(self, computing: Computing) -> Turns[None]:
        self._clock.enter("waiting:requests")
        for bell in self._bells:  # an answer without its ring, before this server began
            bell.ring()
        wait = Wait(self._stopping)
        wait.ready = lambda: self._is_due(wait)
        while True:
            yield wait
            if self._stopping():
                return
            self._clock.enter("busy")
            try:
                self._answer(computing)
            except Exception as error:  # noqa: BLE001 - a boundary: the requests are still open
                self._failed(error)
                yield Wait(self._stopping, time.monotonic() + BACKOFF_S * 2**self._failures)
            else:
                self._succeeded()
            self._clock.enter("waiting:requests")

    def _stopping(self) -> bool:
        return self._compute.stopping.is_set()

    def _is_due(self, wait: Wait) -> bool:
        """Look for requests. True if a batch is to be computed now; else ``wait`` gets the time
        when it is.
        """
        settings, now = self._settings.value.config.inference, time.monotonic()
        self._open = self._requests.open()
        self._since = {request: self._requests.asked_at(slot) for slot, request in self._open}
        wait.until = None
        if not self._open:
            return self._stopping()
        oldest = min(self._since.values())
        asked = {slot for slot, _ in self._open}
        others = any(
            slot not in asked and now - answered < ABSENT_S
            for slot, answered in self._expected.items()
        )
        if not others or len(self._open) >= self._most() or now >= oldest + settings.max_wait_s:
            return True
        wait.until = oldest + settings.max_wait_s
        return self._stopping()

    def _most(self) -> int:
        """Rows of the largest batch: as set, or fewer if the device has no memory for them."""
        most = self._settings.value.config.inference.max_batch
        return min(most, self._limit) if self._limit else most

    def _answer(self, computing: Computing) -> None:
        """Compute one batch: the requests that have waited longest."""
        began, since = time.monotonic(), self._since
        chosen = sorted(self._open, key=lambda found: since[found[1]])[: self._most()]
        version = computing.load_weights()
        if version != self._version:
            self._version = version
            self._counters["weight_loads"] += 1
        padding = computing.batch.answer([(slot, row_of(request)) for slot, request in chosen])
        for slot, request in chosen:
            self._requests.answer(slot, request, version)
        for place in {place_of(request) for _, request in chosen}:
            self._bells[place].ring()
        ended = time.monotonic()
        for slot, request in chosen:
            self._waits.add(ended - since[request])
            if row_of(request) < self._steps - 1:
                self._expected[slot] = ended
            else:
                self._expected.pop(slot, None)
        self._counters["requests"] += len(chosen)
        self._counters["padding"] += padding
        self._batches.add(len(chosen))
        self._seconds.add(ended - began)

    def _succeeded(self) -> None:
        self._failures = 0
        if not self._limit:
            return
        self._since_limit += 1
        if self._since_limit >= GROW_AFTER:
            self._limit, self._since_limit = 2 * self._limit, 0
            if self._limit >= self._settings.value.config.inference.max_batch:
                self._limit = 0

    def _failed(self, error: Exception) -> None:
        """Count a failed batch. Its requests are still open, and are computed again.

        Raises:
            RunError: too many failed in a row.
        """
        self._failures += 1
        self._counters["failures"] += 1
        text = f"{type(error).__name__}: {error}"
        if self._failures > MOST_FAILURES:
            raise RunError(
                self.name, f"{self._failures} batches in a row failed, the last one with {text}"
            ) from error
        if any(words in text for words in OUT_OF_MEMORY):
            self._limit, self._since_limit = max(1, min(len(self._open), self._most()) // 2), 0
        log.warning(
            "a batch failed",
            component=self.name,
            error=text,
            in_a_row=self._failures,
            largest_batch=self._most(),
        )
