"""What the ledger keeps: tickets and where they are, the settings it obeys, and what one look at it
shows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from tianflow.core.payloads import Trajectory, Version

Order = Literal["version", "arrival"]
Admission = Literal["paced", "open"]


class State(enum.Enum):
    """Where a live ticket is."""

    GRANTED = "granted"
    BEGUN = "begun"
    COMMITTED = "committed"
    TAKEN = "taken"

    # members are single; the enum's own hashes their names, in Python, at every look into a table
    __hash__ = object.__hash__


@dataclass(slots=True)
class Ticket:
    """A live ticket. ``version`` is the one it began with (the newest published one until then)."""

    number: int
    holder: str
    slot: int
    state: State
    version: Version
    trajectory: Trajectory | None = None
    learner_at_commit: int = 0
    committed_at: float = 0.0
    cut_at: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that the ledger obeys. ``credits`` is the law's target; `Ledger.credits_limit`
    is what is in force.
    """

    batch: int
    max_staleness: int | None
    credits: int
    patience: float | None = 10.0
    """Seconds a ticket that stands in the way is waited for; None: without limit."""
    order: Order = "version"
    admission: Admission = "paced"
    """open: credits are not held below what the bound can use, so what was begun in vain expires.
    """

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: an update needs at least one trajectory")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(
                f"max_staleness = {self.max_staleness}: no sample can be younger than the policy "
                "that trains on it"
            )
        if self.credits < self.batch:
            raise ValueError(
                f"credits = {self.credits} with {self.batch} trajectories per update: fewer "
                "credits than a batch can never feed the learner"
            )


@dataclass(frozen=True, slots=True)
class Blocked:
    """No batch yet. ``cut``: tickets whose actors should commit what they have. ``until``: when to
    look again at the latest.
    """

    cut: tuple[int, ...] = ()
    until: float | None = None


@dataclass(slots=True)
class Share:
    """What became of the environment steps of one holder (an actor)."""

    committed_steps: int = 0
    trained_steps: int = 0
    dropped_steps: int = 0
    trajectories: int = 0

    def copy(self) -> Share:
        """As it is now. Every look copies that of every actor, and `dataclasses.replace` takes
        eight times as long.
        """
        return Share(
            self.committed_steps, self.trained_steps, self.dropped_steps, self.trajectories
        )


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """One consistent look. Counters count since the run began; ``open`` tickets have begun and are
    neither trained nor dropped.
    """

    version: Version
    published: Version
    granted: int
    begun: int
    committed: int
    trained: int
    inserted: int
    dropped: dict[str, int]
    open: int
    returned: int
    late_commits: int
    cuts: int
    in_use: int
    credits_limit: int
    credits_ceiling: int
    slots: int
    free_slots: int
    quarantined_slots: int
    queue: int
    oldest_committed_at: float | None
    steps_committed: int
    steps_trained: int
    updates: int
    skipped_updates: int
    publishes: int
    publish_lag: int
    unpublished_updates: int
    max_staleness: int | None
    staleness: dict[int, int]
    in_flight: dict[int, int]
    in_queue: dict[int, int]
    violations: int
    recent_staleness: tuple[int, ...]
    shares: dict[str, Share]


def coarse(age: int) -> int:
    """``age`` to three binary digits, so that a histogram of ages in replay stays small: 0..15
    exactly, then 16, 18, 20, …, 32, 36, …
    """
    shift = max(0, age.bit_length() - 4)
    return age >> shift << shift
