"""Counters of the coordinator beside the ledger: active time, episodes, waiting time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tianflow.core.payloads import Episode
from tianflow.core.statistics import ComponentStatistics

RECENT_EPISODES = 100
"""The customary window: CartPole and its like are solved when the mean over 100 episodes reaches
the threshold.
"""


class ActiveClock:
    """Monotonic seconds, less the time for which the run was paused. The exchange measures patience
    with it.
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
        """Stop the clock. Idempotent."""
        if self._paused_since is None:
            self._paused_since = self._clock()

    def resume(self) -> None:
        """Start the clock again. Idempotent."""
        if self._paused_since is not None:
            self._paused_s += self._clock() - self._paused_since
            self._paused_since = None


class EpisodeTally:
    """Finished episodes of training: their number, and the last hundred."""

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
        """Mean return of the last hundred; None while there are fewer."""
        return (
            sum(self.returns) / len(self.returns) if len(self.returns) == RECENT_EPISODES else None
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
