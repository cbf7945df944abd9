"""What every balance controller has to keep, as a suite for the tests of whoever writes one. Needs
a test runner, and imports none.

In a test module, ``class TestMine(ControllerConformance): make = MyLaw`` is all there is to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import ClassVar

from tianflow.config.model import BalanceSettings, Config, EnvSettings, PPOSettings
from tianflow.coordinator.balancer import ControllerRequests, merge
from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import (
    EpisodesFinished,
    EvaluationFinished,
    Event,
    HostExited,
    Observed,
    SettingsChanged,
    UpdateFinished,
)
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.core.statistics import LedgerSnapshot
from tianflow.interfaces import Controller
from tianflow.ledger.ledger import Ledger

OTHERS: tuple[Event, ...] = (
    UpdateFinished(version=1, seconds=1.0, samples=8),
    EpisodesFinished(component="actor-0", returns=(1.0,), lengths=(9,)),
    EvaluationFinished(version=1, episodes=1, mean_return=1.0, returns=(1.0,)),
    HostExited(host="actors-0", reason="died"),
    SettingsChanged(generation=2, paths=("balance.max_staleness",)),
)
"""Events that are no look at the balance: a controller may use them, and has to live without
them.
"""
ROUNDS_PER_UPDATE = 50
"""Rounds of `play` without an update, after which nothing will come any more: no trajectory takes
more than seven.
"""


def looks(batch: int, bound: int | None, *, actors: int = 4, slots: int = 64) -> Iterator[Observed]:
    """Looks at one second an update: nobody waits, then the actors, the learner and both wait half
    of the time.
    """
    learner = waiting = 0.0
    for version in range(40):
        learner += 0.5 * (version >= 20)
        waiting += 0.5 * actors * (10 <= version < 20 or version >= 30)
        lag = version % 2
        ceiling = slots if bound is None else max(0, bound + 1 - lag) * batch
        yield Observed(
            now=float(version),
            version=version,
            publish_lag=lag,
            batch=batch,
            max_staleness=bound,
            credits_limit=max(batch, min(ceiling, slots)),
            credits_in_use=batch,
            credits_ceiling=ceiling,
            slots=slots,
            actors=actors,
            learner_waiting_s=learner,
            actors_waiting_s=waiting,
        )


def play(
    controller: Controller,
    *,
    batch: int,
    bound: int | None,
    actors: int = 6,
    slots: int = 24,
    updates: int = 60,
) -> LedgerSnapshot:
    """The ledger after ``updates`` updates of a small run in which the controller's word is put in
    force before every round.

    A round is a second. Actor ``i`` takes ``1 + i`` rounds for a trajectory, and the learner makes
    an update in each round that begins with a batch.

    Raises:
        AssertionError: the run stands still.
    """
    config = Config(
        env=EnvSettings(id="none"),
        algorithm=PPOSettings(batch_trajectories=batch),
        balance=BalanceSettings(max_staleness="unbounded" if bound is None else bound),
    )
    ledger, wishes = (
        Ledger(limits=Limits(batch=batch, max_staleness=bound, credits=batch), slots=slots),
        ControllerRequests(),
    )
    ledger.open_lineage(Version(1, 0))
    rolling: dict[int, tuple[Grant, int]] = {}
    learner = waiting = 0.0
    last = now = 0
    while ledger.version.number < updates:
        look = _look(
            ledger,
            now=now,
            batch=batch,
            bound=bound,
            actors=actors,
            learner=learner,
            waiting=waiting,
        )
        for directive in controller.handle(look):
            wishes = wishes.after(directive)
        ledger.set_limits(merge({"controller": wishes}, config, slots=slots)[0])
        if _update(ledger, now):
            last = now
        else:
            learner += 1.0
        _roll(ledger, rolling, actors, now)
        waiting += actors - len(rolling)
        now += 1
        assert now - last < ROUNDS_PER_UPDATE, (
            f"{ledger.version.number} updates, and then nothing for {now - last} rounds: {wishes}"
        )
    return ledger.snapshot()


def _look(
    ledger: Ledger,
    *,
    now: int,
    batch: int,
    bound: int | None,
    actors: int,
    learner: float,
    waiting: float,
) -> Observed:
    return Observed(
        now=float(now),
        version=ledger.version.number,
        publish_lag=ledger.publish_lag,
        batch=batch,
        max_staleness=bound,
        credits_limit=ledger.credits_limit,
        credits_in_use=ledger.credits_in_use,
        credits_ceiling=ledger.credits_ceiling,
        slots=ledger.slots,
        actors=actors,
        learner_waiting_s=learner,
        actors_waiting_s=waiting,
    )


def _update(ledger: Ledger, now: int) -> bool:
    """Make one update if there is a batch."""
    taken = ledger.take(ledger.version, float(now))
    if not isinstance(taken, Batch):
        return False
    tickets = tuple(trajectory.ticket for trajectory in taken.trajectories)
    ledger.settle(
        Settlement(
            Version(1, ledger.version.number + 1),
            tickets,
            ledger.limits.max_staleness,
            published=True,
        )
    )
    return True


def _roll(ledger: Ledger, rolling: dict[int, tuple[Grant, int]], actors: int, now: int) -> None:
    """Whoever is done commits; whoever is idle begins, if there is a credit."""
    for actor in range(actors):
        if actor in rolling and rolling[actor][1] <= now:
            grant, _ = rolling.pop(actor)
            ledger.commit(
                grant.ticket, Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), float(now)
            )
        if actor not in rolling and (granted := ledger.grant(f"actor-{actor}")) is not None:
            ledger.begin(granted.ticket, granted.version)
            rolling[actor] = granted, now + 1 + actor


class ControllerConformance:
    """Subclass it in a test module as ``TestSomething`` and set ``make``: a controller's class, or
    a function that makes a controller.
    """

    make: ClassVar[Callable[..., Controller]]
    situations: ClassVar[tuple[tuple[int, int | None], ...]] = tuple(
        product((1, 3, 8), (0, 1, 4, None))
    )
    """(B, max_staleness) in which it is tried."""

    def new(self) -> Controller:
        """A controller that has seen nothing yet."""
        return type(self).make()

    def test_it_answers_every_look_with_directives_that_can_be_carried_out(self) -> None:
        for situation in self.situations:
            controller, wishes = self.new(), ControllerRequests()
            for look in looks(*situation):
                for directive in controller.handle(look):
                    wishes = wishes.after(directive)

    def test_its_credits_always_feed_the_learner(self) -> None:
        """At least one batch, or no update could ever begin."""
        for situation in self.situations:
            controller = self.new()
            for look in looks(*situation):
                for limit in _credits(controller.handle(look)):
                    assert isinstance(limit, int), (
                        f"SetCredits({limit!r}): credits are a whole number"
                    )
                    assert limit >= look.batch, (
                        f"SetCredits({limit}) with B = {look.batch} could never feed the learner"
                    )

    def test_a_bound_of_its_own_is_a_number_of_updates_or_none(self) -> None:
        for situation in self.situations:
            controller = self.new()
            for look in looks(*situation):
                for directive in controller.handle(look):
                    if isinstance(directive, SetBound) and directive.max_staleness is not None:
                        assert directive.max_staleness >= 0, (
                            f"{directive}: no sample can be younger than the policy that trains "
                            "on it"
                        )

    def test_a_repeated_look_changes_nothing(self) -> None:
        """Directives are absolute and time comes in with the event, so the same event has the same
        answer.
        """
        for situation in self.situations:
            controller = self.new()
            for look in looks(*situation):
                assert tuple(controller.handle(look)) == tuple(controller.handle(look)), (
                    f"another answer to the same {look}"
                )

    def test_it_depends_on_what_it_is_told_alone(self) -> None:
        """No clock, no chance, nothing shared: two of a kind that see the same say the same."""
        for situation in self.situations:
            one, other = self.new(), self.new()
            answers = [tuple(one.handle(look)) for look in looks(*situation)]
            assert answers == [tuple(other.handle(look)) for look in looks(*situation)]

    def test_it_lives_with_events_that_it_does_not_read(self) -> None:
        controller, wishes = self.new(), ControllerRequests()
        for event in OTHERS:
            for directive in controller.handle(event):
                wishes = wishes.after(directive)

    def test_it_goes_on_when_the_learner_went_back_to_a_checkpoint(self) -> None:
        controller = self.new()
        seen = list(looks(3, 4))
        for look in [*seen, *(replace(look, now=look.now + len(seen)) for look in seen)]:
            assert all(limit >= look.batch for limit in _credits(controller.handle(look)))

    def test_a_run_under_it_never_stands_still_nor_breaks_the_bound(self) -> None:
        for batch, bound in self.situations:
            after = play(self.new(), batch=batch, bound=bound)
            assert after.violations == 0
            assert (
                after.begun
                == after.trained + after.inserted + sum(after.dropped.values()) + after.open
            )


def _credits(directives: Iterable[Directive]) -> list[int]:
    return [directive.limit for directive in directives if isinstance(directive, SetCredits)]
