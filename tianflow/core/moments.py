"""Moments of durations: count, mean, spread and skew, in sums that can be added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tianflow.core.statistics import ComponentStatistics, Histogram

TIMED = {"actor": "trajectory_seconds", "learner": "update_seconds"}
"""Distribution of the repeated work of a component, by role."""
GREATEST = 1e30
"""Of a value in a summary, so that no sum of powers overflows."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums of ``count`` values and of their powers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0

    @classmethod
    def of(cls, found: Histogram) -> Moments:
        """The moments of a histogram."""
        return cls(found.count, found.total, found.squares, found.cubes)

    @classmethod
    def read(cls, summary: Mapping[str, Any]) -> Moments:
        """The moments behind a `summary`; missing values are 0.

        None at all if a value is one that no duration has, as in a damaged file.
        """
        values = [summary.get(key) or 0.0 for key in ("count", "mean", "spread", "skew")]
        if not all(abs(value) <= GREATEST for value in values):  # nor NaN
            return cls()
        count, (mean, spread, skew) = int(values[0]), map(float, values[1:])
        deviation = mean * spread
        third = skew * deviation**3
        return cls(
            count,
            count * mean,
            count * (mean**2 + deviation**2),
            count * (mean**3 + 3 * mean * deviation**2 + third),
        )

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            self.cubes + other.cubes,
        )

    def since(self, before: Moments) -> Moments:
        """The values after ``before``. If ``before`` has more, the component was restarted, and all
        values count.
        """
        if before.count > self.count:
            return self
        return Moments(
            self.count - before.count,
            max(0.0, self.total - before.total),
            max(0.0, self.squares - before.squares),
            max(0.0, self.cubes - before.cubes),
        )

    @property
    def mean(self) -> float:
        """Mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Variance about the mean."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation over the mean."""
        return math.sqrt(self.variance) / self.mean if self.mean > 0.0 else 0.0

    @property
    def skew(self) -> float:
        """Third central moment over the cube of the standard deviation; 0 if the values differ only
        by rounding.
        """
        cube = self.variance**1.5
        if self.spread < 1e-3 or not cube:
            return 0.0
        third = self.cubes / self.count - 3 * self.mean * self.variance - self.mean**3
        return float(third / cube)

    def summary(self) -> dict[str, float]:
        """Count, mean, spread and skew."""
        return {"count": self.count, "mean": self.mean, "spread": self.spread, "skew": self.skew}


def spread_between(parts: Iterable[Moments]) -> float:
    """Standard deviation of the means of ``parts`` over the mean of all, less the part that the
    spread within them causes by chance.
    """
    own = [part for part in parts if part.count > 1]
    if len(own) < 2:
        return 0.0
    mean = sum(part.mean for part in own) / len(own)
    between = sum((part.mean - mean) ** 2 for part in own) / (len(own) - 1)
    by_chance = sum(part.variance / (part.count - 1) for part in own) / len(own)
    return math.sqrt(max(0.0, between - by_chance)) / mean if mean > 0.0 else 0.0


def durations(
    before: Iterable[ComponentStatistics], now: Iterable[ComponentStatistics]
) -> dict[str, dict[str, float]]:
    """Durations of trajectories and updates between two samples, by role: `Moments.summary`, for
    actors with `spread_between` them as ``apart``.

    A role without a finished trajectory or update is omitted.
    """
    old = {component.name: moments(component) or Moments() for component in before}
    found: dict[str, Moments] = {}
    of_actors = []
    for component in now:
        own = moments(component)
        if own is not None:
            found[component.role] = found.get(component.role, Moments()) + own.since(
                old.get(component.name, Moments())
            )
            of_actors += [own] if component.role == "actor" else []
    summaries = {role: together.summary() for role, together in found.items() if together.count}
    if "actor" in summaries:
        summaries["actor"]["apart"] = spread_between(of_actors)
    return summaries


def moments(component: ComponentStatistics) -> Moments | None:
    """Moments of the component's repeated work since it began; None if its role has none."""
    found = component.distributions.get(TIMED.get(component.role, ""))
    return None if found is None else Moments.of(found)
