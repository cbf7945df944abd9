"""Throughput model: the speed that actors and learner sustain together, when their times vary.
Pure functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODEL = 0.1
"""Relative error by which the model may be too high; see
``tests/observability/test_throughput_model.py``.
"""
DEVIATIONS = 2.0
"""Standard errors to either side."""


@dataclass(frozen=True, slots=True)
class Side:
    """Actors or learner: environment steps per second that they make or take without waiting.

    Attributes:
        pace: environment steps per second.
        spread: standard deviation of one trajectory's or update's time over its mean.
        error: relative standard error of ``pace``.
    """

    pace: float
    spread: float = 0.0
    error: float = 0.0

    def shifted(self, deviations: float) -> Side:
        """The same side with ``pace`` higher by so many standard errors."""
        return Side(self.pace * max(0.1, 1.0 + deviations * self.error), self.spread, self.error)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected environment steps per second, and the range in which they will lie."""

    pace: float
    low: float
    high: float


def sustained(supply: Side, demand: Side, room: float) -> float:
    """Steps per second that both sides sustain, with room for ``room`` batches between them.

    The number of batches between them is modelled as a Brownian motion with drift, reflected at 0
    and at ``room`` (Harrison, Brownian Motion and Stochastic Flow Systems, 1985, section 5.6). The
    upper barrier holds back ``d / (1 - exp(-2 d room / v))``, with the drift ``d`` of supply over
    demand and the variance ``v`` in batches per second. A batch waits for its oldest trajectories,
    so it varies like one of them and not like the mean of all in it.
    """
    pace = min(supply.pace, demand.pace)
    drift = supply.pace - demand.pace
    variance = supply.pace * supply.spread**2 + demand.pace * demand.spread**2
    if variance <= 0.0 or pace <= 0.0:
        return pace
    steepness = -2.0 * drift * room / variance
    if abs(steepness) > 50.0:
        return pace
    held_back = variance / (2.0 * room) if abs(steepness) < 1e-9 else drift / -math.expm1(steepness)
    return max(0.0, supply.pace - held_back)


def forecast(supply: Side, demand: Side, room: float) -> Forecast:
    """`sustained` with its range: ``low`` if both sides are slower by two standard errors, ``high``
    the most that either side could reach.

    Where times do not vary, or their spread is unknown, the slower side decides alone.
    """
    if supply.spread == demand.spread == 0.0:
        return Forecast(*[min(supply.pace, demand.pace)] * 3)
    pace = sustained(supply, demand, room)
    low = (1.0 - MODEL) * sustained(supply.shifted(-DEVIATIONS), demand.shifted(-DEVIATIONS), room)
    high = min(supply.shifted(DEVIATIONS).pace, demand.shifted(DEVIATIONS).pace)
    return Forecast(pace, min(pace, low), max(pace, high))
