"""A program: which components there are and how they are joined. Data only; placement decides where
each runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["learner", "actor", "evaluator", "replay"]


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
    """CPU numbers this host is bound to; empty: any."""
    threads: int = 1
    """Threads of numerical libraries inside the compute thread."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where components run, and the address by which channels of each shape are found."""

    launcher: str
    address: str
    """``memory://`` (one loop) or ``shm://`` (one machine)."""
    hosts: tuple[HostSpec, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What `tianflow.planning.placement.build` makes from a config: components, and where
    they go.
    """

    components: tuple[ComponentSpec, ...]
    placement: Placement
