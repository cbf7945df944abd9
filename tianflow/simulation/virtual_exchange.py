"""`VirtualExchange`: the exchange of a run, with its waiting in virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from tianflow.exchange.exchange import Exchange

if TYPE_CHECKING:
    from tianflow.core.payloads import Grant, Version
    from tianflow.ledger.ledger import Ledger
    from tianflow.simulation.clock import Clock


class WaitingActor(Protocol):
    """The part of a simulated actor that the exchange uses."""

    name: str
    incarnation: int

    def granted(self, grant: Grant | None, incarnation: int) -> None: ...
    def cut(self, ticket: int, incarnation: int) -> None: ...


class CutRequests:
    """Stands in for an arena: passes a cut request to the actor that writes the slot."""

    def __init__(self) -> None:
        self._writers: dict[int, tuple[int, WaitingActor, int]] = {}

    def write(self, slot: int, ticket: int, actor: WaitingActor, incarnation: int) -> None:
        """Register the writer of ``slot``."""
        self._writers[slot] = ticket, actor, incarnation

    def request_cut(self, slot: int, ticket: int) -> None:
        """Ask the writer of ``ticket`` once to commit the steps it has."""
        if slot in self._writers and self._writers[slot][0] == ticket:
            _, actor, incarnation = self._writers.pop(slot)
            actor.cut(ticket, incarnation)


class VirtualExchange(Exchange):
    """`Exchange` on a virtual clock, with simulated actors as holders.

    Args:
        ledger: decides.
        clock: virtual time.
    """

    def __init__(self, *, ledger: Ledger, clock: Clock) -> None:
        self._cut_requests = CutRequests()
        super().__init__(
            ledger=ledger,
            arena=self._cut_requests,  # type: ignore[arg-type]  # the part of an arena that it uses
            clock=lambda: clock.now,
            call_later=clock.call_later,
        )
        self.requests = 0
        self.delayed = 0
        """Requests for a grant that had to wait, out of ``requests``."""

    def request_for(self, actor: WaitingActor, incarnation: int) -> None:
        """Grant ``actor`` a ticket as soon as possible, unless this incarnation has failed."""
        if actor.incarnation == incarnation:
            self.request_grant(actor.name, partial(actor.granted, incarnation=incarnation))
            self.requests += 1
            self.delayed += bool(self._requests)

    def begin_for(
        self, actor: WaitingActor, incarnation: int, grant: Grant, version: Version
    ) -> None:
        """``actor`` begins the rollout of ``grant``."""
        self.begin(grant.ticket, version)
        self._cut_requests.write(grant.slot, grant.ticket, actor, incarnation)
