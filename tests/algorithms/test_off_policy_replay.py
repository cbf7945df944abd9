"""Actor, replay shard and learner together: draws have the form that learners expect, including
initial priorities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.networks.test_networks import observations
from tianflow.algorithms.dqn import DQN
from tianflow.algorithms.r2d2 import R2D2
from tianflow.algorithms.sac import SAC
from tianflow.config.model import Config, EnvSettings, NetworkSettings
from tianflow.config.off_policy import DQNSettings, OffPolicySettings, R2D2Settings, SACSettings
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.hosts.shard_factory import make_shard
from tianflow.interfaces import LearnerBatch
from tianflow.replay import Fragment, Shard, StepStream

torch.set_num_threads(1)
CHOICE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
FORCE = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(3.0, 1.0))
LEAF = LeafSpec("arm", (4,), "float32")
T, N, ROUNDS = 8, 3, 6
TICKS = 64.0
"""The first observed number is the step divided by this."""
FACTORIES: dict[str, Any] = {"dqn": DQN, "r2d2": R2D2, "sac": SAC}


def filled(settings: OffPolicySettings, *, mask: bool = False) -> tuple[Shard, Any]:
    """A shard with random episodes of an actor, and a learner with the actor's weights."""
    spec = EnvironmentSpec(
        "Test-v0",
        (LEAF,),
        FORCE if settings.name == "sac" else CHOICE,
        N,
        "same_step",
        action_mask=mask,
    )
    network = NetworkSettings(hidden=(8,), lstm=5 if settings.name == "r2d2" else 0)
    config = Config(env=EnvSettings(id="Test-v0", num_envs=N), algorithm=settings, network=network)
    config = config.model_copy(
        update={
            "replay": config.replay.model_copy(
                update={"capacity": 500, "selector": "prioritised", "alpha": 1.0}
            )
        }
    )
    policy, learner = (
        FACTORIES[settings.name].make_policy(config, spec),
        FACTORIES[settings.name].make_learner(config, spec, torch.device("cpu")),
    )
    policy.load(learner.flat())
    shard, generator = make_shard(config, spec), np.random.default_rng(3)
    state, start = policy.initial_state(N), torch.ones(N, dtype=torch.bool)
    obs = observations((LEAF,), ROUNDS * T + 1, N, seed=1)
    obs["arm"][..., 0] = torch.arange(ROUNDS * T + 1).unsqueeze(1) / TICKS
    masks = torch.from_numpy(generator.random((ROUNDS * T + 1, N, 3)) < 0.6)
    masks[..., 0] = True
    for number in range(ROUNDS):
        rows = {leaf: values[number * T : (number + 1) * T + 1] for leaf, values in obs.items()}
        over, noise = (
            torch.from_numpy(generator.random((T, N)) < 0.12),
            policy.noise(T, N, generator),
        )
        terminated = over & torch.from_numpy(generator.random((T, N)) < 0.5)
        starts, chosen, states = [start], [], []
        for t in range(T):
            state = {name: leaf.masked_fill(start[:, None], 0.0) for name, leaf in state.items()}
            states.append(state)
            allowed = masks[number * T + t] if mask else None
            chosen.append(
                policy.act(
                    {leaf: values[t] for leaf, values in rows.items()}, state, noise[t], allowed
                )
            )
            state, start = chosen[-1].state, over[t]
            starts.append(start)
        action = torch.stack([step.action for step in chosen])
        arrays = {f"obs/{leaf}": values for leaf, values in rows.items()}
        arrays |= {
            f"final_obs/{leaf}": values
            for leaf, values in observations((LEAF,), T, N, seed=50 + number).items()
        }
        arrays |= {
            "action": action,
            "terminated": terminated,
            "truncated": over & ~terminated,
            "start": torch.stack(starts),
        }
        arrays |= {
            "reward": torch.from_numpy(generator.standard_normal((T, N), dtype=np.float32)),
            "valid": torch.ones_like(over),
        }
        arrays |= policy.record(torch.stack([step.parameters for step in chosen]), action)
        arrays |= {
            f"state/{name}": torch.stack([before[name] for before in states])
            for name in policy.initial_state(1)
        }
        arrays |= {"version": torch.zeros(T, dtype=torch.int64)} | (
            {"action_mask": masks[number * T : (number + 1) * T + 1]} if mask else {}
        )
        shard.insert(
            Fragment(
                {name: array.numpy() for name, array in arrays.items()}, T, StepStream(0, 0), number
            )
        )
    return shard, learner


def drawn(shard: Shard, n: int = 400) -> tuple[LearnerBatch, np.ndarray[Any, Any]]:
    """Windows of a learner, and their priorities in the shard."""
    out = shard.make_batch(n)
    found = shard.draw(n, np.random.default_rng(0), out)
    arrays = {name: torch.from_numpy(array) for name, array in out.items()} | {
        "weight": torch.ones(n)
    }
    return LearnerBatch(arrays), found.probability * found.mass


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        DQNSettings(n_step=1, discount=0.9),
        DQNSettings(n_step=3, discount=0.9),
        R2D2Settings(burn_in=0, unroll=5, overlap=2, n_step=2, discount=0.9, value_rescaling=None),
        R2D2Settings(burn_in=0, unroll=5, overlap=2, n_step=2, discount=0.9),
        R2D2Settings(burn_in=3, unroll=2, n_step=2, discount=0.9, value_rescaling=None),
        R2D2Settings(burn_in=3, unroll=2, n_step=2, discount=0.9),
    ],
)
def test_initial_priorities_in_a_shard_equal_those_of_a_learner_with_equal_weights(
    settings: OffPolicySettings, mask: bool
) -> None:
    """Except for windows without a value after them: their episode was truncated, or the fragment
    ended.
    """
    shard, learner = filled(settings, mask=mask)
    batch, expected = drawn(shard)
    found = learner.step(batch)
    assert found.finite
    arrays = batch.arrays
    end = arrays["obs/arm"][0, :, 0] * TICKS + arrays["valid"].sum(0)
    looked_on = (
        arrays["terminated"].any(0) | (~arrays["truncated"].any(0) & (end.round() % T != 0))
    ).numpy()
    assert looked_on.sum() > 100
    assert expected[looked_on].tolist() == pytest.approx(
        found.priorities[looked_on].tolist(), rel=1e-3, abs=1e-4
    )
    assert np.ptp(found.priorities) > 0.5


@pytest.mark.parametrize(
    "settings", [DQNSettings(), SACSettings(n_step=2), R2D2Settings(burn_in=2, unroll=3, n_step=2)]
)
def test_a_learner_accepts_draws_of_a_shard(settings: OffPolicySettings) -> None:
    shard, learner = filled(settings)
    make: Callable[[], LearnerBatch] = lambda: drawn(shard, 64)[0]  # noqa: E731 - one expression, used three times
    results = [learner.step(make()) for _ in range(3)]
    assert all(result.finite and result.samples > 0 for result in results)
    assert {(64,)} == {result.priorities.shape for result in results}
