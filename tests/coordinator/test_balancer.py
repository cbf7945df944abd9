"""One set of limits from the config and all controllers: the strictest wins, in one place."""

from __future__ import annotations

import pytest

from tests.support.settings import cartpole
from tianflow.channels.latest import LatestCell
from tianflow.channels.memory import heap_arena
from tianflow.config.rules import bound_in_force, make_controllers
from tianflow.coordinator.balancer import Balancer, ControllerRequests, merge
from tianflow.core.directives import SetAdmission, SetBound, SetCredits, SetOrder
from tianflow.core.layout import make_layout
from tianflow.core.limits import Limits
from tianflow.core.payloads import (
    ActionSpec,
    EnvironmentSpec,
    LeafSpec,
    Settlement,
    Trajectory,
    Version,
)
from tianflow.errors import ConfigError
from tianflow.exchange.exchange import Exchange
from tianflow.interfaces import LiveSettings
from tianflow.ledger.ledger import Ledger

SPEC = EnvironmentSpec(
    "x",
    (LeafSpec("", (2,), "float32"),),
    ActionSpec("discrete", (), "int64", (2,), (0,)),
    2,
    "next_step",
)


def wish(*directives):
    wishes = ControllerRequests()
    for directive in directives:
        wishes = wishes.after(directive)
    return wishes


def test_without_controllers_the_config_decides_and_every_slot_is_a_credit():
    limits, winner = merge({}, cartpole(balance={"max_staleness": 3}), slots=20)
    assert (limits.max_staleness, limits.credits, limits.order, winner) == (3, 20, "version", "")


def test_the_smallest_credits_win_and_the_winner_is_named():
    limits, winner = merge(
        {"a": wish(SetCredits(5)), "b": wish(SetCredits(3))}, cartpole(), slots=20
    )
    assert (limits.credits, winner) == (3, "b")


def test_a_person_s_limit_on_credits_beats_every_controller():
    limits, winner = merge({"a": wish(SetCredits(5))}, cartpole(balance={"credits": 2}), slots=20)
    assert (limits.credits, winner) == (2, "balance.credits")


def test_credits_never_fall_below_a_batch():
    limits, _ = merge(
        {"a": wish(SetCredits(1))}, cartpole(algorithm={"batch_trajectories": 4}), slots=20
    )
    assert limits.credits == 4


@pytest.mark.parametrize(
    ("configured", "asked", "expected"),
    [
        (4, (0,), 0),
        (4, (None,), None),
        (4, (None, 2), 2),
        (1, (3,), 1),
        ("unbounded", (5,), 5),
        ("unbounded", (), None),
    ],
)
def test_the_strictest_bound_wins_and_only_a_controller_alone_may_let_it_go(
    configured, asked, expected
):
    wishes = {str(index): wish(SetBound(bound)) for index, bound in enumerate(asked)}
    assert (
        merge(wishes, cartpole(balance={"max_staleness": configured}), slots=20)[0].max_staleness
        == expected
    )


@pytest.mark.parametrize("other", [wish(SetCredits(5)), wish(SetOrder("version")), wish()])
def test_a_controller_without_a_wish_about_the_bound_stands_for_the_configured_one(other):
    let_go = wish(SetBound(None), SetCredits(20), SetOrder("arrival"))
    for wishes in ({"a": let_go, "b": other}, {"b": other, "a": let_go}):
        limits = merge(wishes, cartpole(balance={"max_staleness": 1}), slots=20)[0]
        assert (limits.max_staleness, limits.order) == (1, "version")
        unbounded = merge(wishes, cartpole(balance={"max_staleness": "unbounded"}), slots=20)[0]
        assert unbounded.max_staleness is None


@pytest.mark.parametrize("beside", ["staleness", "freshest", "sample_ratio", "lockstep"])
def test_the_bound_in_force_beside_open_loop_is_the_one_that_validation_reports(beside):
    for controllers in (["open_loop", beside], [beside, "open_loop"]):
        config = cartpole(balance={"max_staleness": 1, "controller": controllers})
        world = World(config)
        expected = 0 if beside == "lockstep" else 1
        assert world.exchange.ledger.limits.max_staleness == expected == bound_in_force(config)
        assert world.bounds[-1] == expected
    twice = cartpole(balance={"max_staleness": 1, "controller": ["open_loop", "open_loop"]})
    assert World(twice).exchange.ledger.limits.max_staleness is None is bound_in_force(twice)


def test_order_of_arrival_is_refused_while_anything_bounds_staleness():
    let_go = wish(SetBound(None), SetOrder("arrival"))
    assert merge({"a": let_go}, cartpole(), slots=20)[0].order == "arrival"
    assert merge({"a": let_go, "b": wish(SetBound(2))}, cartpole(), slots=20)[0].order == "version"


def test_admission_is_open_and_in_order_of_arrival_only_where_every_controller_says_so():
    filtering = wish(SetBound(2), SetAdmission("open"), SetOrder("arrival"))
    alone = merge({"a": filtering}, cartpole(balance={"max_staleness": 2}), slots=20)[0]
    assert (alone.max_staleness, alone.admission, alone.order) == (2, "open", "arrival")
    beside = merge(
        {"a": filtering, "b": wish(SetCredits(20))},
        cartpole(balance={"max_staleness": 2}),
        slots=20,
    )[0]
    assert (beside.admission, beside.order) == ("paced", "version")
    assert merge({}, cartpole(), slots=20)[0].admission == "paced"


def test_an_absolute_directive_overwrites_the_one_before():
    assert wish(SetCredits(5), SetCredits(7)).credits == 7


def test_an_unknown_controller_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="staleness"):
        make_controllers(
            cartpole().model_copy(
                update={"balance": cartpole().balance.model_copy(update={"controller": "stalenes"})}
            )
        )


class World:
    """An exchange, its balancer, and settings that can be changed."""

    def __init__(self, config):
        layout = make_layout(SPEC, steps=4, state_spec={}, return_accumulator=False)
        limits = Limits(
            batch=config.algorithm.batch_trajectories, max_staleness=config.bound, credits=20
        )
        self.exchange = Exchange(
            ledger=Ledger(limits=limits, slots=20), arena=heap_arena(layout, 20), clock=lambda: 0.0
        )
        self.settings = LatestCell(LiveSettings(config, config.bound), 0)
        self.bounds = []
        self.balancer = Balancer(
            exchange=self.exchange,
            settings=self.settings,
            set_bound=self.bounds.append,
            waiting_seconds=lambda: (0.0, 0.0),
            actors=lambda: 2,
            clock=lambda: 0.0,
        )

    def change(self, **sections):
        config = cartpole(**sections)
        self.settings.put(LiveSettings(config, config.bound), self.settings.key + 1)

    @property
    def credits(self):
        return self.exchange.ledger.credits_limit


def test_a_changed_bound_changes_credits_at_once():
    world = World(cartpole(balance={"max_staleness": 3}))
    assert world.credits == 4
    world.change(balance={"max_staleness": 0})
    assert world.credits == 1
    world.change(balance={"max_staleness": 7})
    assert world.credits == 8


def test_open_loop_lets_the_bound_go_and_the_next_controller_takes_it_back():
    world = World(cartpole(balance={"controller": "open_loop"}))
    assert (world.bounds[-1], world.credits, world.exchange.ledger.limits.order) == (
        None,
        20,
        "arrival",
    )
    world.change(balance={"controller": "staleness", "max_staleness": 2})
    assert (world.bounds[-1], world.credits, world.exchange.ledger.limits.order) == (
        2,
        3,
        "version",
    )


def test_every_settled_update_shows_controllers_the_new_lag():
    world = World(cartpole(balance={"max_staleness": 3}))
    exchange = world.exchange
    exchange.open_lineage(Version(1, 0))
    granted = []
    exchange.request_grant("actor-0", granted.append)
    exchange.begin(granted[0].ticket, Version(1, 0))
    exchange.commit(Trajectory(granted[0].ticket, granted[0].slot, 4, 8, Version(1, 0)))
    batches = []
    exchange.request_batch(Version(1, 0), batches.append)
    exchange.settle(Settlement(Version(1, 1), (granted[0].ticket,), 3, published=False))
    assert [controller.credits for controller in world.balancer.statistics()] == [3]
    assert world.credits == 3


def test_statistics_keep_counting_directives_of_a_controller_that_was_replaced():
    world = World(cartpole())
    world.change(balance={"controller": "lockstep"})
    controllers = {controller.name: controller for controller in world.balancer.statistics()}
    assert set(controllers) == {"staleness", "lockstep"}
    assert not controllers["staleness"].winning
    assert controllers["lockstep"].directives > 0
