"""What happened, past tense. Observers may lose events (counted); nothing exact is built from them.

A controller receives `Observed`, whose numbers are absolute (never increments), so a lost one costs
time, not truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """One consistent look at the balance, for controllers. Times are monotonic seconds; shares are
    cumulative seconds.
    """

    now: float
    version: int
    """Completed updates of the learner, in its lineage."""
    publish_lag: int
    """version minus the last settled published version."""
    batch: int
    """B, trajectories per update over all learner ranks."""
    max_staleness: int | None
    """The configured bound; None is unbounded."""
    credits_limit: int
    credits_in_use: int
    credits_ceiling: int
    """C_max = (max_staleness + 1 - publish_lag) * B, or all slots when unbounded."""
    slots: int
    actors: int
    learner_waiting_s: float
    """Seconds for which the learner has waited for a batch, since the run began."""
    actors_waiting_s: float
    """Actor-seconds waited for a grant, since the run began (sum over actors)."""


@dataclass(frozen=True, slots=True)
class UpdateFinished(Event):
    """The learner finished one update."""

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
    """An environment raised, or returned something that is not finite."""

    component: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class EvaluationFinished(Event):
    """An evaluation of exactly one version."""

    version: int
    episodes: int
    mean_return: float
    returns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HostExited(Event):
    """A host process is gone."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """Live settings moved to a new generation."""

    generation: int
    paths: tuple[str, ...]
