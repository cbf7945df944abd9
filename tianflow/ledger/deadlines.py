"""Which tickets are too old for a batch, and which open ones a batch must not pass over. Functions
over the book; they change nothing.
"""

from __future__ import annotations

from tianflow.core.payloads import Version
from tianflow.ledger.batch_selection import must_wait_for
from tianflow.ledger.index import LISTED, TicketIndex
from tianflow.ledger.tickets import Limits, State, Ticket


def expired(tickets: TicketIndex, *, bound: int | None, at: Version) -> list[tuple[int, str]]:
    """Number and reason of begun and committed tickets that cannot be used at version ``at`` or
    later, in ticket order.

    Args:
        tickets: the live ones.
        bound: the largest staleness; None: without limit.
        at: the version of the next batch. What is of another lineage cannot be used at all.
    """
    found = []
    for state in LISTED:
        for version in tickets.listed[state]:
            reason = "lineage" if version.lineage != at.lineage else "expired"
            if reason == "lineage" or (bound is not None and at.number - version.number > bound):
                found += [(number, reason) for number in tickets.of_version(state, version)]
    return sorted(found)


def blocking_tickets(tickets: TicketIndex, *, limits: Limits, at: int) -> list[Ticket]:
    """Open tickets that a batch at version number ``at`` must not pass over, oldest first.

    None when the batch may go ahead, and none when even with them it could not: no more are waited
    for than could make room.
    """
    committed = tickets.count(State.COMMITTED)
    if (
        limits.max_staleness is None
        or not tickets.count(State.BEGUN)
        or 2 * committed < limits.batch
    ):
        return []
    last = limits.max_staleness - at
    needed = must_wait_for(
        _slack(tickets, State.COMMITTED, last), _slack(tickets, State.BEGUN, last), limits.batch
    )
    return [] if committed + needed < limits.batch else tickets.oldest(State.BEGUN, needed)


def _slack(tickets: TicketIndex, state: State, last: int) -> dict[int, int]:
    """How many tickets in ``state`` can last be used so many versions after the batch."""
    return {version.number + last: count for version, count in tickets.versions(state).items()}
