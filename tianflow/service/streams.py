"""`Feed` → `Streams` → readers: server-sent events (HTML standard, section 9.2), to as many readers as are allowed.

A reader that is slow, or was away, goes on where it was; what is no longer kept by then is told as an event ``lost`` with the count.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import web

from tianflow.service.feed import LOST, Feed, Told
from tianflow.service.problems import ProblemError

AT_ONCE = 64
"""Events in one write: bounds what is made ahead for a reader that may be slow."""
HEARTBEAT_S = 15.0
"""Seconds of silence after which a comment shows that the stream is alive; proxies tend to cut after 30 or 60."""
PRESENT_S = 1.0
"""Seconds between two looks whether the reader is still there: its place is for another one."""
WRITE_S = 30.0
"""Seconds in which a reader must take what was written; otherwise it is gone."""
END_S = 0.5
"""Seconds in which a reader must take what was told last: the server waits for nobody who does not read."""
RETRY_MS = 1000
HEADERS = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}


class Streams:
    """The open streams of all runs.

    Args:
        limit: how many there may be; each costs a task and at most a few hundred kilobytes.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self.open = 0

    async def answer(self, feed: Feed, request: web.Request) -> web.StreamResponse:
        """Write events until the reader leaves or nothing more will come.

        Raises:
            ProblemError: 400 Last-Event-ID or ``follow`` cannot be read, 503 too many streams are open.
        """
        follow = _follow(request)
        number = _number(request, newest=feed.newest if follow else 0)
        if self.open >= self._limit:
            detail = f"{self.open} streams are open, and http.max_streams allows no more."
            raise ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="too-many-streams", headers={"Retry-After": "5"})
        self.open += 1
        try:
            return await _stream(feed, request, number, follow=follow)
        finally:
            self.open -= 1


async def _stream(feed: Feed, request: web.Request, number: int, *, follow: bool) -> web.StreamResponse:
    response, transport = web.StreamResponse(headers=HEADERS), request.transport
    await response.prepare(request)
    try:
        async with _ending(feed):
            await _write(response, f"retry: {RETRY_MS}\n\n".encode())
            await _copy(feed, request, response, number, follow=follow)
    except (TimeoutError, ConnectionError):
        # A connection that is merely closed would wait for its reader to take what was written.
        if transport is not None:
            transport.abort()
    return response


@asynccontextmanager
async def _ending(feed: Feed) -> AsyncIterator[None]:
    """What is inside has `END_S` once nothing more will come; TimeoutError then."""
    async with asyncio.timeout(None) as end:

        def limit() -> None:
            end.reschedule(asyncio.get_running_loop().time() + END_S)

        if feed.closed:
            limit()
        feed.at_end.add(limit)
        try:
            yield
        finally:
            feed.at_end.discard(limit)


async def _copy(feed: Feed, request: web.Request, response: web.StreamResponse, number: int, *, follow: bool) -> None:
    loop = asyncio.get_running_loop()
    written = loop.time()
    text, number = _start(feed, number)
    while True:
        lost, events = feed.since(number, AT_ONCE)
        if lost:
            number += lost
            text += _lost(number, lost, "no longer kept")
        if events:
            number = events[-1].number
            text += "".join(_event(event) for event in events)
        elif loop.time() - written >= HEARTBEAT_S:
            text += ":\n\n"
        if text:
            await _write(response, text.encode())
            written, text = loop.time(), ""
        if number >= feed.newest and (feed.closed or not follow):
            return
        if request.transport is None or request.transport.is_closing():
            return
        await feed.wait(number, PRESENT_S)


def _start(feed: Feed, number: int) -> tuple[str, int]:
    """A number that was never told is one of an earlier server of this run: nobody knows what came in between."""
    if number > feed.newest:
        return _lost(0, None, "told by an earlier server of this run"), 0
    return "", number


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_S):
        await response.write(data)


def _event(event: Told) -> str:
    return f"id: {event.number}\nevent: {event.kind}\ndata: {json.dumps(event.data, allow_nan=False)}\n\n"


def _lost(number: int, count: int | None, reason: str) -> str:
    return _event(Told(number, LOST, {"count": count, "reason": reason}))


def _number(request: web.Request, *, newest: int) -> int:
    given = request.headers.get("Last-Event-ID", "").strip()
    if not given:
        return newest
    if re.fullmatch(r"[0-9]{1,18}", given) is None:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "Last-Event-ID is the number of an event, as in its id.")
    return int(given)


def _follow(request: web.Request) -> bool:
    given = request.query.get("follow", "true")
    if given not in {"true", "false"}:
        raise ProblemError(HTTPStatus.BAD_REQUEST, "follow is true or false.")
    return given == "true"
