"""rows of history -> SinkFeeder -> a sink, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from tianflow import plugins
from tianflow.config.model import Config
from tianflow.core.statistics import SinkStatistics
from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger
from tianflow.observability.sinks.base import Sink, SinkRun
from tianflow.rundir.history import Row

GROUP = "tianflow.sinks"
CAPACITY = 300
"""Five minutes of rows a second apart: what is away for longer is not expected back."""
FLUSH_S = 10.0
"""A sink that takes longer over what is left must not keep a run from ending."""

log = logger("sinks")


class SinkFeeder:
    """Feeds one sink. Nothing that the sink does reaches, or is waited for by, whoever offers rows.

    Consumes: rows. Waits: in its thread, for rows and the sink. Unblocked by: `offer`, `close`.
    The thread is a daemon: a sink that never comes back is left behind when the process ends.

    Args:
        name: of the sink.
        make: gives it; called in the thread.
        capacity: most rows that wait; further ones are dropped.
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
        )  # bounded by `offer`: `put` on this one never waits
        self._queued = self._written = self._refused = 0
        self._over = threading.Event()
        self._ended: Future[None] = Future()
        threading.Thread(target=self._work, name=f"sink-{name}", daemon=True).start()

    def statistics(self) -> SinkStatistics:
        """Rows offered, and those that the sink did not get."""
        lost = self._queued - self._written if self._over.is_set() else 0
        return SinkStatistics(self._queued + self._refused, self._refused + lost)

    def offer(self, row: Row) -> None:
        """Queue ``row``, or drop it: the oldest are kept. Never waits."""
        if self._over.is_set() or self._queued - self._written >= self._capacity:
            self._refused += 1
            return
        self._queued += 1
        self._queue.put(row)

    async def close(self, patience_s: float) -> None:
        """Let the sink take what is left and close, for at most so many seconds; then it is given
        up.
        """
        self._queue.put(None)
        _, late = await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=patience_s)
        if late:
            self._over.set()
            log.warning(
                "a sink is given up: it did not end in time",
                sink=self.name,
                seconds=patience_s,
                dropped=self.statistics().dropped,
            )

    def _work(self) -> None:
        try:
            self._feed(self._make())
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; it costs the sink, and not the run
            self._over.set()
            log.warning(
                "a sink failed, and gets nothing more",
                sink=self.name,
                error=f"{type(error).__name__}: {error}",
            )
        finally:
            self._over.set()
            self._ended.set_result(None)

    def _feed(self, sink: Sink) -> None:
        try:
            while (row := self._queue.get()) is not None and not self._over.is_set():
                sink.write(row)
                self._written += 1
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to be told
                sink.close()
            raise
        sink.close()


def require_sinks(config: Config) -> None:
    """Import what ``metrics.sinks`` names, and look for the packages that they need. Blocks.

    Raises:
        ConfigError: one is not there, lacks a package, or does not take its arguments.
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
            accepted = (
                f"pip install 'tianflow[{factory.extra}]' first"
                if hasattr(factory, "extra")
                else ""
            )
            problems.append(
                Problem("metrics.sinks", name, f"{missing[0]} is not installed", accepted)
            )
        problems += _unknown_arguments(name, factory, config.metrics.kwargs.get(name, {}))
    if problems:
        raise ConfigError(problems)


def _unknown_arguments(name: str, factory: Any, kwargs: dict[str, Any]) -> list[Problem]:
    if not callable(factory):
        return [
            Problem(
                "metrics.sinks", name, "cannot be called", "a class or function that makes a sink"
            )
        ]
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    known = tuple(sorted(set(parameters) - {"run"}))
    accepted = f"one of {', '.join(known)}" if known else "nothing"
    return [
        Problem(
            f"metrics.kwargs.{name}.{key}",
            value,
            "no such argument",
            accepted,
            plugins.nearest(key, known),
        )
        for key, value in kwargs.items()
        if key not in known
    ]


def outlets(config: Config, run: SinkRun) -> tuple[SinkFeeder, ...]:
    """One for each of ``metrics.sinks``."""

    def maker(name: str) -> Callable[[], Sink]:
        def make() -> Sink:
            factory: Any = plugins.load(GROUP, name, path="metrics.sinks")
            sink: Sink = factory(run=run, **config.metrics.kwargs.get(name, {}))
            return sink

        return make

    return tuple(SinkFeeder(name=name, make=maker(name)) for name in config.metrics.sinks)
