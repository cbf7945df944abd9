"""Programs: the components of a run, the hosts that run them, and what a host starts with. Data
only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tianflow.core.payloads import NO_VERSION, EnvironmentSpec, TrajectoryLayout, Version

NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names of nodes. They stand in logs, metrics and on screens."""
NODE_LOST, NODE_LEFT, MOVED = "node_lost", "node_left", "moved"
"""Why a host on a node ended, if not by itself: its node was lost, or left, or another node has
more free cores.
"""
ACTORS, REPLAY = "actors", "replay"
NODE_ROLES = (ACTORS, REPLAY)
"""Roles that a node can offer: it runs hosts of actors, or replay shards."""
Role = Literal["learner", "rank", "actor", "evaluator", "replay", "inference"]


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One component. ``name`` is its place ("actor-3"), not its process: it survives restarts."""

    name: str
    role: Role
    index: int = 0


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host process: an event loop, one compute thread, and the components that share them."""

    name: str
    components: tuple[ComponentSpec, ...]
    cores: tuple[int, ...] = ()
    """CPU numbers that the host is bound to; empty: any CPU."""
    threads: int = 1
    """Threads of numerical libraries inside the compute thread."""
    bell: int | None = None
    """Its doorbell among those of the run; None: the host neither asks for inference nor serves it.
    """
    group: str = ""
    """Hosts of one group start together, and end when one of them ends; "": the host is alone."""


@dataclass(frozen=True, slots=True)
class Program:
    """What `tianflow.planning.placement.build` makes from a config: components, and the hosts that
    run them.
    """

    components: tuple[ComponentSpec, ...]
    hosts: tuple[HostSpec, ...]


@dataclass(frozen=True, slots=True)
class LauncherCapabilities:
    """What placement asks a launcher before it places anything."""

    processes: bool = True
    """Each host is a process of its own; False: one host runs every component."""
    binds_cores: bool = True
    """A host process obeys `HostSpec.cores`."""
    nodes: bool = False
    """Hosts of actors run on other machines."""
    on_gpu: str = ""
    """What is accepted instead of a GPU that this machine does not have, in words; "": not known.
    """


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What a host builds its components from."""

    host: HostSpec
    spec: EnvironmentSpec
    layout: TrajectoryLayout
    """Of a trajectory."""
    start: Version
    """The version that a learner on this host starts with."""
    samples: int = 0
    """Samples that were trained on before ``start``."""
    draws: TrajectoryLayout | None = None
    """With replay, the layout of what the learner gets instead of trajectories."""
    incarnation: int = 0
    """How many processes have run this host before, since the run began or was resumed."""
    lineage: int = 0
    """The lineage of versions that a resumed run continues; 0 for a new run."""
    published: Version = NO_VERSION
    """The newest published version."""
    checkpoint: Path | None = None
    """The checkpoint that components of this host load."""
    trained_s: float = 0.0
    """Seconds of training so far, those before a resume included."""
    rendezvous: Path | None = None
    """The file through which the ranks of a learner find each other; None for one rank."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a batch system says of a job."""

    text: str
    """In its words, for example ``pending (Resources)``."""
    ended: bool = False
    """True once the job is over, and does not return to the queue."""
    code: int = 0
    """Exit code of an ended job."""
