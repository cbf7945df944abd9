"""Directives: absolute instructions of a controller, named in the imperative.

Repeating a directive changes nothing, because none is relative ("two more").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Directive:
    """Base class of directives."""


@dataclass(frozen=True, slots=True)
class SetCredits(Directive):
    """Allow at most ``limit`` tickets at the same time.

    With paced admission, the ledger's own ceiling still applies.
    """

    limit: int


@dataclass(frozen=True, slots=True)
class SetBound(Directive):
    """Set the staleness bound to ``max_staleness`` (None: unbounded).

    The strictest bound of all controllers is in force.
    """

    max_staleness: int | None


@dataclass(frozen=True, slots=True)
class SetAdmission(Directive):
    """Set the admission of actors: ``paced`` (default) or ``open``.

    Paced admission grants no more tickets than the bound can use. Open admission grants one for
    each credit.
    """

    admission: Literal["paced", "open"]


@dataclass(frozen=True, slots=True)
class SetOrder(Directive):
    """Set the order in which a batch takes trajectories: ``version`` (default) or ``arrival``.

    In order of version the bound holds without wasted work. Most other systems use order of
    arrival.
    """

    order: Literal["version", "arrival"]
