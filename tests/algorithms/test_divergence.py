"""Divergence of the newest policy from a retained one: it is that of the two actors' policies, on
the same states.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tests.algorithms.test_on_policy import (
    ACTIONS,
    DISCRETE,
    IMAGE,
    N,
    T,
    batch_for,
    config,
    every_algorithm,
    pair,
    rollout,
    spec,
)
from tests.support.effort import grid
from tests.support.pretended_device import pretended_device
from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
from tianflow.algorithms.common.divergence import chosen_columns, chosen_transitions, spread
from tianflow.algorithms.sac import SACPolicy
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config, LearnerSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.interfaces import LearnerBatch, MeasuresDivergence
from tianflow.plugins import load

ALL = 10_000
KINDS = ["discrete", "multi_discrete", "masked", "box"]
kinds = pytest.mark.parametrize("kind", KINDS)
with_and_without_memory = pytest.mark.parametrize("lstm", [0, 5])


def parameters_of(
    policy: Any, arrays: dict[str, Tensor], *, mask: bool, prefix: str = "state/"
) -> Tensor:
    """Parameters [T, N, P] that an actor's policy computes step by step, from the stored state."""
    state = {
        name.removeprefix(prefix): leaf for name, leaf in arrays.items() if name.startswith(prefix)
    }
    found = []
    for t in range(arrays["valid"].shape[0]):
        state = {
            name: torch.where(arrays["start"][t][:, None], 0.0, leaf)
            for name, leaf in state.items()
        }
        observation = {
            name.removeprefix("obs/"): leaf[t]
            for name, leaf in arrays.items()
            if name.startswith("obs/")
        }
        step = policy.act(observation, state, None, arrays["action_mask"][t] if mask else None)
        found.append(step.parameters)
        state = step.state
    return torch.stack(found)


def divergence_of(kind: str, p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) by torch.distributions, [...]."""
    if kind in ("discrete", "masked", "image"):
        return reference.kl_divergence(*(reference.Categorical(logits=x) for x in (p, q)))
    if kind == "multi_discrete":
        return sum(
            (
                reference.kl_divergence(
                    *(reference.Categorical(logits=x[..., cut]) for x in (p, q))
                )
                for cut in (slice(0, 2), slice(2, 5))
            ),
            torch.zeros(p.shape[:-1]),
        )
    size = p.shape[-1] // 2
    return reference.kl_divergence(
        *(
            reference.Independent(reference.Normal(x[..., :size], x[..., size:].exp()), 1)
            for x in (p, q)
        )
    )


def moved(settings: Config, env: EnvironmentSpec, *, updates: int = 2) -> Any:
    """A learner that retained its policy, and made updates afterwards."""
    _, learner = pair(settings, env)
    learner.step(batch_for(settings, env, learner, seed=7))
    learner.retain_policy()
    for seed in range(updates):
        learner.step(batch_for(settings, env, learner, seed=seed))
    return learner


# Against the actors' policies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
@with_and_without_memory
@kinds
def test_the_divergence_is_that_of_the_actors_policies_with_old_and_new_weights(
    kind: str, lstm: int, normalise: bool
) -> None:
    """Each policy normalises with the statistics that its own weights contain."""
    env = spec(ACTIONS.get(kind, DISCRETE), mask=kind == "masked")
    settings = config(lstm=lstm, normalise=normalise, learning_rate=1e-2)
    old, learner = pair(settings, env)
    learner.step(batch_for(settings, env, learner, seed=7))
    old.load(learner.flat())
    learner.retain_policy()
    for seed in range(2):
        learner.step(batch_for(settings, env, learner, seed=seed))
    new = ActorCriticPolicy(settings, env)
    new.load(learner.flat())
    arrays = rollout(old, env, seed=9)
    if lstm:
        for name in ("h", "c"):
            drawn = np.random.default_rng(4).standard_normal((N, lstm), dtype=np.float32)
            arrays[f"state/{name}"] = torch.from_numpy(drawn)
        arrays["start"][0, ::2] = False
    p, q = (parameters_of(policy, arrays, mask=kind == "masked") for policy in (old, new))
    expected = divergence_of(kind, p, q)[arrays["valid"]].mean().item()
    assert expected > 1e-4
    assert expected == pytest.approx(
        learner.divergence(LearnerBatch(arrays), ALL), rel=2e-3, abs=1e-6
    )


def test_the_divergence_of_images_is_that_of_the_actors_policies() -> None:
    settings, env = (
        config("impala", network="nature_cnn", learning_rate=1e-3),
        spec(DISCRETE, IMAGE),
    )
    old, learner = pair(settings, env)
    learner.retain_policy()
    learner.step(batch_for(settings, env, learner))
    new = ActorCriticPolicy(settings, env)
    new.load(learner.flat())
    arrays = rollout(old, env, seed=9)
    p, q = (parameters_of(policy, arrays, mask=False) for policy in (old, new))
    expected = divergence_of("image", p, q)[arrays["valid"]].mean().item()
    assert expected > 1e-5
    assert expected == pytest.approx(learner.divergence(LearnerBatch(arrays), ALL), rel=1e-2)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_divergence_of_sac_is_that_of_the_actors_policies_before_squashing(
    normalise: bool,
) -> None:
    old, learner = off_policy.made("sac", normalise=normalise, learning_rate=1e-2)
    new, _ = off_policy.made("sac", normalise=normalise)
    learner.step(LearnerBatch(off_policy.windows("sac", seed=7)))
    old.load(learner.flat())
    learner.retain_policy()
    learner.step(LearnerBatch(off_policy.windows("sac", seed=8)))
    new.load(learner.flat())
    arrays = off_policy.windows("sac", seed=9, n=40)
    arrays["valid"][0, ::3] = False
    p, q = (_sac_parameters(policy, arrays) for policy in (old, new))
    expected = divergence_of("box", p, q)[arrays["valid"][0]].mean().item()
    assert expected > 1e-4
    assert expected == pytest.approx(learner.divergence(LearnerBatch(arrays), ALL), rel=1e-3)


def _sac_parameters(policy: SACPolicy, arrays: dict[str, Tensor]) -> Tensor:
    observation = {
        name.removeprefix("obs/"): leaf[0]
        for name, leaf in arrays.items()
        if name.startswith("obs/")
    }
    return policy.act(observation, {}, None).parameters


# Equal policies
# --------------------------------------------------------------------------------------------------


@grid(algorithm=list(on_policy.ALGORITHMS), lstm=[0, 5], kind=KINDS)
def test_equal_weights_diverge_by_exactly_0_on_any_states(
    algorithm: str, lstm: int, kind: str
) -> None:
    env = spec(ACTIONS.get(kind, DISCRETE), mask=kind == "masked")
    settings = config(algorithm, lstm=lstm, normalise=True)
    learner = moved(settings, env)
    batches = [batch_for(settings, env, learner, seed=seed) for seed in (20, 21)]
    assert all(learner.divergence(batch, ALL) > 0.0 for batch in batches)
    learner.retain_policy()
    assert [0.0, 0.0] == [learner.divergence(batch, ALL) for batch in batches]


def test_equal_weights_of_sac_diverge_by_exactly_0() -> None:
    _, learner = off_policy.made("sac", normalise=True)
    learner.retain_policy()
    learner.step(LearnerBatch(off_policy.windows("sac")))
    assert learner.divergence(LearnerBatch(off_policy.windows("sac", seed=3)), ALL) > 0.0
    learner.retain_policy()
    assert 0.0 == learner.divergence(LearnerBatch(off_policy.windows("sac", seed=3)), ALL)


@every_algorithm
def test_an_update_that_is_not_finite_does_not_diverge(algorithm: str) -> None:
    settings, env = config(algorithm, normalise=True), spec()
    _, learner = pair(settings, env)
    learner.retain_policy()
    batch = batch_for(settings, env, learner)
    batch.arrays["reward"][0, :2] = math.nan  # type: ignore[index]
    batch.arrays["valid"][0, :2] = True  # type: ignore[index]
    assert not learner.step(batch).finite
    assert 0.0 == learner.divergence(batch, ALL)


def test_a_new_observation_statistic_alone_is_a_divergence() -> None:
    """Statistics are part of the published weights, so actors with older ones act differently."""
    settings, env = config(learning_rate=0.0, normalise=True), spec()
    learner = moved(settings, env, updates=1)
    assert learner.divergence(batch_for(settings, env, learner, seed=5), ALL) > 0.0
    settings = config(learning_rate=0.0, normalise=False)
    learner = moved(settings, env, updates=1)
    assert 0.0 == learner.divergence(batch_for(settings, env, learner, seed=5), ALL)


# States
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [1, 2, T - 1, T, 2 * T, 2 * T + 3, 17, ALL])
@with_and_without_memory
def test_no_more_states_than_wanted_are_evaluated(states: int, lstm: int) -> None:
    learner, env = moved(config(lstm=lstm), spec()), spec()
    batch = batch_for(config(lstm=lstm), env, learner)
    found = (chosen_columns if lstm else chosen_transitions)(batch.arrays, states)
    count = found.start.numel()
    assert 1 <= count <= min(states, T * N)
    assert all(leaf.shape[:2] == found.start.shape for leaf in found.observation.values())
    if lstm:
        assert count == min(states, T) * min(N, max(1, states // T))
    else:
        assert count == min(states, int(batch.arrays["valid"].sum()))
        assert bool(found.valid.all())
    assert learner.divergence(batch, states) > 0.0


def test_chosen_states_are_spread_evenly_over_the_batch() -> None:
    assert [0, 3, 6] == spread(torch.arange(10), 3).tolist()
    assert [5, 7] == spread(torch.tensor([5, 7]), 2).tolist()
    assert [5, 7] == spread(torch.tensor([5, 7]), 9).tolist()
    arrays = rollout(pair(config(), spec())[0], spec())
    arrays["valid"][:] = True
    rows = chosen_transitions(arrays, T).observation[""][0]
    assert rows.shape[0] == T
    for t in range(T):
        place = t * N
        assert torch.equal(rows[t], arrays["obs/"][place // N, place % N])


def test_a_chosen_column_begins_with_its_stored_state() -> None:
    arrays = rollout(pair(config(lstm=5), spec())[0], spec())
    arrays["state/h"] = torch.arange(N * 5.0).reshape(N, 5)
    arrays["valid"][:, 0] = False
    found = chosen_columns(arrays, 2 * T)
    columns = spread(torch.arange(1, N), 2)
    assert torch.equal(arrays["state/h"][columns], found.state["h"])
    assert torch.equal(arrays["obs/"][:T, columns], found.observation[""])
    assert torch.equal(arrays["start"][:T, columns], found.start)


@with_and_without_memory
def test_the_divergence_is_a_mean_so_it_does_not_grow_with_the_number_of_environments(
    lstm: int,
) -> None:
    settings, env = config(lstm=lstm), spec()
    learner = moved(settings, env)
    once = batch_for(settings, env, learner).arrays
    twice = {
        name: torch.cat([leaf, leaf], 0 if name.startswith("state/") else 1)
        for name, leaf in once.items()
    }
    expected = learner.divergence(LearnerBatch(once), ALL)
    assert expected == pytest.approx(learner.divergence(LearnerBatch(twice), ALL), rel=1e-4)


@with_and_without_memory
def test_rows_that_are_not_valid_have_no_influence(lstm: int) -> None:
    settings, env = config(lstm=lstm), spec()
    learner = moved(settings, env)
    arrays = dict(batch_for(settings, env, learner).arrays)
    arrays["valid"] = arrays["valid"].clone()
    arrays["valid"][T - 2 :] = False
    expected = learner.divergence(LearnerBatch(arrays), ALL)
    arrays["obs/"] = arrays["obs/"].clone()
    arrays["obs/"][T - 2 :] = 50.0
    assert expected == learner.divergence(LearnerBatch(arrays), ALL) > 0.0
    arrays["valid"][:] = False
    assert 0.0 == learner.divergence(LearnerBatch(arrays), ALL)


# Cost and place
# --------------------------------------------------------------------------------------------------


@every_algorithm
@with_and_without_memory
def test_measuring_changes_nothing_in_the_learner(algorithm: str, lstm: int) -> None:
    settings, env = config(algorithm, lstm=lstm, normalise=True), spec()
    (_, plain), (_, measured) = pair(settings, env), pair(settings, env)
    for seed in range(3):
        batch = batch_for(settings, env, plain, seed=seed)
        measured.retain_policy()
        plain.step(batch)
        measured.step(batch)
        assert measured.divergence(batch, 20) > 0.0
    expected, found = plain.state_dict(), measured.state_dict()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_without_a_retained_policy_a_learner_holds_no_second_one() -> None:
    assert pair(config(), spec())[1]._retained is None
    assert off_policy.made("sac")[1]._retained is None


def test_a_learner_in_bfloat16_measures_in_float32() -> None:
    settings, env = config(), spec()
    rounded = settings.model_copy(update={"learner": LearnerSettings(precision="bf16")})
    exact, coarse = moved(settings, env), pair(rounded, env)[1]
    state = exact.state_dict()
    retained = exact._retained.buffer.bytes.clone()
    coarse.retain_policy()
    coarse._retained.buffer.bytes.copy_(retained)
    coarse.load_state_dict(state)
    batch = batch_for(settings, env, exact, seed=3)
    assert exact.divergence(batch, ALL) == coarse.divergence(batch, ALL) > 0.0


@every_algorithm
def test_the_retained_policy_is_on_the_learners_device(algorithm: str) -> None:
    settings, env = config(algorithm, normalise=True), spec(mask=True)
    expected = moved(settings, env)
    batch = batch_for(settings, env, expected, seed=3)
    with pretended_device() as device:
        there = on_policy.ALGORITHMS[algorithm].make_learner(settings, env, device)
        there.model.buffer.bytes.copy_(expected._retained.buffer.bytes)
        there.model.observations.refresh()
        there.retain_policy()
        there.load_state_dict(expected.state_dict())
        moved_there = LearnerBatch({name: leaf.to(device) for name, leaf in batch.arrays.items()})
        found = there.divergence(moved_there, 20)
    assert expected.divergence(batch, 20) == pytest.approx(found, rel=1e-3)


def test_the_retained_policy_of_sac_is_on_the_learners_device() -> None:
    arrays = off_policy.windows("sac")
    with pretended_device() as device:
        _, there = off_policy.made("sac", normalise=True, device=device)
        there.retain_policy()
        batch = LearnerBatch({name: leaf.to(device) for name, leaf in arrays.items()})
        there.step(batch)
        assert there.divergence(batch, 20) > 0.0


# The declaration of settings
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN_ALGORITHMS)
def test_settings_declare_what_the_learner_supports(name: str) -> None:
    learner = load("tianflow.algorithms", name, path="algorithm.name").make_learner
    assert BUILT_IN_ALGORITHMS[name].measures_divergence == issubclass(learner, MeasuresDivergence)
    assert (name in ("a2c", "impala", "ppo", "sac")) == issubclass(learner, MeasuresDivergence)
