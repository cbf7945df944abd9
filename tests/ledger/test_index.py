"""The index agrees with a recount of its tickets after any sequence of ledger operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.effort import examples
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.ledger.index import TicketIndex
from tianflow.ledger.ledger import Ledger
from tianflow.ledger.tickets import State, Ticket


def sound(index: TicketIndex) -> None:
    """Compare every answer of ``index`` with a scan of all tickets."""
    tickets = list(index)
    assert len(tickets) == len(index)
    assert sorted(ticket.number for ticket in tickets) == [ticket.number for ticket in tickets]
    assert Counter(ticket.state for ticket in tickets) == Counter(
        {state: index.count(state) for state in State}
    )
    for state in index.listed:
        those = sorted(
            (ticket for ticket in tickets if ticket.state is state),
            key=lambda ticket: (ticket.version, ticket.number),
        )
        assert Counter(ticket.version for ticket in those) == index.versions(state)
        assert list(index.versions(state)) == sorted(index.versions(state))
        assert [list(index.oldest(state, count)) for count in range(len(those) + 2)] == [
            those[:count] for count in range(len(those) + 2)
        ]
        for version in index.versions(state):
            assert tuple(
                ticket.number for ticket in those if ticket.version == version
            ) == index.of_version(state, version)
    open_ = [t for t in tickets if t.state in index.listed and t.state is not State.COMMITTED]
    assert len(open_) == index.open
    for since in range(3):
        recent = sorted(
            (t for t in open_ if t.version.number >= since),
            key=lambda t: (t.version, t.state is State.GRANTED, t.number),
        )
        assert Counter(t.version for t in recent) == index.open_versions(since)
        assert [recent[:count] for count in range(len(recent) + 2)] == [
            index.oldest_open(count, since) for count in range(len(recent) + 2)
        ]
    for holder in ("actor-0", "actor-1", "nobody"):
        assert [ticket for ticket in tickets if ticket.holder == holder] == index.of_holder(holder)
    arrived = sorted(
        (t for t in tickets if t.state is State.COMMITTED), key=lambda t: (t.committed_at, t.number)
    )
    assert arrived == index.arrived(len(tickets))
    assert (arrived[0].committed_at if arrived else None) == index.first_arrival


class LedgerMachine(RuleBasedStateMachine):
    """All operations of a ledger, in any order."""

    @initialize(
        batch=st.integers(1, 3),
        bound=st.none() | st.integers(0, 3),
        order=st.sampled_from(["version", "arrival"]),
        remote=st.booleans(),
    )
    def make(self, batch: int, bound: int | None, order: Any, remote: bool) -> None:
        limits = Limits(batch=batch, max_staleness=bound, credits=12, patience=2.0, order=order)
        self.ledger, self.now, self.lineage = (
            Ledger(limits=limits, slots=12, remote=remote),
            0.0,
            0,
        )
        self.granted: list[Grant] = []
        self.begun: list[Grant] = []
        self.held: list[Batch] = []
        self.renew()

    def renew(self) -> None:
        self.lineage += 1
        self.ledger.open_lineage(Version(self.lineage, 0))

    @rule(holder=st.integers(0, 2), count=st.integers(1, 4))
    def grant(self, holder: int, count: int) -> None:
        self.granted += [
            grant
            for _ in range(count)
            if (grant := self.ledger.grant(f"actor-{holder}")) is not None
        ]

    @precondition(lambda self: self.granted)
    @rule(at=st.integers(0, 20))
    def begin(self, at: int) -> None:
        grant = self.granted.pop(at % len(self.granted))
        if self.ledger.begin(grant.ticket, max(grant.version, self.ledger.published)):
            self.begun.append(grant)

    @precondition(lambda self: self.begun)
    @rule(at=st.integers(0, 20), older=st.integers(0, 1), later=st.sampled_from([0.0, 0.0, 1.0]))
    def commit(self, at: int, older: int, later: float) -> None:
        grant = self.begun.pop(at % len(self.begun))
        self.now += later
        version = Version(grant.version.lineage, max(0, grant.version.number - older))
        self.ledger.commit(
            grant.ticket, Trajectory(grant.ticket, grant.slot, 4, 8, version), self.now
        )

    @precondition(lambda self: self.begun)
    @rule(at=st.integers(0, 20))
    def abort(self, at: int) -> None:
        grant = self.begun.pop(at % len(self.begun))
        self.ledger.abort(grant.ticket, grant.slot, "stopped")

    @rule(ahead=st.integers(0, 1))
    def take(self, ahead: int) -> None:
        version = self.ledger.version
        answer = self.ledger.take(Version(version.lineage, version.number + ahead), self.now)
        if isinstance(answer, Batch):
            self.held.append(answer)

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self) -> None:
        self.ledger.give_back([trajectory.ticket for trajectory in self.held.pop().trajectories])

    @precondition(lambda self: self.held)
    @rule(published=st.booleans())
    def settle(self, published: bool) -> None:
        numbers = tuple(trajectory.ticket for trajectory in self.held.pop(0).trajectories)
        version = self.ledger.version
        self.ledger.settle(
            Settlement(Version(version.lineage, version.number + 1), numbers, None, published)
        )

    @rule(holder=st.integers(0, 2))
    def lose_a_holder(self, holder: int) -> None:
        self.ledger.holder_lost(f"actor-{holder}", "died")

    @rule()
    def lose_the_learner(self) -> None:
        self.ledger.learner_lost()
        self.held.clear()
        self.renew()

    @rule()
    def drop(self) -> None:
        self.ledger.drop_open("drained")

    @rule(bound=st.none() | st.integers(0, 3), order=st.sampled_from(["version", "arrival"]))
    def limit(self, bound: int | None, order: Any) -> None:
        self.ledger.set_limits(replace(self.ledger.limits, max_staleness=bound, order=order))

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "ledger"):
            sound(self.ledger._tickets)
            ledger = self.ledger
            assert (
                min(ledger.limits.credits, ledger.credits_ceiling, ledger.slots)
                == ledger.credits_limit
            )


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = examples(20, stateful_step_count=40)


def ticket(number: int, state: State, version: Version, at: float) -> Ticket:
    return Ticket(number, f"actor-{number % 2}", number, state, version, committed_at=at)


VERSIONS = st.builds(Version, st.integers(1, 2), st.integers(0, 3))


@examples(50)
@given(
    tickets=st.lists(
        st.tuples(st.sampled_from(State), VERSIONS, st.sampled_from([0.0, 1.0, 2.0])), max_size=12
    ),
    moves=st.lists(
        st.tuples(st.integers(0, 11), st.none() | st.sampled_from(State), st.none() | VERSIONS),
        max_size=20,
    ),
    remote=st.booleans(),
)
def test_an_index_finds_its_tickets(tickets: list[Any], moves: list[Any], remote: bool) -> None:
    index = TicketIndex(remote=remote)
    for number, (state, version, at) in enumerate(tickets):
        index.add(ticket(number, state, version, at))
    for number, state, new in moves:
        found = index.get(number)
        if found is None:
            with pytest.raises(KeyError):
                index.pop(number)
        elif state is None:
            assert found is index.pop(number)
        else:
            index.move(found, state, version=new)
            assert (state, new or found.version) == (found.state, found.version)
        sound(index)
