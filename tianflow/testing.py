"""Conformance suite for balance controllers, for use in test modules. It imports no test runner.

A test module needs one class: ``class TestMine(ControllerConformance): make = MyController``.
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
from tianflow.core.payloads import (
    Batch,
    Grant,
    Settlement,
    Trajectory,
    Version,
    credits_ceiling,
)
from tianflow.core.statistics import LedgerSnapshot
from tianflow.interfaces import Controller
from tianflow.ledger.ledger import Ledger

OTHER_EVENTS: tuple[Event, ...] = (
    UpdateFinished(version=1, seconds=1.0, samples=8),
    EpisodesFinished(component="actor-0", returns=(1.0,), lengths=(9,)),
    EvaluationFinished(version=1, episodes=1, mean_return=1.0, returns=(1.0,)),
    HostExited(host="actors-0", reason="died"),
    SettingsChanged(generation=2, paths=("balance.max_staleness",)),
)
"""Events other than `Observed`. A controller may read them, and must work without them."""
MAX_ROUNDS_PER_UPDATE = 50
"""Rounds without an update after which a run has stalled; a trajectory takes at most seven."""


def observations(
    batch: int, bound: int | None, *, actors: int = 4, slots: int = 64
) -> Iterator[Observed]:
    """Observations of a run with one update per second.

    In turn, no component waits, then the actors, then the learner, then both wait half of the time.
    """
    learner = waiting = 0.0
    for version in range(40):
        learner += 0.5 * (version >= 20)
        waiting += 0.5 * actors * (10 <= version < 20 or version >= 30)
        lag = version % 2
        ceiling = slots
        if bound is not None:
            ceiling = credits_ceiling(bound, publish_lag=lag, batch=batch)
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


def simulate(
    controller: Controller,
    *,
    batch: int,
    bound: int | None,
    actors: int = 6,
    slots: int = 24,
    updates: int = 60,
) -> LedgerSnapshot:
    """The ledger after ``updates`` updates of a small run that ``controller`` balances.

    A round is a second. The controller's directives are in force from the next round on. Actor
    ``i`` takes ``1 + i`` rounds for a trajectory. The learner makes an update in each round that
    begins with a batch.

    Raises:
        AssertionError: the run stalled.
    """
    config = Config(
        env=EnvSettings(id="none"),
        algorithm=PPOSettings(batch_trajectories=batch),
        balance=BalanceSettings(max_staleness="unbounded" if bound is None else bound),
    )
    ledger, requests = (
        Ledger(limits=Limits(batch=batch, max_staleness=bound, credits=batch), slots=slots),
        ControllerRequests(),
    )
    ledger.open_lineage(Version(1, 0))
    running: dict[int, tuple[Grant, int]] = {}
    learner = waiting = 0.0
    last = now = 0
    while ledger.version.number < updates:
        observed = _observe(
            ledger,
            now=now,
            batch=batch,
            bound=bound,
            actors=actors,
            learner=learner,
            waiting=waiting,
        )
        for directive in controller.handle(observed):
            requests = requests.after(directive)
        ledger.set_limits(merge({"controller": requests}, config, slots=slots)[0])
        if _update(ledger, now):
            last = now
        else:
            learner += 1.0
        _advance_actors(ledger, running, actors, now)
        waiting += actors - len(running)
        now += 1
        assert now - last < MAX_ROUNDS_PER_UPDATE, (
            f"the run stalled: no update for {now - last} rounds after update "
            f"{ledger.version.number}, with {requests}"
        )
    return ledger.snapshot()


def _observe(
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
    """Make one update if the ledger has a batch."""
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


def _advance_actors(
    ledger: Ledger, running: dict[int, tuple[Grant, int]], actors: int, now: int
) -> None:
    """Actors commit complete trajectories; idle actors begin one if a credit is free."""
    for actor in range(actors):
        if actor in running and running[actor][1] <= now:
            grant, _ = running.pop(actor)
            ledger.commit(
                grant.ticket, Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), float(now)
            )
        if actor not in running and (granted := ledger.grant(f"actor-{actor}")) is not None:
            ledger.begin(granted.ticket, granted.version)
            running[actor] = granted, now + 1 + actor


class ControllerConformance:
    """Base class of a test class. ``make`` is a controller class or a factory function."""

    make: ClassVar[Callable[..., Controller]]
    situations: ClassVar[tuple[tuple[int, int | None], ...]] = tuple(
        product((1, 3, 8), (0, 1, 4, None))
    )
    """(B, max_staleness) of the runs that the suite simulates."""

    def new(self) -> Controller:
        """A new controller, before its first event."""
        return type(self).make()

    def test_every_observation_is_answered_with_valid_directives(self) -> None:
        for situation in self.situations:
            controller, requests = self.new(), ControllerRequests()
            for observed in observations(*situation):
                for directive in controller.handle(observed):
                    requests = requests.after(directive)

    def test_credits_always_feed_the_learner(self) -> None:
        """With fewer credits than one batch, no update could ever begin."""
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                for limit in _credits(controller.handle(observed)):
                    assert isinstance(limit, int), (
                        f"SetCredits({limit!r}): credits are a whole number"
                    )
                    batch = observed.batch
                    assert limit >= batch, (
                        f"SetCredits({limit}) with B = {batch} could never feed the learner"
                    )

    def test_a_bound_is_a_number_of_updates_or_none(self) -> None:
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                for directive in controller.handle(observed):
                    if isinstance(directive, SetBound) and directive.max_staleness is not None:
                        assert directive.max_staleness >= 0, (
                            f"{directive}: a sample cannot be newer than the policy that trains "
                            "on it"
                        )

    def test_a_repeated_observation_changes_nothing(self) -> None:
        """Directives are absolute, and events carry the time. Equal events get equal answers."""
        for situation in self.situations:
            controller = self.new()
            for observed in observations(*situation):
                assert tuple(controller.handle(observed)) == tuple(controller.handle(observed)), (
                    f"a different answer to the same {observed}"
                )

    def test_answers_depend_on_events_alone(self) -> None:
        """Two controllers of one class share no state, clock or chance, so their answers agree."""
        for situation in self.situations:
            one, other = self.new(), self.new()
            answers = [tuple(one.handle(observed)) for observed in observations(*situation)]
            assert answers == [
                tuple(other.handle(observed)) for observed in observations(*situation)
            ]

    def test_events_that_it_does_not_read_are_accepted(self) -> None:
        controller, requests = self.new(), ControllerRequests()
        for event in OTHER_EVENTS:
            for directive in controller.handle(event):
                requests = requests.after(directive)

    def test_control_continues_after_the_learner_returned_to_a_checkpoint(self) -> None:
        controller = self.new()
        seen = list(observations(3, 4))
        for observed in [
            *seen,
            *(replace(observed, now=observed.now + len(seen)) for observed in seen),
        ]:
            assert all(limit >= observed.batch for limit in _credits(controller.handle(observed)))

    def test_a_run_never_stalls_and_never_exceeds_the_bound(self) -> None:
        for batch, bound in self.situations:
            after = simulate(self.new(), batch=batch, bound=bound)
            assert after.violations == 0
            assert (
                after.begun
                == after.trained + after.inserted + sum(after.dropped.values()) + after.open
            )


def _credits(directives: Iterable[Directive]) -> list[int]:
    return [directive.limit for directive in directives if isinstance(directive, SetCredits)]
