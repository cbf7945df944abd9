"""A loaded policy: what it accepts for one step, and how it refuses the rest."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import tianflow
from tests.support.checkpoints import checkpoint
from tianflow.policy import LoadedPolicy

SECTIONS: dict[str, Any] = {
    "env": {"id": "tests.support.environments:DictEnv"},
    "algorithm": {"name": "ppo"},
    "network": {"hidden": [8], "lstm": 4, "previous_step": True},
}
OBSERVATION: Any = {
    "camera": np.zeros((1, 6, 6), np.uint8),
    "arm": {"joints": np.zeros(3), "mode": np.int64(2)},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """With a nested observation, a memory, and the previous step as input."""
    return tianflow.load_policy(checkpoint(tmp_path_factory.mktemp("nested"), SECTIONS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """Without memory."""
    sections = {**SECTIONS, "env": {"id": "FrozenLake-v1"}, "network": {"hidden": [8]}}
    return tianflow.load_policy(checkpoint(tmp_path_factory.mktemp("plain"), sections))


def refusal(policy: LoadedPolicy, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        policy.act(*args, **kwargs)
    return str(refused.value)


def test_a_missing_key_of_an_observation_is_named(policy: LoadedPolicy) -> None:
    given = {"camera": OBSERVATION["camera"], "arm": {"mode": 2}}
    assert (
        "observation 'arm/joints' is missing (float64[3]): observation 'arm' has 'mode'"
        == refusal(policy, given)
    )


def test_a_wrong_shape_or_dtype_is_named_with_what_is_expected(policy: LoadedPolicy) -> None:
    given = {**OBSERVATION, "camera": np.zeros((6, 6, 1), np.float32)}
    expected = "observation 'camera': expected uint8[1, 6, 6], given float32[6, 6, 1]"
    assert expected == refusal(policy, given)


def test_a_state_beyond_a_discrete_space_is_no_index_error(plain: LoadedPolicy) -> None:
    assert "observation: expected a value from 0 to 15, given 16" == refusal(plain, 16)


def test_a_wrong_mask_is_named(plain: LoadedPolicy) -> None:
    assert "mask: expected bool[4], given bool[3]" == refusal(plain, 0, mask=[True] * 3)
    nothing = "mask: expected at least one possible action, given none"
    assert nothing == refusal(plain, 0, mask=np.zeros(4, bool))
    action, _ = plain.act(0, mask=[0, 0, 1, 0])
    assert 2 == action


def test_a_state_goes_back_as_it_came_or_as_arrays(policy: LoadedPolicy) -> None:
    _, state = policy.act(OBSERVATION)
    arrays = {name: leaf.numpy() for name, leaf in state.items()}
    found = [policy.act(OBSERVATION, given, reward=1) for given in (state, arrays)]
    assert ["c", "h", "previous_action"] == sorted(state)
    for name, leaf in found[0][1].items():
        assert torch.equal(leaf, found[1][1][name])
    assert "previous_action" in state, "the state of the caller is not changed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: 3, "state: expected a dict with 'h', 'c', 'previous_action', given a value"),
        (
            lambda state: {"h": state["h"]},
            "state: expected 'h', 'c', 'previous_action', given 'h'; pass what the last call",
        ),
        (lambda state: {}, "state: expected 'h', 'c', 'previous_action', given no entries; "),
        (
            lambda state: state | {"h": torch.zeros(1, 5)},
            "state 'h': expected float32[1, 4], given float32[1, 5]; pass what",
        ),
        (
            lambda state: state | {"c": np.zeros((1, 4), complex)},
            "state 'c': expected float32[1, 4], given complex128[1, 4]; pass what",
        ),
        (
            lambda state: state | {"previous_action": torch.zeros(1)},
            "state 'previous_action': expected int64[1], given float32[1]; pass what",
        ),
    ],
)
def test_a_wrong_state_is_named(policy: LoadedPolicy, change: Any, message: str) -> None:
    _, state = policy.act(OBSERVATION)
    assert refusal(policy, OBSERVATION, change(state), reward=0.0).startswith(message)


def test_a_policy_without_memory_accepts_its_empty_state_only(plain: LoadedPolicy) -> None:
    _, state = plain.act(0)
    plain.act(0, state)
    assert re.match(
        "state: expected no entries, given 'h'", refusal(plain, 0, {"h": torch.zeros(1, 4)})
    )


def test_a_reward_that_is_not_a_number_is_named(policy: LoadedPolicy) -> None:
    _, state = policy.act(OBSERVATION)
    assert "reward is missing" in refusal(policy, OBSERVATION, state)
    refused = refusal(policy, OBSERVATION, state, reward="much")
    assert "reward: expected a number, given 'much'" == refused


def test_zeros_are_the_state_of_a_first_observation(policy: LoadedPolicy) -> None:
    zeros = {
        "h": np.zeros((1, 4), np.float32),
        "c": np.zeros((1, 4), np.float32),
        "previous_action": np.zeros(1, np.int64),
    }
    first, after = policy.act(OBSERVATION)
    again, same = policy.act(OBSERVATION, zeros, reward=0.0)
    assert first == again
    assert all(torch.equal(leaf, same[name]) for name, leaf in after.items())
