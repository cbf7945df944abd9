"""Speeds, shares of time and learning of a run, over the last 10, 60 and 300 seconds of samples."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from tianflow.core.learning import Sums, between
from tianflow.core.statistics import RunStatistics, mean_or_none
from tianflow.observability.learning import LearningTotals, loss_in

Curves = Mapping[Literal["return", "loss"], Sequence[float | None]]
"""Values in order, by what they show; None where one is missing."""
WINDOWS = (10.0, 60.0, 300.0)
SPACING = 1.0
"""Minimum seconds between two stored samples: about 300 of them cover 300 seconds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of a run at ``now`` (monotonic seconds). ``mean_return`` is that of the last 100
    episodes; None before the first.
    """

    now: float
    env_steps: int
    updates: int
    mean_return: float | None
    times: Mapping[str, Mapping[str, float]]
    """Seconds in each state, summed over the components of a role."""
    inserted: int = 0
    drawn: int = 0
    """Like ``inserted``: items of replay."""
    held_back: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each side of replay was blocked; empty without replay."""
    learning: Sums = field(default_factory=dict)
    """Sums of learning statistics."""


class RunRates:
    """Speeds of one run, from samples at any times.

    Args:
        read: returns the run's statistics.
    """

    def __init__(self, *, read: Callable[[], RunStatistics]) -> None:
        self._read = read
        # One more than the longest window holds: the window needs a sample at its far end.
        self._samples: deque[Sample] = deque(maxlen=int(WINDOWS[-1] / SPACING) + 2)
        self._learning = LearningTotals()

    async def run(self, started: Callable[[], None]) -> None:
        """Sample once a second until cancelled."""
        started()
        while True:
            self.sample()
            await asyncio.sleep(SPACING)

    def sample(self) -> RunStatistics:
        """Take a sample now; the statistics behind it."""
        statistics = self._read()
        sample = Sample(
            statistics.now,
            statistics.env_steps,
            statistics.ledger.updates,
            mean_or_none(statistics.recent_returns),
            _times(statistics),
            *_of_replay(statistics),
            self._learning.update(statistics),
        )
        # The newest sample always stays. The one before it is removed if it is too close to its
        # predecessor.
        if len(self._samples) >= 2 and self._samples[-1].now - self._samples[-2].now < SPACING:
            self._samples.pop()
        self._samples.append(sample)
        return statistics

    def steps_per_s(self, window: float) -> float | None:
        """Environment steps per second over the last ``window`` seconds; None before there are two
        samples.
        """
        ends = self._ends(window)
        return (
            None
            if ends is None
            else (ends[1].env_steps - ends[0].env_steps) / (ends[1].now - ends[0].now)
        )

    def updates_per_s(self, window: float) -> float | None:
        """Updates per second over the last ``window`` seconds; None before there are two
        samples.
        """
        ends = self._ends(window)
        return (
            None
            if ends is None
            else (ends[1].updates - ends[0].updates) / (ends[1].now - ends[0].now)
        )

    def return_per_s(self, window: float) -> float | None:
        """Slope of the mean return; None before two samples have one."""
        ends = self._ends(window)
        if ends is None or ends[0].mean_return is None or ends[1].mean_return is None:
            return None
        return (ends[1].mean_return - ends[0].mean_return) / (ends[1].now - ends[0].now)

    def shares(self, window: float) -> dict[str, dict[str, float]]:
        """Fractions of the last ``window`` seconds in each state, by role; empty before there are
        two samples.
        """
        ends = self._ends(window)
        if ends is None:
            return {}
        shares = {}
        for role, seconds in ends[1].times.items():
            before = ends[0].times.get(role, {})
            # A restarted component counts from 0 again, so a decrease counts as 0.
            spent = {
                state: max(0.0, value - before.get(state, 0.0)) for state, value in seconds.items()
            }
            total = sum(spent.values())
            if total > 0.0:
                shares[role] = {
                    state: value / total for state, value in spent.items() if value > 0.0
                }
        return shares

    def samples_per_insert(self, window: float) -> float | None:
        """Draws per insert over the last ``window`` seconds; None without replay or inserts."""
        ends = self._ends(window)
        if ends is None or ends[1].inserted <= ends[0].inserted:
            return None
        return (ends[1].drawn - ends[0].drawn) / (ends[1].inserted - ends[0].inserted)

    def held_back(self, window: float) -> dict[str, float]:
        """Share of the last ``window`` seconds for which each side of replay was blocked; empty
        before there are two samples.
        """
        ends = self._ends(window)
        if ends is None:
            return {}
        before, passed = ends[0].held_back, ends[1].now - ends[0].now
        # The seconds are read a moment after the sample's time, so a share could exceed 1.
        return {
            side: min(1.0, (seconds - before.get(side, 0.0)) / passed)
            for side, seconds in ends[1].held_back.items()
        }

    def learning(self, window: float) -> dict[str, float]:
        """Means of learning statistics over the last ``window`` seconds; the newest value of those
        that have none in it. Empty before there is a sample.
        """
        if not self._samples:
            return {}
        ends, newest = self._ends(window), self._samples[-1].learning
        values = {name: values.last for name, values in newest.items()}
        if ends is not None:
            lately = between(ends[0].learning, newest)
            values |= {name: found.mean for name, found in lately.items()}
        return values

    def newest(self) -> dict[str, float]:
        """The newest value of each learning statistic. Empty before there is a sample."""
        sums = self._samples[-1].learning if self._samples else {}
        return {name: values.last for name, values in sums.items()}

    def curves(self, points: int) -> Curves:
        """Return and loss over the stored samples (300 seconds), each as at most ``points`` values
        in order. A curve without a value is omitted.
        """
        samples = list(self._samples)
        if len(samples) < 2:
            return {}
        parts = min(points, len(samples) - 1)
        edges = [samples[place * (len(samples) - 1) // parts] for place in range(parts + 1)]
        loss = loss_in(edges[-1].learning)
        curves: Curves = {
            "return": [edge.mean_return for edge in edges[1:]],
            "loss": [
                _mean_between(before.learning, after.learning, loss)
                for before, after in pairwise(edges)
            ],
        }
        return {
            name: curve
            for name, curve in curves.items()
            if any(value is not None for value in curve)
        }

    def _ends(self, window: float) -> tuple[Sample, Sample] | None:
        if len(self._samples) < 2:
            return None
        newest = self._samples[-1]
        times = [sample.now for sample in self._samples]
        first = min(bisect_left(times, newest.now - window), len(times) - 2)
        oldest = self._samples[first]
        return (oldest, newest) if newest.now > oldest.now else None


def _mean_between(before: Sums, after: Sums, name: str | None) -> float | None:
    if name is None or name not in after:
        return None
    found = between({name: before[name]} if name in before else {}, {name: after[name]})
    return found[name].mean if found else None


def _of_replay(run: RunStatistics) -> tuple[int, int, Mapping[str, float]]:
    return (
        (0, 0, {})
        if run.replay is None
        else (run.replay.inserts, run.replay.drawn, run.replay.blocked_s)
    )


def _times(run: RunStatistics) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, float]] = {}
    for component in run.components:
        of_role = times.setdefault(component.role, {})
        for state, seconds in component.time.at(run.now).items():
            of_role[state] = of_role.get(state, 0.0) + seconds
    return times
