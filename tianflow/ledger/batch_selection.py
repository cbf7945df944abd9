"""Selection rules of a batch: pure functions over counts of tickets.

A batch takes the oldest versions first. A ticket's ``slack`` is the last version that may use it
minus the version of this batch. With B places in each coming batch, at most j*B of the tickets left
behind may have slack <= j, for every j >= 0 (earliest deadline first). A batch passes over an open
ticket only if this condition still holds.

`must_wait_for` counts the open tickets that a batch needs; `blocking_tickets` finds them in the
index; `expired` finds the tickets that can no longer be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tianflow.core.limits import Limits
from tianflow.core.payloads import Version
from tianflow.ledger.index import LISTED, TicketIndex
from tianflow.ledger.tickets import State, Ticket


def must_wait_for(committed: Mapping[int, int], open_: Mapping[int, int], batch: int) -> int:
    """Number of open tickets, earliest deadline first, that this batch must include.

    Args:
        committed: number of committed tickets of each slack; a batch takes the ``batch`` lowest.
        open_: number of open tickets of each slack.
        batch: B.

    Returns:
        0 if the batch may begin without any open ticket, else the smallest number with which no
            ticket is lost. Tickets that would expire in any case are not counted, because waiting
            gains nothing.
    """
    # All remaining tickets fit into the batches up to the horizon, so any larger slack is
    # equivalent. The cap makes the work proportional to the number of tickets; a bound may be a
    # million.
    horizon = (sum(committed.values()) + sum(open_.values())) // batch + 1
    left = [0] * (horizon + 1)
    chosen, places = [], batch
    for slack, count in sorted(committed.items()):
        taken = min(places, count)
        places -= taken
        if taken:
            chosen.append((slack, taken))
        left[_capped(slack, horizon)] += count - taken
    for slack, count in open_.items():
        left[_capped(slack, horizon)] += count
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
            left[_capped(slack, horizon)] -= moved
            left[_capped(latest, horizon)] += moved
            waiting -= moved
            forced += moved
    return forced


def _capped(slack: int, horizon: int) -> int:
    return min(max(slack, 0), horizon)


def _first_violation(left: Sequence[int], batch: int) -> tuple[int, int] | None:
    """The smallest j for which more than j*B of ``left`` have slack <= j, and the excess."""
    total = 0
    for slack, count in enumerate(left):
        total += count
        if total > slack * batch:
            return slack, total - slack * batch
    return None


def expired(
    tickets: TicketIndex, *, max_staleness: int | None, at: Version
) -> list[tuple[int, str]]:
    """Begun and committed tickets that version ``at`` and later ones cannot use, in ticket order.

    Args:
        tickets: live tickets.
        max_staleness: the bound; None: unbounded.
        at: version of the next batch. Tickets of another lineage cannot be used.

    Returns:
        Number and reason of each: ``lineage`` or ``expired``.
    """
    oldest = 0 if max_staleness is None else at.number - max_staleness
    found = []
    for state in LISTED:
        for version in tickets.listed[state]:
            if version.lineage != at.lineage:
                reason = "lineage"
            elif version.number < oldest:
                reason = "expired"
            else:
                continue
            found += [(number, reason) for number in tickets.of_version(state, version)]
    return sorted(found)


def blocking_tickets(tickets: TicketIndex, *, limits: Limits, at: int) -> list[Ticket]:
    """Open tickets that a batch at version number ``at`` must not pass over, oldest first.

    The result is empty if the batch may begin, and if it could not begin even with the open
    tickets.
    """
    committed = tickets.count(State.COMMITTED)
    if limits.max_staleness is None or 2 * committed < limits.batch or not tickets.open:
        return []
    # A grant that names an older version is of use only if its actor begins with a newer one.
    last = limits.max_staleness - at
    needed = must_wait_for(
        _slack(tickets.versions(State.COMMITTED), last),
        _slack(tickets.open_versions(-last), last),
        limits.batch,
    )
    return [] if committed + needed < limits.batch else tickets.oldest_open(needed, -last)


def _slack(versions: Mapping[Version, int], last: int) -> dict[int, int]:
    """Number of tickets per slack; ``last`` is max_staleness minus the version."""
    return {version.number + last: count for version, count in versions.items()}
