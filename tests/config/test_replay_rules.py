"""Quantities derived from replay settings, and refusals with their messages."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from tests.support.settings import cartpole
from tianflow.config import rules
from tianflow.config.loading import load_config, with_changes
from tianflow.config.model import Config
from tianflow.core.layout import views
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError
from tianflow.hosts.shard_factory import make_shard
from tianflow.planning.layouts import trajectory_layout
from tianflow.replay import Fragment, StepStream

DQN: dict[str, Any] = {"name": "dqn", "batch_size": 32}
R2D2: dict[str, Any] = {"name": "r2d2", "batch_size": 8, "burn_in": 4, "unroll": 8}


def config(algorithm: dict[str, Any] = DQN, **sections: dict[str, Any]) -> Config:
    """An algorithm with replay on four CartPoles, 16 steps per trajectory."""
    given = {
        "env": {"id": "CartPole-v1", "num_envs": 4},
        "algorithm": algorithm,
        "network": {"hidden": [16]},
        "actors": {"count": 1, "rollout_steps": 16},
        "placement": {"launcher": "inline"},
        "run": {"max_updates": 4},
    }
    return load_config(
        {
            name: {**given.get(name, {}), **sections.get(name, {})}
            for name in (*given, *(set(sections) - set(given)))
        }
    )


def refusal(algorithm: dict[str, Any] = DQN, **sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config(algorithm, **sections)
    (problem,) = caught.value.problems
    return f"{problem.path} = {problem.value}: {problem.message}; {problem.accepted}"


# Derived quantities


def test_a_run_with_replay_has_controller_sample_ratio_and_no_bound_by_default() -> None:
    assert ("sample_ratio", None) == (config().balance.controller, config().bound)
    assert 7 == config(balance={"max_staleness": 7}).bound


def test_without_a_ratio_neither_side_ever_waits_for_the_other() -> None:
    limits = rules.rate_limits(config(replay={"min_size": 50}))
    assert (1.0, 50, -inf, inf) == (
        limits.samples_per_insert,
        limits.min_size,
        limits.min_diff,
        limits.max_diff,
    )


def test_a_ratio_without_a_buffer_has_the_narrowest_band_that_lets_both_sides_proceed() -> None:
    made = config(replay={"samples_per_insert": 2.0, "min_size": 100})
    inserts = (16 + 3 + 1) * 4  # steps and a window of three, for four environments
    assert inserts == rules.insert_size(made)
    limits = rules.rate_limits(made)
    assert (inserts, 32) == (limits.insert_size, limits.draw_size)
    assert 2.0 * inserts + 32 == limits.max_diff - 200.0 == 200.0 - limits.min_diff


def test_a_buffer_is_the_band_to_either_side_in_draws() -> None:
    limits = rules.rate_limits(
        config(replay={"samples_per_insert": 2.0, "min_size": 100, "error_buffer": 500.0})
    )
    assert (-300.0, 700.0) == (limits.min_diff, limits.max_diff)


def test_a_longer_period_makes_inserts_smaller_because_the_limiter_counts_items() -> None:
    assert (-(-(16 + 12) // 8) + 1) * 4 == rules.insert_size(config(R2D2))


@pytest.mark.parametrize(
    ("algorithm", "actors", "shards"),
    [(DQN, 1, 1), (DQN, 3, 2), (R2D2, 2, 1), (DQN, 2, 4), (R2D2, 1, 2)],
)
def test_full_shards_hold_at_least_the_guaranteed_number_of_items(
    algorithm: dict[str, Any], actors: int, shards: int
) -> None:
    """Episodes that never end, in real shards."""
    made = config(
        algorithm,
        actors={"count": actors, "rollout_steps": 16},
        replay={"capacity": 800 * shards, "min_size": 1, "shards": shards},
    )
    spec = EnvironmentSpec(
        "S",
        (LeafSpec("", (1,), "float32"),),
        ActionSpec("discrete", (), "int64", (2,), (0,)),
        4,
        "next_step",
    )
    layout = trajectory_layout(made, spec)
    filled, least, most = [make_shard(made, spec) for _ in range(shards)], inf, 0
    stay, turns = 8, 16 * shards
    for number in range(2 * turns):
        for actor in range(actors):
            arrays = views(layout, np.zeros(layout.nbytes, np.uint8))
            arrays["valid"][:] = True
            arrays["start"][0] = number == 0
            arrays["obs/"][:] = np.arange(16 * number, 16 * number + 17, dtype=np.float32)[
                :, None, None
            ]
            place = actor + (number // stay if actors < shards else 0)
            filled[place % shards].insert(Fragment(arrays, 16, StepStream(actor, 0), number))
        if number >= turns:
            least, most = min(least, sum(map(len, filled))), max(most, sum(map(len, filled)))
    assert rules.guaranteed_items(made) <= least
    assert most <= 1.1 * rules.guaranteed_items(made)


# Refusals
# --------------------------------------------------------------------------------------------------


def test_settings_of_replay_without_replay_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="ppo uses each trajectory once and stores nothing in replay"
    ):
        cartpole(replay={"capacity": 500})
    assert cartpole().replay == cartpole(replay={}).replay


def test_a_shard_smaller_than_one_trajectory_is_refused() -> None:
    assert (
        "replay.capacity = 200: each of 2 shards would hold 100 observations, fewer than the 132 "
        "observations of one trajectory in the worst case; at least 264"
    ) == refusal(replay={"capacity": 200, "min_size": 10, "shards": 2})


def test_a_shard_smaller_than_one_item_is_refused() -> None:
    long = {**R2D2, "unroll": 296}
    assert "fewer than the 300 steps of one item; at least 300" in refusal(
        long, replay={"capacity": 200, "min_size": 10}
    )


def test_a_min_size_that_is_never_reached_is_refused() -> None:
    assert (
        "replay.min_size = 990: with 1000 observations in 1 shards, windows of 3 steps every 1 steps "
        "and 4 environments per actor, the table is guaranteed to hold 984 items, so the learner "
        "might wait for ever; at most 984, or a larger replay.capacity"
    ) == refusal(replay={"capacity": 1000, "min_size": 990})
    assert "at most 115" in refusal(R2D2, replay={"capacity": 1000, "min_size": 116})


def test_a_band_in_which_both_sides_would_wait_is_refused() -> None:
    told = refusal(replay={"samples_per_insert": 2.0, "min_size": 100, "error_buffer": 10.0})
    assert "wait for each other for ever; a wider error_buffer, or another ratio or size" in told


def test_a_ratio_above_max_samples_is_refused() -> None:
    assert (
        "replay.max_samples = 2: an item is removed after 2 draws, so samples_per_insert = 2.5 can "
        "never be reached; at least 3, or a lower samples_per_insert"
    ) == refusal(replay={"max_samples": 2, "samples_per_insert": 2.5, "min_size": 10})


def test_a_deterministic_run_with_replay_is_refused() -> None:
    told = refusal(run={"deterministic": True}, balance={"max_staleness": 0})
    assert "run.deterministic = True: the items in replay at a draw depend on timing" in told


# Live
# --------------------------------------------------------------------------------------------------


def test_the_ratio_may_change_and_a_band_that_does_not_fit_it_is_refused() -> None:
    before = config(replay={"samples_per_insert": 2.0, "min_size": 100, "error_buffer": 200.0})
    assert (
        1.5
        == with_changes(before, {"replay": {"samples_per_insert": 1.5}}).replay.samples_per_insert
    )
    with pytest.raises(ConfigError, match="wait for each other for ever"):
        with_changes(before, {"replay": {"samples_per_insert": 50.0}})
    with pytest.raises(ConfigError, match="cannot change during a run"):
        with_changes(before, {"replay": {"capacity": 10}})


def test_a_run_without_replay_accepts_no_live_change_of_replay() -> None:
    before = cartpole()
    assert 3 == with_changes(before, {"balance": {"max_staleness": 3}}).bound
    with pytest.raises(ConfigError, match="uses each trajectory once"):
        with_changes(before, {"replay": {"samples_per_insert": 2.0}})
