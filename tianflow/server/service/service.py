"""Assembles a service: lock, port, store, runs, and an orderly end."""

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
from tianflow.server.service.store import NAME, RunStore, StoreError
from tianflow.server.service.submission_checks import SubmissionChecks
from tianflow.server.service.tokens import read_or_create

RUN_REQUESTS_PER_S = 10_000.0
"""Limit of a run's own server per address. All forwarded requests have the address of the service,
which has limited them already.
"""

log = logger("serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of a service.

    Attributes:
        runs_dir: directory of its runs.
        http: address and limits.
        limit: maximum number of active runs.
        allowed: modules whose objects a submitted config may name.
        token_file: file of the tokens; None: in the directory of the runs.
        tokens: False: access without a token.
    """

    runs_dir: Path
    http: HttpSettings
    limit: int
    allowed: tuple[str, ...] = ()
    token_file: Path | None = None
    tokens: bool = True


def run(settings: ServiceSettings, announce: Callable[[Server, Tokens], None]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. ``announce`` is called once, with
    the address.

    Raises:
        ConfigError: the port is in use, another service uses the directory, or the tokens cannot be
            used.
        StoreError: the store cannot be read.
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
                "stopping: every run ends with a last checkpoint, and resumes at the next start"
            )
    return 128 + number


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    server: Server
    tokens: Tokens
    manager: RunManager


@asynccontextmanager
async def serving(settings: ServiceSettings) -> AsyncIterator[Service]:
    """A service that runs while the context is open. Raises as `run`."""
    files = RunFiles(await asyncio.to_thread(settings.runs_dir.absolute))
    async with _locked(files):
        listener = await bind(settings.http)
        try:
            tokens = NO_TOKENS
            if settings.tokens:
                tokens = await asyncio.to_thread(
                    read_or_create, settings.token_file or files.tokens
                )
            loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
            guard = Guard(
                tokens=tokens, loopback=loopback, allowed_hosts=settings.http.allowed_hosts
            )
            await asyncio.to_thread(_require_store, files)
            store = await asyncio.to_thread(RunStore, files.own / NAME)
            async with RunClient() as client:
                overrides = {
                    "http.allowed_imports": list(settings.allowed),
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
                checks = SubmissionChecks()
                app = make_app(
                    manager=manager,
                    store=store,
                    client=client,
                    guard=guard,
                    http=settings.http,
                    allowed=settings.allowed,
                    check=checks.check,
                )
                runner = make_runner(app)
                server = Server(address(listener), listener.getsockname()[1])
                # the runs end first, so that their streams can be forwarded to their ends
                try:
                    async with (
                        serving_requests(runner, listener, limit=connection_limit(settings.http)),
                        _control_file(server, tokens, files),
                        checks,
                        running(manager.run, "the service no longer starts runs", required=True),
                    ):
                        yield Service(server, tokens, manager)
                finally:
                    await asyncio.to_thread(manager.close)
        finally:
            listener.close()


def _require_store(files: RunFiles) -> None:
    """Refuse an empty store beside runs. A new store is written at once, so it was truncated."""
    path = files.own / NAME
    if not path.exists() or path.stat().st_size > 0:
        return
    found = files.found()
    if found:
        raise StoreError(
            f"{str(path)!r} is empty, although the directory holds runs: {', '.join(found)}; "
            "restore it from a backup, or delete it to begin with an empty list; `tianflow train "
            "--resume RUN` continues one of the runs"
        )


@asynccontextmanager
async def _locked(files: RunFiles) -> AsyncIterator[None]:
    """Lock the directory while the context is open, at most until this process ends."""
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
        message = f"is in use by another service{where}"
        raise ConfigError(
            [Problem("--runs-dir", str(files.runs), message, "another directory")]
        ) from error
    return lock


@asynccontextmanager
async def _control_file(server: Server, tokens: Tokens, files: RunFiles) -> AsyncIterator[None]:
    """Write the control file, by which other programs find the service."""
    pid = os.getpid()
    file = ControlFile(
        run="",
        pid=pid,
        start_time=await asyncio.to_thread(process_start_time, pid),
        address=server.address,
        token=tokens.control,
        read_token=tokens.read,
    )
    try:
        await asyncio.to_thread(file.write, files.runs, SERVICE)
    except OSError as error:
        path = files.runs / SERVICE
        message = f"{str(path)!r} cannot be written: {error.strerror}"
        accepted = f"a directory without {SERVICE!r}; rename the run of this name, if it is one"
        raise ConfigError([Problem("--runs-dir", str(files.runs), message, accepted)]) from error
    try:
        yield
    finally:
        await asyncio.to_thread(file.remove, files.runs, SERVICE)


class _Signals:
    """``first`` becomes the first SIGINT or SIGTERM; a further one calls ``again``."""

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
