"""`Broadcaster`: writes events to all readers that are up to date, with one task and one timer.

A task and a timer for each reader would cost more than the writing: a thousand readers would wake
up for every event. Here a reader's own task sleeps until the reader is slow, disconnected, or has
everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from tianflow.server.common.event_buffer import EventBuffer, EventFrame

AT_ONCE = 64
"""Maximum number of events in one write; limits the memory for a slow reader."""
HEARTBEAT_S = 15.0
"""Seconds of silence after which a comment shows that the stream is alive; proxies tend to cut a
connection after 30 or 60 s.
"""
HEARTBEAT = b":\n\n"
SLOW_BYTES, WRITE_BYTES = 16 * 1024, 32 * 1024
"""Unsent bytes from which a reader counts as slow, and maximum bytes of one write. Their sum is
below 64 KiB, from which on a write would wait. So this module never waits for a reader.
"""
READERS_PER_TURN = 64
"""Readers that are written to in one turn of the event loop."""


class Subscriber:
    """A reader of events.

    Args:
        response: prepared.
        transport: of its connection.
        number: of the newest event written.
    """

    def __init__(
        self, *, response: web.StreamResponse, transport: asyncio.Transport | None, number: int
    ) -> None:
        self.response, self._transport, self.number = response, transport, number
        self._wakeup: asyncio.Future[None] | None = None
        self.disconnected = transport is None

    def leave(self) -> None:
        """Mark the reader as disconnected."""
        self.disconnected = True
        self.wake()

    @property
    def slow(self) -> bool:
        """True if many bytes are unsent."""
        return self._transport is None or self._transport.get_write_buffer_size() >= SLOW_BYTES

    async def sleep(self) -> None:
        """Wait for `wake`."""
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup

    def wake(self, error: BaseException | None = None) -> None:
        """Wake the reader's own task, or end it with ``error``."""
        if self._wakeup is not None and not self._wakeup.done():
            if error is None:
                self._wakeup.set_result(None)
            else:
                self._wakeup.set_exception(error)


class Broadcaster:
    """Writes each frame to the readers that have all earlier ones.

    Consumes: frames. Produces: bytes. Waits: for a frame, never for a reader. Unblocked by:
    `EventBuffer.add`.

    Args:
        buffer: source of the frames.
    """

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._readers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """True without readers."""
        return not self._readers

    async def follow(self, reader: Subscriber) -> None:
        """Write to ``reader``, which is up to date, until it is slow or disconnected, or the buffer
        closes.
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
            if lost:  # each reader's own task reports the count
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
        """Write to the readers that have all events up to ``before``. The others, and slow ones,
        wake up and write in their own tasks.
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
        """An error of this task ends its streams with that error."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            for reader in tuple(self._readers):
                reader.wake(error)


def joined(frames: Sequence[EventFrame]) -> bytes:
    """The text of all frames."""
    return b"".join(frame.text for frame in frames)
