"""The small accounts a coordinator keeps beside the ledger: episodes, paused time, who waits for what, the audit."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from tianflow.logs import logger
from tianflow.payloads import Episode
from tianflow.statistics import ComponentStatistics

log = logger("tallies")

RECENT_EPISODES = 100
"""The customary window: CartPole and its like are solved when the mean over 100 episodes reaches the threshold."""


class ActiveClock:
    """Monotonic seconds, less those for which the run was paused: what patience is measured with."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._paused_since: float | None = None

    def __call__(self) -> float:
        """Seconds of activity, from an arbitrary start."""
        return (self._clock() if self._paused_since is None else self._paused_since) - self._paused_s

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
        return sum(self.returns) / len(self.returns) if len(self.returns) == RECENT_EPISODES else None


class Journal:
    """The audit: every change and action, kept in memory and appended to a file by ``executor``."""

    def __init__(self, *, path: Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self.records: list[Mapping[str, object]] = []

    def add(self, source: str, action: str, **details: object) -> None:
        """Record that ``source`` did ``action``, now."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "source": source, "action": action, **details}
        self.records.append(record)
        self._executor.submit(self._append, json.dumps(record) + "\n")

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log.warning("a line of the audit cannot be written", error=str(error), line=line.rstrip())


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


class Bottleneck:
    """Names what holds the run back, from shares of time over the last few seconds."""

    WINDOW_S = 5.0
    NOTICEABLE = 0.15
    """A share of waiting below this is noise of scheduling, not a bottleneck."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, ...]] = deque()

    def name(
        self, components: Sequence[ComponentStatistics], now: float, *, credits_spent: bool, blocked: Mapping[str, float] | None = None
    ) -> str:
        """One of sampling-bound, learning-bound, balance-bound, transport-bound, balanced, starting.

        ``credits_spent``: every credit that the bound allows is out, so both sides could go on and the bound says no.
        ``blocked``: `ReplayStatistics.blocked_s` of a run with replay. There not the credits but the limiter holds either side back.
        """
        actors = sum(component.role == "actor" for component in components)
        held = {} if blocked is None else blocked
        mark = (now, *waiting_seconds(components, now), held.get("draw", 0.0), held.get("insert", 0.0))
        self._marks.append(mark)
        while len(self._marks) > 2 and self._marks[1][0] <= now - self.WINDOW_S:
            self._marks.popleft()
        passed = now - self._marks[0][0]
        if passed < 0.5 or not actors:
            return "starting"
        waited, actors_waited, draws, inserts = ((new - old) / passed for new, old in zip(mark[1:], self._marks[0][1:], strict=True))
        learner_waits, actors_wait = waited > self.NOTICEABLE, actors_waited / actors > self.NOTICEABLE
        if blocked is not None:
            return _with_replay(learner_waits, actors_wait, draws > self.NOTICEABLE, inserts > self.NOTICEABLE)
        if learner_waits and actors_wait:
            return "balance-bound" if credits_spent else "transport-bound"
        if learner_waits:
            return "sampling-bound"
        return "learning-bound" if actors_wait else "balanced"


def _with_replay(learner_waits: bool, actors_wait: bool, draws_held: bool, inserts_held: bool) -> str:
    """The verdict for a run with replay.

    A learner asks ahead, and actors go on while there are slots: a side that is held back without waiting loses nothing.
    Whoever waits though nobody holds it back waits for the shards.
    """
    match learner_waits and draws_held, actors_wait and inserts_held:
        case True, True:
            return "balance-bound"
        case True, False:
            return "sampling-bound"
        case False, True:
            return "learning-bound"
        case _:
            return "transport-bound" if learner_waits or actors_wait else "balanced"
