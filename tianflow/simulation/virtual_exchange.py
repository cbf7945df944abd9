"""What the exchange does, in virtual time: who waits for a grant or a batch, around the real
ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.errors import TianflowError
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import Blocked

if TYPE_CHECKING:
    from tianflow.simulation.clock import Clock


class WaitingActor(Protocol):
    """An actor, as far as the desk knows it."""

    name: str
    life: int

    def granted(self, grant: Grant, life: int) -> None: ...
    def cut(self, ticket: int, life: int) -> None: ...


class VirtualExchange:
    """`tianflow.exchange.exchange.Exchange` without loop and memory; the balancer takes one for the
    other.

    Args:
        ledger: decides.
        clock: virtual time.
        holders: how many actors there are.
    """

    def __init__(self, *, ledger: Ledger, clock: Clock, holders: int) -> None:
        self.ledger = ledger
        self._clock, self._holders = clock, holders
        self._wanting: deque[tuple[WaitingActor, int]] = deque()
        self._begun: dict[int, tuple[WaitingActor, int]] = {}
        self._asked_to_cut: set[int] = set()
        self._pulling: tuple[Version, Callable[[Batch], None]] | None = None
        self._alarm = 0
        self._settled: list[Callable[[], None]] = []
        self.asks = 0
        self.refused = 0
        """Requests for a grant that had to wait, of all ``asks``."""

    # Actors
    # ----------------------------------------------------------------------------------------------

    def request_grant(self, actor: WaitingActor, life: int) -> None:
        """A grant for ``actor`` as soon as there is one, first come first served, unless it has
        failed by then.
        """
        self._wanting.append((actor, life))
        if len(self._wanting) == 1:  # whoever stands before it waits for what has not come yet
            self._grant()
        self.asks += 1
        self.refused += bool(self._wanting)

    def begin(self, actor: WaitingActor, life: int, ticket: int, version: Version) -> None:
        """The holder begins."""
        if self.ledger.begin(ticket, version):
            self._begun[ticket] = actor, life

    def commit(self, trajectory: Trajectory) -> None:
        """A trajectory is whole, or as long as a cut left it."""
        ticket = trajectory.ticket
        self._begun.pop(ticket, None)
        self.ledger.commit(ticket, trajectory, self._clock.now)
        self._asked_to_cut.discard(ticket)
        if self._pulling is not None:
            self._take()
        if self._wanting:
            self._grant()

    def holder_lost(self, actor: WaitingActor, tickets: Iterable[int], reason: str) -> None:
        """``actor`` was reaped, with ``tickets`` in its hands."""
        for ticket in tickets:
            self._begun.pop(ticket, None)
            self._asked_to_cut.discard(ticket)
        self.ledger.holder_lost(actor.name, reason)
        self._pump()

    # Learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """The learner published its first version."""
        self.ledger.open_lineage(version)
        self._pump()

    def request_batch(self, for_version: Version, deliver: Callable[[Batch], None]) -> None:
        """Call ``deliver`` with a batch for ``for_version`` as soon as there is one."""
        if self._pulling is not None:
            raise TianflowError("the learner pulls one batch at a time")
        self._pulling = for_version, deliver
        self._pump()

    def give_back(self, tickets: Iterable[int]) -> None:
        """A batch was not used after all."""
        self.ledger.give_back(tickets)
        self._pump()

    def settle(self, settlement: Settlement) -> None:
        """An update is over."""
        self.ledger.settle(settlement)
        for observe in self._settled:
            observe()
        self._pump()

    # Balance
    # ----------------------------------------------------------------------------------------------

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force."""
        if limits != self.ledger.limits:
            self.ledger.set_limits(limits)
            self._pump()

    def on_settled(self, observe: Callable[[], None]) -> None:
        """Call ``observe`` after every settled update, before anything else moves."""
        self._settled.append(observe)

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._take()
        self._grant()

    def _grant(self) -> None:
        wanting, ledger = self._wanting, self.ledger
        while wanting and ledger.grantable:
            actor, life = wanting.popleft()
            if actor.life == life and (
                grant := ledger.grant(actor.name, ahead=ledger.ahead(self._holders))
            ):
                actor.granted(grant, life)

    def _take(self) -> None:
        if self._pulling is None:
            return
        for_version, deliver = self._pulling
        self._alarm += 1
        answer = self.ledger.take(for_version, self._clock.now)
        if isinstance(answer, Blocked):
            self._wait_for_stragglers(answer)
            return
        self._pulling = None
        deliver(answer)

    def _wait_for_stragglers(self, blocked: Blocked) -> None:
        for ticket in blocked.cut:
            if ticket not in self._asked_to_cut and ticket in self._begun:
                self._asked_to_cut.add(ticket)
                actor, life = self._begun[ticket]
                actor.cut(ticket, life)
        if blocked.until is not None:
            self._clock.at(
                max(0.0, blocked.until - self._clock.now) + 0.001, self._ring, self._alarm
            )

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._pump()
