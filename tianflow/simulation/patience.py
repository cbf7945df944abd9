"""Limits of a simulation: refuses one that would take too long, and ends one that makes no
progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tianflow.errors import ConfigError, Problem
from tianflow.planning.memory import MOST_SLOTS

if TYPE_CHECKING:
    from tianflow.config.model import Config
    from tianflow.simulation.rates import MeasuredRates

MOST_S = 1e7
"""Maximum virtual time, four months: the balancer's four ticks per second then take minutes."""
MARGIN = 100.0
"""Multiple of the longest duration that may pass without an update. Random failures may delay an
update, but not by this much.
"""
LEAST_S = 100.0
EVENTS, EVENTS_A_TRAJECTORY, EVENTS_AN_ACTOR = 5_000_000, 1000, 100
"""Number of events without an update: a trajectory takes about eight, and each actor starts with a
few.
"""


def require_an_end(config: Config, rates: MeasuredRates, *, updates: int, seconds: float) -> None:
    """Refuse a simulation that would take too long, or can feed no update.

    Args:
        config: with the simulated number of actors.
        rates: durations.
        updates: all updates, with the warm-up.
        seconds: virtual time after which the simulation ends anyway.

    Raises:
        ConfigError: names the cause.
    """
    batch = config.algorithm.batch_trajectories
    if batch > MOST_SLOTS:
        raise ConfigError(
            [
                Problem(
                    "algorithm.batch_trajectories",
                    batch,
                    "exceeds the slots of any run",
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
                    "leaves no virtual time",
                    "a positive number of seconds, or 0 for no limit",
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
        accepted = f"at most {MOST_S:.0e} s: fewer --updates, or a limit with --seconds"
        raise ConfigError(
            [
                Problem(
                    "--updates",
                    updates,
                    f"would take {expected:.3g} s of virtual time: {slow}",
                    accepted,
                )
            ]
        )


def an_update_s(config: Config, rates: MeasuredRates) -> float:
    """Seconds of one update."""
    return rates.update_s * (1.0 + config.learner.slowdown) + rates.publish_s


def a_batch_s(config: Config, rates: MeasuredRates) -> float:
    """Seconds in which all actors sample one batch if they never wait; actors of one host take
    turns.
    """
    at_once = min(config.actors.count, config.actors.hosts or config.actors.count)
    pace = 1.0 - rates.straggler_share * (1.0 - 1.0 / rates.straggler_factor)
    return config.algorithm.batch_trajectories * rates.trajectory_s / (at_once * pace)


class Patience:
    """Decides when a simulation without updates has stalled, for example because actors fail sooner
    than they commit.

    It also counts events, for a simulation whose virtual time stands still.
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
        self._updates, self._since, self._events_before = 0, 0.0, 0

    def is_over(self, *, updates: int, now: float, events: int) -> bool:
        """True if too many events or too much time passed since the last update."""
        if updates != self._updates:
            self._updates, self._since, self._events_before = updates, now, events
        return now - self._since > self._seconds or events - self._events_before > self._events
