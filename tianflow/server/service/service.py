"""The one assembler of a service: lock, port, store, runs, and an orderly end."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tianflow.config.model import HttpSettings
from tianflow.errors import ConfigError, Problem
from tianflow.hosts import event_loop
from tianflow.logs import logger
from tianflow.rundir.control_file import SERVICE, ControlFile, process_start_time
from tianflow.server.common.auth import NO_TOKENS, Guard, Tokens
from tianflow.server.run.server import (
    Server,
    address,
    bind,
    connection_limit,
    make_runner,
    running,
    serving_requests,
)
from tianflow.server.service.routes import make_app
from tianflow.server.service.run_client import RunClient
from tianflow.server.service.run_manager import RunManager
from tianflow.server.service.run_process import RunFiles
from tianflow.server.service.store import NAME, RunStore
from tianflow.server.service.tokens import read_or_make

RUN_REQUESTS_PER_S = 10_000.0
"""What a run's own server takes from one address: all that come through the service have the same
one, and were counted there.
"""

log = logger("serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How a service is set up.

    Attributes:
        runs_dir: directory of its runs.
        http: where it answers, and within which limits.
        limit: how many runs may go on at once.
        allowed: modules whose objects a config that is submitted may name.
        token_file: where its tokens lie; None: in the directory of its runs.
        tokens: False: nobody is asked for one.
    """

    runs_dir: Path
    http: HttpSettings
    limit: int
    allowed: tuple[str, ...] = ()
    token_file: Path | None = None
    tokens: bool = True


def run(settings: ServiceSettings, announce: Callable[[Server, Tokens], None]) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. ``announce`` is told once where it answers.

    Raises:
        ConfigError: the port is taken, another service holds the directory, or the tokens cannot be
            used.
        StoreError: what is remembered cannot be read.
    """
    return event_loop.run(_serve(settings, announce))


async def _serve(settings: ServiceSettings, announce: Callable[[Server, Tokens], None]) -> int:
    signals = _Signals()
    with signals:
        async with serving(settings) as service:
            signals.again = service.manager.kill_all
            announce(service.server, service.tokens)
            number = await signals.first
            log.warning(
                "ending: every run is let go of, with a last checkpoint, and goes on when the "
                "service is back"
            )
    return 128 + number


@dataclass(frozen=True, slots=True)
class Service:
    """A service that answers."""

    server: Server
    tokens: Tokens
    manager: RunManager


@asynccontextmanager
async def serving(settings: ServiceSettings) -> AsyncIterator[Service]:
    """A service that answers while the context is open. Raises as `run`."""
    files = RunFiles(await asyncio.to_thread(settings.runs_dir.absolute))
    async with _locked(files):
        listener = await bind(settings.http)
        try:
            tokens = NO_TOKENS
            if settings.tokens:
                tokens = await asyncio.to_thread(read_or_make, settings.token_file or files.tokens)
            loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
            guard = Guard(
                tokens=tokens, loopback=loopback, allowed_hosts=settings.http.allowed_hosts
            )
            store = await asyncio.to_thread(RunStore, files.own / NAME)
            async with RunClient() as client:
                overrides = {
                    "http.max_streams": settings.http.max_streams,
                    "http.max_requests_per_s": RUN_REQUESTS_PER_S,
                }
                manager = RunManager(
                    store=store,
                    files=files,
                    limit=settings.limit,
                    client=client,
                    overrides=overrides,
                )
                app = make_app(
                    manager=manager,
                    store=store,
                    client=client,
                    guard=guard,
                    http=settings.http,
                    allowed=settings.allowed,
                )
                runner = make_runner(app)
                server = Server(address(listener), listener.getsockname()[1])
                # the runs end first: their streams are then passed on to their ends while the
                # server is still there
                try:
                    async with (
                        serving_requests(runner, listener, limit=connection_limit(settings.http)),
                        _control_file(server, tokens, files),
                        running(manager.run),
                    ):
                        yield Service(server, tokens, manager)
                finally:
                    await asyncio.to_thread(manager.close)
        finally:
            listener.close()


@asynccontextmanager
async def _locked(files: RunFiles) -> AsyncIterator[None]:
    """The directory belongs to this service while the context is open, and no longer than its
    process lives.
    """
    lock = await asyncio.to_thread(_lock, files)
    try:
        yield
    finally:
        os.close(lock)


def _lock(files: RunFiles) -> int:
    try:
        files.own.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(files.own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            [Problem("--runs-dir", str(files.runs), f"cannot be used: {error.strerror}")]
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        other = ControlFile.read(files.runs, SERVICE)
        where = f" at {other.address}" if other is not None else ""
        message = f"another service{where} holds the runs there"
        raise ConfigError(
            [Problem("--runs-dir", str(files.runs), message, "another directory")]
        ) from error
    return lock


@asynccontextmanager
async def _control_file(server: Server, tokens: Tokens, files: RunFiles) -> AsyncIterator[None]:
    """Other programs find the service by its file."""
    pid = os.getpid()
    file = ControlFile(
        run="",
        pid=pid,
        start_time=await asyncio.to_thread(process_start_time, pid),
        address=server.address,
        token=tokens.control,
        read_token=tokens.read,
    )
    await asyncio.to_thread(file.write, files.runs, SERVICE)
    try:
        yield
    finally:
        await asyncio.to_thread(file.remove, files.runs, SERVICE)


class _Signals:
    """The first SIGINT or SIGTERM is what ``first`` becomes; a further one calls ``again``."""

    def __init__(self) -> None:
        self.first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.again: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _handle(self, number: int) -> None:
        if self.first.done():
            self.again()
        else:
            self.first.set_result(number)
