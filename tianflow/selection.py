"""Which trajectories a batch takes, and which open ones it has to wait for. Pure functions over counts.

A batch takes the oldest versions. It may pass over an open ticket only if every ticket left behind can still be used in
time: with ``slack`` = last admissible use minus the version of this batch, for every j >= 0 at most j*B of the tickets
left behind may have slack <= j (earliest deadline first, with B places at each coming version).
"""

from __future__ import annotations

from collections.abc import Sequence


def must_wait_for(committed: Sequence[int], open_: Sequence[int], batch: int) -> int:
    """How many open tickets, earliest deadline first, belong into this batch although they are not committed yet.

    Args:
        committed: slack of every committed ticket, ascending; a batch takes the first ``batch`` of them.
        open_: slack of every open ticket, ascending.
        batch: B.

    Returns:
        0 when the batch may go ahead without any of them; otherwise the fewest with which nothing is lost. Tickets that
        could not be used in time even if everything were committed are not waited for: nothing is gained by it.
    """
    # All that is left fits into the batches up to the horizon, so more slack than that is no different from it. Without it
    # the work would grow with the bound, which may be a million, instead of with the number of tickets.
    horizon = (len(committed) + len(open_)) // batch + 1
    chosen = list(committed[:batch])
    left = [0] * (horizon + 1)
    for slack in (*committed[batch:], *open_):
        left[min(max(slack, 0), horizon)] += 1
    forced = 0
    while forced < len(open_) and chosen:
        tight = _first_violation(left, batch)
        if tight is None or chosen[-1] <= tight or open_[forced] > tight:
            break
        left[max(open_[forced], 0)] -= 1
        left[min(chosen.pop(), horizon)] += 1
        forced += 1
    return forced


def _first_violation(left: Sequence[int], batch: int) -> int | None:
    """The smallest j for which more than j*B of the tickets left behind have slack <= j."""
    total = 0
    for slack, count in enumerate(left):
        total += count
        if total > slack * batch:
            return slack
    return None
