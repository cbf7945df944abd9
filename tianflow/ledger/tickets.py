"""Tickets of the ledger: their states, and the answer when a batch is blocked."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tianflow.core.payloads import Trajectory, Version


class State(enum.Enum):
    """State of a live ticket."""

    GRANTED = "granted"
    BEGUN = "begun"
    COMMITTED = "committed"
    TAKEN = "taken"

    # Members are singletons. `enum` hashes their names in Python, which would slow every lookup.
    __hash__ = object.__hash__


@dataclass(slots=True)
class Ticket:
    """A live ticket. ``version`` is the newest published version, from begin on the one in use."""

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
    """No batch yet.

    ``cut``: tickets whose actors should commit what they have. ``until``: latest time of the next
    try.
    """

    cut: tuple[int, ...] = ()
    until: float | None = None
