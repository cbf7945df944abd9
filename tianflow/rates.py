"""How fast a run goes: a small ring of samples, and speeds over the last 10, 60 and 300 seconds."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tianflow.statistics import RunStatistics

WINDOWS = (10.0, 60.0, 300.0)
SPACING = 1.0
"""Least seconds between two kept samples: 300 seconds then fit into about 300 of them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Where a run stood at ``now`` (monotonic seconds). ``mean_return`` is of the last 100 episodes, None before the first."""

    now: float
    env_steps: int
    updates: int
    mean_return: float | None


class Rates:
    """Speeds of one run, from samples taken now and then.

    Args:
        read: gives the run's statistics.
    """

    def __init__(self, *, read: Callable[[], RunStatistics]) -> None:
        self._read = read
        # One more than the longest window holds, so that the window has a sample at its far end.
        self._samples: deque[Sample] = deque(maxlen=int(WINDOWS[-1] / SPACING) + 2)

    async def run(self, started: Callable[[], None]) -> None:
        """Sample once a second until cancelled."""
        started()
        while True:
            self.sample()
            await asyncio.sleep(SPACING)

    def sample(self) -> RunStatistics:
        """Take a sample now; the statistics it was made from."""
        statistics = self._read()
        returns = statistics.recent_returns
        mean = sum(returns) / len(returns) if returns else None
        sample = Sample(statistics.now, statistics.env_steps, statistics.ledger.updates, mean)
        # The newest sample is always kept; the one before it goes when it is too close to its predecessor.
        if len(self._samples) >= 2 and self._samples[-1].now - self._samples[-2].now < SPACING:
            self._samples.pop()
        self._samples.append(sample)
        return statistics

    def steps_per_s(self, window: float) -> float | None:
        """Environment steps per second over the last ``window`` seconds; None before there are two samples."""
        ends = self._ends(window)
        return None if ends is None else (ends[1].env_steps - ends[0].env_steps) / (ends[1].now - ends[0].now)

    def updates_per_s(self, window: float) -> float | None:
        """Updates per second over the last ``window`` seconds; None before there are two samples."""
        ends = self._ends(window)
        return None if ends is None else (ends[1].updates - ends[0].updates) / (ends[1].now - ends[0].now)

    def return_per_s(self, window: float) -> float | None:
        """How fast the mean return rises; None before there are two samples with one."""
        ends = self._ends(window)
        if ends is None or ends[0].mean_return is None or ends[1].mean_return is None:
            return None
        return (ends[1].mean_return - ends[0].mean_return) / (ends[1].now - ends[0].now)

    def _ends(self, window: float) -> tuple[Sample, Sample] | None:
        if len(self._samples) < 2:
            return None
        newest = self._samples[-1]
        times = [sample.now for sample in self._samples]
        first = min(bisect_left(times, newest.now - window), len(times) - 2)
        oldest = self._samples[first]
        return (oldest, newest) if newest.now > oldest.now else None
