"""Events: facts about the past, named in the past tense.

Observers may lose events, and lost events are counted. Exact counts never depend on them. The
numbers in `Observed` are absolute, so a controller that misses one reacts later, but correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events."""


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """A consistent observation of the balance, for controllers.

    Times are monotonic seconds. Waiting times are cumulative seconds.
    """

    now: float
    version: int
    """Completed updates of the learner in its lineage."""
    publish_lag: int
    """Updates since the last settled published version."""
    batch: int
    """B, trajectories per update over all learner ranks."""
    max_staleness: int | None
    """Configured staleness bound; None: unbounded. A controller may request a tighter one."""
    credits_limit: int
    credits_in_use: int
    credits_ceiling: int
    """C_max (`tianflow.core.payloads.credits_ceiling`) under ``max_staleness``, or the number of
    slots when unbounded.
    """
    slots: int
    actors: int
    learner_waiting_s: float
    """Seconds that the learner has waited for a batch since the run began."""
    actors_waiting_s: float
    """Actor-seconds spent waiting for a grant since the run began, summed over actors."""


@dataclass(frozen=True, slots=True)
class UpdateFinished(Event):
    """The learner completed one update."""

    version: int
    seconds: float
    samples: int
    statistics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodesFinished(Event):
    """Episodes ended in one trajectory."""

    component: str
    returns: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentFailed(Event):
    """An environment raised, or returned a value that is not finite."""

    component: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EvaluationFinished(Event):
    """An evaluation of one version was completed."""

    version: int
    episodes: int
    mean_return: float
    returns: tuple[float, ...]
    name: str = "main"
    """``main``, or the name of a further evaluation."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric of the environment over the episodes that have it, by its name."""


@dataclass(frozen=True, slots=True)
class HostExited(Event):
    """A host process ended."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """Live settings changed; ``generation`` is the new generation."""

    generation: int
    paths: tuple[str, ...]
