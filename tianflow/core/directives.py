"""What to do, imperative and absolute (never "two more"), so that repeating one is harmless."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Directive:
    """Base of all directives."""


@dataclass(frozen=True, slots=True)
class SetCredits(Directive):
    """Let at most ``limit`` tickets be out at once. Where admission is paced, the ledger's ceiling
    still applies.
    """

    limit: int


@dataclass(frozen=True, slots=True)
class SetBound(Directive):
    """Hold the staleness bound at ``max_staleness`` (None: unbounded, which any stricter controller
    overrides).
    """

    max_staleness: int | None


@dataclass(frozen=True, slots=True)
class SetAdmission(Directive):
    """Who may begin: ``paced`` (never more tickets than the bound can use, the default) or ``open``
    (whoever has a credit).
    """

    admission: Literal["paced", "open"]


@dataclass(frozen=True, slots=True)
class SetOrder(Directive):
    """How a batch is chosen: ``version`` (the promise holds without waste) or ``arrival`` (what
    other systems do).
    """

    order: Literal["version", "arrival"]
