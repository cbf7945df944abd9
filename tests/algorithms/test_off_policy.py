"""DQN, R2D2, SAC and TD3: actor and learner agree, updates are atomic, targets are constant,
padding is ignored.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.networks.test_networks import observations
from tests.support.paths import cases
from tests.support.pretended_device import pretended_device
from tianflow.algorithms.dqn import DQN
from tianflow.algorithms.r2d2 import R2D2, first_row, trained_rows, unroll, zero_undefined
from tianflow.algorithms.sac import SAC
from tianflow.algorithms.td3 import TD3
from tianflow.config.model import (
    Config,
    EnvSettings,
    LearnerSettings,
    NetworkSettings,
    NormalisationSettings,
)
from tianflow.config.off_policy import (
    DQNSettings,
    OffPolicySettings,
    R2D2Settings,
    SACSettings,
    TD3Settings,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import CheckpointError
from tianflow.interfaces import LearnerBatch
from tianflow.networks.q_values import QOutput
from tianflow.ops.q_values import n_step_target, rows_after, sequence_priority
from tianflow.ops.returns import n_step

CASES = cases("off_policy")
torch.set_num_threads(
    1
)  # a second thread slows tensors of this size down, most of all on a busy machine
CPU = torch.device("cpu")
CHOICE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(2,))
FORCE = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(3.0, 1.0))
FACTORIES: dict[str, Any] = {"dqn": DQN, "r2d2": R2D2, "sac": SAC, "td3": TD3}
SETTINGS: dict[str, OffPolicySettings] = {
    "dqn": DQNSettings(target_update_updates=3),
    "r2d2": R2D2Settings(
        burn_in=3, unroll=4, n_step=2, target_update_updates=3, learning_rate=1e-3
    ),
    "sac": SACSettings(),
    "td3": TD3Settings(),
}
VECTOR, NUMBER = LeafSpec("vector", (5,), "float32"), LeafSpec("number", (), "int64", (4,))
N = 6
every_algorithm = pytest.mark.parametrize("name", FACTORIES)
q_learning = pytest.mark.parametrize("name", ["dqn", "r2d2"])
continuous = pytest.mark.parametrize("name", ["sac", "td3"])


def made(
    name: str,
    *,
    normalise: bool = False,
    seed: int = 1,
    device: torch.device = CPU,
    leaves: tuple[LeafSpec, ...] | None = None,
    precision: Any = "fp32",
    graphs: Any = "auto",
    **changes: Any,
) -> tuple[Any, Any]:
    """Policy and learner with equal weights."""
    leaves = leaves or (VECTOR, NUMBER)
    spec = EnvironmentSpec(
        "Test-v0", leaves, CHOICE if name in ("dqn", "r2d2") else FORCE, N, "next_step"
    )
    settings = SETTINGS[name].model_copy(update=changes)
    env = EnvSettings(
        id="Test-v0", num_envs=N, normalisation=NormalisationSettings(observations=normalise)
    )
    config = Config(
        env=env,
        algorithm=settings,
        network=NetworkSettings(hidden=(16,), lstm=7 if name == "r2d2" else 0),
        learner=LearnerSettings(precision=precision, graphs=graphs),
    )
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    policy, learner = (
        FACTORIES[name].make_policy(config, spec),
        FACTORIES[name].make_learner(config, spec, device),
    )
    policy.load(learner.flat())
    return policy, learner


def windows(
    name: str, *, seed: int = 0, n: int = N, fresh: bool | None = None
) -> dict[str, Tensor]:
    """Windows of replay: some end early, by termination or truncation; the rest is padding, and
    repeats the observation after the last step.
    """
    generator = np.random.default_rng(seed)
    length = SETTINGS[name].window[0]
    whole = generator.integers(1, length + 1, size=n)
    whole[: n // 2] = length
    row = np.arange(length)[:, None]
    last, kind = row == whole - 1, generator.integers(3, size=n)
    obs = observations((VECTOR, NUMBER), length + 1, n, seed=seed)
    shown = np.minimum(np.arange(length + 1)[:, None], whole)
    arrays: dict[str, Any] = {
        f"obs/{leaf}": values[shown, np.arange(n)] for leaf, values in obs.items()
    }
    arrays |= {
        "action": generator.integers(3, size=(length, n))
        if name in ("dqn", "r2d2")
        else generator.uniform((-1.0, 0.0), (3.0, 1.0), (length, n, 2)).astype(np.float32),
        "reward": generator.standard_normal((length, n), dtype=np.float32),
        "terminated": last & (kind == 0),
        "truncated": last & (kind == 1),
        "valid": row < whole,
        "start": np.zeros((length + 1, n), bool),
        "weight": generator.uniform(0.2, 1.0, n).astype(np.float32),
        "version": np.zeros(n, np.int64),
    }
    arrays["start"][0] = generator.random(n) < 0.5 if fresh is None else fresh
    if name == "r2d2":
        arrays |= {
            f"state/{leaf}": generator.standard_normal((n, 7), dtype=np.float32)
            * ~arrays["start"][0][:, None]
            for leaf in "hc"
        }
    return {leaf: torch.as_tensor(values).clone() for leaf, values in arrays.items()}


def acted(policy: Any, *, steps: int, seed: int = 0) -> dict[str, Tensor]:
    """One episode as an actor stores it, with the state before every step: observations [steps + 1,
    N, ...], all else [steps, N, ...].
    """
    obs, state = observations((VECTOR, NUMBER), steps + 1, N, seed=seed), policy.initial_state(N)
    noise = policy.noise(steps, N, np.random.default_rng(seed))
    chosen, states = [], []
    for t in range(steps):
        chosen.append(
            policy.act({leaf: values[t] for leaf, values in obs.items()}, state, noise[t])
        )
        states.append(state)
        state = chosen[-1].state
    action = torch.stack([step.action for step in chosen])
    stored = {f"obs/{leaf}": values for leaf, values in obs.items()} | {"action": action}
    stored |= policy.record(torch.stack([step.parameters for step in chosen]), action)
    return stored | {
        f"state/{leaf}": torch.stack([before[leaf] for before in states])
        for leaf in policy.initial_state(1)
    }


def same_state(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert np.array_equal(array, found[name]), name


# Actors
# --------------------------------------------------------------------------------------------------


@q_learning
def test_an_actor_selects_the_largest_value_among_allowed_actions_unless_it_explores(
    name: str,
) -> None:
    policy, _ = made(name)
    obs = observations((VECTOR, NUMBER), 400)
    mask = torch.from_numpy(np.random.default_rng(0).random((400, 3)) < 0.6)
    mask[:, 2] = True
    state = policy.initial_state(400)
    greedy = policy.act(obs, state, None, mask)
    plain = policy.act(obs, state, None).parameters
    assert torch.equal(torch.where(mask, plain, -math.inf).argmax(-1), greedy.action)
    noise = policy.noise(1, 400, np.random.default_rng(1))[0]  # epsilon is 1 at update 0
    explored = policy.act(obs, state, noise, mask)
    assert mask.gather(1, explored.action.unsqueeze(1)).all()
    assert not torch.equal(greedy.action, explored.action)
    recorded = policy.record(explored.parameters.unsqueeze(0), explored.action.unsqueeze(0))
    torch.testing.assert_close(
        recorded["q_taken"][0], plain.gather(1, explored.action.unsqueeze(1)).squeeze(1)
    )
    torch.testing.assert_close(recorded["q_max"][0], torch.where(mask, plain, -math.inf).amax(-1))


@q_learning
def test_epsilon_is_published_with_the_weights_and_each_environment_has_its_own_with_apex(
    name: str,
) -> None:
    policy, learner = made(name)
    learner.set_settings(learner.settings, learner.settings.epsilon_updates // 2)
    policy.load(learner.flat())
    explores = (policy.noise(4000, N, np.random.default_rng(0)) > 0.0).any(-1).double().mean(0)
    assert [0.525] * N == pytest.approx(explores.tolist(), abs=0.04)
    learner.set_settings(learner.settings.model_copy(update={"epsilon_base": 0.4}), 0)
    policy.load(learner.flat())
    policy.place(1, 2)
    explores = (policy.noise(20_000, N, np.random.default_rng(0)) > 0.0).any(-1).double().mean(0)
    expected = [0.4 ** (1 + 7 * index / (2 * N - 1)) for index in range(N, 2 * N)]
    assert expected == pytest.approx(explores.tolist(), abs=4e-3)


@continuous
def test_continuous_actions_stay_within_their_bounds_and_are_greedy_without_noise(
    name: str,
) -> None:
    changes: dict[str, Any] = {"noise_start": 5.0, "noise_end": 5.0} if name == "td3" else {}
    policy, _ = made(name, **changes)
    obs = observations((VECTOR, NUMBER), 300)
    action = policy.act(obs, {}, policy.noise(1, 300, np.random.default_rng(0))[0]).action
    assert (action >= torch.tensor([-1.0, 0.0])).all()
    assert (action <= torch.tensor([3.0, 1.0])).all()
    assert (action.std(0) > torch.tensor([1.0, 0.25])).all()
    greedy = policy.act(obs, {}, None)
    centre = greedy.parameters[:, :2].tanh() if name == "sac" else greedy.parameters
    torch.testing.assert_close(
        greedy.action, torch.tensor([1.0, 0.5]) + torch.tensor([2.0, 0.5]) * centre
    )


def test_exploration_noise_of_td3_follows_its_schedule() -> None:
    policy, learner = made("td3", noise_start=1.0, noise_end=0.2, noise_updates=100)
    spread = []
    for updates in (0, 50, 100, 900):
        learner.set_settings(learner.settings, updates)
        policy.load(learner.flat())
        spread.append(policy.noise(3000, N, np.random.default_rng(0)).std().item())
    assert [1.0, 0.6, 0.2, 0.2] == pytest.approx(spread, rel=0.03)


@every_algorithm
def test_an_actor_loads_complete_weights_and_constructs_no_optimiser(name: str) -> None:
    policy, learner = made(name)
    assert policy.table == learner.table
    assert not any(parameter.requires_grad for parameter in policy.model.network.parameters())
    with pytest.raises(ValueError, match="3 bytes"):
        policy.load(np.zeros(3, np.uint8))


# Updates
# --------------------------------------------------------------------------------------------------


@every_algorithm
@pytest.mark.parametrize("normalise", [False, True])
def test_an_update_trains_on_every_item_and_returns_its_priority(
    name: str, normalise: bool
) -> None:
    _, learner = made(name, normalise=normalise)
    before, arrays = learner.flat().copy(), windows(name)
    found = learner.step(LearnerBatch(arrays))
    burnt = trained_rows(arrays["valid"], arrays["start"][0], 3).sum() if name == "r2d2" else N
    assert (int(burnt), True) == (found.samples, found.finite)
    assert {"loss", "grad_norm", "td_error", "q_value"} <= set(found.statistics)
    assert all(math.isfinite(value) for value in found.statistics.values())
    assert (N,) == found.priorities.shape
    assert np.float32 == found.priorities.dtype
    assert (found.priorities >= 0.0).all()
    assert not np.array_equal(before, learner.flat())


@every_algorithm
def test_padding_has_no_influence(name: str) -> None:
    """Observations that an update does not read have no influence either. Both may contain huge
    values.
    """
    results = []
    for garbage in (False, True):
        _, learner = made(name, normalise=True)
        for seed in (1, 2):
            arrays = windows(name, seed=seed)
            if garbage:
                padding = ~arrays["valid"]
                arrays["reward"][padding] = math.nan
                arrays["terminated"][padding] = True
                arrays["truncated"][padding] = True
                arrays["action"][padding] = 1
                unseen = torch.cat([torch.zeros_like(padding[:1]), padding | arrays["terminated"]])
                if SETTINGS[name].ends_only:
                    unseen[1:-1], unseen[-1] = True, False
                arrays["obs/vector"][unseen] = math.inf
                arrays["obs/number"][unseen] = 99
            found = learner.step(LearnerBatch(arrays))
            results.append(
                (found.samples, found.finite, found.statistics, found.priorities.tolist())
            )
        results.append(learner.flat().tolist())
    assert results[:3] == results[3:]
    assert results[0][1]


@every_algorithm
def test_an_item_without_weight_has_no_gradient_but_a_priority(name: str) -> None:
    """With SAC and TD3 only the critics' loss is weighted."""
    _, learner = made(name)
    _, other = made(name)
    arrays = windows(name)
    arrays["weight"][:] = 0.0
    found = learner.step(LearnerBatch(arrays))
    expected = other.step(LearnerBatch(windows(name)))
    assert expected.priorities.tolist() == found.priorities.tolist()
    key = "value_loss" if name in ("sac", "td3") else "loss"
    assert 0.0 == found.statistics[key] < expected.statistics[key]
    if name in ("sac", "td3"):
        assert found.statistics["policy_loss"] == expected.statistics["policy_loss"]


@every_algorithm
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int8", "float16"])
def test_observations_of_unusual_width_are_learned_from(name: str, dtype: str, device: str) -> None:
    """PyTorch lacks some operations for them: masked_fill, and on a GPU every indexing."""
    wide = LeafSpec("vector", (5,), dtype)
    policy, learner = made(name, leaves=(wide, NUMBER), device=torch.device(device))
    arrays = windows(name)
    arrays["obs/vector"] = (arrays["obs/vector"].abs() * 100).to(getattr(torch, dtype))
    before = learner.flat().copy()
    batch = LearnerBatch({leaf: array.to(device) for leaf, array in arrays.items()})
    result = learner.step(batch)
    assert result.finite
    assert result.samples > 0
    assert not np.array_equal(before, learner.flat())
    observation = {leaf: arrays[f"obs/{leaf}"][0] for leaf in ("vector", "number")}
    policy.load(learner.flat())
    action = policy.act(observation, policy.initial_state(N), None).action
    assert N == len(action)


@every_algorithm
def test_a_batch_without_trainable_steps_changes_nothing(name: str) -> None:
    _, learner = made(name, normalise=True)
    learner.step(LearnerBatch(windows(name)))
    before, arrays = learner.state_dict(), windows(name)
    found = learner.step(LearnerBatch(arrays | {"valid": torch.zeros_like(arrays["valid"])}))
    assert (0, True, {}, None) == (found.samples, found.finite, found.statistics, found.priorities)
    found = learner.step(LearnerBatch(windows(name)), lambda: True)
    assert (0, True, {}, None) == (found.samples, found.finite, found.statistics, found.priorities)
    answers = iter([False, True])
    found = learner.step(LearnerBatch(windows(name)), lambda: next(answers))
    assert (0, True, {}, None) == (found.samples, found.finite, found.statistics, found.priorities)
    same_state(before, learner.state_dict())
    assert not any(optimiser.gradients.any() for optimiser in learner.optimisers.values())


@every_algorithm
@pytest.mark.parametrize("poison", ["reward", "obs/vector", "weight"])
def test_an_update_that_is_not_finite_changes_nothing(name: str, poison: str) -> None:
    _, learner = made(name, normalise=True)
    _, twin = made(name, normalise=True)
    for one in (learner, twin):
        one.step(LearnerBatch(windows(name)))
    before, arrays = learner.state_dict(), windows(name, seed=1, fresh=True)
    arrays[poison][(0,) if poison == "weight" else (0, 0)] = math.nan
    found = learner.step(LearnerBatch(arrays))
    assert (False, None) == (found.finite, found.priorities)
    same_state(before, learner.state_dict())
    for one in (learner, twin):
        assert one.step(LearnerBatch(windows(name, seed=2))).finite
    same_state(twin.state_dict(), learner.state_dict())


@every_algorithm
def test_a_resumed_learner_continues_bit_for_bit(name: str) -> None:
    _, learner = made(name, normalise=True)
    for seed in range(4):
        learner.step(LearnerBatch(windows(name, seed=seed)))
    saved = learner.state_dict()
    _, resumed = made(name, normalise=True, seed=9)
    resumed.load_state_dict(saved)
    for seed in range(4, 8):
        expected, found = (
            one.step(LearnerBatch(windows(name, seed=seed))) for one in (learner, resumed)
        )
        assert expected.statistics == found.statistics
        assert expected.priorities.tolist() == found.priorities.tolist()
    same_state(learner.state_dict(), resumed.state_dict())


@every_algorithm
def test_state_of_another_model_is_refused_and_changes_nothing(name: str) -> None:
    _, learner = made(name)
    before = learner.state_dict()
    with pytest.raises(CheckpointError, match="generator is missing"):
        learner.load_state_dict({key: array for key, array in before.items() if key != "generator"})
    with pytest.raises(CheckpointError, match=r"adam/mean is float32\[3\]"):
        learner.load_state_dict(
            before | {"adam/mean": np.zeros(3, np.float32), "flat": before["flat"] * 0}
        )
    same_state(before, learner.state_dict())


@every_algorithm
def test_live_settings_are_absolute_and_the_learning_rate_is_set_separately(name: str) -> None:
    _, one = made(name)
    _, two = made(name)
    two.set_live(1.0, 0.0)
    two.set_live(two.settings.learning_rate, 0.0)
    two.set_settings(two.settings, 0)
    for learner in (one, two):
        learner.step(LearnerBatch(windows(name)))
    assert np.array_equal(one.flat(), two.flat())
    two.set_live(0.0, 0.0)
    two.set_settings(two.settings, 0)
    before = two.flat().copy()
    two.step(LearnerBatch(windows(name)))
    assert np.array_equal(before, two.flat())


@every_algorithm
def test_a_batch_on_another_device_gives_the_update_of_a_cpu(name: str) -> None:
    _, cpu = made(name, normalise=True)
    with pretended_device() as device:
        _, there = made(name, normalise=True, device=device)
        for seed in range(3):
            arrays = windows(name, seed=seed)
            found = there.step(
                LearnerBatch({leaf: array.to(device) for leaf, array in arrays.items()})
            )
            expected = cpu.step(LearnerBatch(arrays))
            assert expected.priorities.tolist() == pytest.approx(
                found.priorities.tolist(), rel=1e-3, abs=1e-4
            )
            assert expected.statistics == pytest.approx(found.statistics, rel=1e-3, abs=1e-4)
        there.load_state_dict(there.state_dict())


@pytest.mark.gpu
@every_algorithm
def test_a_gpu_makes_the_updates_of_a_cpu(name: str) -> None:
    _, cpu = made(name, normalise=True)
    _, gpu = made(name, normalise=True, device=torch.device("cuda"))
    for seed in range(3):
        arrays = windows(name, seed=seed)
        expected, found = (
            cpu.step(LearnerBatch(arrays)),
            gpu.step(LearnerBatch({leaf: array.cuda() for leaf, array in arrays.items()})),
        )
        assert expected.priorities.tolist() == pytest.approx(
            found.priorities.tolist(), rel=1e-3, abs=1e-4
        )
        assert expected.statistics == pytest.approx(found.statistics, rel=1e-3, abs=1e-4)
    saved = gpu.state_dict()
    cpu.load_state_dict(saved)
    same_state(saved, cpu.state_dict())


# Targets
# --------------------------------------------------------------------------------------------------


@q_learning
def test_a_target_network_is_constant_and_then_becomes_the_online_one(name: str) -> None:
    """Every third update, by the settings of these tests."""
    _, learner = made(name)
    first = learner.target.parameters.clone()
    for update in range(1, 7):
        learner.step(LearnerBatch(windows(name, seed=update)))
        if update % 3 == 0:
            assert torch.equal(learner.model.buffer.parameters, learner.target.parameters)
        else:
            assert not torch.equal(learner.model.buffer.parameters, learner.target.parameters)
            assert update > 3 or torch.equal(first, learner.target.parameters)
    weights = dict(learner.target.network.named_parameters())
    assert all(
        torch.equal(weights[key], value) for key, value in learner.model.network.named_parameters()
    )


@continuous
def test_target_networks_move_by_a_share(name: str) -> None:
    _, learner = made(name, target_smoothing=0.25)
    pairs = [(learner.critics.buffer, learner.target_critics)]
    pairs += [(learner.model.buffer, learner.target_actor)] if name == "td3" else []
    for update in range(4):
        before = [target.parameters.clone() for _, target in pairs]
        learner.step(LearnerBatch(windows(name, seed=update)))
        for old, (source, target) in zip(before, pairs, strict=True):
            share = 0.0 if name == "td3" and update % 2 else 0.25
            torch.testing.assert_close(
                target.parameters, old + share * (source.parameters - old), atol=1e-7, rtol=1e-6
            )


def test_the_actor_of_td3_is_updated_every_second_time() -> None:
    _, learner = made("td3")
    moved = []
    for update in range(4):
        before = learner.flat().copy()
        learner.step(LearnerBatch(windows("td3", seed=update)))
        moved.append(not np.array_equal(before, learner.flat()))
    assert [True, False, True, False] == moved


@every_algorithm
def test_no_gradient_flows_through_targets(name: str) -> None:
    """A loss depends on observations and constants: target networks have no gradient, and cannot
    have one.
    """
    _, learner = made(name)
    arrays = windows(name)
    learner.compute_gradients({**arrays, **learner.noise(arrays)})
    targets = [
        getattr(learner, part)
        for part in ("target", "target_critics", "target_actor")
        if hasattr(learner, part)
    ]
    assert targets
    for target in targets:
        assert all(
            parameter.grad is None and not parameter.requires_grad
            for parameter in target.network.parameters()
        )


@pytest.mark.parametrize("double", [False, True])
def test_the_gradient_of_dqn_is_that_of_the_selected_value_alone(double: bool) -> None:
    """(target - Q(s, a)) dQ(s, a), with Q(s', .) of the same network held constant, computed by
    hand.
    """
    _, learner = made("dqn", double=double, huber_delta=None)
    arrays = windows("dqn")
    arrays["valid"][:] = True
    arrays["terminated"][:], arrays["truncated"][:] = False, False
    learner.compute_gradients(arrays)
    found = learner.model.buffer.gradients.clone()
    network = learner.model.network
    first = {leaf: arrays[f"obs/{leaf}"][0] for leaf in ("vector", "number")}
    last = {leaf: arrays[f"obs/{leaf}"][3] for leaf in ("vector", "number")}
    with torch.no_grad():
        bootstrap = network.act(last, {})[0].amax(-1)
        returns = (
            arrays["reward"][0]
            + 0.99 * arrays["reward"][1]
            + 0.99**2 * arrays["reward"][2]
            + 0.99**3 * bootstrap
        )
    value = network.act(first, {})[0].gather(1, arrays["action"][0].unsqueeze(1)).squeeze(1)
    learner.model.buffer.gradients.zero_()
    torch.autograd.backward((0.5 * arrays["weight"] * (returns - value).square()).mean())
    torch.testing.assert_close(found, learner.model.buffer.gradients, atol=1e-6, rtol=1e-5)


def test_double_q_learning_selects_with_the_online_network() -> None:
    """With different networks, errors differ from those of ordinary Q-learning, whose targets are
    never lower.
    """
    errors = {}
    for double in (False, True):
        _, learner = made("dqn", double=double)
        apart(learner.target)
        arrays = windows("dqn")
        arrays["reward"] += 1000.0  # so that no error changes its sign
        errors[double] = learner.step(LearnerBatch(arrays)).priorities
    assert (errors[True] <= errors[False] + 1e-3).all()
    assert (errors[True] < errors[False] - 1e-2).any()


def test_forbidden_actions_are_not_used_for_bootstrapping() -> None:
    _, learner = made("dqn")
    learner.model.network.advantage.head.bias.data[0] = 1000.0
    learner.target.follow(1.0)
    arrays = windows("dqn") | {"action": torch.ones(3, N, dtype=torch.int64)}
    free = learner.step(LearnerBatch(dict(arrays))).priorities
    arrays["action_mask"] = torch.ones(4, N, 3, dtype=torch.bool)
    arrays["action_mask"][..., 0] = False
    bound = learner.step(LearnerBatch(arrays)).priorities
    goes_on = ~arrays["terminated"].any(0).numpy()
    assert (bound[goes_on] < free[goes_on] - 500.0).all()


def apart(*targets: Any) -> None:
    """Move target networks away from the online ones, so that a test can distinguish them."""
    for seed, target in enumerate(targets):
        target.parameters.add_(
            torch.randn(target.parameters.shape, generator=torch.Generator().manual_seed(seed))
            * 0.1
        )


def first_and_last(arrays: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return tuple(
        {leaf: arrays[f"obs/{leaf}"][row] for leaf in ("vector", "number")} for row in (0, -1)
    )  # type: ignore[return-value]


def test_losses_of_sac_are_the_published_ones() -> None:
    """arXiv 1812.05905, eq. 5 to 9 and 18, from distributions of PyTorch's own."""
    _, learner = made("sac", initial_temperature=0.7)
    apart(learner.target_critics)
    arrays = windows("sac")
    first, last = first_and_last(arrays)
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())

    def sampled(obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, log_std = learner.model.network(obs).chunk(2, -1)
        before = mean + log_std.exp() * torch.randn(N, 2, generator=generator)
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before)  # type: ignore[no-untyped-call]
        return before.tanh(), (density - (1.0 - before.tanh().square()).log()).sum(-1)

    with torch.no_grad():
        action, log_prob = sampled(last)
        value = learner.target_critics.network(last, action).min(0).values - 0.7 * log_prob
        target = arrays["reward"][0] + 0.99 * torch.where(arrays["terminated"][0], 0.0, value)
        taken = (arrays["action"][0] - torch.tensor([1.0, 0.5])) / torch.tensor([2.0, 0.5])
        error = target - learner.critics.network(first, taken)
        action, log_prob = sampled(first)
        policy_loss = (0.7 * log_prob - learner.critics.network(first, action).min(0).values).mean()
    found = learner.step(LearnerBatch(arrays))
    assert error.abs().mean(0).tolist() == pytest.approx(found.priorities.tolist(), abs=1e-5)
    assert (0.5 * arrays["weight"] * error.square()).mean(1).sum().item() == pytest.approx(
        found.statistics["value_loss"], abs=1e-5
    )
    assert policy_loss.item() == pytest.approx(found.statistics["policy_loss"], abs=1e-5)
    assert -log_prob.mean().item() == pytest.approx(found.statistics["entropy"], abs=1e-5)
    assert 0.7 == pytest.approx(found.statistics["temperature"])


def test_losses_of_td3_are_the_published_ones() -> None:
    """arXiv 1802.09477, algorithm 1."""
    _, learner = made("td3", target_noise=0.4)
    apart(learner.target_critics, learner.target_actor)
    arrays = windows("td3")
    first, last = first_and_last(arrays)
    generator = torch.Generator()
    generator.set_state(learner.generator.get_state())
    with torch.no_grad():
        noise = (0.4 * torch.randn(N, 2, generator=generator)).clamp(-0.5, 0.5)
        smoothed = (learner.target_actor.network(last) + noise).clamp(-1.0, 1.0)
        value = learner.target_critics.network(last, smoothed).min(0).values
        target = arrays["reward"][0] + 0.99 * torch.where(arrays["terminated"][0], 0.0, value)
        taken = (arrays["action"][0] - torch.tensor([1.0, 0.5])) / torch.tensor([2.0, 0.5])
        error = target - learner.critics.network(first, taken)
        policy_loss = -learner.critics.network(first, learner.model.network(first))[0].mean()
    found = learner.step(LearnerBatch(arrays))
    assert error.abs().mean(0).tolist() == pytest.approx(found.priorities.tolist(), abs=1e-5)
    assert (0.5 * arrays["weight"] * error.square()).mean(1).sum().item() == pytest.approx(
        found.statistics["value_loss"], abs=1e-5
    )
    assert policy_loss.item() == pytest.approx(found.statistics["policy_loss"], abs=1e-5)


def test_the_temperature_of_sac_moves_the_entropy_towards_its_target() -> None:
    for target, direction in ((5.0, 1.0), (-20.0, -1.0), (None, 0.0)):
        _, learner = made("sac", target_entropy=target)
        before = learner.log_temperature.item()
        learner.step(LearnerBatch(windows("sac")))
        assert direction == np.sign(round(learner.log_temperature.item() - before, 9))


@continuous
def test_the_gradient_of_the_actor_reaches_no_critic(name: str) -> None:
    _, learner = made(name)
    arrays = windows(name)
    arrays["weight"][:] = 0.0
    learner.compute_gradients({**arrays, **learner.noise(arrays)})
    assert 0.0 == learner.critics.norm()
    assert learner.model.norm() > 0.0


# Recurrent state


class Toy:
    """s' = tanh(wh s + wx x), in float64; its values are its states."""

    def __init__(self, hidden: float, seen: float) -> None:
        self.hidden, self.seen = (
            torch.tensor(weight, dtype=torch.float64, requires_grad=True)
            for weight in (hidden, seen)
        )

    def __call__(self, observation: Any, state: Any, start: Tensor) -> QOutput:
        s, states = state["s"], []
        for x, begins in zip(observation["x"], start, strict=True):
            s = torch.tanh(self.hidden * torch.where(begins.unsqueeze(1), 0.0, s) + self.seen * x)
            states.append(s)
        stacked = torch.stack(states)
        return QOutput(stacked, {"s": stacked})


@pytest.mark.parametrize("weights", ["learner_wh_wx", "acting_wh_wx"])
def test_burn_in_brings_a_stored_state_to_the_handed_one(weights: str) -> None:
    """With equal weights it is exactly the state of the actor."""
    inputs, expected = (CASES["r2d2_burn_in_toy_rnn"][key] for key in ("inputs", "expected"))
    begin, burn_in = inputs["sequence_start"], inputs["burn_in"]
    x = torch.tensor(inputs["obs"][begin:], dtype=torch.float64).view(-1, 1, 1)
    stored = torch.tensor([[expected["stored_state_at_1"]]], dtype=torch.float64)
    network, fresh = Toy(*inputs[weights]), torch.tensor([False])
    values = unroll(network, {"x": x}, {"s": stored}, fresh, burn_in)
    after = values[burn_in, 0, 0]
    burnt = torch.atanh(after) - network.seen * x[burn_in, 0, 0]
    wanted = expected["state_after_burn_in_from_stored"]
    if weights == "acting_wh_wx":
        wanted = expected["acting_states_before_each_obs"][begin + burn_in]
    assert wanted == pytest.approx((burnt / network.hidden).item(), abs=1e-9)
    assert [0.0] * burn_in == values[:burn_in, 0, 0].tolist()
    (gradient,) = torch.autograd.grad(after, network.hidden)
    assert wanted * (1.0 - after.item() ** 2) == pytest.approx(
        gradient.item(), abs=1e-9
    )  # and none through earlier steps


@pytest.mark.parametrize("updates", [0, 3])
def test_with_equal_weights_a_learner_computes_the_values_of_its_actor(updates: int) -> None:
    policy, learner = made("r2d2", normalise=True)
    for seed in range(updates):
        learner.step(LearnerBatch(windows("r2d2", seed=seed)))
    policy.load(learner.flat())
    stored = acted(policy, steps=12)
    for begin in (0, 4):
        obs = learner.model.observations(
            {leaf: stored[f"obs/{leaf}"][begin : begin + 8] for leaf in ("vector", "number")}
        )
        state = {leaf: stored[f"state/{leaf}"][begin] for leaf in "hc"}
        values = unroll(learner.model.network, obs, state, torch.full((N,), begin == 0), 3).detach()
        rows = slice(0 if begin == 0 else 3, 7)
        q_taken = (
            values[rows]
            .gather(-1, stored["action"][begin : begin + 7][rows].unsqueeze(-1))
            .squeeze(-1)
        )
        torch.testing.assert_close(
            q_taken, stored["q_taken"][begin : begin + 7][rows], atol=1e-5, rtol=0.0
        )
        torch.testing.assert_close(
            values[rows].amax(-1), stored["q_max"][begin : begin + 7][rows], atol=1e-5, rtol=0.0
        )


@pytest.mark.parametrize("rescaling", [None, 1e-3])
def test_priorities_from_what_the_actor_recorded_are_those_of_the_learner(
    rescaling: float | None,
) -> None:
    """With equal weights; the value after the window is the actor's own of its next step."""
    for name in ("dqn", "r2d2"):
        changes: dict[str, Any] = {"value_rescaling": rescaling} if name == "r2d2" else {}
        policy, learner = made(name, **changes)
        length, n = learner.settings.window[0], learner.settings.n_step
        stored, begin = acted(policy, steps=length + 3), 2
        arrays = windows(name, fresh=False)
        part = {
            leaf: values[begin : begin + length + leaf.startswith("obs/")]
            for leaf, values in stored.items()
        }
        arrays |= {
            leaf: values[0] if leaf.startswith("state/") else values
            for leaf, values in part.items()
            if not leaf.startswith("q_")
        }
        valid, over = arrays["valid"], arrays["terminated"] | arrays["truncated"]
        shown = torch.minimum(torch.arange(length + 1)[:, None], valid.sum(0))
        arrays |= {
            leaf: values[shown, torch.arange(N)]
            for leaf, values in arrays.items()
            if leaf.startswith("obs/")
        }
        found = learner.step(LearnerBatch(arrays)).priorities
        discount_t = learner.settings.discount * (~arrays["terminated"]).float()
        step = n_step(r_t=arrays["reward"], discount_t=discount_t, done_t=over, valid_t=valid, n=n)
        bootstrap = rows_after(stored["q_max"][begin : begin + length + 1], step.steps_t)
        error = (
            n_step_target(step, bootstrap, rescaling=rescaling if name == "r2d2" else None)
            - part["q_taken"]
        )
        first = (
            error[0].abs()
            if name == "dqn"
            else sequence_priority(
                error, trained_rows(valid, torch.zeros(N, dtype=torch.bool), 3), eta=0.9
            )
        )
        assert first.tolist() == pytest.approx(found.tolist(), abs=1e-5)


def test_steps_of_burn_in_have_no_loss_and_no_gradient() -> None:
    """Rewards and actions there have no influence on the trained steps."""
    gradients = []
    for reward in (0.0, 1e3):
        _, learner = made("r2d2")
        arrays = windows("r2d2", fresh=False)
        arrays["valid"][:], arrays["terminated"][:], arrays["truncated"][:] = True, False, False
        arrays["reward"][:3] = reward
        arrays["action"][:3] = int(reward > 0.0)
        found = learner.compute_gradients(arrays)
        assert 4 * N == found.samples
        gradients.append(learner.model.buffer.gradients.clone())
    assert torch.equal(*gradients)


def test_no_gradient_reaches_observations_of_burn_in_unless_the_episode_begins_there() -> None:
    _, learner = made("r2d2")
    arrays = windows("r2d2")
    arrays["start"][0] = torch.arange(N) < 2
    obs = {leaf: arrays[f"obs/{leaf}"] for leaf in ("vector", "number")}
    obs["vector"].requires_grad_()
    values = unroll(
        learner.model.network,
        obs,
        {leaf: arrays[f"state/{leaf}"] for leaf in "hc"},
        arrays["start"][0],
        3,
    )
    (gradient,) = torch.autograd.grad(values[3:].square().sum(), obs["vector"])
    assert gradient[:3, :2].abs().sum() > 0.0
    assert 0.0 == gradient[:3, 2:].abs().sum()
    assert (gradient[3:].abs().sum((0, 2)) > 0.0).all()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_windows_that_begin_an_episode_are_trained_completely_beside_others(share: float) -> None:
    """Values are those of one unroll from the stored state, for any set of fresh columns."""
    _, learner = made("r2d2")
    arrays = windows("r2d2")
    fresh = torch.arange(N) < share * N
    obs, state = zero_undefined(arrays), {leaf: arrays[f"state/{leaf}"] for leaf in "hc"}
    expected = learner.model.network(obs, state, first_row(fresh, 8)).values
    found = unroll(learner.model.network, obs, state, fresh, 3)
    torch.testing.assert_close(found[3:], expected[3:], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[:3, fresh], expected[:3, fresh], atol=1e-6, rtol=1e-5)


def test_trained_rows_are_after_burn_in_or_in_windows_that_begin_an_episode() -> None:
    valid = torch.tensor(
        [[True, True, True], [True, True, True], [True, True, False], [False, True, False]]
    )
    expected = [
        [True, False, False],
        [True, False, False],
        [True, True, False],
        [False, True, False],
    ]
    assert expected == trained_rows(valid, torch.tensor([True, False, False]), 2).tolist()


def test_a_window_within_its_burn_in_has_priority_zero() -> None:
    _, learner = made("r2d2")
    arrays = windows("r2d2", fresh=False)
    arrays["valid"][2:, 0] = False
    assert 0.0 == learner.step(LearnerBatch(arrays)).priorities[0]


@every_algorithm
def test_an_item_without_error_keeps_a_priority_above_zero(name: str) -> None:
    """All values are 0, the episode terminates at once without reward: the error is exactly 0."""
    _, learner = made(name)
    for tensor in learner.saved_tensors.values():
        tensor.zero_()
    arrays = windows(name, fresh=True)
    arrays["valid"][1:], arrays["terminated"][0], arrays["truncated"][:] = False, True, False
    arrays["reward"].zero_()
    result = learner.step(LearnerBatch(arrays))
    assert 0.0 == result.statistics["td_error"]
    assert [pytest.approx(1e-6)] * N == result.priorities.tolist()


# Start-up
# --------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_creating_a_learner_and_an_update_does_not_import_the_compiler() -> None:
    """Constructing torch.optim.Adam would import it: about a second at every start."""
    code = (
        "import sys; from tests.algorithms.test_off_policy import *\n"
        "for name in FACTORIES: made(name)[1].step(LearnerBatch(windows(name)))\n"
        "from tests.algorithms.test_on_policy import *\n"
        "_, learner = pair(config(), spec())\n"
        "learner.step(batch_for(config(), spec(), learner))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
