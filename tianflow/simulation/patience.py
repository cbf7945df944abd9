"""How long a simulation may go on: refused beforehand where it would take too long, and ended where
nothing comes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tianflow.errors import ConfigError, Problem
from tianflow.planning.memory import MOST_SLOTS

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.simulation.rates import MeasuredRates

MOST_S = 1e7
"""Virtual time, four months: the controllers look four times a second, and so often takes
minutes.
"""
MARGIN = 100.0
"""So many times as long as anything takes, without an update: one that dies of failures alone is a
matter of chance, but not of more.
"""
LEAST_S = 100.0
EVENTS, EVENTS_A_TRAJECTORY, EVENTS_AN_ACTOR = 5_000_000, 1000, 100
"""So many without an update: a trajectory of an update is eight or so, and each actor begins with a
few.
"""


def require_an_end(config: Config, rates: MeasuredRates, *, updates: int, seconds: float) -> None:
    """Refuse what would go on for too long, or could feed no update.

    Args:
        config: with as many actors as are to be simulated.
        rates: how long everything takes.
        updates: all that are to be done.
        seconds: of virtual time, after which it ends anyway.

    Raises:
        ConfigError: naming what makes it so long.
    """
    batch = config.algorithm.batch_trajectories
    if batch > MOST_SLOTS:
        raise ConfigError(
            [
                Problem(
                    "algorithm.batch_trajectories",
                    batch,
                    "no run has slots for so many",
                    f"at most {MOST_SLOTS}",
                )
            ]
        )
    if not seconds > 0.0:
        raise ConfigError(
            [
                Problem(
                    "--seconds",
                    seconds,
                    "no time would pass",
                    "seconds of virtual time, or 0 for no end",
                )
            ]
        )
    learning, sampling = an_update_s(config, rates), a_batch_s(config, rates)
    expected = updates * max(learning, sampling)
    if min(expected, seconds) > MOST_S:
        slow = (
            f"an update takes {learning:.3g} s (rates.update_s, learner.slowdown)"
            if learning > sampling
            else f"a batch of {batch} takes {sampling:.3g} s (rates.trajectory_s, "
            "algorithm.batch_trajectories, actors)"
        )
        accepted = f"at most {MOST_S:.0e} s: fewer --updates, or an end with --seconds"
        raise ConfigError(
            [
                Problem(
                    "--updates",
                    updates,
                    f"would last {expected:.3g} s of virtual time: {slow}",
                    accepted,
                )
            ]
        )


def an_update_s(config: Config, rates: MeasuredRates) -> float:
    """Seconds of one update."""
    return rates.update_s * (1.0 + config.learner.slowdown) + rates.publish_s


def a_batch_s(config: Config, rates: MeasuredRates) -> float:
    """Seconds in which all actors, those of one host in turn, make what an update takes, were they
    never held back.
    """
    at_once = min(config.actors.count, config.actors.hosts or config.actors.count)
    pace = 1.0 - rates.straggler_share * (1.0 - 1.0 / rates.straggler_factor)
    return config.algorithm.batch_trajectories * rates.trajectory_s / (at_once * pace)


class Patience:
    """Ends a simulation in which nothing is trained on any more, though events go on: failures that
    come sooner than a trajectory is over.

    Also where virtual time would stand still: it counts events, too.
    """

    def __init__(self, config: Config, rates: MeasuredRates) -> None:
        batch, actors = config.algorithm.batch_trajectories, config.actors.count
        longest = max(
            an_update_s(config, rates),
            a_batch_s(config, rates),
            rates.trajectory_s * rates.straggler_factor,
        )
        away = (
            rates.restart_s
            + rates.turn_s
            + rates.transfer_s(rates.trajectory_bytes)
            + rates.transfer_s(rates.weights_bytes)
        )
        self._seconds = LEAST_S + MARGIN * (
            longest + away + rates.latency_s + rates.learner_latency_s
        )
        self._events = EVENTS + EVENTS_A_TRAJECTORY * batch + EVENTS_AN_ACTOR * actors
        self._updates, self._now, self._seen = 0, 0.0, 0

    def is_over(self, *, updates: int, now: float, events: int) -> bool:
        """After so many ``updates``, at virtual time ``now``, ``events`` later than the
        beginning.
        """
        if updates != self._updates:
            self._updates, self._now, self._seen = updates, now, events
        return now - self._now > self._seconds or events - self._seen > self._events
