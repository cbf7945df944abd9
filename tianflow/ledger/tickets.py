"""What the ledger keeps: tickets and where they are, the settings it obeys, and what one look at it
shows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tianflow.core.payloads import Trajectory, Version


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
class Blocked:
    """No batch yet. ``cut``: tickets whose actors should commit what they have. ``until``: when to
    look again at the latest.
    """

    cut: tuple[int, ...] = ()
    until: float | None = None
