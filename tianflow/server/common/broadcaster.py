"""`EventBuffer` → `Broadcaster` → readers that have all so far: what comes is joined once, and
written to all of them by one task with one timer.

A task and a timer of its own for each reader cost more than writing to it: a thousand readers were
woken for every event, and every second to see whether they were still there. Here a reader's own
task sleeps until the reader is slow, gone, or has all there will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from tianflow.server.common.event_buffer import EventBuffer, EventFrame

AT_ONCE = 64
"""Events in one write: bounds what is made ahead for a reader that may be slow."""
HEARTBEAT_S = 15.0
"""Seconds of silence after which a comment shows that a stream is alive; proxies tend to cut after
30 or 60.
"""
HEARTBEAT = b":\n\n"
SLOW_BYTES, WRITE_BYTES = 16 * 1024, 32 * 1024
"""Bytes written and not taken with which a reader is slow, and those of one write here. Both
together are less than the 64 KiB from which on a write waits until they are taken: nothing here
waits for a reader.
"""
READERS_PER_TURN = 64
"""Readers between two turns of the loop."""


class Subscriber:
    """One who reads.

    Args:
        response: prepared.
        transport: beneath it.
        number: of the newest event written.
    """

    def __init__(
        self, *, response: web.StreamResponse, transport: asyncio.Transport | None, number: int
    ) -> None:
        self.response, self._transport, self.number = response, transport, number
        self._wakeup: asyncio.Future[None] | None = None
        self.gone = transport is None

    def leave(self) -> None:
        """It has gone."""
        self.gone = True
        self.wake()

    @property
    def slow(self) -> bool:
        """Whether much of what was written is not taken yet."""
        return self._transport is None or self._transport.get_write_buffer_size() >= SLOW_BYTES

    async def sleep(self) -> None:
        """Until `wake`."""
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup

    def wake(self, error: BaseException | None = None) -> None:
        """Its own task goes on, or ends with ``error``."""
        if self._wakeup is not None and not self._wakeup.done():
            if error is None:
                self._wakeup.set_result(None)
            else:
                self._wakeup.set_exception(error)


class Broadcaster:
    """Writes what comes to those that have all so far.

    Consumes: frames. Produces: bytes. Waits: for a frame, never for a reader. Unblocked by:
    `EventBuffer.add`.

    Args:
        kept: whose frames.
    """

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._readers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """True if nobody listens."""
        return not self._readers

    async def follow(self, reader: Subscriber) -> None:
        """Write to ``reader``, which has all there is, until it is slow, it is gone, or nothing
        more will come.
        """
        self._readers.add(reader)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(
                self._run(reader.number), name="broadcaster"
            )
            self._task.add_done_callback(self._report_failure)
        try:
            await reader.sleep()
        finally:
            self._readers.discard(reader)
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self, number: int) -> None:
        loop, buffer = asyncio.get_running_loop(), self._buffer
        written_at = loop.time()
        while not buffer.closed:
            await buffer.wait(number, max(0.0, written_at + HEARTBEAT_S - loop.time()))
            before, (lost, frames) = number, buffer.since(number, AT_ONCE)
            if lost:  # each of its readers is told by its own task how many
                frames, number = (), buffer.newest
                self._wake_all()
            if frames:
                number = frames[-1].number
                await self._write(before, number, joined(frames))
            elif loop.time() - written_at >= HEARTBEAT_S:
                await self._write(number, number, HEARTBEAT)
            else:
                continue
            written_at = loop.time()
        self._wake_all()

    async def _write(self, before: int, after: int, data: bytes) -> None:
        """To those that have all up to ``before``; others, and those that are slow, are left to
        their own tasks.
        """
        for turn, reader in enumerate(tuple(self._readers), start=1):
            if reader.number != before or reader.slow or len(data) > WRITE_BYTES:
                reader.wake()
                continue
            reader.number = after
            try:
                await reader.response.write(data)
            except ConnectionError:
                reader.leave()
            if turn % READERS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _wake_all(self) -> None:
        for reader in tuple(self._readers):
            reader.wake()

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        """A mistake here ends the streams it was made for, and is told with them."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            for reader in tuple(self._readers):
                reader.wake(error)


def joined(frames: Sequence[EventFrame]) -> bytes:
    """All of them, one after another."""
    return b"".join(frame.text for frame in frames)
