"""Exchange: grants -> actors -> trajectories -> learner. The queues around the ledger, which
decides.

Every transport of the trajectory and grant channels ends here: ends in memory call it, and the
links of host processes call it for their ends. It runs on the coordinator's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from tianflow.channels.arena import Arena
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.errors import TianflowError
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import Blocked

PAUSED = "paused"
"""Reason of `Exchange.hold_grants` in a pause of the run, in which its clock stands still."""
DeliverGrant = Callable[[Grant | None], None]
DeliverBatch = Callable[[Batch | None], None]
CallLater = Callable[[float, Callable[[], None]], Callable[[], None]]
"""Calls a function after a delay in seconds; the returned function cancels the call."""


def call_later(delay: float, act: Callable[[], None]) -> Callable[[], None]:
    """`CallLater` on the running event loop."""
    return asyncio.get_running_loop().call_later(delay, act).cancel


def _do_nothing() -> None:
    """Cancel a call that was not made."""


class Exchange:
    """Queues of requests for grants and batches; `Ledger` holds all state of tickets.

    Waits: never; callers give a callback. Unblocked by: any change of the ledger, which `_pump`
    follows.

    Args:
        ledger: decides.
        arena: whose slots are granted; cut requests go through it.
        clock: monotonic seconds, less the time for which the run was paused.
        call_later: timer on the same clock.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater = call_later,
    ) -> None:
        self.ledger = ledger
        self.arena = arena
        self._remote = ledger.remote
        self._clock, self._call_later = clock, call_later
        self._requests: deque[tuple[str, DeliverGrant]] = deque()
        """One entry for each requested grant."""
        self._holders: set[str] = set()
        self._pulling: tuple[Version, DeliverBatch] | None = None
        self._cancel_call: Callable[[], None] | None = None
        self._cancel_rest: Callable[[], None] = _do_nothing
        self._ended = False
        self._holds: set[str] = set()
        self._settled: list[Callable[[], None]] = []
        self.seed_epoch = 0
        """Sent with every grant; see `Grant.seed_epoch`."""

    # Actors
    # ----------------------------------------------------------------------------------------------

    def request_grant(self, holder: str, deliver: DeliverGrant) -> None:
        """Call ``deliver`` with a grant as soon as one is free, first come first served; with None
        at the end.
        """
        if self._ended:
            deliver(None)
            return
        self._holders.add(holder)
        self._requests.append((holder, deliver))
        self._grant()

    def cancel_request(self, holder: str) -> None:
        """``holder`` no longer waits for grants, and may be gone."""
        self._holders.discard(holder)
        self._requests = deque(entry for entry in self._requests if entry[0] != holder)

    def begin(self, ticket: int, version: Version) -> None:
        """The holder begins."""
        self.ledger.begin(ticket, version)
        # A batch may have waited for it as for one with an older version.
        if self._remote and self.ledger.batch_full:
            self._take()

    def commit(self, trajectory: Trajectory, place: str = "") -> bool:
        """A trajectory is complete, and its data lie at ``place``; False when it came too late."""
        if place:
            raise TianflowError(f"the learner cannot read a trajectory at {place!r:.40}")
        return self._commit(trajectory)

    def _commit(self, trajectory: Trajectory) -> bool:
        accepted = self.ledger.commit(trajectory.ticket, trajectory, self._clock())
        self._pump()
        return accepted

    def abort(self, ticket: int, slot: int, reason: str) -> None:
        """A ticket comes back unused."""
        self.ledger.abort(ticket, slot, reason)
        self._pump()

    def holder_lost(self, holder: str, reason: str) -> int:
        """``holder`` was reaped. The number of tickets that came back."""
        self.cancel_request(holder)
        lost = self.ledger.holder_lost(holder, reason)
        self._pump()
        return lost

    def holder_detached(self, holder: str, name: str, reason: str) -> int:
        """``holder`` was abandoned but may still write. The number of tickets that came back; their
        slots follow with `holder_lost` of ``name``.
        """
        self.cancel_request(holder)
        lost = self.ledger.holder_detached(holder, name, reason)
        self._pump()
        return lost

    # Learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A learner published its first version."""
        self.ledger.open_lineage(version)
        self._pump()

    def request_batch(self, for_version: Version, deliver: DeliverBatch) -> None:
        """Call ``deliver`` with a batch for ``for_version`` as soon as it is there; with None at
        the end.
        """
        if self._pulling is not None:
            raise TianflowError("the learner pulls one batch at a time")
        if self._ended:
            deliver(None)
            return
        self._pulling = (for_version, deliver)
        self._pump()

    def cancel_pull(self) -> None:
        """The learner no longer waits (or is gone)."""
        self._pulling = None
        self.ledger.pull_cancelled()

    def give_back(self, tickets: Iterable[int]) -> None:
        """A batch was not used."""
        self.ledger.give_back(tickets)
        self._pump()

    def settle(self, settlement: Settlement) -> None:
        """An update is over."""
        self.ledger.settle(settlement)
        for observe in self._settled:
            observe()
        self._pump()

    def published(self, version: Version) -> None:
        """A version was published between two updates, because a changed setting asked for it."""
        self.ledger.publish(version)
        self._pump()

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner was reaped. The number of tickets that were dropped."""
        self._pulling = None
        return self.ledger.learner_lost(reason)

    # Balance
    # ----------------------------------------------------------------------------------------------

    def set_limits(self, limits: Limits) -> None:
        """Put limits in force."""
        if limits != self.ledger.limits:
            self.ledger.set_limits(limits)
            self._pump()

    def add_slots(self, count: int) -> None:
        """More slots exist."""
        self.ledger.add_slots(count)
        self._pump()

    def hold_grants(self, reason: str) -> None:
        """Grant nothing until ``reason``, and every other reason, is released."""
        self._holds.add(reason)
        self.ledger.hold_grants(True)

    def release_grants(self, reason: str) -> None:
        """``reason`` no longer blocks grants."""
        self._holds.discard(reason)
        self.ledger.hold_grants(bool(self._holds))
        self._pump()

    def on_settled(self, observe: Callable[[], None]) -> None:
        """Call ``observe`` after every settled update, before the queues move."""
        self._settled.append(observe)

    def drop_open(self, reason: str) -> int:
        """Drop every ticket that the learner does not have. Their number."""
        dropped = self.ledger.drop_open(reason)
        self._pump()
        return dropped

    def close(self) -> None:
        """The run ends: every request, waiting or later, gets the end."""
        self._ended = True
        self._cancel_timer()
        self._cancel_rest()
        while self._requests:
            self._requests.popleft()[1](None)
        if self._pulling is not None:
            pulling, self._pulling = self._pulling, None
            pulling[1](None)

    @property
    def waiting_for_grant(self) -> int:
        """Number of requests that wait for a grant."""
        return len(self._requests)

    @property
    def pulling(self) -> bool:
        """True while the learner waits for a batch."""
        return self._pulling is not None

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._take()
        self._grant()

    def _grant(self) -> None:
        """Grant what the ledger permits, in the order of requests."""
        if self._remote:
            self._grant_to_machines()
            return
        while self._requests and self.ledger.grantable:
            holder, deliver = self._requests.popleft()
            deliver(self._ticket_for(holder))

    def _ticket_for(self, holder: str) -> Grant | None:
        ledger = self.ledger
        ahead = ledger.ahead(len(self._holders))
        return ledger.grant(holder, seed_epoch=self.seed_epoch, ahead=ahead)

    def _grant_to_machines(self) -> None:
        """`_grant` where holders are on other machines. Late holders rest while others wait."""
        ledger, lateness = self.ledger, self.ledger.lateness
        some_rest = bool(lateness.late) and not self._holders <= lateness.late
        now = self._clock() if some_rest else 0.0
        passed_over = []
        while self._requests and ledger.grantable:
            holder, deliver = self._requests.popleft()
            if some_rest and lateness.rests(holder, now):
                passed_over.append((holder, deliver))
                continue
            grant = self._ticket_for(holder)
            place = self._place_for(holder)
            deliver(grant._replace(place=place) if grant is not None and place else grant)
        if passed_over:
            self._requests.extendleft(reversed(passed_over))
            self._grant_after_rest(now)
        if lateness.blocking and any(
            holder not in lateness.blocking and holder not in lateness.late
            for holder, _ in self._requests
        ):
            lateness.costs(self._clock())

    def _place_for(self, holder: str) -> str:  # noqa: ARG002 - the learner reads on the head
        """The machine where a trajectory of ``holder`` is to lie; "": the head. Asked only where
        there are other machines.
        """
        return ""

    def _grant_after_rest(self, now: float) -> None:
        """Grant again when a late holder has rested. A trajectory that arrives does it, too."""
        self._cancel_rest()
        until = self.ledger.lateness.next_end(now)
        if until is not None:
            self._cancel_rest = self._call_later(until - now + 0.001, self._pump)

    def _take(self) -> None:
        if self._pulling is None:
            return
        for_version, deliver = self._pulling
        if for_version.lineage != self.ledger.version.lineage:
            return
        self._cancel_timer()
        answer = self.ledger.take(for_version, self._clock())
        if isinstance(answer, Blocked):
            self._wait_for_stragglers(answer)
            return
        self._pulling = None
        deliver(answer)

    def _wait_for_stragglers(self, blocked: Blocked) -> None:
        for number in blocked.cut:
            slot = self.ledger.slot_of(number)
            if slot is not None:
                self.arena.request_cut(slot, number)
        # In a pause the clock stands still, so the timer would be set again at once. The release of
        # grants looks again, with which every pause ends.
        if blocked.until is not None and PAUSED not in self._holds:
            delay = max(0.0, blocked.until - self._clock()) + 0.001
            self._cancel_call = self._call_later(delay, self._pump)

    def _cancel_timer(self) -> None:
        if self._cancel_call is not None:
            self._cancel_call()
            self._cancel_call = None
