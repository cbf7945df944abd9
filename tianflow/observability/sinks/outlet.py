"""`SinkFeeder`: passes rows of history to a sink in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import packages_distributions
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tianflow import plugins
from tianflow.config.model import Config
from tianflow.core.statistics import SinkStatistics
from tianflow.errors import ConfigError, Problem
from tianflow.interfaces import Sink, SinkRun
from tianflow.logs import logger
from tianflow.rundir.history import Row

GROUP = "tianflow.sinks"
DIRECTORIES: Mapping[str, str] = {"tensorboard": "directory", "wandb": "dir"}
"""Arguments of shipped sinks that name a directory."""
CAPACITY = 300
"""Five minutes of rows at one per second; a sink that is unavailable for longer is not expected to
return.
"""
FLUSH_S = 10.0
"""Seconds that a sink gets for its remaining rows at the end of a run."""

log = logger("sinks")


class SinkFeeder:
    """Feeds one sink. A slow or failing sink does not affect the caller of `offer`.

    Consumes: rows. Waits: in its thread, for rows and the sink. Unblocked by: `offer`, `close`. The
    thread is a daemon, so a sink that hangs does not delay the end of the process.

    Args:
        name: of the sink.
        make: makes the sink; called in the thread.
        capacity: maximum number of waiting rows; further ones are dropped.
    """

    def __init__(self, *, name: str, make: Callable[[], Sink], capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(
                f"capacity = {capacity}: every row would be dropped; accepted: 1 or more"
            )
        self.name = name
        self._make, self._capacity = make, capacity
        self._queue: SimpleQueue[Row | None] = (
            SimpleQueue()
        )  # bounded by `offer`: `put` on this queue never waits
        self._queued = self._written = self._refused = 0
        self._stopped = threading.Event()
        self._ended: Future[None] = Future()
        threading.Thread(target=self._work, name=f"sink-{name}", daemon=True).start()

    def statistics(self) -> SinkStatistics:
        """Rows offered, and rows that the sink did not receive."""
        lost = self._queued - self._written if self._stopped.is_set() else 0
        return SinkStatistics(self._queued + self._refused, self._refused + lost)

    def offer(self, row: Row) -> None:
        """Queue ``row``, or drop it if the queue is full. Never waits."""
        if self._stopped.is_set() or self._queued - self._written >= self._capacity:
            self._refused += 1
            return
        self._queued += 1
        self._queue.put(row)

    async def close(self, patience_s: float) -> None:
        """Let the sink write the remaining rows and close, for at most ``patience_s`` seconds."""
        self._queue.put(None)
        _, late = await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=patience_s)
        if late:
            self._stopped.set()
            log.warning(
                "a sink did not close in time and is abandoned",
                sink=self.name,
                seconds=patience_s,
                dropped=self.statistics().dropped,
            )

    def _work(self) -> None:
        try:
            self._feed(self._make())
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; the run continues without it
            self._stopped.set()
            log.warning(
                "a sink failed and receives no more rows",
                sink=self.name,
                error=f"{type(error).__name__}: {error}",
            )
        finally:
            self._stopped.set()
            self._ended.set_result(None)

    def _feed(self, sink: Sink) -> None:
        try:
            while (row := self._queue.get()) is not None and not self._stopped.is_set():
                sink.write(row)
                self._written += 1
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to report
                sink.close()
            raise
        sink.close()


def require_sinks(config: Config) -> None:
    """Import the sinks of ``metrics.sinks``, and check the packages that they need. Blocks.

    Raises:
        ConfigError: a sink does not exist, lacks a package, or does not accept its arguments.
    """
    problems = []
    for name in config.metrics.sinks:
        factory: Any = plugins.load(GROUP, name, path="metrics.sinks")
        missing = [
            package
            for package in getattr(factory, "packages", ())
            if importlib.util.find_spec(package) is None
        ]
        if missing:
            message = f"{missing[0]} is not installed"
            problems.append(Problem("metrics.sinks", name, message, _remedy(factory)))
        problems += _unknown_arguments(name, factory, config.metrics.kwargs.get(name, {}))
    if problems:
        raise ConfigError(problems)


def _remedy(factory: Any) -> str:
    """The command that installs the packages of ``factory``, "" without an extra of a known
    distribution. The extra belongs to the distribution that ships the sink.
    """
    if not hasattr(factory, "extra"):
        return ""
    package = factory.__module__.partition(".")[0]
    if package == "tianflow":
        return f"{plugins.install_line(factory.extra)} first"
    owners = packages_distributions().get(package, [])
    return f"pip install '{owners[0]}[{factory.extra}]' first" if owners else ""


def _unknown_arguments(name: str, factory: Any, kwargs: dict[str, Any]) -> list[Problem]:
    if not callable(factory):
        return [
            Problem(
                "metrics.sinks", name, "is not callable", "a class or function that makes a sink"
            )
        ]
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    known = tuple(sorted(set(parameters) - {"run"}))
    accepted = f"one of {', '.join(known)}" if known else "no arguments"
    return [
        Problem(
            f"metrics.kwargs.{name}.{key}",
            value,
            "is not an argument of the sink",
            accepted,
            plugins.nearest(key, known),
        )
        for key, value in kwargs.items()
        if key not in known
    ]


def _with_absolute(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a sink, with absolute directories. A sink is made in a thread, and an
    environment of the same process may change the working directory first.
    """
    directory = DIRECTORIES.get(name, "")
    given = arguments.get(directory)
    if not isinstance(given, str):
        return dict(arguments)
    return {**arguments, directory: str(Path(given).absolute())}


def feeders(config: Config, run: SinkRun) -> tuple[SinkFeeder, ...]:
    """One feeder for each of ``metrics.sinks``."""

    def maker(name: str) -> Callable[[], Sink]:
        def make() -> Sink:
            factory: Any = plugins.load(GROUP, name, path="metrics.sinks")
            sink: Sink = factory(run=run, **arguments)
            return sink

        arguments = _with_absolute(name, config.metrics.kwargs.get(name, {}))
        return make

    return tuple(SinkFeeder(name=name, make=maker(name)) for name in config.metrics.sinks)
