"""Placement: from a config to a program, which says what components there are and which hosts run
them.
"""

from __future__ import annotations

import os

from tianflow.config.model import Config
from tianflow.config.rules import MOST_DOORBELLS, cores_of_learner
from tianflow.core import devices
from tianflow.core.program import ComponentSpec, HostSpec, LauncherCapabilities, Program

MOST_ASKING = 64
"""Hosts of actors on nodes at most, with central inference and without ``actors.hosts``."""
LEARNER = ComponentSpec("learner", "learner")
EVALUATOR = ComponentSpec("evaluator", "evaluator")


def build(config: Config, capabilities: LauncherCapabilities) -> Program:
    """The components of a run, and the hosts that run them.

    Args:
        config: settings in force.
        capabilities: of the launcher.
    """
    actors = tuple(
        ComponentSpec(f"actor-{index}", "actor", index) for index in range(config.actors.count)
    )
    shards = tuple(
        ComponentSpec(f"replay-{index}", "replay", index) for index in range(shard_count(config))
    )
    servers = tuple(
        ComponentSpec(f"inference-{index}", "inference", index)
        for index in range(servers_of(config))
    )
    ranks = ranks_of(config)
    components = (LEARNER, *ranks, *shards, *servers, *actors, EVALUATOR)
    if capabilities.processes:
        cores = _cores(config) if capabilities.binds_cores else []
        hosts = _hosts_of_actors(config, actors, servers, cores, elsewhere=capabilities.nodes)
        return Program(components, (*_hosts(config, shards, servers, cores), *hosts))
    host = HostSpec(
        config.placement.launcher,
        components,
        threads=config.learner.threads,
        bell=0 if config.central else None,
    )
    return Program(components, (host,))


def ranks_of(config: Config) -> tuple[ComponentSpec, ...]:
    """The learner's ranks except rank 0, which is `LEARNER`."""
    return tuple(
        ComponentSpec(f"learner-{index}", "rank", index) for index in range(1, config.learner.ranks)
    )


def servers_of(config: Config) -> int:
    """Number of inference servers; 0 with local inference."""
    return config.inference.servers if config.central else 0


def bells_wanted(config: Config) -> int:
    """Number of doorbells: one for each inference server and each host of actors; 0 with local
    inference.
    """
    return servers_of(config) + hosts_wanted(config) if config.central else 0


def bells_on_head(config: Config) -> int:
    """Number of doorbells on the head of a run with nodes: one for each inference server, and one
    for the gateway, which asks for all nodes.
    """
    return servers_of(config) + 1 if config.central else 0


def bells_on_node(config: Config) -> int:
    """Number of doorbells on a node: those that its hosts ring instead of the servers, and one for
    each host that it may get.
    """
    return servers_of(config) + (config.actors.hosts or MOST_ASKING) if config.central else 0


def shard_count(config: Config) -> int:
    """Number of replay shards; 0 for an algorithm that uses each trajectory once."""
    return 0 if config.algorithm.window is None else config.replay.shards


def shards_on_nodes(config: Config) -> bool:
    """True if nodes that offer the role run the replay shards."""
    return config.cluster.replay == "nodes" and shard_count(config) > 0


def _cores(config: Config) -> list[int]:
    """CPU numbers that hosts are bound to; empty if they are not bound."""
    return sorted(os.sched_getaffinity(0)) if config.placement.affinity == "auto" else []


def _hosts(
    config: Config,
    shards: tuple[ComponentSpec, ...],
    servers: tuple[ComponentSpec, ...],
    cores: list[int],
) -> tuple[HostSpec, ...]:
    """One host for each rank of the learner, one for the evaluator, one for each replay shard and
    inference server.

    A learner on a GPU has no core of its own, because it would leave that core idle. With more
    ``cores`` than another learner has threads, each rank has its cores alone: two processes
    that stay on their cores do more work than two that the system moves. An inference server is not
    bound to a core, because it works in short turns.
    """
    threads = config.learner.threads
    alone, others = _cores_of_others(config, cores)
    return (
        *(
            HostSpec(
                rank.name,
                (rank,),
                tuple(cores[threads * rank.index : threads * (rank.index + 1)]) if alone else (),
                threads,
                group="learner" if config.learner.ranks > 1 else "",
            )
            for rank in (LEARNER, *ranks_of(config))
        ),
        HostSpec("evaluator", (EVALUATOR,), others),
        *(HostSpec(shard.name, (shard,), others) for shard in shards),
        *(HostSpec(server.name, (server,), bell=server.index) for server in servers),
    )


def _cores_of_others(config: Config, cores: list[int]) -> tuple[bool, tuple[int, ...]]:
    """Whether the learner has cores alone, and the cores of the other hosts."""
    used = config.learner.threads * config.learner.ranks
    on_gpu = devices.on_gpu(config.learner.device, config.learner.ranks)
    alone = len(cores) > used and not on_gpu
    return alone, tuple(cores[used:]) if alone else tuple(cores) if on_gpu else ()


def _hosts_of_actors(
    config: Config,
    actors: tuple[ComponentSpec, ...],
    servers: tuple[ComponentSpec, ...],
    cores: list[int],
    *,
    elsewhere: bool,
) -> tuple[HostSpec, ...]:
    """Hosts that share the actors. An actor stays on its host when the number of actors changes.

    Actors ``elsewhere`` have a host each, unless ``actors.hosts`` says otherwise, and the cores of
    their node.
    """
    others = () if elsewhere else _cores_of_others(config, cores)[1]
    wanted = hosts_on_nodes(config) if elsewhere else hosts_wanted(config)
    shared = [
        tuple(actor for actor in actors if actor.index % wanted == place) for place in range(wanted)
    ]
    return tuple(
        HostSpec(
            f"actors-{place}",
            group,
            _share(others, place, wanted),
            bell=len(servers) + place if servers else None,
        )
        for place, group in enumerate(shared)
        if group
    )


def hosts_wanted(config: Config) -> int:
    """Number of actor hosts on this machine: as the config says, else one for each core that the
    learner leaves. With central inference, there are no more of them than doorbells.
    """
    wanted = config.actors.hosts or max(1, devices.cores() - cores_of_learner(config))
    return min(wanted, MOST_DOORBELLS - servers_of(config)) if config.central else wanted


def hosts_on_nodes(config: Config) -> int:
    """Number of actor hosts on all nodes: as the config says, else one for each actor."""
    wanted = config.actors.hosts or max(1, config.actors.count)
    return min(wanted, config.actors.hosts or MOST_ASKING) if config.central else wanted


def _share(cores: tuple[int, ...], place: int, hosts: int) -> tuple[int, ...]:
    """The cores of one actor host: one core alone if there are enough, else all of them, shared."""
    return (cores[place],) if cores and hosts <= len(cores) else cores
