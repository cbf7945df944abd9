"""sockets -> `ConnectionLimiter` -> aiohttp: so many connections at once, and whoever waits for a
reader hears at once that it has gone.

A connection costs a descriptor, a task and some kilobytes before it has asked for anything: those
that are too many get an answer of a few hundred bytes, which was made once, and no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import cast

from aiohttp import web

from tianflow.logs import logger
from tianflow.server.common.problems import SAFE, ProblemError

REFUSED_S = 1.0
"""Seconds in which one that was refused must take the answer and leave: closed at once, it would
see a reset and no reason.
"""
MAX_REFUSED = 256
"""That many refused ones are waited for; more are cut off."""
LOG_S = 60.0
"""Seconds between two lines of the log that say so: whoever connects could fill a disk with them.
"""
RETRY_AFTER_S = 5

log = logger("service")


class ConnectionLimiter:
    """Makes what takes the bytes of each new connection: a protocol factory.

    Args:
        server: aiohttp's, which makes what answers.
        limit: how many connections may be open.
    """

    def __init__(self, *, server: Callable[[], asyncio.Protocol], limit: int) -> None:
        self.server, self._limit = server, limit
        self.open = 0
        """Connections that may ask."""
        self.refused = 0
        """Refused ones that have not left yet."""
        self.transports: set[asyncio.Transport] = set()
        self.closed = False
        self._logged_at = float("-inf")
        detail = f"{limit} connections are open, and there is room for no more."
        self.refusal = _encoded(
            ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="too-many-connections")
        )

    def __call__(self) -> asyncio.Protocol:
        """For one connection. Whether there is room is asked when it is made: many may be accepted
        in one turn of the loop.
        """
        return Connection(self)

    def close(self) -> None:
        """Cut off whoever is still there, and whoever comes yet: what was accepted just before the
        end may be made after it.
        """
        self.closed = True
        for transport in tuple(self.transports):
            transport.abort()

    def has_room(self) -> bool:
        """Whether one more may come in; if not, the log says so now and then."""
        if self.open < self._limit:
            return True
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning("connections are refused", open=self.open, limit=self._limit)
        return False


class Connection(asyncio.Protocol):
    """One connection, admitted or refused. An admitted one is aiohttp's in all but its end, which
    others may wait for, too.
    """

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._transport: asyncio.Transport | None = None
        self._handler: asyncio.Protocol | None = None
        self._refused: asyncio.TimerHandle | None = None
        self.on_lost: set[Callable[[], None]] = set()
        """Called when the other side has gone."""

    def connection_made(self, base_transport: asyncio.BaseTransport) -> None:
        """It is aiohttp's, or refused."""
        transport = self._transport = cast(
            "asyncio.Transport", base_transport
        )  # uvloop's is one, and says that it is none
        self._limiter.transports.add(transport)
        if self._limiter.closed:
            transport.abort()
        elif self._limiter.has_room():
            self._limiter.open += 1
            self._handler = self._limiter.server()
            self._handler.connection_made(transport)
        elif self._limiter.refused < MAX_REFUSED:
            self._limiter.refused += 1
            self._refused = asyncio.get_running_loop().call_later(REFUSED_S, transport.abort)
            transport.write(self._limiter.refusal)
            transport.write_eof()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """A request, or what a refused one had sent before it could read why."""
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """It sends no more."""
        return self._handler.eof_received() if self._handler is not None else None

    def pause_writing(self) -> None:
        """What was written is not taken."""
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """It is taken again."""
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Its place is free, and so is that of a stream it had."""
        if self._transport is not None:
            self._limiter.transports.discard(self._transport)
        if self._handler is not None:
            self._limiter.open -= 1
            self._handler.connection_lost(exc)
        elif self._refused is not None:
            self._limiter.refused -= 1
            self._refused.cancel()
        for callback in tuple(self.on_lost):
            callback()


@contextmanager
def notify_on_disconnect(request: web.Request, callback: Callable[[], None]) -> Iterator[None]:
    """``tell`` is called as soon as whoever asked has gone, while the context is open; at once, if
    that is so already.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        callback()
        yield
        return
    connection = transport.get_protocol()
    on_lost = (
        connection.on_lost if isinstance(connection, Connection) else set()
    )  # another server tells only whoever writes
    on_lost.add(callback)
    try:
        yield
    finally:
        on_lost.discard(callback)


def _encoded(error: ProblemError) -> bytes:
    """The whole answer, as it goes over the wire."""
    response = error.response()
    assert isinstance(response.body, bytes)
    headers = {
        "Content-Type": "application/problem+json; charset=utf-8",
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        "Retry-After": str(RETRY_AFTER_S),
        **SAFE,
    }
    lines = [
        f"HTTP/1.1 {response.status} {response.reason}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + response.body
