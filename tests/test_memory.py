"""How many slots a run wants, and how many its limit holds."""

from __future__ import annotations

import pytest

from tests.settings import cartpole
from tianflow.channels.arena import arena_nbytes
from tianflow.config_loading import load_config
from tianflow.errors import ConfigError
from tianflow.layout import make_layout
from tianflow.memory import check_memory, slots_capacity, slots_wanted
from tianflow.payloads import ActionSpec, EnvironmentSpec, LeafSpec

SPEC = EnvironmentSpec("x", (LeafSpec("", (2,), "float32"),), ActionSpec("discrete", (), "int64", (2,), (0,)), 2, "next_step")
LAYOUT = make_layout(SPEC, steps=4, state_spec={}, return_accumulator=False)


@pytest.mark.parametrize(
    ("bound", "batch", "actors", "expected"), [(0, 1, 1, 2), (1, 1, 1, 3), (3, 4, 5, 21), ("unbounded", 4, 5, 32), ("unbounded", 10, 5, 50)]
)
def test_slots_cover_every_credit_and_one_given_up_ticket_an_actor(bound, batch, actors, expected):
    config = cartpole(balance={"max_staleness": bound}, algorithm={"batch_trajectories": batch}, actors={"count": actors})
    assert slots_wanted(config) == expected


def test_the_limit_holds_what_fits():
    limit = 10 * arena_nbytes(LAYOUT, 1)
    assert slots_capacity(cartpole(balance={"memory_limit": limit}), LAYOUT) == 10
    assert arena_nbytes(LAYOUT, 10) <= limit


def test_a_limit_below_a_batch_and_a_slot_an_actor_is_refused_with_what_would_do():
    each = arena_nbytes(LAYOUT, 1)
    config = cartpole(balance={"memory_limit": 4 * each}, algorithm={"batch_trajectories": 3}, actors={"count": 2})
    with pytest.raises(ConfigError, match=f"at least {5 * each} bytes"):
        check_memory(config, LAYOUT)
    check_memory(cartpole(balance={"memory_limit": 5 * each}, algorithm={"batch_trajectories": 3}, actors={"count": 2}), LAYOUT)


@pytest.mark.parametrize("bound", [3, 50_000, "unbounded"])
def test_with_replay_slots_do_not_grow_with_the_age_that_items_may_have(bound):
    given = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "balance": {"max_staleness": bound}, "actors": {"count": 20}}
    assert slots_wanted(load_config(given)) == 4 + 2 * 20
