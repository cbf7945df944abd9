"""Counters of the ledger since the run began: tickets, steps, updates, staleness, and shares."""

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
"""Number of trained trajectories in the recent maximum and percentiles of staleness."""


@dataclass(slots=True)
class LedgerCounters:
    """Counters named as in `LedgerSnapshot`. All but ``recent`` only increase."""

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
        """Count a commit of ``trajectory`` by ``holder``."""
        self.committed += 1
        self.steps_committed += trajectory.env_steps
        share = self._share(holder)
        share.committed_steps += trajectory.env_steps
        share.trajectories += 1

    def count_training(self, ticket: Ticket, used_at: int, max_staleness: int | None) -> None:
        """Count the use of ``ticket`` at version ``used_at``, under ``max_staleness``."""
        assert ticket.trajectory is not None
        staleness = used_at - ticket.version.number
        self.trained += 1
        self.steps_trained += ticket.trajectory.env_steps
        self._share(ticket.holder).trained_steps += ticket.trajectory.env_steps
        self.staleness[staleness] += 1
        # An actor may read a version, and commit with it, before the update that made it settles.
        learner_at_commit = max(ticket.learner_at_commit, ticket.version.number)
        self.in_flight[learner_at_commit - ticket.version.number] += 1
        self.in_queue[used_at - learner_at_commit] += 1
        # A negative staleness means a wrong version label. It is always a bug, and counts as a
        # violation.
        self.violations += _exceeds(staleness, max_staleness)
        self.recent.append(staleness)

    def count_update(self, settlement: Settlement) -> None:
        """Count a completed update."""
        self.updates += 1
        self.skipped_updates += settlement.skipped
        self.unpublished_updates += not settlement.published

    def count_replayed(self, counts: Mapping[int, int], max_staleness: int | None) -> None:
        """Count an update that used ``counts[s]`` replayed items of staleness s."""
        for staleness in sorted(counts):
            bucket, count = coarse(staleness), counts[staleness]
            self.staleness[bucket] += count
            self.violations += count * _exceeds(staleness, max_staleness)
            self.recent.append(bucket)

    def count_drop(self, ticket: Ticket, reason: str) -> None:
        """Count a ticket that was given up: returned if it had not begun, else dropped for
        ``reason``.
        """
        if ticket.state is State.GRANTED:
            self.returned += 1
            return
        self.dropped[reason] += 1
        if ticket.trajectory is not None:
            self._share(ticket.holder).dropped_steps += ticket.trajectory.env_steps

    def snapshot(
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
        """The counters, the contents of ``tickets`` and ``slots``, and the settings in force."""
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


def _exceeds(staleness: int, max_staleness: int | None) -> bool:
    return staleness < 0 or (max_staleness is not None and staleness > max_staleness)
