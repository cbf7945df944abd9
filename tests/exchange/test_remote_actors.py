"""Actors behind links of any speed, in virtual time: none of their trajectories expires, and a
learner that waits for them does not delay the others.

The exchange and the ledger are real. A link carries one message after the other in each direction,
and weights cross it in their time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.worlds import small_layout
from tianflow.channels.memory import heap_arena
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.exchange.exchange import Exchange
from tianflow.ledger.ledger import Ledger

STEPS, STEP_S, UPDATE_S, EVERY_S = 16, 0.01, 0.01, 20.0
SLOTS = 64


@dataclass(frozen=True)
class Link:
    """Seconds that a trajectory and a version of the weights occupy a link, and that a message takes.
    For ``stall_s`` of each 20 seconds, no message passes.
    """

    trajectory_s: float = 0.002
    weights_s: float = 0.001
    latency_s: float = 0.001
    stall_s: float = 0.0

    def late(self, now: float, occupied_s: float = 0.0) -> float:
        """Seconds until a message arrives that is sent at ``now``."""
        return occupied_s + self.latency_s + max(0.0, self.stall_s - now % EVERY_S)


class Node:
    """A link, and the actors behind it. A grant waits for the weights that it names."""

    def __init__(self, world: World, link: Link) -> None:
        self.world, self.link = world, link
        self.version = Version(1, 0)
        self.held: list[tuple[Grant, Callable[[], None]]] = []
        self.free_at, self.sending = 0.0, False

    def send_weights(self) -> None:
        """The newest weights, one version after the other."""
        newest = self.world.ledger.published
        if self.sending or newest <= self.version:
            return
        self.sending = True
        delay = self.link.late(self.world.now, self.link.weights_s)
        self.world.after(delay, lambda: self._store(newest))

    def _store(self, version: Version) -> None:
        self.version, self.sending = version, False
        ready = [begin for grant, begin in self.held if grant.version <= version]
        self.held = [(grant, begin) for grant, begin in self.held if grant.version > version]
        for begin in ready:
            begin()
        self.send_weights()

    def hold(self, grant: Grant, begin: Callable[[], None]) -> None:
        """Call ``begin`` once the weights that ``grant`` names are here."""
        if grant.version <= self.version:
            begin()
        else:
            self.held.append((grant, begin))

    def to_head(self, occupied_s: float, act: Callable[[], None]) -> None:
        """Do ``act`` at the head once what was sent before has arrived."""
        self.free_at = max(self.world.now, self.free_at) + occupied_s
        delay = self.link.late(self.world.now, self.free_at - self.world.now)
        self.world.after(delay, act)


class Actor:
    """Plays one trajectory after the other; one that is cut ends at its next step. Where a grant
    allows it, the next one is requested ahead.
    """

    def __init__(self, world: World, node: Node, name: str) -> None:
        self.world, self.node, self.name = world, node, name
        self.arrived = 0
        self._line: deque[Grant] = deque()
        self._playing, self._cut = False, set[int]()
        self._requested = 0
        self._request()

    def cut(self, ticket: int) -> None:
        self._cut.add(ticket)

    def _request(self) -> None:
        self._requested += 1
        self.node.to_head(0.0, lambda: self.world.exchange.request_grant(self.name, self._granted))

    def _granted(self, grant: Grant | None) -> None:
        assert grant is not None
        delay = self.node.link.late(self.world.now)
        self.world.after(delay, lambda: self.node.hold(grant, lambda: self._line_up(grant)))

    def _line_up(self, grant: Grant) -> None:
        self._requested -= 1
        self._line.append(grant)
        if not self._playing:
            self._begin()

    def _begin(self) -> None:
        grant, version = self._line.popleft(), self.node.version
        self._playing = True
        self.node.to_head(0.0, lambda: self.world.exchange.begin(grant.ticket, version))
        if grant.ahead and not self._requested:
            self._request()
        self._step(grant, version, 0)

    def _step(self, grant: Grant, version: Version, taken: int) -> None:
        if taken < STEPS and not (taken and grant.ticket in self._cut):
            self.world.after(STEP_S, lambda: self._step(grant, version, taken + 1))
            return
        trajectory = Trajectory(grant.ticket, grant.slot, taken, taken, version)
        size = self.node.link.trajectory_s * taken / STEPS
        self.node.to_head(size, lambda: self._arrive(trajectory))
        self._playing = False
        if self._line:
            self._begin()
        elif not self._requested:
            self._request()

    def _arrive(self, trajectory: Trajectory) -> None:
        self.world.exchange.commit(trajectory)
        self.arrived += trajectory.length


class World:
    """Nodes with so many actors each, and a learner with one trajectory a batch."""

    def __init__(
        self,
        *nodes: tuple[int, Link],
        bound: int,
        remote: bool = True,
        share: float = 0.05,
        patience: float | None = None,
    ) -> None:
        self.now, self._events, self._order = 0.0, list[Any](), itertools.count()
        limits = Limits(
            batch=1, max_staleness=bound, credits=bound + 1, patience=patience, late_share=share
        )
        self.ledger = Ledger(limits=limits, slots=SLOTS, remote=remote)
        self.exchange = Exchange(
            ledger=self.ledger,
            arena=heap_arena(small_layout(), SLOTS),
            clock=lambda: self.now,
            call_later=self.after,
        )
        self.exchange.arena.on_cut = self._request_cut
        self.exchange.open_lineage(Version(1, 0))
        self.nodes = [Node(self, link) for _, link in nodes]
        self.actors = [
            Actor(self, node, f"{number}-{index}")
            for number, (node, (count, _)) in enumerate(zip(self.nodes, nodes, strict=True))
            for index in range(count)
        ]
        self.exchange.on_settled(self._publish)
        self._pull()

    def after(self, delay: float, act: Callable[[], None]) -> Callable[[], None]:
        entry = [self.now + delay, next(self._order), act]
        heapq.heappush(self._events, entry)

        def cancel() -> None:
            entry[2] = lambda: None

        return cancel

    def run(self, seconds: float) -> World:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end
        return self

    def steps(self, node: int) -> int:
        """Steps of the actors of a node that have arrived."""
        return sum(actor.arrived for actor in self.actors if actor.name.startswith(f"{node}-"))

    @property
    def dropped(self) -> dict[str, int]:
        return self.ledger.snapshot().dropped

    def _request_cut(self, _: int, ticket: int) -> None:
        for actor in self.actors:
            delay = actor.node.link.late(self.now)
            self.after(delay, lambda actor=actor: actor.cut(ticket))

    def _publish(self) -> None:
        for node in self.nodes:
            node.send_weights()

    def _pull(self) -> None:
        self.exchange.request_batch(self.ledger.version, self._train)

    def _train(self, batch: Batch | None) -> None:
        assert batch is not None
        bound = self.ledger.limits.max_staleness
        settlement = Settlement(
            Version(1, self.ledger.version.number + 1),
            tuple(trajectory.ticket for trajectory in batch.trajectories),
            bound,
            published=True,
        )

        def settle() -> None:
            self.exchange.settle(settlement)
            self._pull()

        self.after(UPDATE_S, settle)


FAST, STALLING = Link(), Link(latency_s=0.05, stall_s=2.0)
SLOW = Link(trajectory_s=0.4, weights_s=0.1)
BOUND = 4


def test_a_begin_that_crosses_a_slow_link_comes_too_late() -> None:
    """A ledger that takes it to be known at once passes over the trajectory, which expires."""
    world = World((1, FAST), (2, SLOW), bound=BOUND, remote=False, share=1.0).run(60.0)
    assert world.dropped["expired"] > 0


@pytest.mark.parametrize("actors", [1, 2, 4])
@pytest.mark.parametrize("bound", [1, BOUND, 8])
def test_behind_a_slow_link_nothing_expires_and_every_actor_is_trained_on(
    bound: int, actors: int
) -> None:
    world = World((1, FAST), (actors, SLOW), bound=bound).run(60.0)
    seen = world.ledger.snapshot()
    assert ({}, 0) == (world.dropped, seen.violations)
    assert all(seen.shares[actor.name].trained_steps > 0 for actor in world.actors)


@pytest.mark.parametrize("actors", [1, 3])
@pytest.mark.parametrize("link", [SLOW, Link(2.0, 0.0), Link(0.0, 2.0), Link(5.0, 5.0)])
def test_a_slow_link_leaves_nine_tenths_of_their_rate_to_others(link: Link, actors: int) -> None:
    """With credits for all. Without a limit, it takes more from them."""
    alone = steps_alone(400.0)
    fast = World((1, FAST), (actors, link), bound=8, share=0.05).run(400.0)
    assert 0.9 * alone <= fast.steps(0)
    assert fast.steps(1) > 0
    if actors > 1:
        unlimited = World((1, FAST), (actors, link), bound=8, share=1.0).run(100.0)
        assert unlimited.steps(0) < 0.9 * steps_alone(100.0)


@cache
def steps_alone(seconds: float) -> int:
    return World((1, FAST), bound=8).run(seconds).steps(0)


def test_a_stalling_link_leaves_nine_tenths_of_their_rate_to_others_and_a_slow_one_its_own() -> (
    None
):
    """An actor rests for its own losses only."""
    alone = World((2, FAST), bound=12).run(200.0).steps(0)
    fast, slow, stalling = map(
        World((2, FAST), (2, SLOW), (2, STALLING), bound=12).run(200.0).steps, range(3)
    )
    assert 0.9 * alone <= fast
    assert slow > 0.05 * alone
    assert stalling > 0.05 * alone


def test_with_a_larger_share_late_actors_do_more_and_others_less() -> None:
    worlds = [
        World((1, FAST), (1, SLOW), bound=2, share=share).run(100.0) for share in (0.02, 0.1, 1.0)
    ]
    fast, slow = ([world.steps(node) for world in worlds] for node in (0, 1))
    assert fast[0] > fast[1] > fast[2]
    assert slow[0] < slow[1] < slow[2]


def test_late_actors_do_not_rest_where_no_other_is() -> None:
    """They would rest for the sake of no other."""
    unlimited = World((2, SLOW), bound=2, share=1.0).run(100.0).steps(0)
    assert unlimited == World((2, SLOW), bound=2, share=0.001).run(100.0).steps(0)


SECONDS = st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0])
LINKS = st.builds(Link, SECONDS, SECONDS, SECONDS, SECONDS)


@examples(40)
@given(
    nodes=st.lists(st.tuples(st.integers(1, 3), LINKS), min_size=1, max_size=4),
    bound=st.integers(0, 6),
    share=st.sampled_from([0.02, 0.1, 1.0]),
)
def test_whatever_the_links_nothing_expires_and_training_continues(
    nodes: list[tuple[int, Link]], bound: int, share: float
) -> None:
    world = World(*nodes, bound=bound, share=share).run(20.0)
    before = world.ledger.snapshot().updates
    seen = world.run(20.0).ledger.snapshot()
    assert ({}, 0) == (seen.dropped, seen.violations)
    assert seen.updates > before
