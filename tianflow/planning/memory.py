"""Memory: the slots that a run wants, the slots that its limit holds, and what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

from tianflow.channels.arena import arena_nbytes
from tianflow.config.model import Config
from tianflow.config.networks import torso_parameters
from tianflow.config.rules import is_paced
from tianflow.core.payloads import EnvironmentSpec, TrajectoryLayout
from tianflow.errors import ConfigError, Problem

MOST_SLOTS = 65536
CGROUP = Path("/sys/fs/cgroup")
COPIES = 4
"""Float32 copies of every parameter: the learner's, their gradient, and the two means of Adam.
Published copies and those of actors come on top.
"""
DRAW_SLOTS = 4
"""Slots of draws: one at the learner, one ahead of it, one whose priorities return to the shards,
one that shards write.
"""


def slots_wanted(config: Config) -> int:
    """Slots for every credit that the bound allows, and one for every actor that may hold a dropped
    ticket.

    If the bound does not pace the actors, only memory limits them: four batches, and two slots for
    each actor. The same holds with replay, which copies a trajectory out of its slot at once.
    """
    batch, actors = config.algorithm.batch_trajectories, config.actors.count
    if config.bound is None or not is_paced(config) or config.algorithm.window is not None:
        return max(32, 4 * batch + 2 * actors)
    return (config.bound + 1) * batch + actors


def slots_capacity(config: Config, layout: TrajectoryLayout) -> int:
    """Number of slots that ``balance.memory_limit`` holds."""
    return min(MOST_SLOTS, config.balance.memory_limit // arena_nbytes(layout, 1))


def check_memory(config: Config, layout: TrajectoryLayout) -> None:
    """Refuse a memory limit that is too small.

    Raises:
        ConfigError: the limit does not hold one batch and a slot for every actor.
    """
    least = config.algorithm.batch_trajectories + config.actors.count
    capacity = slots_capacity(config, layout)
    if capacity < least:
        nbytes = arena_nbytes(layout, 1)
        message = (
            f"a trajectory takes {nbytes} bytes, so it holds {capacity}; a batch of "
            f"{config.algorithm.batch_trajectories} "
            f"and {config.actors.count} actors need {least}, or the learner would wait for ever"
        )
        accepted = f"at least {least * nbytes} bytes"
        raise ConfigError(
            [Problem("balance.memory_limit", config.balance.memory_limit, message, accepted)]
        )


def machine_memory() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory of the machine, or fewer if its control group (version 2, mounted at
    ``cgroup``) has a limit.
    """
    try:
        (limit,) = (cgroup / "memory.max").read_text(encoding="utf-8").split()
        return machine_memory() if limit == "max" else min(machine_memory(), int(limit))
    except (OSError, ValueError):
        return machine_memory()


def check_network_memory(config: Config, spec: EnvironmentSpec) -> None:
    """Refuse a built-in network that this machine cannot train: if memory runs out, the system
    kills processes, and not only those of this run.

    Raises:
        ConfigError: the network is too large; the message has its size.
    """
    parameters = torso_parameters(config.network, spec.observation)
    needed, usable = COPIES * 4 * parameters, usable_memory()
    if needed > usable:
        path = "network.hidden" if config.network.name == "mlp" else "network.kwargs"
        value = (
            list(config.network.hidden) if config.network.name == "mlp" else config.network.kwargs
        )
        message = (
            f"a network of {parameters:,} parameters or more: learning takes {COPIES} numbers for "
            "each, "
            f"{needed / 2**30:,.1f} GiB, and this machine has {usable / 2**30:,.1f}"
        )
        raise ConfigError([Problem(path, value, message, "smaller layers, or a larger machine")])
