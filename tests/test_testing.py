"""Shipped controllers pass the conformance suite, and a broken controller fails each of its tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import Event, Observed
from tianflow.testing import ControllerConformance, simulate
from tianflow_controllers.consume_only import ConsumeOnly
from tianflow_controllers.freshest import Freshest
from tianflow_controllers.lockstep import Lockstep
from tianflow_controllers.open_loop import OpenLoop
from tianflow_controllers.sample_ratio import SampleRatio
from tianflow_controllers.staleness import Staleness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class TestConsumeOnly(ControllerConformance):
    make = ConsumeOnly


class TestFreshest(ControllerConformance):
    make = Freshest


class TestLockstep(ControllerConformance):
    make = Lockstep


class TestOpenLoop(ControllerConformance):
    make = OpenLoop


class TestSampleRatio(ControllerConformance):
    make = SampleRatio


class TestStaleness(ControllerConformance):
    make = Staleness


class Scripted:
    """A controller that answers every observation with ``answer(observation)``."""

    def __init__(self, answer: Callable[[Observed], Iterable[Directive]]) -> None:
        self.answer = answer
        self.observations = 0

    def handle(self, event: Event) -> Iterable[Directive]:
        if not isinstance(event, Observed):
            return ()
        self.observations += 1
        return self.answer(event)


class CountsObservations(Scripted):
    """One more credit at every observation."""

    def __init__(self) -> None:
        super().__init__(lambda seen: [SetCredits(seen.batch + self.observations)])


class ReadsEveryEvent(Scripted):
    """Treats every event as an observation."""

    def __init__(self) -> None:
        super().__init__(lambda seen: [SetCredits(seen.batch + seen.version)])

    def handle(self, event: Event) -> Iterable[Directive]:
        return self.answer(event)  # type: ignore[arg-type]  # the mistake


class ExpectsProgress(Scripted):
    """Assumes that the version never decreases."""

    def __init__(self) -> None:
        self.version = -1
        super().__init__(self.forward)

    def forward(self, seen: Observed) -> Iterable[Directive]:
        assert seen.version >= self.version
        self.version = seen.version
        return [SetCredits(seen.batch)]


BROKEN = {
    "test_every_observation_is_answered_with_valid_directives": lambda: Scripted(
        lambda _: [Directive()]
    ),
    "test_credits_always_feed_the_learner": lambda: Scripted(lambda _: [SetCredits(2)]),
    "test_a_bound_is_a_number_of_updates_or_none": lambda: Scripted(lambda _: [SetBound(-1)]),
    "test_a_repeated_observation_changes_nothing": CountsObservations,
    "test_answers_depend_on_events_alone": lambda: Scripted(
        lambda seen: [SetCredits(seen.batch + time.monotonic_ns() % 997)]
    ),
    "test_events_that_it_does_not_read_are_accepted": ReadsEveryEvent,
    "test_control_continues_after_the_learner_returned_to_a_checkpoint": ExpectsProgress,
    "test_a_run_never_stalls_and_never_exceeds_the_bound": lambda: Scripted(
        lambda _: [SetBound(-1)]
    ),
}


@pytest.mark.parametrize(
    "promise", [name for name in vars(ControllerConformance) if name.startswith("test_")]
)
def test_the_suite_fails_for_a_controller_that_breaks_the_promise(promise: str) -> None:
    class Suite(ControllerConformance):
        make = staticmethod(BROKEN[promise])

    with pytest.raises((AssertionError, AttributeError, TypeError, ValueError)):
        getattr(Suite(), promise)()


def test_a_stalled_run_fails() -> None:
    with pytest.raises(AssertionError, match="the run stalled: no update for 50 rounds"):
        simulate(Staleness(), batch=3, bound=1, actors=0)
