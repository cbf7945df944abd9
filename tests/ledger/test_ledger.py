"""Transitions of tickets, refusals, and the identities of the counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.virtual_time import broken_identity
from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Batch, Grant, Settlement, Trajectory, Version
from tianflow.core.statistics import Share, coarse
from tianflow.ledger.ledger import Ledger, LedgerError
from tianflow.ledger.tickets import Blocked, State


class Bench:
    """A ledger with a learner at ``version``, and shorthands for messages of actors and learners."""

    def __init__(
        self,
        *,
        batch: int = 2,
        bound: int | None = 1,
        version: int = 0,
        slots: int = 16,
        remote: bool = False,
        **limits: Any,
    ) -> None:
        given = {"batch": batch, "max_staleness": bound, "credits": slots, **limits}
        self.ledger = Ledger(limits=Limits(**given), slots=slots, remote=remote)
        self.lineage = 1
        self.ledger.open_lineage(self.v(version))

    def v(self, number: int) -> Version:
        return Version(self.lineage, number)

    def granted(self, holder: str = "actor-0") -> Grant:
        grant = self.ledger.grant(holder)
        assert grant is not None
        return grant

    def begun(self, version: int | None = None, holder: str = "actor-0") -> Grant:
        grant = self.granted(holder)
        assert self.ledger.begin(
            grant.ticket, self.v(version) if version is not None else grant.version
        )
        return grant

    def commit(
        self, grant: Grant, version: int | None = None, *, now: float = 0.0, length: int = 4
    ) -> bool:
        oldest = self.v(version) if version is not None else grant.version
        return self.ledger.commit(
            grant.ticket, Trajectory(grant.ticket, grant.slot, length, 2 * length, oldest), now
        )

    def committed(
        self, version: int | None = None, holder: str = "actor-0", now: float = 0.0
    ) -> Grant:
        grant = self.begun(version, holder)
        assert self.commit(grant, version, now=now)
        return grant

    def take(self, version: int | None = None, now: float = 0.0) -> Batch | Blocked:
        return self.ledger.take(
            self.v(self.ledger.version.number if version is None else version), now
        )

    def taken(self, version: int | None = None) -> Batch:
        batch = self.take(version)
        assert isinstance(batch, Batch)
        return batch

    def settle(
        self, batch: Batch, bound: int | None = 1, *, published: bool = True, skipped: bool = False
    ) -> None:
        version = self.v(self.ledger.version.number + 1)
        self.ledger.settle(Settlement(version, tickets(batch), bound, published, skipped))

    def update(self, *, published: bool = True, bound: int | None = 1) -> None:
        """One complete update with new trajectories."""
        for _ in range(self.ledger.limits.batch):
            self.committed(self.ledger.published.number)
        batch = self.taken()
        self.settle(batch, bound, published=published)

    def limit(self, **changes: Any) -> None:
        self.ledger.set_limits(replace(self.ledger.limits, **changes))

    def sound(self) -> None:
        assert "" == broken_identity(self.ledger)


def tickets(batch: Batch) -> tuple[int, ...]:
    return tuple(trajectory.ticket for trajectory in batch.trajectories)


# Transitions of a ticket
# --------------------------------------------------------------------------------------------------


def states(bench: Bench) -> tuple[list[State], int, int, int, int]:
    """(states of live tickets, granted, begun, committed, open)."""
    seen = bench.ledger.snapshot()
    return (
        [ticket.state for ticket in bench.ledger.live()],
        seen.granted,
        seen.begun,
        seen.committed,
        seen.open,
    )


def test_a_ticket_goes_from_granted_to_trained_and_is_counted_in_each_state() -> None:
    bench = Bench(batch=1)
    grant = bench.granted()
    assert ([State.GRANTED], 1, 0, 0, 0) == states(bench)
    bench.ledger.begin(grant.ticket, bench.v(0))
    assert ([State.BEGUN], 1, 1, 0, 1) == states(bench)
    bench.commit(grant)
    assert ([State.COMMITTED], 1, 1, 1, 1) == states(bench)
    assert 1 == bench.ledger.snapshot().queue
    batch = bench.taken()
    assert ([State.TAKEN], 1, 1, 1, 1) == states(bench)
    assert 0 == bench.ledger.snapshot().queue
    bench.sound()
    bench.settle(batch)
    assert ([], 1, 1, 1, 0) == states(bench)
    seen = bench.ledger.snapshot()
    assert (1, 1, {0: 1}) == (seen.trained, seen.updates, seen.staleness)


def test_a_grant_names_the_newest_published_version_and_a_slot_of_its_own() -> None:
    bench = Bench()
    bench.update()
    first, second = bench.granted(), bench.granted()
    assert (bench.v(1), bench.v(1)) == (first.version, second.version)
    assert first.slot != second.slot
    assert second.ticket == first.ticket + 1


def test_a_grant_carries_the_seed_epoch_it_was_asked_with() -> None:
    assert 7 == Bench().ledger.grant("actor-0", seed_epoch=7).seed_epoch  # type: ignore[union-attr]


def test_nothing_is_granted_before_a_learner_has_published() -> None:
    ledger = Ledger(limits=Limits(batch=1, max_staleness=0, credits=1), slots=4)
    assert ledger.grant("actor-0") is None
    assert NO_VERSION == ledger.version
    ledger.open_lineage(Version(1, 0))
    assert ledger.grant("actor-0") is not None


def test_credit_and_slot_return_when_the_version_is_settled() -> None:
    bench = Bench(batch=1, bound=0, slots=2)
    bench.committed()
    batch = bench.taken()
    assert bench.ledger.grant("actor-0") is None
    assert 1 == bench.ledger.snapshot().free_slots
    bench.settle(batch, bound=0)
    bench.sound()
    assert 2 == bench.ledger.snapshot().free_slots
    assert bench.ledger.grant("actor-0") is not None


def test_without_a_free_slot_nothing_is_granted_though_there_are_credits() -> None:
    bench = Bench(batch=1, bound=None, slots=2, credits=3)
    bench.begun()
    bench.ledger.drop_open("stopped")
    bench.granted()
    assert (1, 2, 0) == (
        bench.ledger.credits_in_use,
        bench.ledger.credits_limit,
        bench.ledger.snapshot().free_slots,
    )
    assert bench.ledger.grant("actor-0") is None
    bench.ledger.add_slots(1)
    assert 2 == bench.granted().slot
    bench.sound()


def test_a_ticket_has_the_version_of_its_oldest_step() -> None:
    """Handed value: steps of versions 6 6 7 7 7 used at 10 are 4 versions old, neither 3 nor
    3.4.
    """
    bench = Bench(batch=1, bound=4, version=10)
    grant = bench.begun(7)
    bench.commit(grant, min(6, 6, 7, 7, 7))
    bench.settle(bench.taken(), bound=4)
    assert {4: 1} == bench.ledger.snapshot().staleness


def test_a_late_label_does_not_make_a_ticket_younger_than_it_began() -> None:
    bench = Bench(batch=1, bound=4, version=10)
    grant = bench.begun(7)
    bench.commit(grant, 9)
    bench.settle(bench.taken(), bound=4)
    assert {3: 1} == bench.ledger.snapshot().staleness


def test_staleness_splits_into_in_flight_and_in_queue() -> None:
    bench = Bench(batch=1, bound=3)
    slow = bench.begun(0)
    bench.update()
    bench.commit(slow, 0)
    bench.committed(1)
    bench.limit(order="arrival")
    batch = bench.taken()
    assert (slow.ticket,) == tickets(batch)
    bench.settle(batch, bound=3)
    seen = bench.ledger.snapshot()
    assert ({0: 1, 1: 1}, {0: 1, 1: 1}, {0: 2}) == (seen.staleness, seen.in_flight, seen.in_queue)
    bench.settle(bench.taken(), bound=3)
    seen = bench.ledger.snapshot()
    assert ({0: 1, 1: 2}, {0: 2, 1: 1}, {0: 2, 1: 1}) == (
        seen.staleness,
        seen.in_flight,
        seen.in_queue,
    )
    assert (0, 1, 1) == seen.recent_staleness


def test_a_version_that_was_read_before_it_settled_counts_no_negative_staleness() -> None:
    bench = Bench(batch=1, bound=3)
    used = bench.committed(0)
    early = bench.begun(1)
    bench.commit(early, 1)
    batch = bench.taken()
    assert (used.ticket,) == tickets(batch)
    bench.settle(batch, bound=3)
    bench.settle(bench.taken(), bound=3)
    seen = bench.ledger.snapshot()
    assert ({0: 2}, {0: 2}, {0: 2}) == (seen.staleness, seen.in_flight, seen.in_queue)


# Admission
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bound", "batch", "started", "expected"),
    [
        (0, 0, 4, 0, 4),
        (0, 0, 4, 4, 0),
        (1, 0, 4, 4, 4),
        (0, 2, 4, 0, 12),
        (3, 1, 8, 35, 5),
        (3, 1, 8, 40, 0),
    ],
)
def test_as_many_may_begin_as_the_admission_rule_of_areal_says(
    version: int, bound: int, batch: int, started: int, expected: int
) -> None:
    """Handed values of arXiv 2505.24298: admit while floor((N - 1) / B) <= i + eta, N trajectories
    started, learner version i.
    """
    bench = Bench(batch=batch, bound=bound, slots=64)
    for _ in range(version):
        bench.update(bound=bound)
    for _ in range(started - version * batch):
        bench.granted()
    more = 0
    while bench.ledger.grant("actor-1") is not None:
        more += 1
    assert expected == more


@pytest.mark.parametrize(
    ("bound", "lag", "expected"), [(0, 0, 2), (3, 0, 8), (3, 1, 6), (3, 3, 2), (None, 1, 16)]
)
def test_the_ceiling_is_a_batch_for_each_version_still_admissible(
    bound: int | None, lag: int, expected: int
) -> None:
    bench = Bench(bound=bound)
    for _ in range(lag):
        bench.update(published=False, bound=bound)
    assert (lag, expected) == (bench.ledger.publish_lag, bench.ledger.credits_ceiling)


def test_a_publish_ends_the_lag() -> None:
    bench = Bench(bound=3)
    bench.update(published=False, bound=3)
    assert 1 == bench.ledger.publish_lag
    bench.ledger.publish(bench.v(1))
    assert (0, 8) == (bench.ledger.publish_lag, bench.ledger.credits_ceiling)


def test_an_older_publish_does_not_replace_a_newer_one() -> None:
    bench = Bench()
    bench.update()
    bench.ledger.publish(bench.v(0))
    assert bench.v(1) == bench.ledger.published
    assert 2 == bench.ledger.snapshot().publishes


def test_credits_are_the_least_of_controller_ceiling_and_slots() -> None:
    assert 3 == Bench(credits=3).ledger.credits_limit
    assert 4 == Bench(credits=100).ledger.credits_limit
    assert 5 == Bench(credits=100, bound=None, slots=5).ledger.credits_limit


def test_a_lowered_limit_takes_nothing_away_and_grants_nothing() -> None:
    bench = Bench(bound=3)
    grants = [bench.begun() for _ in range(8)]
    bench.limit(max_staleness=0)
    assert (2, 8) == (bench.ledger.credits_limit, bench.ledger.credits_in_use)
    assert bench.ledger.grant("actor-0") is None
    assert bench.commit(grants[0])


def test_while_held_nothing_is_granted() -> None:
    bench = Bench()
    bench.ledger.hold_grants(True)
    assert bench.ledger.grant("actor-0") is None
    bench.ledger.hold_grants(False)
    assert bench.ledger.grant("actor-0") is not None


def test_a_hold_outlasts_a_new_learner() -> None:
    """A run that drains must not begin anything because its learner was restarted meanwhile."""
    bench = Bench()
    bench.ledger.hold_grants(True)
    bench.ledger.learner_lost()
    bench.ledger.open_lineage(Version(2, 0))
    assert bench.ledger.grant("actor-0") is None
    bench.ledger.hold_grants(False)
    assert bench.ledger.grant("actor-0") is not None


def test_the_end_of_a_hold_grants_nothing_while_there_is_no_learner() -> None:
    bench = Bench()
    bench.ledger.hold_grants(True)
    bench.ledger.learner_lost()
    bench.ledger.hold_grants(False)
    assert bench.ledger.grant("actor-0") is None


def test_a_hold_can_begin_before_the_first_learner() -> None:
    ledger = Ledger(limits=Limits(batch=1, max_staleness=0, credits=1), slots=4)
    ledger.hold_grants(True)
    ledger.open_lineage(Version(1, 0))
    assert ledger.grant("actor-0") is None


# Taking
# --------------------------------------------------------------------------------------------------


def test_a_batch_takes_the_oldest_versions_and_lists_them_in_ticket_order() -> None:
    bench = Bench(bound=5, version=5)
    young, old, older = bench.committed(5), bench.committed(4), bench.committed(3)
    assert (old.ticket, older.ticket) == tickets(bench.taken())
    assert [young.ticket] == [t.number for t in bench.ledger.live(State.COMMITTED)]


def test_in_order_of_arrival_a_batch_takes_the_first_commits() -> None:
    bench = Bench(bound=5, version=5, order="arrival")
    first, _, second = (
        bench.committed(5, now=1.0),
        bench.committed(3, now=3.0),
        bench.committed(4, now=2.0),
    )
    assert (first.ticket, second.ticket) == tickets(bench.taken())


def test_too_few_commits_give_no_batch() -> None:
    bench = Bench(bound=None)
    bench.committed()
    assert Blocked() == bench.take()


def test_the_staleness_window_is_inclusive_and_one_older_is_expired() -> None:
    """Handed values: versions 10, 9, 7, 6 at learner version 10 under bound 3; kept are those of
    staleness 0, 1, 3.
    """
    bench = Bench(batch=1, bound=3, version=10)
    kept = [bench.committed(version).ticket for version in (10, 9, 7)]
    bench.committed(6)
    bench.take()
    assert {"expired": 1} == bench.ledger.snapshot().dropped
    assert kept == [t.number for t in bench.ledger.live()]
    assert 1 == bench.ledger.snapshot().slots - bench.ledger.snapshot().free_slots - 2
    bench.sound()


def test_a_label_from_the_future_is_a_violation_even_without_a_bound() -> None:
    """Handed value: version 11 at learner version 10 has staleness -1, always a bug."""
    bench = Bench(batch=1, bound=None, version=10)
    bench.committed(11)
    bench.settle(bench.taken(), bound=None)
    assert ({-1: 1}, 1) == (bench.ledger.snapshot().staleness, bench.ledger.snapshot().violations)


def test_a_violation_is_counted_when_the_check_at_use_was_bypassed() -> None:
    bench = Bench(batch=1, bound=3)
    bench.committed(0)
    batch = bench.taken(0)
    for expected, bound in ((0, 3), (1, 0)):
        bench.settle(batch, bound=bound)
        assert expected == bench.ledger.snapshot().violations
        bench.committed(0)
        batch = bench.taken()


def test_violations_are_judged_by_the_bound_of_the_use_not_of_now() -> None:
    bench = Bench(batch=1, bound=3, version=3)
    bench.committed(0)
    batch = bench.taken()
    bench.limit(max_staleness=0)
    bench.settle(batch, bound=3)
    assert 0 == bench.ledger.snapshot().violations


def test_a_prefetched_batch_is_judged_at_the_version_at_which_it_will_be_used() -> None:
    bench = Bench(batch=1, bound=1, version=1)
    bench.committed(0)
    using = bench.taken()
    bench.limit(max_staleness=2)
    bench.committed(0)
    fresh = bench.committed(1)
    bench.limit(max_staleness=1)
    assert (fresh.ticket,) == tickets(bench.taken(2))
    assert {"expired": 1} == bench.ledger.snapshot().dropped
    bench.settle(using)


def test_an_open_ticket_that_can_no_longer_be_used_expires_and_its_slot_is_quarantined() -> None:
    bench = Bench(batch=1, bound=1, version=2)
    bench.begun(0)
    bench.take()
    seen = bench.ledger.snapshot()
    assert ({"expired": 1}, 0, 1) == (seen.dropped, seen.in_use, seen.quarantined_slots)


def test_a_ticket_that_has_not_begun_never_expires() -> None:
    bench = Bench(batch=1, bound=0, slots=4)
    waits = bench.granted()
    bench.limit(max_staleness=1)
    bench.update()
    bench.limit(max_staleness=0)
    assert Blocked() == bench.take()
    assert bench.ledger.begin(waits.ticket, bench.v(1))
    assert bench.commit(waits, 1)
    assert (waits.ticket,) == tickets(bench.taken())


def test_a_returned_batch_is_taken_again_without_expired_tickets() -> None:
    bench = Bench(batch=2, bound=2, version=2)
    old, young = bench.committed(0), bench.committed(2)
    bench.ledger.give_back(tickets(bench.taken()))
    bench.sound()
    younger = bench.committed(2)
    bench.limit(max_staleness=0)
    assert (young.ticket, younger.ticket) == tickets(bench.taken())
    assert {"expired": 1} == bench.ledger.snapshot().dropped
    assert old.ticket not in [t.number for t in bench.ledger.live()]
    bench.sound()


def test_returning_tickets_that_are_not_taken_changes_nothing() -> None:
    bench = Bench(batch=1)
    bench.committed()
    bench.ledger.give_back([0, 99])
    assert [State.COMMITTED] == [t.state for t in bench.ledger.live()]
    bench.sound()


def test_a_skipped_optimiser_step_is_an_update_with_a_counter_of_its_own() -> None:
    bench = Bench(batch=1)
    bench.committed()
    bench.settle(bench.taken(), skipped=True, published=False)
    seen = bench.ledger.snapshot()
    assert (1, 1, bench.v(1), bench.v(0), 1) == (
        seen.updates,
        seen.skipped_updates,
        seen.version,
        seen.published,
        seen.unpublished_updates,
    )


# Order and stragglers
# -------------------------------------------------------------------------------------------------


def test_a_ticket_with_time_left_is_passed_over() -> None:
    bench = Bench(batch=2, bound=1)
    bench.begun()
    ready = bench.committed(), bench.committed()
    assert (ready[0].ticket, ready[1].ticket) == tickets(bench.taken())


def straggling(*, patience: float | None = 10.0) -> tuple[Bench, Grant]:
    """At version 1, bound 1: one open ticket of version 0 that must be used now, and two committed
    ones of version 1.
    """
    bench = Bench(batch=2, bound=1, patience=patience)
    slow = bench.begun(0, "slow")
    bench.update()
    bench.committed(1)
    bench.committed(1)
    return bench, slow


def test_a_ticket_that_blocks_a_batch_is_cut_once_and_waited_for() -> None:
    bench, slow = straggling()
    assert Blocked((slow.ticket,), 15.0) == bench.take(now=5.0)
    assert Blocked((slow.ticket,), 15.0) == bench.take(now=9.0)
    assert 1 == bench.ledger.snapshot().cuts


def test_the_next_try_is_due_when_the_first_of_several_stragglers_times_out() -> None:
    bench, slow = straggling()
    bench.take(now=5.0)
    bench.limit(max_staleness=2)
    second = bench.begun(0, "second")
    bench.limit(max_staleness=1)
    assert Blocked((slow.ticket, second.ticket), 15.0) == bench.take(now=9.0)
    assert isinstance(bench.take(now=20.0), Batch)
    assert {"straggler": 2} == bench.ledger.snapshot().dropped


def test_a_cut_trajectory_is_trained_on() -> None:
    bench, slow = straggling()
    bench.take(now=5.0)
    assert bench.commit(slow, 0, length=1)
    batch = bench.taken()
    assert slow.ticket in tickets(batch)
    bench.settle(batch)
    assert ({0: 3, 1: 1}, {}) == (
        bench.ledger.snapshot().staleness,
        bench.ledger.snapshot().dropped,
    )


def test_a_straggler_that_does_not_answer_in_time_is_dropped_and_the_batch_begins() -> None:
    bench, slow = straggling()
    bench.take(now=5.0)
    batch = bench.take(now=15.0)
    assert isinstance(batch, Batch)
    assert slow.ticket not in tickets(batch)
    assert {"straggler": 1} == bench.ledger.snapshot().dropped
    assert 1 == bench.ledger.snapshot().quarantined_slots
    bench.sound()


def test_a_slot_of_a_given_up_ticket_is_watched_until_its_holder_gives_it_back() -> None:
    """Its environment may hang: the patience may end long before the time-out of a step."""
    bench, slow = straggling()
    bench.take(now=5.0)
    bench.take(now=15.0)
    assert {"straggler": 1} == bench.ledger.snapshot().dropped
    assert (slow.ticket, slow.slot) in [found[:2] for found in bench.ledger.written_slots()]
    assert not bench.commit(slow, 0)
    assert [] == bench.ledger.written_slots()


def test_without_a_patience_limit_a_straggler_never_times_out() -> None:
    bench, slow = straggling(patience=None)
    assert Blocked((slow.ticket,), None) == bench.take(now=5.0)
    assert Blocked((slow.ticket,), None) == bench.take(now=1e9)


def test_patience_zero_drops_a_straggler_at_once() -> None:
    bench, _ = straggling(patience=0.0)
    assert isinstance(bench.take(now=5.0), Batch)
    assert {"straggler": 1} == bench.ledger.snapshot().dropped


def test_a_thousand_simultaneous_stragglers_are_all_dropped() -> None:
    bench = Bench(batch=1200, bound=2, slots=6000, patience=0.0)
    for _ in range(1200):
        bench.begun(0)
    bench.update(bound=2)
    for _ in range(1200):
        bench.committed(1)
    bench.limit(max_staleness=1)
    assert isinstance(bench.take(), Batch)
    assert {"straggler": 1200} == bench.ledger.snapshot().dropped


def test_no_ticket_is_cut_in_order_of_arrival_or_without_a_bound() -> None:
    for limits in ({"order": "arrival"}, {"max_staleness": None}):
        bench, _ = straggling()
        bench.limit(**limits)
        assert isinstance(bench.take(), Batch)
        assert 0 == bench.ledger.snapshot().cuts


def test_synchronous_training_waits_for_whole_fragments() -> None:
    bench = Bench(batch=2, bound=0)
    bench.begun()
    bench.committed()
    assert Blocked() == bench.take(now=1e9)
    assert (0, {}) == (bench.ledger.snapshot().cuts, bench.ledger.snapshot().dropped)


# Other machines
# --------------------------------------------------------------------------------------------------


def granted_long_ago(*, remote: bool = True, **limits: Any) -> tuple[Bench, Grant]:
    """`straggling`, with a ticket that may have begun: on another machine, that is not known yet."""
    bench = Bench(batch=2, bound=1, remote=remote, **limits)
    far = bench.granted("far")
    bench.update()
    bench.committed(1)
    bench.committed(1)
    return bench, far


def test_a_batch_waits_for_a_ticket_that_may_have_begun_on_another_machine() -> None:
    bench, far = granted_long_ago()
    assert Blocked((far.ticket,), 15.0) == bench.take(now=5.0)
    assert bench.ledger.begin(far.ticket, far.version)
    assert Blocked((far.ticket,), 15.0) == bench.take(now=6.0)
    assert bench.commit(far, 0)
    batch = bench.taken()
    assert far.ticket in tickets(batch)
    bench.settle(batch)
    assert {} == bench.ledger.snapshot().dropped
    bench.sound()


def test_on_this_machine_a_ticket_that_has_not_begun_is_passed_over() -> None:
    """Its actor will begin with the newest version."""
    bench, _ = granted_long_ago(remote=False)
    assert isinstance(bench.take(now=5.0), Batch)


def test_a_batch_does_not_wait_for_a_ticket_that_began_with_a_newer_version() -> None:
    bench, far = granted_long_ago()
    bench.take(now=5.0)
    assert bench.ledger.begin(far.ticket, bench.v(1))
    assert isinstance(bench.take(now=6.0), Batch)


def test_a_grant_that_does_not_arrive_in_time_is_given_up_and_has_not_begun() -> None:
    bench, far = granted_long_ago()
    bench.take(now=5.0)
    assert isinstance(bench.take(now=15.0), Batch)
    seen = bench.ledger.snapshot()
    assert ({}, 1, 1) == (seen.dropped, seen.returned, seen.quarantined_slots)
    assert not bench.ledger.begin(far.ticket, far.version)
    assert not bench.commit(far)
    assert 0 == bench.ledger.snapshot().quarantined_slots


def test_no_batch_waits_for_a_grant_that_is_of_use_with_a_newer_version_only() -> None:
    """The bound was lowered meanwhile."""
    bench = Bench(batch=1, bound=2, remote=True)
    far = bench.granted("far")
    bench.update(bound=2)
    bench.update(bound=2)
    bench.committed(2)
    bench.limit(max_staleness=1)
    assert isinstance(bench.take(now=5.0), Batch)
    assert bench.ledger.begin(far.ticket, bench.v(2))


def costly(**limits: Any) -> tuple[Bench, Grant]:
    """A learner that has waited since 5, when another holder needed a credit."""
    bench, far = granted_long_ago(**limits)
    bench.take(now=5.0)
    bench.ledger.lateness.costs(5.0)
    bench.take(now=8.0)
    assert {"far"} == bench.ledger.lateness.blocking
    return bench, far


@pytest.mark.parametrize(("share", "late"), [(0.5, {"far"}), (1.0, set())])
def test_a_holder_that_costs_others_time_is_late(share: float, late: set[str]) -> None:
    bench, far = costly(late_share=share)
    assert bench.ledger.begin(far.ticket, far.version)
    assert bench.commit(far, now=9.0)
    assert isinstance(bench.take(now=9.0), Batch)
    assert late == bench.ledger.lateness.late


def test_a_late_holder_is_in_time_when_its_next_trajectory_is_or_fails() -> None:
    bench, far = costly(late_share=0.5)
    bench.ledger.abort(far.ticket, far.slot, "stopped")
    bench.settle(bench.taken())
    assert {"far"} == bench.ledger.lateness.late
    again = bench.granted("far")
    bench.ledger.abort(again.ticket, again.slot, "stopped")
    assert set() == bench.ledger.lateness.late


def test_a_batch_that_is_pulled_in_advance_costs_no_time() -> None:
    bench = Bench(batch=1, bound=2, remote=True)
    far = bench.granted("far")
    bench.update(bound=2)
    bench.committed(1)
    bench.taken()
    bench.committed(1)
    assert Blocked((far.ticket,), 15.0) == bench.take(2, now=5.0)
    assert set() == bench.ledger.lateness.blocking


def test_a_batch_that_is_not_full_in_any_case_costs_no_time() -> None:
    bench = Bench(batch=2, bound=1, remote=True)
    far = bench.granted("far")
    bench.update()
    bench.committed(1)
    assert Blocked((far.ticket,), 15.0) == bench.take(now=5.0)
    assert set() == bench.ledger.lateness.blocking


@pytest.mark.parametrize("end", ["lost", "learner", "pull"])
def test_a_wait_that_ends_for_another_reason_has_no_consequence(end: str) -> None:
    bench, far = costly(late_share=0.5)
    if end == "lost":
        bench.ledger.holder_lost("far", "node_lost")
    elif end == "learner":
        bench.ledger.learner_lost()
        bench.lineage = 2
        bench.ledger.open_lineage(bench.v(0))
    else:
        bench.ledger.pull_cancelled()
        assert bench.ledger.begin(far.ticket, bench.v(1))
    bench.take(now=9.0)
    assert set() == bench.ledger.lateness.late


# Giving up
# --------------------------------------------------------------------------------------------------


def test_a_ticket_aborted_before_it_began_returns_credit_and_slot_and_counts_as_returned() -> None:
    bench = Bench()
    grant = bench.granted()
    bench.ledger.abort(grant.ticket, grant.slot, "stopped")
    seen = bench.ledger.snapshot()
    assert (0, 1, {}, 16, 0) == (
        seen.in_use,
        seen.returned,
        seen.dropped,
        seen.free_slots,
        seen.quarantined_slots,
    )
    bench.sound()


def test_a_ticket_aborted_after_it_began_is_dropped_with_the_reason_given() -> None:
    bench = Bench()
    grant = bench.begun()
    bench.ledger.abort(grant.ticket, grant.slot, "env_error")
    seen = bench.ledger.snapshot()
    assert ({"env_error": 1}, 16, 1) == (seen.dropped, seen.free_slots, seen.begun)
    bench.sound()


@pytest.mark.parametrize("release", ["commit", "abort", "holder_lost"])
def test_the_slot_of_a_dropped_ticket_is_reused_only_after_its_holder_releases_it(
    release: str,
) -> None:
    bench = Bench(slots=2, credits=2)
    grant = bench.begun(holder="slow")
    assert 1 == bench.ledger.drop_open("stopped")
    others = [bench.ledger.grant("other"), bench.ledger.grant("other")]
    assert [True, False] == [other is not None and other.slot != grant.slot for other in others]
    bench.sound()
    if release == "commit":
        assert not bench.commit(grant)
    elif release == "abort":
        bench.ledger.abort(grant.ticket, grant.slot, "stopped")
    else:
        assert 0 == bench.ledger.holder_lost("slow", "env_hang")
    bench.sound()
    assert grant.slot == bench.granted("other").slot


def test_a_late_commit_is_refused_and_counted_without_side_effects() -> None:
    bench = Bench(batch=1)
    grant = bench.begun()
    bench.ledger.drop_open("stopped")
    assert not bench.commit(grant)
    assert not bench.commit(grant)
    seen = bench.ledger.snapshot()
    assert (2, 0, {"stopped": 1}) == (seen.late_commits, seen.committed, seen.dropped)
    assert Blocked() == bench.take()
    bench.sound()


def test_a_late_commit_does_not_free_the_slot_that_another_ticket_has_by_then() -> None:
    bench = Bench(slots=2, credits=2)
    grant = bench.begun(holder="dead")
    bench.ledger.holder_lost("dead", "env_hang")
    other = [bench.granted("other"), bench.granted("other")]
    assert grant.slot in [taken.slot for taken in other]
    assert not bench.commit(grant)
    assert 0 == bench.ledger.snapshot().free_slots
    bench.sound()


def test_a_ticket_given_up_in_the_meantime_does_not_begin() -> None:
    bench = Bench()
    grant = bench.granted()
    bench.ledger.drop_open("stopped")
    assert not bench.ledger.begin(grant.ticket, grant.version)
    assert 0 == bench.ledger.snapshot().begun
    bench.ledger.abort(grant.ticket, grant.slot, "stopped")
    assert 16 == bench.ledger.snapshot().free_slots


def test_a_lost_holder_loses_what_is_open_and_keeps_what_it_committed() -> None:
    bench = Bench(batch=1, bound=3)
    bench.granted("dead")
    bench.begun(holder="dead")
    good = bench.committed(holder="dead")
    bench.begun(holder="alive")
    assert 2 == bench.ledger.holder_lost("dead", "env_hang")
    seen = bench.ledger.snapshot()
    assert ({"env_hang": 1}, 1, 0) == (seen.dropped, seen.returned, seen.quarantined_slots)
    assert (good.ticket,) == tickets(bench.taken())
    bench.sound()


def test_a_stop_drops_what_is_open_and_leaves_what_the_learner_has() -> None:
    bench = Bench(batch=1, bound=5)
    bench.committed()
    batch = bench.taken()
    bench.granted(), bench.begun(), bench.committed()
    assert 3 == bench.ledger.drop_open("stopped")
    bench.sound()
    bench.settle(batch)
    bench.sound()


# Learners
# --------------------------------------------------------------------------------------------------


def lose_learner(bench: Bench) -> Batch:
    """One ticket in every state when the learner is reaped."""
    for _ in range(3):
        bench.committed()
    batch = bench.taken()
    bench.begun(), bench.granted()
    assert 5 == bench.ledger.learner_lost()
    return batch


def test_a_lost_learner_loses_all_tickets() -> None:
    bench = Bench(bound=5)
    lose_learner(bench)
    seen = bench.ledger.snapshot()
    assert ({"learner_lost": 4}, 1, 0, 2, 14) == (
        seen.dropped,
        seen.returned,
        seen.in_use,
        seen.quarantined_slots,
        seen.free_slots,
    )
    bench.sound()


def test_after_a_lost_learner_nothing_is_granted_before_the_next_has_published() -> None:
    bench = Bench(bound=5)
    lose_learner(bench)
    assert bench.ledger.grant("actor-0") is None
    bench.ledger.open_lineage(Version(2, 0))
    assert Version(2, 0) == bench.granted().version


def test_late_messages_of_a_lost_learner_change_nothing() -> None:
    """Its last messages may be read after it was reaped."""
    bench = Bench(bound=5)
    batch = lose_learner(bench)
    before = bench.ledger.snapshot()
    bench.ledger.give_back(tickets(batch))
    late = Settlement(bench.v(1), tickets(batch), 5, True)
    bench.ledger.settle(late)
    bench.ledger.publish(bench.v(1))
    assert before == bench.ledger.snapshot()
    bench.ledger.open_lineage(Version(2, 0))
    bench.ledger.settle(late)
    bench.ledger.publish(bench.v(1))
    assert (Version(2, 0), Version(2, 0), 0) == (
        bench.ledger.version,
        bench.ledger.published,
        bench.ledger.snapshot().updates,
    )
    bench.sound()


def test_a_younger_lineage_replaces_a_longer_one() -> None:
    bench = Bench(version=137)
    bench.ledger.learner_lost()
    bench.ledger.open_lineage(Version(2, 100))
    assert (Version(2, 100), Version(2, 100), 0) == (
        bench.ledger.version,
        bench.ledger.published,
        bench.ledger.publish_lag,
    )


def test_tickets_of_an_older_lineage_are_swept_whatever_their_number() -> None:
    bench = Bench(batch=1, bound=None)
    bench.committed(0)
    bench.ledger.open_lineage(Version(2, 0))
    bench.lineage = 2
    assert Blocked() == bench.take()
    assert {"lineage": 1} == bench.ledger.snapshot().dropped
    bench.sound()


def test_a_run_resumed_at_ten_thousand_keeps_the_bound_from_its_first_batch_on() -> None:
    bench = Bench(batch=1, bound=0, version=10_000)
    assert 1 == bench.ledger.credits_limit
    bench.committed(10_000)
    bench.settle(bench.taken(), bound=0)
    assert ({0: 1}, 0) == (bench.ledger.snapshot().staleness, bench.ledger.snapshot().violations)


# Shares
# --------------------------------------------------------------------------------------------------


def test_the_steps_of_every_holder_are_followed_to_their_end() -> None:
    bench = Bench(batch=1, bound=1, version=1)
    bench.committed(1, "a")
    bench.committed(0, "b")
    batch = bench.taken(2)
    bench.settle(batch)
    shares = bench.ledger.snapshot().shares
    assert Share(committed_steps=8, trained_steps=8, dropped_steps=0, trajectories=1) == shares["a"]
    assert Share(committed_steps=8, trained_steps=0, dropped_steps=8, trajectories=1) == shares["b"]
    assert (16, 8) == (
        bench.ledger.snapshot().steps_committed,
        bench.ledger.snapshot().steps_trained,
    )


def test_a_snapshot_does_not_change_when_the_ledger_does() -> None:
    bench = Bench(batch=1)
    bench.committed()
    before = bench.ledger.snapshot()
    bench.settle(bench.taken())
    assert (0, 0, {}) == (before.trained, before.shares["actor-0"].trained_steps, before.staleness)


# Refusals
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"batch": 0}, "an update needs at least one trajectory"),
        ({"max_staleness": -1}, "a sample cannot be newer than the policy that trains on it"),
        ({"credits": 7}, "fewer credits than one batch can never feed the learner"),
    ],
)
def test_limits_that_could_not_work_are_refused_with_their_consequence(
    limits: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Limits(**{"batch": 8, "max_staleness": 1, "credits": 16, **limits})


def test_a_ticket_begins_once() -> None:
    bench = Bench()
    grant = bench.begun()
    with pytest.raises(LedgerError, match="cannot begin: it is begun"):
        bench.ledger.begin(grant.ticket, grant.version)


def test_a_ticket_cannot_be_committed_before_it_began_nor_twice() -> None:
    bench = Bench()
    grant = bench.granted()
    with pytest.raises(LedgerError, match="cannot be committed: it is granted"):
        bench.commit(grant)
    bench.ledger.begin(grant.ticket, grant.version)
    bench.commit(grant)
    with pytest.raises(LedgerError, match="cannot be committed: it is committed"):
        bench.commit(grant)


@pytest.mark.parametrize(("slot", "length"), [(5, 4), (0, 0)])
def test_a_commit_with_a_foreign_slot_or_without_steps_is_refused(slot: int, length: int) -> None:
    bench = Bench()
    grant = bench.begun()
    with pytest.raises(LedgerError, match="expected its own slot"):
        bench.ledger.commit(
            grant.ticket, Trajectory(grant.ticket, slot, length, length, grant.version), 0.0
        )


@pytest.mark.parametrize("taken", [False, True])
def test_a_committed_ticket_cannot_be_aborted(taken: bool) -> None:
    """The learner may be reading it: the holder has nothing left to give back."""
    bench = Bench(batch=1)
    grant = bench.committed()
    if taken:
        bench.taken()
    with pytest.raises(LedgerError, match="cannot be aborted: it is"):
        bench.ledger.abort(grant.ticket, grant.slot, "stopped")
    bench.sound()


def test_a_lineage_must_be_newer_than_the_last() -> None:
    with pytest.raises(LedgerError, match="lineage 1 is not newer than 1"):
        Bench().ledger.open_lineage(Version(1, 5))


def test_a_batch_for_another_lineage_is_refused() -> None:
    with pytest.raises(
        LedgerError, match="a batch for lineage 2 was requested while lineage 1 is active"
    ):
        Bench().ledger.take(Version(2, 0), 0.0)


def test_a_batch_for_a_past_version_is_refused() -> None:
    """It would be judged younger than it is."""
    bench = Bench()
    bench.update()
    with pytest.raises(
        LedgerError,
        match="a batch for version 0 was requested, but the learner is already at version",
    ):
        bench.take(0)


def test_a_version_that_does_not_follow_is_refused() -> None:
    bench = Bench(batch=1)
    with pytest.raises(LedgerError, match="does not follow"):
        bench.ledger.settle(Settlement(bench.v(2), (), 1, True))


def test_a_ticket_that_was_not_taken_cannot_be_trained_on_and_settling_is_atomic() -> None:
    bench = Bench(batch=1)
    bench.committed()
    taken = bench.taken()
    other = bench.committed()
    before = bench.ledger.snapshot()
    for wrong in (other.ticket, 99, taken.trajectories[0].ticket):
        with pytest.raises(LedgerError, match="used in training without being taken"):
            bench.ledger.settle(
                Settlement(bench.v(1), (taken.trajectories[0].ticket, wrong), 1, True)
            )
    assert before == bench.ledger.snapshot()


def test_a_version_that_the_learner_has_not_made_cannot_be_published() -> None:
    """The lag would be negative, and more would be granted than can be used in time."""
    with pytest.raises(LedgerError, match="published before it was settled"):
        Bench().ledger.publish(Version(1, 1))


# Replay
# --------------------------------------------------------------------------------------------------


def whole(bench: Bench) -> None:
    """The identity of tickets with replay, and every slot in one place."""
    seen, ledger = bench.ledger.snapshot(), bench.ledger
    assert seen.begun == seen.trained + seen.inserted + sum(seen.dropped.values()) + seen.open
    slots = ledger._slots.without_ticket()
    slots += [ticket.slot for ticket in ledger.live() if ticket.state is not State.TAKEN]
    assert sorted(slots) == list(range(seen.slots))


def test_a_trajectory_that_a_shard_has_copied_returns_credit_and_slot_and_counts_as_inserted() -> (
    None
):
    bench = Bench(bound=None, slots=1, credits=2, batch=1)
    grant = bench.committed()
    trajectory = bench.ledger.take_one(grant.ticket)
    assert (grant.ticket, grant.slot) == (trajectory.ticket, trajectory.slot)
    assert bench.ledger.grant("actor-1") is None  # the shard reads the only slot
    whole(bench)
    bench.ledger.inserted(grant.ticket)
    assert (1, 0, 0) == (
        bench.ledger.snapshot().inserted,
        bench.ledger.snapshot().open,
        bench.ledger.credits_in_use,
    )
    assert bench.granted().slot == grant.slot
    whole(bench)


def test_only_a_committed_trajectory_goes_into_replay() -> None:
    bench = Bench(bound=None)
    begun, committed = bench.begun(), bench.committed()
    assert bench.ledger.insertable(begun.ticket) is None
    assert bench.ledger.insertable(99) is None
    found = bench.ledger.insertable(committed.ticket)
    assert found is not None
    assert committed.slot == found.slot
    with pytest.raises(LedgerError, match="cannot be inserted: it is begun"):
        bench.ledger.take_one(begun.ticket)
    bench.ledger.take_one(committed.ticket)
    with pytest.raises(LedgerError, match="cannot be inserted: it is taken"):
        bench.ledger.take_one(committed.ticket)
    assert bench.ledger.insertable(committed.ticket) is None


def test_a_refused_trajectory_returns_credit_and_slot() -> None:
    bench = Bench(bound=None)
    grant = bench.committed()
    bench.ledger.refuse(grant.ticket, "lineage")
    assert {"lineage": 1} == bench.ledger.snapshot().dropped
    assert (0, 16) == (bench.ledger.credits_in_use, bench.ledger.snapshot().free_slots)
    with pytest.raises(LedgerError, match="cannot be refused: it is not committed"):
        bench.ledger.refuse(grant.ticket, "lineage")
    whole(bench)


@pytest.mark.parametrize("reason", ["shard_lost", "stopped"])
def test_only_the_tickets_that_a_lost_shard_was_reading_are_dropped(reason: str) -> None:
    bench = Bench(bound=None)
    read, waiting = bench.committed(), bench.committed()
    bench.ledger.take_one(read.ticket)
    bench.ledger.shard_lost([read.ticket], reason)
    assert {reason: 1} == bench.ledger.snapshot().dropped
    assert [waiting.ticket] == [ticket.number for ticket in bench.ledger.live()]
    whole(bench)
    bench.ledger.inserted(read.ticket)  # nobody says so any more; it would change nothing
    assert 0 == bench.ledger.snapshot().inserted
    whole(bench)


def test_a_learner_that_ended_stops_grants_and_keeps_tickets_for_replay() -> None:
    bench = Bench(bound=None)
    taken, committed, begun = bench.committed(), bench.committed(), bench.begun()
    bench.ledger.take_one(taken.ticket)
    bench.ledger.learner_left()
    assert bench.ledger.grant("actor-1") is None
    assert not bench.ledger.is_current(bench.v(1))
    assert 3 == bench.ledger.snapshot().open
    bench.ledger.inserted(taken.ticket)
    assert bench.commit(begun)
    bench.lineage = 2
    bench.ledger.open_lineage(bench.v(0))
    assert bench.ledger.is_current(bench.v(1))
    bench.ledger.take_one(committed.ticket)
    bench.ledger.inserted(committed.ticket)
    assert (2, {}) == (bench.ledger.snapshot().inserted, bench.ledger.snapshot().dropped)
    bench.granted()
    whole(bench)


def test_staleness_of_replayed_items_is_counted_per_item_and_beyond_the_bound_as_violation() -> (
    None
):
    bench = Bench(bound=None)
    bench.ledger.replayed({0: 3, 5: 2, 40: 1}, None)
    assert ({0: 3, 5: 2, 40: 1}, 0) == (
        bench.ledger.snapshot().staleness,
        bench.ledger.snapshot().violations,
    )
    bench.ledger.replayed({5: 2, 6: 3, -1: 4}, 5)
    assert 7 == bench.ledger.snapshot().violations


def test_high_staleness_is_counted_in_few_buckets_that_are_off_by_an_eighth_at_most() -> None:
    assert list(range(16)) == [coarse(age) for age in range(16)]
    assert [16, 16, 18, 18] == [coarse(age) for age in range(16, 20)]
    assert [32, 32, 32, 32, 36] == [coarse(age) for age in range(32, 37)]
    for age in (17, 99, 1000, 123_457, 10**9 + 7):
        assert coarse(age) <= age < coarse(age) * 9 / 8
    assert len({coarse(age) for age in range(100_000)}) < 130


def test_the_credit_limit_in_force_follows_all_of_its_inputs() -> None:
    ledger = Ledger(limits=Limits(batch=2, max_staleness=3, credits=100), slots=3)

    def update(*, published: bool) -> None:
        for _ in range(2):
            grant = ledger.grant("actor-0")
            assert grant is not None
            ledger.begin(grant.ticket, grant.version)
            ledger.commit(
                grant.ticket, Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), 0.0
            )
        batch = ledger.take(ledger.version, 0.0)
        assert isinstance(batch, Batch)
        numbers = tuple(trajectory.ticket for trajectory in batch.trajectories)
        version = Version(ledger.version.lineage, ledger.version.number + 1)
        ledger.settle(Settlement(version, numbers, 3, published))

    ledger.open_lineage(Version(1, 0))
    assert 3 == ledger.credits_limit
    ledger.add_slots(10)
    assert 8 == ledger.credits_limit
    update(published=False)
    assert 6 == ledger.credits_limit
    ledger.publish(ledger.version)
    assert 8 == ledger.credits_limit
    update(published=False)
    ledger.learner_lost()
    ledger.open_lineage(Version(2, 0))
    assert 8 == ledger.credits_limit
    update(published=True)
    ledger.set_limits(Limits(batch=2, max_staleness=3, credits=5))
    assert 5 == ledger.credits_limit
