"""How many slots a run wants, and how many its limit holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.settings import cartpole
from tianflow.channels.arena import arena_nbytes
from tianflow.config.loading import load_config
from tianflow.core.layout import make_layout
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError
from tianflow.planning import memory
from tianflow.planning.memory import (
    check_memory,
    check_network_memory,
    slots_capacity,
    slots_wanted,
    usable_memory,
)

SPEC = EnvironmentSpec(
    "x",
    (LeafSpec("", (2,), "float32"),),
    ActionSpec("discrete", (), "int64", (2,), (0,)),
    2,
    "next_step",
)
LAYOUT = make_layout(SPEC, steps=4, state_spec={}, return_accumulator=False)


@pytest.mark.parametrize(
    ("bound", "batch", "actors", "expected"),
    [(0, 1, 1, 2), (1, 1, 1, 3), (3, 4, 5, 21), ("unbounded", 4, 5, 32), ("unbounded", 10, 5, 50)],
)
def test_slots_cover_every_credit_and_one_given_up_ticket_an_actor(bound, batch, actors, expected):
    config = cartpole(
        balance={"max_staleness": bound},
        algorithm={"batch_trajectories": batch},
        actors={"count": actors},
    )
    assert slots_wanted(config) == expected


def test_the_limit_holds_what_fits():
    limit = 10 * arena_nbytes(LAYOUT, 1)
    assert slots_capacity(cartpole(balance={"memory_limit": limit}), LAYOUT) == 10
    assert arena_nbytes(LAYOUT, 10) <= limit


def test_a_limit_below_a_batch_and_a_slot_an_actor_is_refused_with_what_would_do():
    each = arena_nbytes(LAYOUT, 1)
    config = cartpole(
        balance={"memory_limit": 4 * each}, algorithm={"batch_trajectories": 3}, actors={"count": 2}
    )
    with pytest.raises(ConfigError, match=f"at least {5 * each} bytes"):
        check_memory(config, LAYOUT)
    check_memory(
        cartpole(
            balance={"memory_limit": 5 * each},
            algorithm={"batch_trajectories": 3},
            actors={"count": 2},
        ),
        LAYOUT,
    )


@pytest.mark.parametrize("bound", [3, 50_000, "unbounded"])
def test_with_replay_slots_do_not_grow_with_the_age_that_items_may_have(bound):
    given = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn"},
        "balance": {"max_staleness": bound},
        "actors": {"count": 20},
    }
    assert slots_wanted(load_config(given)) == 4 + 2 * 20


def test_a_network_larger_than_the_machine_is_refused_with_its_size_before_anything_is_allocated(
    monkeypatch,
):
    needed = (
        4 * 4 * ((2 + 1) * 1000 + (1000 + 1) * 50)
    )  # four float32 for every weight and bias of 2 -> 1000 -> 50
    monkeypatch.setattr(memory, "usable_memory", lambda: needed - 1)
    with pytest.raises(
        ConfigError, match=r"network.hidden = \[1000, 50\]: a network of 53,050 parameters or more"
    ):
        check_network_memory(cartpole(network={"hidden": [1000, 50]}), SPEC)
    monkeypatch.setattr(memory, "usable_memory", lambda: needed)
    check_network_memory(cartpole(network={"hidden": [1000, 50]}), SPEC)


def test_a_network_of_any_size_is_judged_at_once():
    with pytest.raises(ConfigError, match="GiB, and this machine has"):
        check_network_memory(cartpole(network={"hidden": [10**15, 10**15]}), SPEC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096\n", 4096), ("max\n", None), ("9" * 30, None), ("", None), (None, None)],
)
def test_usable_is_what_the_control_group_allows_of_the_machine(
    tmp_path: Path, text: str | None, expected: int | None
):
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert usable_memory(tmp_path) == (memory.machine_memory() if expected is None else expected)
