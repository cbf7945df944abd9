"""What the ledger has counted since the run began: tickets, steps, updates, staleness, and the
share of every holder.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tianflow.core.payloads import Settlement, Trajectory, Version
from tianflow.core.statistics import LedgerSnapshot, Share, coarse
from tianflow.ledger.index import TicketIndex
from tianflow.ledger.slots import Slots
from tianflow.ledger.tickets import State, Ticket

RECENT = 1000
"""Trained trajectories over which the recent maximum and percentiles of staleness are taken."""


@dataclass(slots=True)
class LedgerCounters:
    """Counters, named as in `LedgerSnapshot`. They only grow; ``recent`` and ``shares`` are the
    newest and the sum.
    """

    granted: int = 0
    begun: int = 0
    committed: int = 0
    trained: int = 0
    inserted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    returned: int = 0
    late_commits: int = 0
    cuts: int = 0
    steps_committed: int = 0
    steps_trained: int = 0
    updates: int = 0
    skipped_updates: int = 0
    publishes: int = 0
    unpublished_updates: int = 0
    violations: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    in_queue: Counter[int] = field(default_factory=Counter)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    shares: dict[str, Share] = field(default_factory=dict)

    def count_commit(self, holder: str, trajectory: Trajectory) -> None:
        """``holder`` has committed ``trajectory``."""
        self.committed += 1
        self.steps_committed += trajectory.env_steps
        share = self._share(holder)
        share.committed_steps += trajectory.env_steps
        share.trajectories += 1

    def count_training(self, ticket: Ticket, used_at: int, bound: int | None) -> None:
        """A taken ticket was trained on at version ``used_at``, under ``bound``."""
        assert ticket.trajectory is not None
        staleness = used_at - ticket.version.number
        self.trained += 1
        self.steps_trained += ticket.trajectory.env_steps
        self._share(ticket.holder).trained_steps += ticket.trajectory.env_steps
        self.staleness[staleness] += 1
        self.in_flight[ticket.learner_at_commit - ticket.version.number] += 1
        self.in_queue[used_at - ticket.learner_at_commit] += 1
        # A negative staleness is a label from the future: always a bug, and counted as one.
        self.violations += staleness < 0 or (bound is not None and staleness > bound)
        self.recent.append(staleness)

    def count_update(self, settlement: Settlement) -> None:
        """An update is over."""
        self.updates += 1
        self.skipped_updates += settlement.skipped
        self.unpublished_updates += not settlement.published

    def count_replayed(self, ages: Mapping[int, int], bound: int | None) -> None:
        """An update used ``ages[s]`` items of staleness s from replay, under ``bound``."""
        for age in sorted(ages):
            about, count = coarse(age), ages[age]
            self.staleness[about] += count
            self.violations += count * (age < 0 or (bound is not None and age > bound))
            self.recent.append(about)

    def count_drop(self, ticket: Ticket, reason: str) -> None:
        """``ticket`` was given up: returned if it had not begun, else dropped(reason)."""
        if ticket.state is State.GRANTED:
            self.returned += 1
            return
        self.dropped[reason] += 1
        if ticket.trajectory is not None:
            self._share(ticket.holder).dropped_steps += ticket.trajectory.env_steps

    def look(
        self,
        *,
        version: Version,
        published: Version,
        publish_lag: int,
        max_staleness: int | None,
        credits_limit: int,
        credits_ceiling: int,
        tickets: TicketIndex,
        slots: Slots,
    ) -> LedgerSnapshot:
        """The counters as they are now, and what ``tickets`` and ``slots`` hold, beside what is in
        force.
        """
        return LedgerSnapshot(
            version=version,
            published=published,
            granted=self.granted,
            begun=self.begun,
            committed=self.committed,
            trained=self.trained,
            inserted=self.inserted,
            dropped=dict(self.dropped),
            open=len(tickets) - tickets.count(State.GRANTED),
            returned=self.returned,
            late_commits=self.late_commits,
            cuts=self.cuts,
            in_use=len(tickets),
            credits_limit=credits_limit,
            credits_ceiling=credits_ceiling,
            slots=slots.count,
            free_slots=slots.free,
            quarantined_slots=slots.quarantined,
            queue=tickets.count(State.COMMITTED),
            oldest_committed_at=tickets.first_arrival,
            steps_committed=self.steps_committed,
            steps_trained=self.steps_trained,
            updates=self.updates,
            skipped_updates=self.skipped_updates,
            publishes=self.publishes,
            publish_lag=publish_lag,
            unpublished_updates=self.unpublished_updates,
            max_staleness=max_staleness,
            staleness=dict(self.staleness),
            in_flight=dict(self.in_flight),
            in_queue=dict(self.in_queue),
            violations=self.violations,
            recent_staleness=tuple(self.recent),
            shares={holder: share.copy() for holder, share in self.shares.items()},
        )

    def _share(self, holder: str) -> Share:
        share = self.shares.get(holder)
        if share is None:
            share = self.shares[holder] = Share()
        return share
