r"""The ledger: a plain object and the only writer of ticket states. Time is an argument.

    granted -> begun -> committed -> taken -> trained, or inserted into replay
                  \________\___________\____-> dropped(reason)

All ticket metrics come from one snapshot, so ``begun = trained + inserted + dropped + open`` holds
in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from tianflow.core.limits import Limits
from tianflow.core.payloads import (
    NO_VERSION,
    Batch,
    Grant,
    Settlement,
    Trajectory,
    Version,
    credits_ceiling,
)
from tianflow.core.statistics import LedgerSnapshot
from tianflow.errors import TianflowError
from tianflow.ledger.batch_selection import blocking_tickets, expired
from tianflow.ledger.counters import LedgerCounters
from tianflow.ledger.index import TicketIndex
from tianflow.ledger.lateness import Lateness
from tianflow.ledger.slots import Slots
from tianflow.ledger.tickets import Blocked, State, Ticket


class LedgerError(TianflowError):
    """A message violates the ledger's rules: a bug in the sender, never bad data."""


class Ledger:
    """Tickets, credits and slots. The ledger decides; its caller waits, wakes and sends messages.

    On one machine a ticket is open from its begin, which the ledger learns at once. From another
    machine that message may arrive after the bound has passed. There a ticket counts as open from
    its grant, at the version that the grant names: a batch waits for it in time.

    Args:
        limits: settings in force.
        slots: number of slots at first; `add_slots` adds more.
        remote: holders are on other machines.
    """

    def __init__(self, *, limits: Limits, slots: int, remote: bool = False) -> None:
        self._limits, self._remote = limits, remote
        self._tickets = TicketIndex(remote=remote)
        self._lateness = Lateness()
        self._live = self._tickets.by_number
        self._slots = Slots(slots)
        self._counters = LedgerCounters()
        self._version = NO_VERSION
        self._published = NO_VERSION
        self._learning = False
        self._grants_held = False
        self._next_ticket = 0
        self._update_credits_limit()

    # Limits
    # ----------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Settings in force."""
        return self._limits

    def set_limits(self, limits: Limits) -> None:
        """Put ``limits`` in force."""
        self._limits = limits
        self._update_credits_limit()

    def add_slots(self, count: int) -> None:
        """Add ``count`` free slots."""
        self._slots.add(count)
        self._update_credits_limit()

    @property
    def remote(self) -> bool:
        """True if holders are on other machines."""
        return self._remote

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._slots.count

    @property
    def version(self) -> Version:
        """Version of the learner: its lineage and its number of completed updates."""
        return self._version

    @property
    def published(self) -> Version:
        """The newest published version."""
        return self._published

    @property
    def publish_lag(self) -> int:
        """Updates since the last published version."""
        return (
            self._version.number - self._published.number
            if self._published.lineage == self._version.lineage
            else 0
        )

    @property
    def credits_ceiling(self) -> int:
        """C_max (`tianflow.core.payloads.credits_ceiling`); all slots with open admission or no
        bound.

        Replay runs use the same ceiling. Without it, actors that run further ahead fill shards with
        items that are too stale before they can be drawn.
        """
        bound = self._limits.max_staleness
        if bound is None or self._limits.admission == "open":
            return self.slots
        return credits_ceiling(bound, publish_lag=self.publish_lag, batch=self._limits.batch)

    @property
    def credits_limit(self) -> int:
        """Credits in force: the target of the controllers, at most the ceiling and the number of
        slots.
        """
        return self._credits_limit

    @property
    def steps_committed(self) -> int:
        """Valid environment steps in committed trajectories."""
        return self._counters.steps_committed

    @property
    def batch_full(self) -> bool:
        """True if as many trajectories are committed as a batch has."""
        return self._tickets.count(State.COMMITTED) >= self._limits.batch

    @property
    def credits_in_use(self) -> int:
        """Tickets that hold a credit: granted, begun, committed or taken."""
        return len(self._tickets)

    # Actors
    # ----------------------------------------------------------------------------------------------

    @property
    def grantable(self) -> bool:
        """True while a learner is active and a credit and a slot are free."""
        return (
            self._learning
            and not self._grants_held
            and len(self._live) < self._credits_limit
            and self._slots.free > 0
        )

    def grant(self, holder: str, *, seed_epoch: int = 0, ahead: int = 0) -> Grant | None:
        """A credit and a slot for ``holder``; None while one of them is not free."""
        if not self.grantable:
            return None
        ticket = Ticket(
            self._next_ticket, holder, self._slots.take(), State.GRANTED, self._published
        )
        self._next_ticket += 1
        self._tickets.add(ticket)
        if self._remote:
            self._lateness.granted(holder)
        self._counters.granted += 1
        return Grant(ticket.number, ticket.slot, self._published, seed_epoch, ahead)

    @property
    def lateness(self) -> Lateness:
        """Lateness of holders on other machines. The caller adds which others wait meanwhile."""
        return self._lateness

    def ahead(self, holders: int) -> int:
        """Number of tickets that each of ``holders`` may request in advance of the one in use.

        The value leaves enough credits for the other holders and for the batch in training. A
        single holder may always request one.
        """
        share = (self._credits_limit - self._limits.batch) // holders - 1
        return max(share, 1 if holders == 1 else 0)

    def begin(self, number: int, version: Version) -> bool:
        """The holder begins with ``version``. Returns False if the ticket was given up in the
        meantime.
        """
        ticket = self._live.get(number)
        if ticket is None:
            return False
        if ticket.state is not State.GRANTED:
            raise LedgerError(f"ticket {number} cannot begin: it is {ticket.state.value}")
        self._tickets.move(ticket, State.BEGUN, version=version)
        self._counters.begun += 1
        return True

    def commit(self, number: int, trajectory: Trajectory, now: float) -> bool:
        """The trajectory is complete.

        Returns False if the ticket was given up before. Its slot becomes free now.
        """
        ticket = self._live.get(number)
        if ticket is None:
            self._counters.late_commits += 1
            self._slots.leave_quarantine(trajectory.slot, number)
            return False
        if ticket.state is not State.BEGUN:
            raise LedgerError(f"ticket {number} cannot be committed: it is {ticket.state.value}")
        if trajectory.slot != ticket.slot or not 1 <= trajectory.length:
            raise LedgerError(
                f"ticket {number} was committed with slot {trajectory.slot} and length "
                f"{trajectory.length}: expected its own slot {ticket.slot} and at least one step"
            )
        ticket.trajectory, ticket.learner_at_commit, ticket.committed_at = (
            trajectory,
            self._version.number,
            now,
        )
        self._tickets.move(ticket, State.COMMITTED, version=min(ticket.version, trajectory.version))
        if self._remote:
            self._lateness.arrived(ticket.holder)
        self._counters.count_commit(ticket.holder, trajectory)
        return True

    def abort(self, number: int, slot: int, reason: str) -> None:
        """The holder returns a ticket and no longer accesses its slot."""
        ticket = self._live.get(number)
        if ticket is not None:
            if ticket.state not in (State.GRANTED, State.BEGUN):
                raise LedgerError(f"ticket {number} cannot be aborted: it is {ticket.state.value}")
            self._drop(number, reason)
        self._slots.leave_quarantine(slot, number)

    def holder_lost(self, holder: str, reason: str) -> int:
        """``holder`` ended: drop its open tickets, free its slots, retain committed ones.

        Returns the number of dropped tickets.
        """
        lost = self._drop_of(holder, reason)
        self._slots.holder_lost(holder)
        return lost

    def holder_detached(self, holder: str, name: str, reason: str) -> int:
        """``holder`` was given up but not reaped, so it may still write: drop its open tickets. Its
        slots stay in quarantine until `holder_lost` of ``name``.

        Returns the number of dropped tickets.
        """
        lost = self._drop_of(holder, reason)
        self._slots.rename(holder, name)
        return lost

    def _drop_of(self, holder: str, reason: str) -> int:
        """Drop the open tickets of ``holder``. Their number."""
        self._lateness.lost(holder)
        lost = [
            t.number
            for t in self._tickets.of_holder(holder)
            if t.state in (State.GRANTED, State.BEGUN)
        ]
        for number in lost:
            self._drop(number, reason)
        return len(lost)

    def drop_open(self, reason: str) -> int:
        """Drop every ticket that is not taken, at a stop. Returns their number."""
        numbers = [t.number for t in self.live(State.GRANTED, State.BEGUN, State.COMMITTED)]
        for number in numbers:
            self._drop(number, reason)
        return len(numbers)

    # Learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A new learner has published ``version``, its first. Grants may begin."""
        if version.lineage <= self._version.lineage and self._version != NO_VERSION:
            raise LedgerError(
                f"lineage {version.lineage} is not newer than {self._version.lineage}"
            )
        self._version = self._published = version
        self._update_credits_limit()
        self._learning = True
        self._counters.publishes += 1

    def learner_left(self) -> None:
        """The learner ended, in a replay run. Grants stop until the next lineage; tickets stay
        valid.
        """
        self._learning = False

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner ended: drop all tickets, and stop grants until the next lineage.

        Returns the number of dropped tickets.
        """
        self._learning = False
        self._lateness.cancel()
        numbers = [t.number for t in self._tickets]
        for number in numbers:
            self._drop(number, reason)
        self._slots.readers_lost()
        return len(numbers)

    def hold_grants(self, hold: bool) -> None:
        """Stop or allow grants, independently of the learner (for a stop or a drain)."""
        self._grants_held = hold

    def take(self, for_version: Version, now: float) -> Batch | Blocked:
        """A batch of B trajectories for ``for_version``, or the tickets that block it.

        Before a batch is chosen, every ticket that ``for_version`` could use only beyond the bound
        is dropped as expired. The learner checks the bound again at use.
        """
        if for_version.lineage != self._version.lineage:
            raise LedgerError(
                f"a batch for lineage {for_version.lineage} was requested while lineage "
                f"{self._version.lineage} is active"
            )
        if for_version.number < self._version.number:
            raise LedgerError(
                f"a batch for version {for_version.number} was requested, but the learner is "
                f"already at version {self._version.number}"
            )
        self._drop_expired(for_version)
        by_arrival = self._limits.order == "arrival"
        blocked = None if by_arrival else self._wait_for_stragglers(for_version.number, now)
        if self._remote:
            self._note_wait(blocked, for_version, now)
        if blocked is not None:
            return blocked
        if not self.batch_full:
            return Blocked()
        batch = self._limits.batch
        first = (
            self._tickets.arrived(batch)
            if by_arrival
            else self._tickets.oldest(State.COMMITTED, batch)
        )
        chosen = sorted(first, key=attrgetter("number"))
        for ticket in chosen:
            self._tickets.move(ticket, State.TAKEN)
            self._slots.lend(ticket.slot, ticket.number)
        return Batch(for_version, tuple(t.trajectory for t in chosen if t.trajectory is not None))

    def pull_cancelled(self) -> None:
        """The learner does not wait for a batch any more."""
        self._lateness.cancel()

    def give_back(self, numbers: Iterable[int]) -> None:
        """Return taken, unused tickets to the queue. The next `take` drops those that expired."""
        for number in numbers:
            ticket = self._live.get(number)
            if ticket is None or ticket.state is not State.TAKEN:
                continue
            self._slots.take_back(number)
            self._tickets.move(ticket, State.COMMITTED)

    def settle(self, settlement: Settlement) -> None:
        """An update is complete: its tickets are trained, and the learner is at its new version.

        Credits and slots return only now, although the data were copied before, because a slot
        without a credit cannot be granted. Messages of a learner that was lost change nothing.
        """
        if self._of_lost_learner(settlement.version):
            return
        if settlement.version != Version(self._version.lineage, self._version.number + 1):
            raise LedgerError(
                f"version {settlement.version} does not follow version {self._version}"
            )
        trained: dict[int, Ticket] = {}
        for number in settlement.tickets:
            ticket = self._live.get(number)
            if ticket is None or ticket.state is not State.TAKEN or number in trained:
                raise LedgerError(f"ticket {number} was used in training without being taken")
            trained[number] = ticket
        for ticket in trained.values():
            self._counters.count_training(ticket, self._version.number, settlement.bound)
            self._tickets.pop(ticket.number)
            self._slots.copied(ticket.number)
        self._version = settlement.version
        self._update_credits_limit()
        self._counters.count_update(settlement)
        if settlement.published:
            self.publish(settlement.version)

    def publish(self, version: Version) -> None:
        """All actors can read ``version``. An older version changes nothing."""
        if self._of_lost_learner(version):
            return
        if version > self._version:
            raise LedgerError(
                f"version {version} was published before it was settled; the learner is at version "
                f"{self._version}"
            )
        if version > self._published:
            self._published = version
            self._update_credits_limit()
            self._counters.publishes += 1

    # Replay
    # ----------------------------------------------------------------------------------------------

    def take_one(self, number: int) -> Trajectory:
        """Lend the slot of a committed trajectory to a replay shard, until `inserted`."""
        ticket = self._tickets[number]
        if ticket.state is not State.COMMITTED or ticket.trajectory is None:
            raise LedgerError(f"ticket {number} cannot be inserted: it is {ticket.state.value}")
        self._tickets.move(ticket, State.TAKEN)
        self._slots.lend(ticket.slot, number)
        return ticket.trajectory

    def insertable(self, number: int) -> Ticket | None:
        """The ticket ``number`` if it is committed, for insertion into replay. Read-only."""
        ticket = self._live.get(number)
        return ticket if ticket is not None and ticket.state is State.COMMITTED else None

    def refuse(self, number: int, reason: str) -> None:
        """Drop a committed trajectory that replay does not accept. Credit and slot return."""
        if self.insertable(number) is None:
            raise LedgerError(f"ticket {number} cannot be refused: it is not committed")
        self._drop(number, reason)

    def inserted(self, number: int) -> None:
        """A shard has copied the trajectory: credit and slot return.

        If the ticket was dropped in the meantime, only the slot returns.
        """
        self._slots.copied(number)
        if self._live.get(number) is not None:
            self._tickets.pop(number)
            self._counters.inserted += 1

    def shard_lost(self, numbers: Iterable[int], reason: str = "shard_lost") -> None:
        """A shard ended while it read these tickets: drop them."""
        for number in numbers:
            self._slots.copied(number)
            if self._live.get(number) is not None:
                self._drop(number, reason)

    def is_current(self, version: Version) -> bool:
        """True if ``version`` belongs to the lineage of the active learner."""
        return not self._of_lost_learner(version)

    def replayed(self, staleness: Mapping[int, int], max_staleness: int | None) -> None:
        """An update used ``staleness[s]`` replayed items of staleness s."""
        self._counters.count_replayed(staleness, max_staleness)

    # Queries
    # ----------------------------------------------------------------------------------------------

    def slot_of(self, number: int) -> int | None:
        """The slot of a live ticket; None if the ticket is not live."""
        ticket = self._live.get(number)
        return None if ticket is None else ticket.slot

    def live(self, *states: State) -> list[Ticket]:
        """Live tickets in one of ``states`` (default: all), in ticket order, for observers.
        Read-only.
        """
        return [t for t in self._tickets if not states or t.state in states]

    def written_slots(self) -> list[tuple[int, int, str]]:
        """(ticket, slot, holder) of each slot that its holder writes to. A ticket that was given up
        counts until the holder gives the slot back.
        """
        begun = [(t.number, t.slot, t.holder) for t in self.live(State.BEGUN)]
        return begun + self._slots.written_in_quarantine()

    def snapshot(self) -> LedgerSnapshot:
        """All figures of the ledger at one moment."""
        return self._counters.snapshot(
            version=self._version,
            published=self._published,
            publish_lag=self.publish_lag,
            max_staleness=self._limits.max_staleness,
            credits_limit=self.credits_limit,
            credits_ceiling=self.credits_ceiling,
            tickets=self._tickets,
            slots=self._slots,
        )

    # Internals
    # ----------------------------------------------------------------------------------------------

    def _update_credits_limit(self) -> None:
        """Cache `credits_limit`. Every grant reads it; it changes a few times per update."""
        self._credits_limit = min(self._limits.credits, self.credits_ceiling, self.slots)

    def _of_lost_learner(self, version: Version) -> bool:
        return not self._learning or version.lineage < self._version.lineage

    def _drop_expired(self, at: Version) -> None:
        bound = self._limits.max_staleness
        for number, reason in expired(self._tickets, max_staleness=bound, at=at):
            self._drop(number, reason)

    def _wait_for_stragglers(self, for_version: int, now: float) -> Blocked | None:
        """Cut the open tickets that this batch must not pass over; drop those that stay open too
        long.

        With bound 0 all tickets have the same deadline, and none is cut. Synchronous training
        therefore waits for complete trajectories.
        """
        limits = self._limits
        while wanted := blocking_tickets(self._tickets, limits=limits, at=for_version):
            since = [self._cut(ticket, now) for ticket in wanted]
            if limits.patience is None:
                return Blocked(tuple(t.number for t in wanted))
            late = [
                t.number
                for t, cut_at in zip(wanted, since, strict=True)
                if now - cut_at >= limits.patience
            ]
            if not late:
                return Blocked(tuple(t.number for t in wanted), min(since) + limits.patience)
            for number in late:
                self._drop(number, "straggler")
        return None

    def _note_wait(self, blocked: Blocked | None, for_version: Version, now: float) -> None:
        """Note for which holders on other machines the learner waits. A batch that it pulls in
        advance does not count, nor does one that is not full in any case.
        """
        if blocked is not None and self.batch_full and for_version == self._version:
            self._lateness.waits(self._tickets[number].holder for number in blocked.cut)
        else:
            self._lateness.ends(now, self._limits.late_share)

    def _cut(self, ticket: Ticket, now: float) -> float:
        """The time since which ``ticket`` blocks a batch; set to ``now`` if it did not before."""
        if ticket.cut_at is None:
            ticket.cut_at = now
            self._counters.cuts += 1
        return ticket.cut_at

    def _drop(self, number: int, reason: str) -> None:
        """Drop a ticket. Its credit returns at once, its slot when no process can access it any
        more.
        """
        ticket = self._tickets.pop(number)
        self._counters.count_drop(ticket, reason)
        if ticket.state in (State.GRANTED, State.BEGUN):
            self._lateness.arrived(ticket.holder)
            begun = ticket.state is State.BEGUN
            self._slots.quarantine(ticket.slot, ticket.holder, number, begun=begun)
        elif ticket.state is State.COMMITTED:
            self._slots.release(ticket.slot)
        # The slot of a taken ticket stays lent until its reader has copied it or ends.
