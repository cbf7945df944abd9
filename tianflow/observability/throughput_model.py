"""What two sides that wait for each other sustain together, when how long they take varies. Pure
functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODEL = 0.1
"""What the model may be too high by: see ``tests/observability/test_throughput_model.py``."""
DEVIATIONS = 2.0
"""Standard errors to either side."""


@dataclass(frozen=True, slots=True)
class Side:
    """Actors or learner: environment steps per second that it makes or takes without ever waiting.

    ``spread``: standard deviation of one trajectory's or update's time over its mean. ``error``:
    standard error of ``pace`` over it, from how few were seen.
    """

    pace: float
    spread: float = 0.0
    error: float = 0.0

    def off(self, deviations: float) -> Side:
        """The same, if it was misjudged by so many standard errors."""
        return Side(self.pace * max(0.1, 1.0 + deviations * self.error), self.spread, self.error)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Environment steps per second: about ``pace``, and hardly less than ``low`` or more than
    ``high``.
    """

    pace: float
    low: float
    high: float


def sustained(supply: Side, demand: Side, room: float) -> float:
    """Steps per second that both sustain, with room for ``room`` batches between them.

    What lies between them is a Brownian motion with drift kept between 0 and ``room`` (Harrison,
    Brownian Motion and Stochastic Flow Systems, 1985, section 5.6): what the upper barrier holds
    back is ``d / (1 - exp(-2 d room / v))``, with the drift ``d`` of supply over demand and the
    variance ``v`` in batches per second. A batch waits for certain trajectories, the oldest, so it
    varies like one of them and not like the mean of all in it.
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
    """`sustained`, and how far off that may be, both sides misjudged by two standard errors;
    ``high`` is what neither could exceed.

    Where nothing varies, or nobody knows, the slower side alone decides.
    """
    if supply.spread == demand.spread == 0.0:
        return Forecast(*[min(supply.pace, demand.pace)] * 3)
    pace = sustained(supply, demand, room)
    low = (1.0 - MODEL) * sustained(supply.off(-DEVIATIONS), demand.off(-DEVIATIONS), room)
    high = min(supply.off(DEVIATIONS).pace, demand.off(DEVIATIONS).pace)
    return Forecast(pace, min(pace, low), max(pace, high))
