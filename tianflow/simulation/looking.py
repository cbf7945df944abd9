"""When a look at the queue can change anything: counts by version, so that a commit costs versions instead of tickets."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping

from tianflow.ledger import Ledger
from tianflow.payloads import Version
from tianflow.tickets import State


def forced_by_counts(committed: Mapping[int, int], open_: Mapping[int, int], batch: int) -> int:
    """What `tianflow.selection.must_wait_for` answers, from ``{slack: how many}`` instead of sorted lists."""
    taken, left = _split(committed, batch)
    open_left = dict(sorted(open_.items()))
    left.update(open_left)
    forced = 0
    while (open_left or taken) and (found := _first_violation(left, batch)) is not None:
        tight, excess = found
        earliest, latest = min(open_left, default=None), max(taken, default=None)
        if earliest is None or latest is None or latest <= tight or earliest > tight:
            break
        moved = min(excess, open_left[earliest], taken[latest])
        forced += moved
        for counts, slack in ((open_left, earliest), (taken, latest), (left, earliest)):
            counts[slack] -= moved
            if not counts[slack]:
                del counts[slack]
        left[latest] += moved
    return forced


def _split(committed: Mapping[int, int], batch: int) -> tuple[dict[int, int], Counter[int]]:
    """The ``batch`` committed ones with the least slack, and the rest."""
    taken: dict[int, int] = {}
    left: Counter[int] = Counter()
    room = batch
    for slack, count in sorted(committed.items()):
        chosen = min(room, count)
        room -= chosen
        if chosen:
            taken[slack] = chosen
        if count > chosen:
            left[slack] = count - chosen
    return taken, left


def _first_violation(left: Mapping[int, int], batch: int) -> tuple[int, int] | None:
    """The smallest j >= 0 for which more than j*B are left with slack <= j, and by how many."""
    total = 0
    for slack, count in sorted(left.items()):
        total += count
        at = max(slack, 0)
        if total > at * batch:
            return at, total - at * batch
    return None


class Look(enum.Enum):
    """Whether to look at the ledger."""

    NO = "nothing has changed"
    CUT = "more tickets are to be cut"
    NOW = "there may be a batch, or something is to be dropped"


class Watch:
    """Says whether `Ledger.take` could do anything but answer what it answered last. Counts follow the ledger; `lost` makes it look.

    `Ledger.take` goes over all tickets. While the learner waits for a batch, every commit would cost that: with 10,000
    actors it is what a simulation, and a coordinator, would spend its time on.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: Counter[int] = Counter()
        self._committed: Counter[int] = Counter()
        self._cut = 0
        self._known = False
        self._queue = 0

    def lost(self) -> None:
        """Something changed that is not followed here: the next look is a real one."""
        self._known = False

    def begun(self, version: Version) -> None:
        """A ticket began."""
        self._open[version.number] += 1

    def committed(self, version: Version, *, was_cut: bool) -> None:
        """A begun ticket was committed."""
        self._open[version.number] -= 1
        self._committed[version.number] += 1
        self._queue += 1
        self._cut -= was_cut

    def looked(self, *, new_cuts: int, before: int) -> None:
        """A look gave nothing but ``new_cuts``. ``before``: tickets that were live then; were any dropped, all are counted anew."""
        if self._known and before == self._ledger.credits_in_use:
            self._cut += new_cuts
            return
        live = self._ledger.live(State.BEGUN, State.COMMITTED)
        self._open = Counter(t.version.number for t in live if t.state is State.BEGUN)
        self._committed = Counter(t.version.number for t in live if t.state is State.COMMITTED)
        self._queue = self._committed.total()
        self._cut = sum(t.state is State.BEGUN and t.cut_at is not None for t in live)
        self._known = True

    def worthwhile(self, for_version: int) -> Look:
        """NO when `Ledger.take` is known to find no batch, nothing to cut and nothing to drop."""
        if not self._known:
            return Look.NOW
        limits, queue = self._ledger.limits, self._queue
        enough = Look.NOW if queue >= limits.batch else Look.NO
        if limits.order == "arrival" or limits.max_staleness is None:
            return enough
        if 2 * queue < limits.batch:  # no more are waited for than are there
            return Look.NO
        last = limits.max_staleness - for_version
        slack = {version + last: count for version, count in self._open.items() if count}
        if min(slack, default=0) < 0:
            return Look.NOW
        needed = forced_by_counts({version + last: count for version, count in self._committed.items() if count}, slack, limits.batch)
        if needed and queue + needed >= limits.batch:
            return Look.CUT if needed > self._cut else Look.NO
        return enough
