"""The small accounts a coordinator keeps beside the ledger: episodes, paused time, who waits for
what, the audit.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from tianflow.core.payloads import Episode
from tianflow.core.statistics import ComponentStatistics
from tianflow.logs import logger
from tianflow.rundir.audit_log import AuditPage, read_page

log = logger("tallies")

RECENT_EPISODES = 100
"""The customary window: CartPole and its like are solved when the mean over 100 episodes reaches
the threshold.
"""

KEPT_RECORDS = 1000
"""Entries of the audit in memory: a program may turn a knob again and again for weeks."""


class ActiveClock:
    """Monotonic seconds, less those for which the run was paused: what patience is measured
    with.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._paused_since: float | None = None

    def __call__(self) -> float:
        """Seconds of activity, from an arbitrary start."""
        return (
            self._clock() if self._paused_since is None else self._paused_since
        ) - self._paused_s

    def pause(self) -> None:
        """Stand still. Idempotent."""
        if self._paused_since is None:
            self._paused_since = self._clock()

    def resume(self) -> None:
        """Go on. Idempotent."""
        if self._paused_since is not None:
            self._paused_s += self._clock() - self._paused_since
            self._paused_since = None


class EpisodeTally:
    """Finished episodes of training: how many, and the last hundred."""

    def __init__(self, *, count: int = 0) -> None:
        self.count = count
        self.returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self.lengths: deque[int] = deque(maxlen=RECENT_EPISODES)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Count ``episodes``."""
        self.count += len(episodes)
        for episode in episodes:
            self.returns.append(episode.episode_return)
            self.lengths.append(episode.length)

    @property
    def mean(self) -> float | None:
        """Mean return of the last hundred; None before there are so many."""
        return (
            sum(self.returns) / len(self.returns) if len(self.returns) == RECENT_EPISODES else None
        )


class AuditLog:
    """The audit: every change and action, appended to a file by ``executor``; the newest are kept
    in memory, too.
    """

    def __init__(self, *, path: Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self.records: deque[Mapping[str, object]] = deque(maxlen=KEPT_RECORDS)
        self.count = 0
        """Records of this process, those that are no longer kept included."""
        self._newest: Future[None] | None = None

    def add(self, source: str, action: str, **details: object) -> None:
        """Record that ``source`` did ``action``, now."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "source": source, "action": action, **details}
        self.records.append(record)
        self.count += 1
        self._newest = self._executor.submit(self._append, json.dumps(record) + "\n")

    async def read(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of the file, with everything that was recorded before this was asked. Where it
        cannot be read, what is in memory.
        """
        if self._newest is not None:
            await asyncio.shield(
                asyncio.wrap_future(self._newest)
            )  # a reader that gives up would take what waits to be written with it
        try:
            return await asyncio.to_thread(read_page, self._path, before=before, limit=limit)
        except OSError as error:
            log.warning("the audit cannot be read", error=str(error))
            return AuditPage(tuple(self.records)[-limit:], None)

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log.warning(
                "a line of the audit cannot be written", error=str(error), line=line.rstrip()
            )


def waiting_seconds(components: Iterable[ComponentStatistics], now: float) -> tuple[float, float]:
    """(seconds the learner has waited for batches, actor-seconds waited for grants)."""
    learner = actors = 0.0
    for component in components:
        shares = component.time.at(now)
        if component.role == "learner":
            learner += shares.get("waiting:batch", 0.0)
        elif component.role == "actor":
            actors += shares.get("waiting:grant", 0.0)
    return learner, actors
