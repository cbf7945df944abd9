r"""The ledger: the one writer of ticket states. A plain object; time comes in as an argument.

    granted -> begun -> committed -> taken -> trained, or inserted into replay
                  \________\___________\____-> dropped(reason)

Every ticket metric is one snapshot of it, so ``begun = trained + inserted + dropped + open`` holds
at every look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Batch, Grant, Settlement, Trajectory, Version
from tianflow.core.statistics import LedgerSnapshot
from tianflow.errors import TianflowError
from tianflow.ledger.batch_selection import blocking_tickets, expired
from tianflow.ledger.counters import LedgerCounters
from tianflow.ledger.index import TicketIndex
from tianflow.ledger.slots import Slots
from tianflow.ledger.tickets import Blocked, State, Ticket


class LedgerError(TianflowError):
    """A message that the rules of the ledger forbid: a bug in the sender, never in the data."""


class Ledger:
    """Tickets, credits and slots. It decides; whoever calls it waits, wakes and carries messages.

    Args:
        limits: settings in force.
        slots: slots that exist at first; `add_slots` makes more known.
    """

    def __init__(self, *, limits: Limits, slots: int) -> None:
        self._limits = limits
        self._tickets = TicketIndex()
        self._live = self._tickets.by_number
        self._slots = Slots(slots)
        self._accounts = LedgerCounters()
        self._version = NO_VERSION
        self._published = NO_VERSION
        self._learning = False
        self._grants_held = False
        self._next_ticket = 0
        self._reckon()

    # Limits
    # ----------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """Settings in force."""
        return self._limits

    def set_limits(self, limits: Limits) -> None:
        """Put new settings in force, whole."""
        self._limits = limits
        self._reckon()

    def add_slots(self, count: int) -> None:
        """``count`` more slots exist."""
        self._slots.add(count)
        self._reckon()

    @property
    def slots(self) -> int:
        """Slots that exist."""
        return self._slots.count

    @property
    def version(self) -> Version:
        """The learner's version: its lineage and completed updates."""
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
        """C_max = (max_staleness + 1 - publish lag) * B: with more credits a trajectory could be
        born too stale to be used.

        With replay, too: actors that run further ahead keep shards busy with what is too old by the
        time it could be drawn. Where admission is open there is none but the slots.
        """
        bound = self._limits.max_staleness
        return (
            self.slots
            if bound is None or self._limits.admission == "open"
            else max(0, bound + 1 - self.publish_lag) * self._limits.batch
        )

    @property
    def credits_limit(self) -> int:
        """Credits in force: the controller's target, never above the ceiling, never more than there
        are slots.
        """
        return self._credits_limit

    @property
    def steps_committed(self) -> int:
        """Valid environment steps in committed trajectories."""
        return self._accounts.steps_committed

    @property
    def credits_in_use(self) -> int:
        """Tickets that hold a credit: granted, begun, committed or taken."""
        return len(self._tickets)

    # Actors
    # ----------------------------------------------------------------------------------------------

    @property
    def grantable(self) -> bool:
        """A credit and a slot are free, and somebody learns."""
        return (
            self._learning
            and not self._grants_held
            and len(self._live) < self._credits_limit
            and self._slots.free > 0
        )

    def grant(self, holder: str, *, seed_epoch: int = 0, ahead: int = 0) -> Grant | None:
        """A credit and a slot for ``holder``, or None if it has to wait for either."""
        if not self.grantable:
            return None
        ticket = Ticket(
            self._next_ticket, holder, self._slots.take(), State.GRANTED, self._published
        )
        self._next_ticket += 1
        self._tickets.add(ticket)
        self._accounts.granted += 1
        return Grant(ticket.number, ticket.slot, self._published, seed_epoch, ahead)

    def ahead(self, holders: int) -> int:
        """How many tickets each of ``holders`` can have asked for beside the one it uses, and take
        nothing from anybody.

        As many as each could have beside the batch that is trained on; a single one takes from
        nobody, so it always has one.
        """
        share = (self._credits_limit - self._limits.batch) // holders - 1
        return max(share, 1 if holders == 1 else 0)

    def begin(self, number: int, version: Version) -> bool:
        """The holder begins with ``version``. False when the ticket was given up meanwhile."""
        ticket = self._live.get(number)
        if ticket is None:
            return False
        if ticket.state is not State.GRANTED:
            raise LedgerError(f"ticket {number} cannot begin: it is {ticket.state.value}")
        self._tickets.move(ticket, State.BEGUN, version=version)
        self._accounts.begun += 1
        return True

    def commit(self, number: int, trajectory: Trajectory, now: float) -> bool:
        """The trajectory is whole. False when it came too late: the ticket was given up, and its
        slot is free only now.
        """
        ticket = self._live.get(number)
        if ticket is None:
            self._accounts.late_commits += 1
            self._slots.leave_quarantine(trajectory.slot, number)
            return False
        if ticket.state is not State.BEGUN:
            raise LedgerError(f"ticket {number} cannot be committed: it is {ticket.state.value}")
        if trajectory.slot != ticket.slot or not 1 <= trajectory.length:
            raise LedgerError(
                f"ticket {number} was committed with a slot or length that is not its own"
            )
        ticket.trajectory, ticket.learner_at_commit, ticket.committed_at = (
            trajectory,
            self._version.number,
            now,
        )
        self._tickets.move(ticket, State.COMMITTED, version=min(ticket.version, trajectory.version))
        self._accounts.count_commit(ticket.holder, trajectory)
        return True

    def abort(self, number: int, slot: int, reason: str) -> None:
        """The holder gives a ticket back and no longer touches its slot."""
        ticket = self._live.get(number)
        if ticket is not None:
            if ticket.state not in (State.GRANTED, State.BEGUN):
                raise LedgerError(f"ticket {number} cannot be aborted: it is {ticket.state.value}")
            self._drop(number, reason)
        self._slots.leave_quarantine(slot, number)

    def holder_lost(self, holder: str, reason: str) -> int:
        """``holder`` was reaped: its open tickets are dropped, its slots are free. Committed ones
        stay good. Returns how many.
        """
        lost = [
            t.number
            for t in self._tickets.of_holder(holder)
            if t.state in (State.GRANTED, State.BEGUN)
        ]
        for number in lost:
            self._drop(number, reason)
        self._slots.holder_lost(holder)
        return len(lost)

    def drop_open(self, reason: str) -> int:
        """Give up every ticket that is not with the learner, at a stop. Returns how many."""
        numbers = [t.number for t in self.live(State.GRANTED, State.BEGUN, State.COMMITTED)]
        for number in numbers:
            self._drop(number, reason)
        return len(numbers)

    # Learner
    # ----------------------------------------------------------------------------------------------

    def open_lineage(self, version: Version) -> None:
        """A learner has published ``version``, its first. Grants may go out."""
        if version.lineage <= self._version.lineage and self._version != NO_VERSION:
            raise LedgerError(
                f"lineage {version.lineage} is not newer than {self._version.lineage}"
            )
        self._version = self._published = version
        self._reckon()
        self._learning = True
        self._accounts.publishes += 1

    def learner_left(self) -> None:
        """The learner was reaped. Nothing is granted before the next lineage; what goes into replay
        stays good.
        """
        self._learning = False

    def learner_lost(self, reason: str = "learner_lost") -> int:
        """The learner was reaped: everything made for it is dropped, and nothing is granted before
        the next lineage.
        """
        self._learning = False
        numbers = [t.number for t in self._tickets]
        for number in numbers:
            self._drop(number, reason)
        self._slots.readers_lost()
        return len(numbers)

    def hold_grants(self, hold: bool) -> None:
        """While held, nothing is granted (a stop, a drain), whatever learners come and go."""
        self._grants_held = hold

    def take(self, for_version: Version, now: float) -> Batch | Blocked:
        """B trajectories to be used at ``for_version``, or what stands in the way.

        Sweeps first: what could only be used beyond the bound is dropped(expired) and its slot
        freed.
        """
        if for_version.lineage != self._version.lineage:
            raise LedgerError(
                f"a batch for lineage {for_version.lineage} while {self._version.lineage} is "
                "learning"
            )
        if for_version.number < self._version.number:
            raise LedgerError(
                f"a batch for version {for_version.number}, which is past: the learner is at "
                f"{self._version.number}"
            )
        self._sweep(for_version.number)
        batch, by_arrival = self._limits.batch, self._limits.order == "arrival"
        blocked = None if by_arrival else self._stragglers(for_version.number, now)
        if blocked is not None:
            return blocked
        if self._tickets.count(State.COMMITTED) < batch:
            return Blocked()
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

    def give_back(self, numbers: Iterable[int]) -> None:
        """Taken but not used: committed again. `take` drops what has become too old."""
        for number in numbers:
            ticket = self._live.get(number)
            if ticket is None or ticket.state is not State.TAKEN:
                continue
            self._slots.take_back(number)
            self._tickets.move(ticket, State.COMMITTED)

    def settle(self, settlement: Settlement) -> None:
        """An update is over. Its tickets are trained, credits and slots return, and the version it
        made is the learner's.

        Slots return no earlier, although they were copied out: no slot without its credit lets
        anybody begin. What a learner had said before it was reaped may be read after; like a late
        commit, it changes nothing.
        """
        if self._of_lost_learner(settlement.version):
            return
        if settlement.version != Version(self._version.lineage, self._version.number + 1):
            raise LedgerError(f"version {settlement.version} does not follow {self._version}")
        trained: dict[int, Ticket] = {}
        for number in settlement.tickets:
            ticket = self._live.get(number)
            if ticket is None or ticket.state is not State.TAKEN or number in trained:
                raise LedgerError(f"ticket {number} was trained on without having been taken")
            trained[number] = ticket
        for ticket in trained.values():
            self._accounts.count_training(ticket, self._version.number, settlement.bound)
            self._tickets.pop(ticket.number)
            self._slots.copied(ticket.number)
        self._version = settlement.version
        self._reckon()
        self._accounts.count_update(settlement)
        if settlement.published:
            self.publish(settlement.version)

    def publish(self, version: Version) -> None:
        """``version`` can be read by every actor. Never moves backwards."""
        if self._of_lost_learner(version):
            return
        if version > self._version:
            raise LedgerError(
                f"version {version} was published before it was settled; the learner is at "
                f"{self._version}"
            )
        if version > self._published:
            self._published = version
            self._reckon()
            self._accounts.publishes += 1

    # Replay
    # ----------------------------------------------------------------------------------------------

    def take_one(self, number: int) -> Trajectory:
        """A committed trajectory goes to a replay shard, which reads its slot until `inserted`."""
        ticket = self._tickets[number]
        if ticket.state is not State.COMMITTED or ticket.trajectory is None:
            raise LedgerError(f"ticket {number} cannot be inserted: it is {ticket.state.value}")
        self._tickets.move(ticket, State.TAKEN)
        self._slots.lend(ticket.slot, number)
        return ticket.trajectory

    def insertable(self, number: int) -> Ticket | None:
        """The ticket, if it is committed and may go to a replay shard; do not write to it."""
        ticket = self._live.get(number)
        return ticket if ticket is not None and ticket.state is State.COMMITTED else None

    def refuse(self, number: int, reason: str) -> None:
        """A committed trajectory does not go into replay: credit and slot return."""
        if self.insertable(number) is None:
            raise LedgerError(f"ticket {number} cannot be refused: it is not committed")
        self._drop(number, reason)

    def inserted(self, number: int) -> None:
        """A shard has copied the trajectory: credit and slot return. What was dropped meanwhile
        only frees its slot.
        """
        self._slots.copied(number)
        if self._live.get(number) is not None:
            self._tickets.pop(number)
            self._accounts.inserted += 1

    def shard_lost(self, numbers: Iterable[int], reason: str = "shard_lost") -> None:
        """The shard that read these was reaped."""
        for number in numbers:
            self._slots.copied(number)
            if self._live.get(number) is not None:
                self._drop(number, reason)

    def hears(self, version: Version) -> bool:
        """Whether it is the learner of this lineage that learns; what another one had said changes
        nothing.
        """
        return not self._of_lost_learner(version)

    def replayed(self, ages: Mapping[int, int], bound: int | None) -> None:
        """An update used ``ages[s]`` items of staleness s, under ``bound``."""
        self._accounts.count_replayed(ages, bound)

    # Looking
    # ----------------------------------------------------------------------------------------------

    def slot_of(self, number: int) -> int | None:
        """The slot of a live ticket; None: it lives no more."""
        ticket = self._live.get(number)
        return None if ticket is None else ticket.slot

    def live(self, *states: State) -> list[Ticket]:
        """Live tickets in one of ``states`` (all, if none is named), in ticket order. For those who
        watch; do not write to them.
        """
        return [t for t in self._tickets if not states or t.state in states]

    def snapshot(self) -> LedgerSnapshot:
        """Everything that can be asked, at one moment."""
        return self._accounts.look(
            version=self._version,
            published=self._published,
            publish_lag=self.publish_lag,
            max_staleness=self._limits.max_staleness,
            credits_limit=self.credits_limit,
            credits_ceiling=self.credits_ceiling,
            tickets=self._tickets,
            slots=self._slots,
        )

    # Inside
    # ----------------------------------------------------------------------------------------------

    def _reckon(self) -> None:
        """`credits_limit` anew, after limits, slots or a version changed: every grant asks for it,
        and it changes a few times an update.
        """
        self._credits_limit = min(self._limits.credits, self.credits_ceiling, self.slots)

    def _of_lost_learner(self, version: Version) -> bool:
        return not self._learning or version.lineage < self._version.lineage

    def _sweep(self, for_version: int) -> None:
        at = Version(self._version.lineage, for_version)
        for number, reason in expired(self._tickets, bound=self._limits.max_staleness, at=at):
            self._drop(number, reason)

    def _stragglers(self, for_version: int, now: float) -> Blocked | None:
        """Open tickets that this batch must not pass over: cut them, and drop those that do not
        answer in time.

        At bound 0 all have the same deadline, so none is ever cut: synchronous training waits for
        whole fragments.
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

    def _cut(self, ticket: Ticket, now: float) -> float:
        """Since when ``ticket`` has been wanted: from now on, if it was not yet."""
        if ticket.cut_at is None:
            ticket.cut_at = now
            self._accounts.cuts += 1
        return ticket.cut_at

    def _drop(self, number: int, reason: str) -> None:
        """The credit returns at once; the slot when nobody can write to it or read from it any
        more.
        """
        ticket = self._tickets.pop(number)
        self._accounts.count_drop(ticket, reason)
        if ticket.state in (State.GRANTED, State.BEGUN):
            self._slots.quarantine(ticket.slot, ticket.holder, number)
        elif ticket.state is State.COMMITTED:
            self._slots.release(ticket.slot)
        # A taken one's slot stays with the learner until it is reaped.
