"""How many slots a run wants, and how many its memory limit holds."""

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
"""Of every parameter, float32: the learner's, their gradient, and the two means of Adam. Published
ones and actors' come on top.
"""
DRAW_SLOTS = 4
"""One that the learner has, one ahead of it, one whose priorities are on their way back, one that
shards write.
"""


def slots_wanted(config: Config) -> int:
    """Slots for every credit the bound allows, and one for every actor that may hold a ticket which
    was given up.

    Where the bound paces nobody only memory pushes back: four batches and two for each actor then.
    So it is with replay, which takes a trajectory out of its slot at once, however old it may
    become.
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
            f"a trajectory takes {nbytes} bytes, so it holds {capacity}; a batch of "
            f"{config.algorithm.batch_trajectories} "
            f"and {config.actors.count} actors need {least}, or the learner would wait for ever"
        )
        accepted = f"at least {least * nbytes} bytes"
        raise ConfigError(
            [Problem("balance.memory_limit", config.balance.memory_limit, message, accepted)]
        )


def machine_memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of the machine, or what its control group (version 2, mounted at ``cgroup``) allows."""
    try:
        (limit,) = (cgroup / "memory.max").read_text(encoding="utf-8").split()
        return machine_memory() if limit == "max" else min(machine_memory(), int(limit))
    except (OSError, ValueError):
        return machine_memory()


def check_network_memory(config: Config, spec: EnvironmentSpec) -> None:
    """Refuse a built-in network that this machine cannot train: allocating it would have the system
    end something, not only this run.

    Raises:
        ConfigError: with how large it is at least.
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
