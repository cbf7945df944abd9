"""Starts and stops the HTTP server of a run: socket, ``control.json``, and an end within two
seconds.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tianflow.config.model import HttpSettings
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import RunControl
from tianflow.logs import logger, report_death
from tianflow.observability.rates import RunRates
from tianflow.rundir.control_file import ControlFile, process_start_time
from tianflow.server.common.auth import Guard, Tokens
from tianflow.server.common.connections import ConnectionLimiter
from tianflow.server.common.event_feed import Feed
from tianflow.server.run.app import ServedRun, make_app

log = logger("server")

GRACE_S = 1.0
"""Seconds that open requests get at the end."""
IDLE_S = 75.0
"""Seconds within which a connection must send a whole request head; more than the usual interval
between two scrapes.
"""
LINGER_S = 5.0
"""Seconds in which the rest of a refused body is read and discarded, so that the client can read
the refusal.
"""
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Server:
    """A server that listens at ``address`` (``http://host:port``)."""

    address: str
    port: int


@asynccontextmanager
async def serve(
    run: RunControl, http: HttpSettings, tokens: Tokens, directory: Path
) -> AsyncIterator[Server]:
    """Serve ``run`` while the context is open; ``control.json`` in ``directory`` holds the address.

    Raises:
        ConfigError: the port is in use, the host is not an address of this machine, or tokens are
            missing though other machines can connect.
    """
    rates = RunRates(read=run.statistics)
    listener = await bind(http)
    try:
        loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        guard = Guard(tokens=tokens, loopback=loopback, allowed_hosts=http.allowed_hosts)
        server = Server(address(listener), listener.getsockname()[1])
        feed = Feed(events=run.events, clock=time.time)
        app = make_app(runs={run.id: ServedRun(run, rates, feed)}, guard=guard, http=http)
        runner = make_runner(app)
        # the feed closes first, so that every stream can be written to its end
        async with (
            serving_requests(runner, listener, limit=connection_limit(http)),
            _control_file(run, server, tokens, directory),
            running(rates.run, "the server no longer measures rates"),
            running(feed.run, "the server no longer sends events"),
        ):
            yield server
    finally:
        listener.close()


async def bind(http: HttpSettings) -> socket.socket:
    """Make a listening socket. It has a single address, so that port 0 gives one port even if the
    name has several addresses.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            [
                Problem(
                    "http.host",
                    http.host,
                    f"cannot be used: {error.strerror}",
                    "an address of this machine",
                )
            ]
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                [Problem("http.host", http.host, "is not an address of this machine", "127.0.0.1")]
            ) from error
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise ConfigError(
            [
                Problem(
                    "http.port",
                    http.port,
                    f"{reason} on {http.host}",
                    "another port, or 0 for any free port",
                )
            ]
        ) from error
    return listener


def address(listener: socket.socket) -> str:
    """The address for clients; the loopback address if the socket listens on all addresses."""
    host, port = listener.getsockname()[:2]
    parsed = ipaddress.ip_address(host)
    if parsed.is_unspecified:
        host = "127.0.0.1" if parsed.version == 4 else "::1"
    return f"http://[{host}]:{port}" if parsed.version == 6 else f"http://{host}:{port}"


def make_runner(app: web.Application) -> web.AppRunner:
    """The runner of ``app``. It closes idle connections, and does not wait for them at the end."""
    return web.AppRunner(
        app,
        access_log=None,
        logger=_aiohttp_logger(),
        handle_signals=False,
        shutdown_timeout=GRACE_S,
        keepalive_timeout=IDLE_S,
        lingering_time=LINGER_S,
    )


def _aiohttp_logger() -> logging.Logger:
    """aiohttp's logger, without tracebacks of malformed requests, so that clients cannot fill the
    disk.
    """
    found = logging.getLogger("aiohttp.server")
    found.addFilter(_is_server_error)  # the logger adds the same filter only once
    return found


def _is_server_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def connection_limit(http: HttpSettings) -> int:
    """Maximum number of connections of a server with these settings."""
    return http.max_connections + http.max_streams


@asynccontextmanager
async def serving_requests(
    runner: web.AppRunner, listener: socket.socket, *, limit: int
) -> AsyncIterator[None]:
    """Serve at ``listener`` while the context is open, with at most ``limit`` connections."""
    async with AsyncExitStack() as stack:
        await runner.setup()
        assert runner.server is not None
        limiter = ConnectionLimiter(server=runner.server, limit=limit)
        stack.callback(limiter.close)
        stack.push_async_callback(runner.cleanup)
        server = await asyncio.get_running_loop().create_server(
            limiter, sock=listener, backlog=BACKLOG
        )
        stack.push_async_callback(_stop_listening, server, listener)
        yield


async def _stop_listening(server: asyncio.Server, listener: socket.socket) -> None:
    """Close. An asyncio server leaks connections that it accepts in the turn in which it closes, so
    it stops accepting one turn earlier.
    """
    try:
        asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
    finally:
        server.close()


@asynccontextmanager
async def _control_file(
    run: RunControl, server: Server, tokens: Tokens, directory: Path
) -> AsyncIterator[None]:
    pid = os.getpid()
    file = ControlFile(
        run=run.id,
        pid=pid,
        start_time=await asyncio.to_thread(process_start_time, pid),
        address=server.address,
        token=tokens.control,
        read_token=tokens.read,
    )
    await asyncio.to_thread(file.write, directory)
    try:
        yield
    finally:
        await asyncio.to_thread(file.remove, directory)


@asynccontextmanager
async def running(
    component: Callable[[Callable[[], None]], Coroutine[None, None, None]],
    death: str,
    *,
    required: bool = False,
) -> AsyncIterator[None]:
    """Run ``component`` while the context is open.

    If it fails, ``death`` is logged at once. The context continues to its own end; there the
    exception is raised if the component is ``required``.
    """
    task = asyncio.create_task(component(lambda: None))
    report_death(task, log, death)
    try:
        await asyncio.sleep(0)  # the first step; cancelled before it, it would not clean up
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if required and not task.cancelled():
            task.result()
