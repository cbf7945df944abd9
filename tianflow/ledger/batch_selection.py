"""Which trajectories a batch takes, and which open ones it has to wait for. Pure functions over
counts.

A batch takes the oldest versions. It may pass over an open ticket only if every ticket left behind
can still be used in
time: with ``slack`` = last admissible use minus the version of this batch, for every j >= 0 at most
j*B of the tickets left behind may have slack <= j (earliest deadline first, with B places at each
coming version).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tianflow.core.limits import Limits
from tianflow.core.payloads import Version
from tianflow.ledger.index import LISTED, TicketIndex
from tianflow.ledger.tickets import State, Ticket


def must_wait_for(committed: Mapping[int, int], open_: Mapping[int, int], batch: int) -> int:
    """How many open tickets, earliest deadline first, belong into this batch although they are not
    committed yet.

    Args:
        committed: how many committed tickets there are of each slack; a batch takes the ``batch``
            with the least.
        open_: how many open tickets there are of each slack.
        batch: B.

    Returns:
        0 when the batch may go ahead without any of them; otherwise the fewest with which nothing
        is lost. Tickets that could not be used in time even if everything were committed are not
        waited for: nothing is gained by it.
    """
    # All that is left fits into the batches up to the horizon, so more slack than that is no
    # different from it. Without it the work would grow with the bound, which may be a million,
    # instead of with the number of tickets.
    horizon = (sum(committed.values()) + sum(open_.values())) // batch + 1
    left = [0] * (horizon + 1)
    chosen, room = [], batch
    for slack, count in sorted(committed.items()):
        taken = min(room, count)
        room -= taken
        if taken:
            chosen.append((slack, taken))
        left[_place(slack, horizon)] += count - taken
    for slack, count in open_.items():
        left[_place(slack, horizon)] += count
    forced = 0
    for slack, count in sorted(open_.items()):
        waiting = count
        while waiting:
            tight = _first_violation(left, batch)
            if tight is None or not chosen or chosen[-1][0] <= tight[0] or slack > tight[0]:
                return forced
            latest, taken = chosen.pop()
            moved = min(tight[1], waiting, taken)
            if moved < taken:
                chosen.append((latest, taken - moved))
            left[_place(slack, horizon)] -= moved
            left[_place(latest, horizon)] += moved
            waiting -= moved
            forced += moved
    return forced


def _place(slack: int, horizon: int) -> int:
    return min(max(slack, 0), horizon)


def _first_violation(left: Sequence[int], batch: int) -> tuple[int, int] | None:
    """The smallest j for which more than j*B of the tickets left behind have slack <= j, and by how
    many.
    """
    total = 0
    for slack, count in enumerate(left):
        total += count
        if total > slack * batch:
            return slack, total - slack * batch
    return None


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
