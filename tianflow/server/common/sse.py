"""`EventStreams`: server-sent events (HTML standard, section 9.2), for a limited number of readers.

A reader that is slow, or was disconnected, resumes where it was. Evicted events
are reported as one event ``lost`` with their count. Readers that are up to date are written to
together (`Broadcaster`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from aiohttp import web

from tianflow.server.common.broadcaster import AT_ONCE, Broadcaster, Subscriber, joined
from tianflow.server.common.connections import notify_on_disconnect
from tianflow.server.common.event_buffer import EventBuffer
from tianflow.server.common.event_feed import LOST, EventRecord
from tianflow.server.common.problems import ProblemError

WRITE_S = 30.0
"""Seconds for a reader to accept a write; then it counts as disconnected."""
END_S = 0.5
"""Seconds for a reader to accept the last events, so that the server does not wait for readers at
the end.
"""
RETRY_MS = 1000
HEADERS = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}


class EventStreams:
    """The open streams of all runs.

    Args:
        limit: maximum number of streams; each costs a task and at most a few hundred kilobytes.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._broadcasters: dict[EventBuffer, Broadcaster] = {}
        self.open = 0

    async def answer(self, buffer: EventBuffer, request: web.Request) -> web.StreamResponse:
        """Write events until the reader disconnects or the buffer closes.

        Raises:
            ProblemError: 400 invalid Last-Event-ID or ``follow``, 503 too many streams.
        """
        with self.reserve():
            return await self.write(buffer, request)

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Reserve a stream while the context is open. Raises ProblemError, 503, at the limit."""
        if self.open >= self._limit:
            detail = f"The limit of {self.open} streams (http.max_streams) is reached; retry later."
            raise ProblemError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                detail,
                kind="too-many-streams",
                headers={"Retry-After": "5"},
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def write(self, buffer: EventBuffer, request: web.Request) -> web.StreamResponse:
        """As `answer`, with a stream that is already reserved."""
        follow = _follow(request)
        number = _number(request, newest=buffer.newest if follow else 0)
        broadcaster = self._broadcasters.setdefault(buffer, Broadcaster(buffer))
        try:
            return await _stream(buffer, broadcaster, request, number, follow=follow)
        finally:
            if broadcaster.idle:
                self._broadcasters.pop(buffer, None)


async def _stream(
    buffer: EventBuffer,
    broadcaster: Broadcaster,
    request: web.Request,
    number: int,
    *,
    follow: bool,
) -> web.StreamResponse:
    response, transport = web.StreamResponse(headers=HEADERS), request.transport
    reader = Subscriber(response=response, transport=transport, number=number)
    try:
        await response.prepare(request)  # the connection may be closed by now
        async with _ending(buffer):
            with notify_on_disconnect(request, reader.leave):
                await _write(response, f"retry: {RETRY_MS}\n\n".encode())
                await _copy(buffer, broadcaster, reader, follow=follow)
    except (TimeoutError, ConnectionError):
        # A normal close would wait until the reader accepts the remaining bytes.
        if transport is not None:
            transport.abort()
    return response


@asynccontextmanager
async def _ending(buffer: EventBuffer) -> AsyncIterator[None]:
    """Limit the content of the context to `END_S` after the buffer closes, with TimeoutError."""
    async with asyncio.timeout(None) as end:

        def limit() -> None:
            end.reschedule(asyncio.get_running_loop().time() + END_S)

        if buffer.closed:
            limit()
        buffer.on_close.add(limit)
        try:
            yield
        finally:
            buffer.on_close.discard(limit)


async def _copy(
    buffer: EventBuffer, broadcaster: Broadcaster, reader: Subscriber, *, follow: bool
) -> None:
    """Write everything after ``reader.number``: the backlog in this task, later events through the
    broadcaster while the reader is fast enough.
    """
    text = b""
    if reader.number > buffer.newest:
        # the number is from an earlier server of this run; events in between are unknown
        text, reader.number = _lost(0, None, "published by an earlier server of this run"), 0
    while True:
        lost, frames = buffer.since(reader.number, AT_ONCE)
        if lost:
            reader.number += lost
            text += _lost(reader.number, lost, "no longer retained")
        if frames:
            reader.number = frames[-1].number
            text += joined(frames)
        if text:
            await _write(reader.response, text)
            text = b""
        elif reader.disconnected or buffer.closed or not follow:
            return
        else:
            await broadcaster.follow(reader)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(data)


def _lost(number: int, count: int | None, reason: str) -> bytes:
    return EventRecord(number, LOST, {"count": count, "reason": reason}).text


def _number(request: web.Request, *, newest: int) -> int:
    given = request.headers.get("Last-Event-ID", "").strip()
    if not given:
        return newest
    if re.fullmatch(r"[0-9]{1,18}", given) is None:
        raise ProblemError(
            HTTPStatus.BAD_REQUEST, "Last-Event-ID must be the number of an event, as in its id."
        )
    return int(given)


def _follow(request: web.Request) -> bool:
    given = request.query.get("follow", "true")
    if given not in {"true", "false"}:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "follow must be true or false.")
    return given == "true"
