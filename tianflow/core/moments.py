"""How long something took, in few numbers that can be added up: count, mean, spread and skew."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tianflow.core.statistics import ComponentStatistics, Histogram

TIMED = {"actor": "trajectory_seconds", "learner": "update_seconds"}
"""What a component of each role does again and again, by the name of its distribution."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of ``count`` values: sums of them and of their powers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    cubes: float = 0.0

    @classmethod
    def of(cls, found: Histogram) -> Moments:
        """Those of everything that was counted."""
        return cls(found.count, found.total, found.squares, found.cubes)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Moments:
        """From what `told` gave; what is missing is 0."""
        count, mean = int(told.get("count") or 0), float(told.get("mean") or 0.0)
        deviation = mean * float(told.get("spread") or 0.0)
        third = float(told.get("skew") or 0.0) * deviation**3
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
        """What came after ``before``; all of it where there was more before: who counts was
        restarted.
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
        """0 without a value."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """About the mean."""
        return max(0.0, self.squares / self.count - self.mean**2) if self.count else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation over the mean."""
        return math.sqrt(self.variance) / self.mean if self.mean > 0.0 else 0.0

    @property
    def skew(self) -> float:
        """Third central moment over the cube of the standard deviation; 0 where all are equal but
        for rounding.
        """
        if self.spread < 1e-3:
            return 0.0
        third = self.cubes / self.count - 3 * self.mean * self.variance - self.mean**3
        return float(third / self.variance**1.5)

    def told(self) -> dict[str, float]:
        """The same, as a person reads it."""
        return {"count": self.count, "mean": self.mean, "spread": self.spread, "skew": self.skew}


def spread_between(parts: Iterable[Moments]) -> float:
    """Standard deviation of the own means of ``parts`` over the mean of all, less what their own
    spread makes of it by chance.
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
    """By role, how long trajectories (`Moments.told`, and ``apart``: `spread_between` the actors)
    and updates took between two looks.

    A role of which nothing ended in the meantime is left out.
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
    told = {role: together.told() for role, together in found.items() if together.count}
    if "actor" in told:
        told["actor"]["apart"] = spread_between(of_actors)
    return told


def moments(component: ComponentStatistics) -> Moments | None:
    """Of what ``component`` does again and again, since it began; None: its role has no such
    thing.
    """
    found = component.distributions.get(TIMED.get(component.role, ""))
    return None if found is None else Moments.of(found)
