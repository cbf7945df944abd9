"""`ConnectionLimiter`: limits the number of open connections. A handler can be notified when its
client disconnects.

A connection costs a descriptor, a task and some kilobytes before its first request. A connection
beyond the limit gets a prepared answer of a few hundred bytes, and no task.

A connection is a stranger until a request on it was authorised. Strangers cannot use up the places
of authorised clients: old ones give way, and a part of the places is a reserve for new connections,
in which the oldest stranger gives way to the next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import cast

from aiohttp import web

from tianflow.logs import logger
from tianflow.server.common.problems import SAFE, ProblemError

REFUSED_S = 1.0
"""Seconds for a refused client to read the answer and disconnect. With an immediate close it would
see a reset and no reason.
"""
MAX_REFUSED = 256
"""Maximum number of refused connections that wait; further ones are aborted."""
LOG_S = 60.0
"""Minimum seconds between two log lines about refusals, so that clients cannot fill the disk."""
HEAD_S = 10.0
"""Seconds for a new connection to send its first request head."""
STRANGER_S = 2.0
"""Seconds after which a connection without an authorised request gives way to a new one, if its
place is needed.
"""
RESERVE = 8
"""One of so many places is in the reserve. An authorised client sends its first request within
milliseconds, in which no flood fills the reserve of 36 of 288 places.
"""
RETRY_AFTER_S = 5

log = logger("service")


class ConnectionLimiter:
    """Protocol factory: makes the protocol of each new connection.

    Args:
        server: aiohttp's protocol factory.
        limit: maximum number of open connections.
    """

    def __init__(self, *, server: Callable[[], asyncio.Protocol], limit: int) -> None:
        self.server, self._limit, self._reserve = server, limit, limit // RESERVE
        self.open = 0
        """Number of admitted connections."""
        self.refused = 0
        """Number of refused connections that are still open."""
        self.transports: set[asyncio.Transport] = set()
        self.strangers: dict[asyncio.Transport, float] = {}
        """Admitted connections without an authorised request, oldest first, with their start."""
        self._newest: dict[asyncio.Transport, None] = {}
        """Strangers in the reserve, oldest first."""
        self.closed = False
        self._logged_at = float("-inf")
        detail = f"The limit of {limit} connections is reached; retry later."
        self.refusal = _encoded(
            ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="too-many-connections")
        )

    def __call__(self) -> asyncio.Protocol:
        """Make the protocol of one connection. The limit is checked when the connection is made,
        because many may be accepted in one turn of the event loop.
        """
        return LimitedConnection(self)

    def close(self) -> None:
        """Abort all connections, and later ones: a connection that was accepted just before may be
        made after this call.
        """
        self.closed = True
        for transport in tuple(self.transports):
            transport.abort()

    def admit(self, transport: asyncio.Transport) -> bool:
        """Give a new connection a place, if there is one. Otherwise log the refusal at
        intervals.
        """
        now = asyncio.get_running_loop().time()
        in_reserve = self.open >= self._limit - self._reserve
        if in_reserve and self._gives_way(self.strangers, started_before=now - STRANGER_S):
            in_reserve = False
        elif self.open >= self._limit and not self._gives_way(self._newest):
            self._log_refusal(now)
            return False
        self.open += 1
        self.strangers[transport] = now
        if in_reserve:
            self._newest[transport] = None
        return True

    def authorised(self, transport: asyncio.Transport) -> None:
        """A request on this connection was authorised, so it retains its place."""
        self.strangers.pop(transport, None)
        self._newest.pop(transport, None)

    def leave(self, transport: asyncio.Transport) -> None:
        """An admitted connection has ended."""
        self.open -= 1
        self.authorised(transport)

    def _gives_way(
        self, strangers: Iterable[asyncio.Transport], *, started_before: float = math.inf
    ) -> bool:
        """Abort the oldest of ``strangers``. Its place is free a turn later. False if there is no
        such stranger.
        """
        for transport in strangers:
            if self.strangers[transport] > started_before:
                break
            if not transport.is_closing():
                transport.abort()
                return True
        return False

    def _log_refusal(self, now: float) -> None:
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning("connections are refused", open=self.open, limit=self._limit)


class LimitedConnection(asyncio.Protocol):
    """One connection, admitted or refused. An admitted one forwards everything to aiohttp; handlers
    can also wait for its end.
    """

    def __init__(self, limiter: ConnectionLimiter) -> None:
        self._limiter = limiter
        self._transport: asyncio.Transport | None = None
        self._handler: asyncio.Protocol | None = None
        self._refused: asyncio.TimerHandle | None = None
        self._head_timeout: asyncio.TimerHandle | None = None
        self._last = b""
        self.on_lost: set[Callable[[], None]] = set()
        """Called when the client disconnects."""

    def connection_made(self, base_transport: asyncio.BaseTransport) -> None:
        """Admit or refuse the connection."""
        transport = self._transport = cast(
            "asyncio.Transport", base_transport
        )  # uvloop's transport is one, but not a subclass
        self._limiter.transports.add(transport)
        if self._limiter.closed:
            transport.abort()
        elif self._limiter.admit(transport):
            loop = asyncio.get_running_loop()
            self._head_timeout = loop.call_later(HEAD_S, transport.abort)
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
        """Forward a request; ignore the data of a refused client."""
        if self._handler is not None:
            if self._head_timeout is not None:
                self._look_for_head(data)
            self._handler.data_received(data)

    def _look_for_head(self, data: bytes) -> None:
        """Note the end of the first request head. Its bytes may arrive one by one."""
        seen = self._last + data
        self._last = seen[-3:]
        if b"\r\n\r\n" in seen or b"\n\n" in seen:
            self._has_head()

    def _has_head(self) -> None:
        if self._head_timeout is not None:
            self._head_timeout.cancel()
            self._head_timeout = None

    def authorised(self) -> None:
        """A request of this connection was authorised."""
        if self._transport is not None:
            self._limiter.authorised(self._transport)

    def eof_received(self) -> bool | None:
        """Forward the end of the client's data."""
        return self._handler.eof_received() if self._handler is not None else None

    def pause_writing(self) -> None:
        """Forward that the client does not read."""
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Forward that the client reads again."""
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's place, and call the callbacks."""
        if self._transport is not None:
            self._limiter.transports.discard(self._transport)
        if self._handler is not None:
            if self._transport is not None:
                self._limiter.leave(self._transport)
            self._has_head()
            self._handler.connection_lost(exc)
        elif self._refused is not None:
            self._limiter.refused -= 1
            self._refused.cancel()
        for callback in tuple(self.on_lost):
            callback()


@contextmanager
def notify_on_disconnect(request: web.Request, callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback`` when the client of ``request`` disconnects within the context, or at once
    if it has already.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        callback()
        yield
        return
    connection = transport.get_protocol()
    on_lost = (
        connection.on_lost if isinstance(connection, LimitedConnection) else set()
    )  # on another server, only a failed write shows a disconnect
    on_lost.add(callback)
    try:
        yield
    finally:
        on_lost.discard(callback)


def note_authorised(request: web.Request) -> None:
    """The connection of ``request`` belongs to an authorised client."""
    connection = request.transport.get_protocol() if request.transport is not None else None
    if isinstance(connection, LimitedConnection):
        connection.authorised()


def _encoded(error: ProblemError) -> bytes:
    """The whole answer in bytes."""
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
