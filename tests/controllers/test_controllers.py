"""Controllers answer a list of events with a list of directives; ``freshest`` settles in virtual time."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.virtual_time import Settings, World
from tianflow.core.directives import Directive, SetAdmission, SetBound, SetCredits, SetOrder
from tianflow.core.events import Observed, UpdateFinished
from tianflow_controllers.consume_only import ConsumeOnly
from tianflow_controllers.freshest import Freshest
from tianflow_controllers.lockstep import Lockstep
from tianflow_controllers.open_loop import OpenLoop
from tianflow_controllers.sample_ratio import SampleRatio
from tianflow_controllers.staleness import Staleness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tianflow.interfaces import Controller

CONTROLLERS = {
    "consume_only": ConsumeOnly,
    "freshest": Freshest,
    "lockstep": Lockstep,
    "open_loop": OpenLoop,
    "sample_ratio": SampleRatio,
    "staleness": Staleness,
}


def observed(version: int = 0, **changes: Any) -> Observed:
    """One second per update, B = 8, bound 3, no waiting, except for ``changes``."""
    given: dict[str, Any] = {
        "now": float(version),
        "version": version,
        "publish_lag": 0,
        "batch": 8,
        "max_staleness": 3,
        "credits_limit": 8,
        "credits_in_use": 8,
        "credits_ceiling": 32,
        "slots": 64,
        "actors": 4,
        "learner_waiting_s": 0.0,
        "actors_waiting_s": 0.0,
    }
    return Observed(**{**given, **changes})


def answers(controller: Controller, events: Iterable[Observed]) -> list[list[Directive]]:
    return [list(controller.handle(event)) for event in events]


class Loop:
    """Puts a controller's credits in force for its next observation."""

    def __init__(self, controller: Controller, **always: Any) -> None:
        self.controller, self.always = controller, always
        self.learner = self.actors = 0.0
        self.version = 0
        self.credits = self.observe()

    def observe(self, **changes: Any) -> int:
        seen = {
            "learner_waiting_s": self.learner,
            "actors_waiting_s": self.actors,
            "credits_limit": getattr(self, "credits", 8),
            **self.always,
            **changes,
        }
        (directive,) = self.controller.handle(observed(self.version, **seen))
        assert isinstance(directive, SetCredits)
        return directive.limit

    def run(
        self, updates: int, *, learner: float = 0.0, actors: float = 0.0, **changes: Any
    ) -> list[int]:
        """Credits after each update.

        In each update the learner waits ``learner`` seconds, and each of 4 actors ``actors`` seconds.
        """
        credits_ = []
        for _ in range(updates):
            self.version += 1
            self.learner += learner
            self.actors += 4 * actors
            self.credits = self.observe(**changes)
            credits_.append(self.credits)
        return credits_


@pytest.mark.parametrize("name", CONTROLLERS)
def test_each_controller_is_the_one_controller_of_its_module(name: str) -> None:
    module = import_module(f"tianflow_controllers.{name}")
    assert [CONTROLLERS[name]] == [
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if hasattr(found, "handle")
    ]


@pytest.mark.parametrize("controller", [Staleness(), Freshest(), Lockstep(), OpenLoop()])
def test_controllers_ignore_events_that_they_do_not_read(controller: Controller) -> None:
    assert [] == list(controller.handle(UpdateFinished(version=1, seconds=1.0, samples=8)))


# staleness, lockstep, open_loop
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "lag", "batch", "expected"),
    [(0, 0, 8, 8), (1, 0, 8, 16), (4, 0, 4, 20), (4, 2, 4, 12), (16, 16, 8, 8), (None, 5, 8, 64)],
)
def test_staleness_gives_one_batch_for_each_version_that_is_still_admissible(
    bound: int | None, lag: int, batch: int, expected: int
) -> None:
    event = observed(max_staleness=bound, publish_lag=lag, batch=batch)
    assert [[SetCredits(expected)]] == answers(Staleness(), [event])


def test_staleness_never_gives_less_than_a_batch_even_while_a_publish_is_overdue() -> None:
    assert [[SetCredits(8)]] == answers(Staleness(), [observed(max_staleness=0, publish_lag=2)])


def test_staleness_follows_live_changes_at_once_and_repeats_itself_otherwise() -> None:
    events = [
        observed(1, max_staleness=0),
        observed(2, max_staleness=8),
        observed(3, max_staleness=8),
        observed(4, max_staleness=0),
    ]
    assert [[SetCredits(8)], [SetCredits(72)], [SetCredits(72)], [SetCredits(8)]] == answers(
        Staleness(), events
    )


def test_lockstep_is_bound_zero_and_exactly_one_batch_of_credits() -> None:
    assert [[SetBound(0), SetCredits(8)]] == answers(Lockstep(), [observed(max_staleness=None)])


def test_open_loop_removes_the_bound_and_gives_every_slot_in_order_of_arrival() -> None:
    assert [[SetBound(None), SetCredits(64), SetOrder("arrival")]] == answers(
        OpenLoop(), [observed()]
    )


@pytest.mark.parametrize("bound", [0, 3, None])
def test_consume_only_keeps_the_bound_and_does_not_pace(bound: int | None) -> None:
    event = observed(max_staleness=bound)
    assert [
        [SetBound(bound), SetCredits(64), SetAdmission("open"), SetOrder("arrival")]
    ] == answers(ConsumeOnly(), [event])


def test_filtering_without_pacing_keeps_the_bound_and_wastes_work_that_pacing_saves() -> None:
    """Sixteen actors produce more than the learner uses: with pacing no trajectory expires, without
    pacing many do.
    """
    dropped = {}
    for controller in (Staleness(), ConsumeOnly()):
        world = balanced(controller, actors=16)
        world.run(updates=200)
        assert max(trained.staleness for trained in world.trained) <= 8
        assert world.ledger.snapshot().violations == 0
        dropped[type(controller)] = world.ledger.snapshot().dropped.get("expired", 0)
    assert dropped[Staleness] == 0
    assert dropped[ConsumeOnly] > 100


# freshest
# --------------------------------------------------------------------------------------------------


def test_freshest_begins_with_one_batch() -> None:
    assert [[SetCredits(8)]] == answers(Freshest(), [observed(credits_limit=32)])


def test_freshest_raises_by_a_quarter_batch_once_per_turnover_when_both_wait() -> None:
    loop = Loop(Freshest(window_updates=1))
    assert [10] * 3 + [12] * 3 + [14] * 3 + [16] * 3 + [18] * 4 + [20] == loop.run(
        17, learner=0.5, actors=0.5
    )


def test_freshest_measures_a_raise_only_on_grants_after_it() -> None:
    """At C = 10 the learner needs two updates to use all grants of C = 8."""
    loop = Loop(Freshest(window_updates=1))
    loop.run(1, learner=0.5, actors=0.5)
    assert [10, 10, 10] == loop.run(2, learner=0.5, actors=0.5) + loop.run(1, actors=0.5)


def test_freshest_raises_by_at_least_one() -> None:
    loop = Loop(Freshest(window_updates=1), batch=2, credits_limit=2)
    assert [3] == loop.run(1, learner=0.5, actors=0.5)


def test_freshest_does_not_raise_when_only_the_learner_waits() -> None:
    assert {8} == set(Loop(Freshest()).run(50, learner=0.5))


def test_freshest_does_not_raise_when_only_the_actors_wait() -> None:
    assert {8} == set(Loop(Freshest()).run(50, actors=0.9))


def test_freshest_needs_both_waits_in_the_same_window() -> None:
    loop = Loop(Freshest(window_updates=2))
    assert {8} == {
        credits_
        for _ in range(20)
        for credits_ in loop.run(2, learner=0.5) + loop.run(2, actors=0.5)
    }


def test_freshest_never_leaves_one_batch_to_the_ceiling() -> None:
    loop = Loop(Freshest(hold_updates=4))
    assert 32 == max(loop.run(200, learner=0.5, actors=0.5))
    assert 8 == min(loop.run(400, actors=0.5))


def test_freshest_gives_one_credit_up_after_quiet_updates_without_waiting() -> None:
    loop = Loop(Freshest(window_updates=1, quiet_updates=6, hold_updates=6))
    loop.run(4, learner=0.5, actors=0.5)
    assert 12 == loop.credits
    assert [12] * 5 + [11] * 6 + [10] == loop.run(12, actors=0.5)


def test_freshest_does_not_probe_below_its_last_raise_for_hold_updates() -> None:
    loop = Loop(Freshest(window_updates=1, quiet_updates=6, hold_updates=50))
    loop.run(1, learner=0.5, actors=0.5)
    assert [10] * 49 + [9] == loop.run(50, actors=0.5)


def test_freshest_changes_at_most_once_per_turnover() -> None:
    """At C = 32 the learner needs four updates to use all tickets that hold a credit."""
    loop = Loop(Freshest(window_updates=1, quiet_updates=1, hold_updates=1))
    loop.run(80, learner=0.5, actors=0.5)
    assert 32 == loop.credits
    steps = [len(list(same)) for _, same in itertools.groupby(loop.run(20, actors=0.5))]
    assert {4} == set(steps[1:-1])


def test_freshest_measures_the_share_of_time_that_each_actor_waits() -> None:
    """Four actors wait 0.02 of the time each: 0.08 actor-seconds per second, below the threshold of
    0.03 per actor.
    """
    assert {8} == set(Loop(Freshest(actors_waiting=0.03)).run(50, learner=0.5, actors=0.02))
    assert 8 < max(Loop(Freshest(actors_waiting=0.03)).run(50, learner=0.5, actors=0.04))


def test_freshest_restarts_the_count_of_quiet_updates_after_the_learner_waited() -> None:
    loop = Loop(Freshest(window_updates=1, quiet_updates=6, hold_updates=6))
    loop.run(4, learner=0.5, actors=0.5)
    assert {12} == {
        credits_
        for _ in range(10)
        for credits_ in loop.run(4, actors=0.5) + loop.run(2, learner=0.5)
    }


def test_freshest_obeys_a_lower_ceiling_at_once() -> None:
    loop = Loop(Freshest())
    loop.run(200, learner=0.5, actors=0.5)
    assert [8] == loop.run(1, max_staleness=0)


def test_freshest_returns_to_its_target_when_a_publish_lag_ends() -> None:
    loop = Loop(Freshest(window_updates=1, hold_updates=1000))
    loop.run(200, learner=0.5, actors=0.5)
    assert [16, 16, 16, 32] == loop.run(3, publish_lag=2, credits_limit=16) + loop.run(1)


def test_freshest_does_not_wind_up_while_something_stricter_holds_the_credits() -> None:
    loop = Loop(Freshest(window_updates=1), credits_limit=12)
    assert 14 == max(loop.run(100, learner=0.5, actors=0.5))


def test_freshest_tolerates_lost_and_repeated_observations() -> None:
    loop = Loop(Freshest(window_updates=2))
    loop.version, loop.learner, loop.actors = 40, 20.0, 80.0
    assert [10, 10, 10] == [loop.observe() for _ in range(3)]


def test_freshest_continues_after_the_learner_returned_to_a_checkpoint() -> None:
    loop = Loop(Freshest(window_updates=1))
    loop.run(100, learner=0.5, actors=0.5)
    before, loop.version = loop.credits, 10
    assert {before} == set(loop.run(1, learner=0.5, actors=0.5))
    assert before - 5 == loop.run(20, actors=0.5)[-1]


def test_freshest_follows_a_live_change_of_the_batch() -> None:
    assert [20] == Loop(Freshest()).run(1, batch=20)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"quiet_updates": 0}, "credits would decrease while the learner waits"),
        ({"quiet_updates": 2.5}, "a whole number, at least 1"),
        ({"quiet_updates": float("nan")}, "a whole number, at least 1"),
        (
            {"quiet_updates": 50, "hold_updates": 49},
            "a hold shorter than quiet_updates has no effect",
        ),
        ({"window_updates": -1}, "waiting cannot be measured over an empty window"),
        ({"window_updates": float("inf")}, "a whole number, at least 1"),
        ({"raise_batches": 0.0}, "a starving learner would get no more credits"),
        ({"learner_waiting": 0.0}, "waiting would be detected always or never"),
        ({"actors_waiting": 1.0}, "waiting would be detected always or never"),
    ],
)
def test_freshest_refuses_parameters_that_cannot_work_and_gives_the_consequence(
    parameters: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        Freshest(**parameters)
    assert str(refused.value).startswith(next(reversed(parameters)) + " = ")


def test_freshest_takes_whole_numbers_given_as_floats() -> None:
    Freshest(quiet_updates=4.0, hold_updates=100.0, window_updates=2.0)


# Settling, against real actors and a real learner in virtual time
# -------------------------------------------------------


def slower_learner(world: World) -> None:
    world.settings = replace(world.settings, update_s=2 * world.settings.update_s)


def faster_learner(world: World) -> None:
    world.settings = replace(world.settings, update_s=world.settings.update_s / 2)


def fewer_actors(world: World) -> None:
    world.park(world.actors[::2])


def faster_actors(world: World) -> None:
    for actor in world.actors:
        actor.step_s /= 4


def balanced(
    controller: Controller, *, seed: int = 0, actors: int = 16, batch: int = 8, step_s: float = 0.03
) -> World:
    world = World(settings=Settings(batch=batch, bound=8), controllers=[controller], seed=seed)
    for _ in range(actors):
        world.add_host(step_s, jitter=0.3)
    world.start_learner()
    return world


@pytest.mark.e2e
@pytest.mark.parametrize("change", [slower_learner, faster_learner, fewer_actors, faster_actors])
def test_freshest_settles(change: Callable[[World], None]) -> None:
    """Unless a hold is active, C is within max(1, B/4) of its final value after 16 * ceil(C/B) updates.

    It leaves that band only for a probe, at most once per ``hold_updates``. The learner waits less
    than 3 % of the time.
    """
    batch, hold = 8, 200
    controller = Freshest(hold_updates=hold)
    world = balanced(controller, seed=1, actors=2 * batch, batch=batch)
    world.run(updates=300)
    while controller._floor_until > world.version.number:
        world.run(updates=1)
    before, seen, began, idle = world.history[-1][2], len(world.history), world.now, world.idle
    change(world)
    world.run(updates=500)
    credits_ = [limit for _, _, limit in world.history[seen:]]
    stays = max(set(credits_[250:]), key=credits_[250:].count)
    near = [abs(limit - stays) <= max(1, batch // 4) for limit in credits_]
    first = near.index(True)
    assert first <= 16 * -(-max(before, stays) // batch)
    leaves = [
        update for update in range(first + 1, len(near)) if near[update - 1] and not near[update]
    ]
    assert all(later - earlier >= hold for earlier, later in itertools.pairwise(leaves))
    assert (world.idle - idle) / (world.now - began) < 0.03


def test_freshest_is_fresher_than_the_bound_and_nearly_as_fast() -> None:
    mean, seconds = {}, {}
    for controller in (Freshest, Staleness):
        world = balanced(controller(), seed=3, actors=32)
        world.run(updates=100)
        world.trained.clear()
        began = world.now
        world.run(updates=300)
        seconds[controller] = world.now - began
        mean[controller] = sum(trained.staleness for trained in world.trained) / len(world.trained)
    assert mean[Staleness] > 0.9 * 8
    assert mean[Freshest] < 0.4 * mean[Staleness]
    assert seconds[Freshest] < 1.03 * seconds[Staleness]


def test_freshest_stays_below_the_ceiling_when_sampling_is_the_bottleneck() -> None:
    world = balanced(Freshest(), actors=4)
    world.run(updates=400)
    assert max(limit for _, _, limit in world.history) <= 4 + 2 * 8
    assert world.ledger.credits_ceiling == 72


# sample_ratio
# --------------------------------------------------------------------------------------------------


def test_sample_ratio_gives_every_slot_and_leaves_pacing_to_the_rate_limiter() -> None:
    controller = SampleRatio()
    for version, slots in enumerate((64, 64, 80)):
        assert [SetCredits(slots)] == list(
            controller.handle(observed(version, slots=slots, batch=1, max_staleness=None))
        )


def test_sample_ratio_never_gives_less_than_a_batch() -> None:
    assert [SetCredits(8)] == list(SampleRatio().handle(observed(slots=3, batch=8)))


def test_sample_ratio_ignores_other_events() -> None:
    assert [] == list(SampleRatio().handle(UpdateFinished(1, 0.1, 10, {})))
