"""Every controller that is shipped passes the suite for controllers, and each promise of the suite is broken once
to see it noticed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import Event, Observed
from tianflow.testing import ControllerConformance, play
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


class Says:
    """A controller that answers every look with what ``answer`` makes of it."""

    def __init__(self, answer: Callable[[Observed], Iterable[Directive]]) -> None:
        self.answer = answer
        self.looks = 0

    def handle(self, event: Event) -> Iterable[Directive]:
        if not isinstance(event, Observed):
            return ()
        self.looks += 1
        return self.answer(event)


class Counts(Says):
    """One credit more at every look."""

    def __init__(self) -> None:
        super().__init__(lambda look: [SetCredits(look.batch + self.looks)])


class Reads(Says):
    """The version's credits, which a repeated look leaves as they are, and events that it takes for
    looks.
    """

    def __init__(self) -> None:
        super().__init__(lambda look: [SetCredits(look.batch + look.version)])

    def handle(self, event: Event) -> Iterable[Directive]:
        return self.answer(event)  # type: ignore[arg-type]  # the mistake


class Remembers(Says):
    """It was never told that a version can be lower than the last one."""

    def __init__(self) -> None:
        self.version = -1
        super().__init__(self.forward)

    def forward(self, look: Observed) -> Iterable[Directive]:
        assert look.version >= self.version
        self.version = look.version
        return [SetCredits(look.batch)]


BROKEN = {
    "test_it_answers_every_look_with_directives_that_can_be_carried_out": lambda: Says(
        lambda _: [Directive()]
    ),
    "test_its_credits_always_feed_the_learner": lambda: Says(lambda _: [SetCredits(2)]),
    "test_a_bound_of_its_own_is_a_number_of_updates_or_none": lambda: Says(
        lambda _: [SetBound(-1)]
    ),
    "test_a_repeated_look_changes_nothing": Counts,
    "test_it_depends_on_what_it_is_told_alone": lambda: Says(
        lambda look: [SetCredits(look.batch + time.monotonic_ns() % 997)]
    ),
    "test_it_lives_with_events_that_it_does_not_read": Reads,
    "test_it_goes_on_when_the_learner_went_back_to_a_checkpoint": Remembers,
    "test_a_run_under_it_never_stands_still_nor_breaks_the_bound": lambda: Says(
        lambda _: [SetBound(-1)]
    ),
}


@pytest.mark.parametrize(
    "promise", [name for name in vars(ControllerConformance) if name.startswith("test_")]
)
def test_the_suite_notices_a_controller_that_breaks_the_promise(promise: str) -> None:
    class Suite(ControllerConformance):
        make = staticmethod(BROKEN[promise])

    with pytest.raises((AssertionError, AttributeError, TypeError, ValueError)):
        getattr(Suite(), promise)()


def test_a_run_that_stands_still_is_noticed() -> None:
    with pytest.raises(AssertionError, match="and then nothing for 50 rounds"):
        play(Staleness(), batch=3, bound=1, actors=0)
