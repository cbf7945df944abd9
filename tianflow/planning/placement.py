"""From a config to a program: which components there are, and where they go. The only module that
knows every part.
"""

from __future__ import annotations

import os

from tianflow.config.model import Config
from tianflow.core.program import ComponentSpec, HostSpec, Placement, Program

LEARNER = ComponentSpec("learner", "learner")
EVALUATOR = ComponentSpec("evaluator", "evaluator")


def build(config: Config) -> Program:
    """The components of a run, and the hosts they go to."""
    actors = tuple(
        ComponentSpec(f"actor-{index}", "actor", index) for index in range(config.actors.count)
    )
    shards = tuple(
        ComponentSpec(f"replay-{index}", "replay", index) for index in range(shard_count(config))
    )
    components = (LEARNER, *shards, *actors, EVALUATOR)
    if config.placement.launcher == "inline":
        host = HostSpec("inline", components, threads=config.learner.threads)
        return Program(components, Placement("inline", "memory://", (host,)))
    return Program(
        components, Placement(config.placement.launcher, "shm://", _hosts(config, actors, shards))
    )


def shard_count(config: Config) -> int:
    """Replay shards of a run; 0 for an algorithm that uses each trajectory once."""
    return 0 if config.algorithm.window is None else config.replay.shards


def _hosts(
    config: Config, actors: tuple[ComponentSpec, ...], shards: tuple[ComponentSpec, ...]
) -> tuple[HostSpec, ...]:
    """One host for the learner, one for the evaluator, one for each replay shard, and actors dealt
    out over theirs.

    With two cores or more and affinity "auto", the learner has its cores to itself: two processes
    that are never moved between cores do more than two that are. An actor keeps its host when the
    count changes.
    """
    cores = sorted(os.sched_getaffinity(0)) if config.placement.affinity == "auto" else []
    alone = len(cores) > config.learner.threads
    for_learner = tuple(cores[: config.learner.threads]) if alone else ()
    for_actors = tuple(cores[config.learner.threads :]) if alone else ()
    wanted = hosts_wanted(config)
    dealt = [
        tuple(actor for actor in actors if actor.index % wanted == place) for place in range(wanted)
    ]
    hosts = [
        HostSpec(f"actors-{place}", group, _share(for_actors, place, wanted))
        for place, group in enumerate(dealt)
        if group
    ]
    return (
        HostSpec("learner", (LEARNER,), for_learner, config.learner.threads),
        HostSpec("evaluator", (EVALUATOR,), for_actors),
        *(HostSpec(shard.name, (shard,), for_actors) for shard in shards),
        *hosts,
    )


def hosts_wanted(config: Config) -> int:
    """Processes that actors are dealt out over on this machine: as many as the config says, else
    one for each core the learner leaves.
    """
    return config.actors.hosts or max(1, len(os.sched_getaffinity(0)) - config.learner.threads)


def _share(cores: tuple[int, ...], place: int, hosts: int) -> tuple[int, ...]:
    """The cores of one actor host: one of its own where there are enough, else all of them
    shared.
    """
    return (cores[place],) if cores and hosts <= len(cores) else cores
