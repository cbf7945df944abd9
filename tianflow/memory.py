"""How many slots a run wants, and how many its memory limit holds."""

from __future__ import annotations

from tianflow.channels.arena import arena_nbytes
from tianflow.config import Config
from tianflow.config_rules import is_paced
from tianflow.errors import ConfigError, Problem
from tianflow.payloads import TrajectoryLayout

MOST_SLOTS = 65536
DRAW_SLOTS = 4
"""One that the learner has, one ahead of it, one whose priorities are on their way back, one that shards write."""


def slots_wanted(config: Config) -> int:
    """Slots for every credit the bound allows, and one for every actor that may hold a ticket which was given up.

    Where the bound paces nobody only memory pushes back: four batches and two for each actor then. So it is with replay, which
    takes a trajectory out of its slot at once, however old it may become.
    """
    batch, actors = config.algorithm.batch_trajectories, config.actors.count
    if config.bound is None or not is_paced(config) or config.algorithm.window is not None:
        return max(32, 4 * batch + 2 * actors)
    return (config.bound + 1) * batch + actors


def slots_capacity(config: Config, layout: TrajectoryLayout) -> int:
    """Slots that ``balance.memory_limit`` has room for."""
    return min(MOST_SLOTS, config.balance.memory_limit // arena_nbytes(layout, 1))


def check_memory(config: Config, layout: TrajectoryLayout) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: the limit does not even hold one batch and a slot for every actor.
    """
    least = config.algorithm.batch_trajectories + config.actors.count
    capacity = slots_capacity(config, layout)
    if capacity < least:
        nbytes = arena_nbytes(layout, 1)
        message = (
            f"a trajectory takes {nbytes} bytes, so it holds {capacity}; a batch of {config.algorithm.batch_trajectories} "
            f"and {config.actors.count} actors need {least}, or the learner would wait for ever"
        )
        accepted = f"at least {least * nbytes} bytes"
        raise ConfigError([Problem("balance.memory_limit", config.balance.memory_limit, message, accepted)])
