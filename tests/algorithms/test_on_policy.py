"""Algorithms: actor and learner agree, updates are atomic, learners resume bit for bit, and they
learn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.networks.test_networks import Counter, observations
from tests.support.effort import grid
from tests.support.paths import cases
from tests.support.pretended_device import pretended_device
from tianflow.algorithms import ppo
from tianflow.algorithms.a2c import A2C
from tianflow.algorithms.common import normalisers
from tianflow.algorithms.common.actor_critic import ActorCriticPolicy, read_batch
from tianflow.algorithms.common.model import ActorCriticModel
from tianflow.algorithms.common.normalisers import IMAGE_EPSILON, ObservationNormaliser
from tianflow.algorithms.common.parameter_buffer import Adam, FlatBuffer
from tianflow.algorithms.impala import Impala
from tianflow.algorithms.ppo import PPO, PPOLearner
from tianflow.config.model import (
    A2CSettings,
    Config,
    EnvSettings,
    ImpalaSettings,
    LearnerSettings,
    NetworkSettings,
    NormalisationSettings,
    PPOSettings,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import CheckpointError
from tianflow.interfaces import LearnerBatch, StepResult
from tianflow.networks import Output, make_network

CASES = cases("estimators")
torch.set_num_threads(
    1
)  # a second thread slows tensors of this size down, most of all on a busy machine
CPU = torch.device("cpu")
DISCRETE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(2,))
SEVERAL = ActionSpec(kind="multi_discrete", shape=(2,), dtype="int64", categories=(2, 3))
BOX = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=(1.0, 1.0))
ACTIONS = {"discrete": DISCRETE, "multi_discrete": SEVERAL, "box": BOX}
ALGORITHMS = {"ppo": PPO, "impala": Impala, "a2c": A2C}
SETTINGS = {
    "ppo": PPOSettings(epochs=2, minibatch_size=16),
    "impala": ImpalaSettings(),
    "a2c": A2CSettings(),
}
LEAF, IMAGE = LeafSpec("", (5,), "float32"), LeafSpec("", (1, 36, 36), "uint8")
T, N = 6, 8


def spec(
    action: ActionSpec = DISCRETE,
    *leaves: LeafSpec,
    mask: bool = False,
    autoreset: Any = "next_step",
) -> EnvironmentSpec:
    return EnvironmentSpec("Test-v0", leaves or (LEAF,), action, N, autoreset, action_mask=mask)


def config(
    algorithm: Any = "ppo",
    *,
    lstm: int = 0,
    normalise: bool = False,
    network: str = "mlp",
    **changes: Any,
) -> Config:
    settings = SETTINGS[algorithm].model_copy(update=changes)
    env = EnvSettings(
        id="Test-v0",
        num_envs=N,
        normalisation=NormalisationSettings(observations=normalise, returns=normalise),
    )
    return Config(
        env=env,
        algorithm=settings,
        network=NetworkSettings(name=network, hidden=(16, 16), lstm=lstm),
    )


def rollout(
    policy: ActorCriticPolicy, env: EnvironmentSpec, *, seed: int = 0, steps: int = T
) -> dict[str, Tensor]:
    """A trajectory as an actor stores it: random observations, step by step, with the state zeroed
    at starts.
    """
    generator = np.random.default_rng(seed)
    obs = observations(env.observation, steps + 1, N, seed=seed)
    ended, cut = torch.from_numpy(generator.random((2, steps, N)) < 0.1)
    start = torch.zeros(steps + 1, N, dtype=torch.bool)
    start[0], start[1:] = True, ended | cut
    mask = torch.from_numpy(generator.random((steps + 1, N, env.action.mask_size)) < 0.7)
    mask[..., :1] = True
    noise, state = policy.noise(steps, N, generator), policy.initial_state(N)
    first = dict(state)
    actions, parameters = [], []
    for t in range(steps):
        state = {name: torch.where(start[t][:, None], 0.0, leaf) for name, leaf in state.items()}
        made = policy.act(
            {name: leaf[t] for name, leaf in obs.items()},
            state,
            noise[t],
            mask[t] if env.action_mask else None,
        )
        state = made.state
        actions.append(made.action)
        parameters.append(made.parameters)
    action = torch.stack(actions)
    arrays = {f"obs/{name}": leaf for name, leaf in obs.items()} | {
        f"state/{name}": leaf for name, leaf in first.items()
    }
    arrays |= {
        "action": action,
        "log_prob": policy.log_prob(torch.stack(parameters), action),
        "reward": torch.from_numpy(generator.standard_normal((steps, N), dtype=np.float32)),
        "terminated": ended,
        "truncated": cut,
        "valid": torch.from_numpy(generator.random((steps, N)) < 0.9),
        "start": start,
        "version": torch.zeros(steps, 1, dtype=torch.int64),
        "return_so_far": torch.from_numpy(generator.standard_normal((steps, N)) * 3.0),
    }
    if env.action_mask:
        arrays["action_mask"] = mask
    if env.autoreset != "next_step":
        arrays |= {
            f"final_obs/{name}": leaf
            for name, leaf in observations(env.observation, steps, N, seed=seed + 1).items()
        }
    return {name: array.clone() for name, array in arrays.items()}


def pair(settings: Config, env: EnvironmentSpec) -> tuple[ActorCriticPolicy, Any]:
    factory = ALGORITHMS[settings.algorithm.name]
    policy, learner = factory.make_policy(settings, env), factory.make_learner(settings, env, CPU)
    policy.load(learner.flat())
    return policy, learner


def batch_for(settings: Config, env: EnvironmentSpec, learner: Any, seed: int = 0) -> LearnerBatch:
    policy = ALGORITHMS[settings.algorithm.name].make_policy(settings, env)
    policy.load(learner.flat())
    return LearnerBatch(rollout(policy, env, seed=seed))


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


@grid(kind=["discrete", "multi_discrete", "masked", "box"], lstm=[0, 5], normalise=[False, True])
def test_learner_and_actor_agree_on_every_log_probability(
    kind: str, lstm: int, normalise: bool
) -> None:
    """At equal weights |log ratio| < 1e-5, also after updates changed weights and normaliser."""
    env = spec(ACTIONS.get(kind, DISCRETE), mask=kind == "masked")
    settings = config(lstm=lstm, normalise=normalise, learning_rate=3e-2)
    policy, learner = pair(settings, env)
    for seed in range(3):
        learner.step(LearnerBatch(rollout(policy, env, seed=seed)))
        policy.load(learner.flat())
    arrays = rollout(policy, env, seed=9)
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    with torch.no_grad():
        output = learner.model.evaluate(samples.observation, samples.state, samples.start)
        parameters = learner.model.distribution.masked(output.parameters[:-1], samples.mask)
        log_ratio = (
            learner.model.distribution.log_prob(parameters, samples.action) - samples.log_prob
        )
    assert log_ratio.abs().max() < 1e-5
    assert arrays["log_prob"].std() > 1e-2


@every_algorithm
@pytest.mark.parametrize("lstm", [0, 5])
@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "masked", "box"])
def test_at_learning_rate_zero_without_staleness_nothing_diverges(
    algorithm: str, lstm: int, kind: str
) -> None:
    expected = CASES["ppo_zero_learning_rate_invariant"]["expected"]
    settings, env = (
        config(algorithm, lstm=lstm, learning_rate=0.0),
        spec(ACTIONS.get(kind, DISCRETE), mask=kind == "masked"),
    )
    policy, learner = pair(settings, env)
    before = learner.flat().copy()
    found = learner.step(LearnerBatch(rollout(policy, env)))
    assert expected["clip_fraction"] == found.statistics["clip_fraction"]
    assert expected["approx_kl"] == pytest.approx(found.statistics["kl"], abs=1e-9)
    assert found.statistics["ess_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert np.array_equal(before, learner.flat())


@every_algorithm
def test_statistics_are_named_alike_and_finite(algorithm: str) -> None:
    settings, env = config(algorithm), spec()
    _, learner = pair(settings, env)
    batch = batch_for(settings, env, learner)
    found = learner.step(batch)
    names = {
        "loss",
        "policy_loss",
        "value_loss",
        "entropy",
        "kl",
        "ess_ratio",
        "log_ratio_max",
        "clip_fraction",
        "grad_norm",
        "explained_variance",
    }
    names |= {"approx_kl"} if algorithm == "ppo" else set()
    assert names == set(found.statistics)
    assert all(math.isfinite(value) for value in found.statistics.values())
    assert int(batch.arrays["valid"].sum()) == found.samples
    assert found.finite
    assert found.statistics["entropy"] == pytest.approx(math.log(3), abs=0.01)


@every_algorithm
@pytest.mark.parametrize("lstm", [0, 5])
def test_invalid_rows_have_no_influence(algorithm: str, lstm: int) -> None:
    """They contain garbage rewards, actions and log-probabilities; without recurrent state
    observations, too.
    """
    settings, env = config(algorithm, lstm=lstm, normalise=True), spec()
    results = []
    for garbage in (False, True):
        _, learner = pair(settings, env)
        arrays = dict(batch_for(settings, env, learner).arrays)
        arrays["valid"][4:] = False
        if garbage:
            invalid = ~arrays["valid"]
            arrays["reward"][invalid] = 1e4
            arrays["log_prob"][invalid] = -50.0
            arrays["action"][invalid] = 0
            arrays["return_so_far"][invalid] = 1e6
            arrays["terminated"][invalid] = True
            if not lstm:
                arrays["obs/"][5:] = 1e3
        results.append((learner.step(LearnerBatch(arrays)), learner.flat().copy()))
    assert results[0][0] == results[1][0]
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("lstm", [0, 4])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int8", "float16"])
def test_observations_of_unusual_width_are_learned_from(
    algorithm: str, dtype: str, lstm: int, device: str
) -> None:
    env, made = (
        spec(DISCRETE, LeafSpec("", (5,), dtype), autoreset="same_step"),
        config(algorithm, lstm=lstm),
    )
    policy = ALGORITHMS[algorithm].make_policy(made, env)
    learner: Any = ALGORITHMS[algorithm].make_learner(made, env, torch.device(device))
    arrays = rollout(policy, env)
    arrays["final_obs/"] = arrays["obs/"][:-1].clone()
    before = learner.flat().copy()
    batch = LearnerBatch({leaf: array.to(device) for leaf, array in arrays.items()})
    assert learner.step(batch).finite
    assert not np.array_equal(before, learner.flat())


@every_algorithm
def test_a_batch_without_valid_transitions_changes_nothing(algorithm: str) -> None:
    settings, env = config(algorithm), spec()
    _, learner = pair(settings, env)
    before, arrays = learner.state_dict(), dict(batch_for(settings, env, learner).arrays)
    found = learner.step(LearnerBatch(arrays | {"valid": torch.zeros(T, N, dtype=torch.bool)}))
    assert (0, True, {}) == (found.samples, found.finite, found.statistics)
    same_state(before, learner.state_dict())


def same_state(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert np.array_equal(array, found[name]), name


@pytest.mark.parametrize(
    ("algorithm", "passes"),
    [
        *((name, {}) for name in ALGORITHMS),
        pytest.param("ppo", {"epochs": 1, "minibatch_size": T * N}, id="ppo-in one step"),
    ],
)
@pytest.mark.parametrize("poison", ["reward", "log_prob"])
def test_an_update_that_is_not_finite_changes_nothing(
    algorithm: str, passes: dict[str, int], poison: str
) -> None:
    if algorithm == "a2c" and poison == "log_prob":
        poison = "obs/"
    settings, env = config(algorithm, normalise=True, **passes), spec()
    _, learner = pair(settings, env)
    learner.step(batch_for(settings, env, learner))
    before, batch = learner.state_dict(), batch_for(settings, env, learner, seed=1)
    batch.arrays[poison][batch.arrays["valid"].nonzero()[-1].unbind()] = math.nan
    assert not learner.step(batch).finite
    same_state(before, learner.state_dict())
    good = batch_for(settings, env, learner, seed=2)
    assert learner.step(good).finite


def test_a_stopped_ppo_update_changes_nothing() -> None:
    settings, env = config(normalise=True), spec()
    _, learner = pair(settings, env)
    learner.step(batch_for(settings, env, learner))
    before, answers = learner.state_dict(), iter([False, False, False, True])
    found = learner.step(batch_for(settings, env, learner, seed=1), lambda: next(answers))
    assert (0, True, {}) == (found.samples, found.finite, found.statistics)
    same_state(before, learner.state_dict())


@every_algorithm
@pytest.mark.parametrize("lstm", [0, 5])
def test_a_resumed_learner_continues_bit_for_bit(algorithm: str, lstm: int) -> None:
    settings, env = config(algorithm, lstm=lstm, normalise=True), spec()
    _, learner = pair(settings, env)
    learner.step(batch_for(settings, env, learner))
    saved = learner.state_dict()
    batches = [batch_for(settings, env, learner, seed=seed) for seed in (1, 2)]
    expected = [learner.step(batch) for batch in batches]
    _, resumed = pair(
        settings.model_copy(update={"run": settings.run.model_copy(update={"seed": 7})}), env
    )
    resumed.load_state_dict(saved)
    assert expected == [resumed.step(batch) for batch in batches]
    same_state(learner.state_dict(), resumed.state_dict())


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    _, learner = pair(config(), spec())
    _, other = pair(config(), spec(SEVERAL))
    before = learner.state_dict()
    with pytest.raises(CheckpointError, match=r"flat is uint8"):
        learner.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointError, match="generator is missing"):
        learner.load_state_dict(
            {name: array for name, array in before.items() if name != "generator"}
        )
    same_state(before, learner.state_dict())


@every_algorithm
def test_two_learners_of_one_seed_are_equal_and_live_settings_are_absolute(algorithm: str) -> None:
    settings, env = config(algorithm), spec()
    _, one = pair(settings, env)
    _, two = pair(settings, env)
    batch = batch_for(settings, env, one)
    two.set_live(1.0, 0.5)
    two.set_live(settings.algorithm.learning_rate, settings.algorithm.entropy_cost)
    one.step(batch)
    two.step(batch)
    assert np.array_equal(one.flat(), two.flat())
    two.set_live(0.0, 0.0)
    before = two.flat().copy()
    two.step(batch)
    assert np.array_equal(before, two.flat())


def test_ppo_uses_the_clip_range_in_force() -> None:
    settings, env = config("ppo", epochs=4, learning_rate=1e-2), spec()
    fractions = []
    for clip in (1e-6, 10.0):
        _, learner = pair(settings, env)
        learner.set_settings(settings.algorithm.model_copy(update={"clip": clip}), 0)
        fractions.append(
            learner.step(batch_for(settings, env, learner)).statistics["clip_fraction"]
        )
    assert fractions[0] > 0.5
    assert 0.0 == fractions[1]


def test_the_flat_buffer_is_the_network_and_its_table_names_every_tensor() -> None:
    network = make_network(NetworkSettings(hidden=(3,)), spec(BOX))
    expected = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    buffer = FlatBuffer(network, {"extra": (2, 3), "one": ()}, CPU)
    named = dict(network.named_parameters())
    flat = buffer.bytes.numpy()
    assert buffer.table.nbytes == flat.nbytes
    for entry in buffer.table.entries:
        array = np.ndarray(entry.shape, entry.dtype, flat.data, entry.offset)
        assert entry.offset % 64 == 0
        if entry.name in buffer.extras:
            buffer.extras[entry.name].fill_(3.0)
            assert (array == 3.0).all()
            continue
        name = entry.name.removeprefix("network/")
        assert np.array_equal(expected[name].numpy(), array)
        array[...] = 5.0
        assert (named[name] == 5.0).all()
    assert {"network/log_std", "extra", "one"} < {entry.name for entry in buffer.table.entries}


def test_gradients_accumulate_in_the_flat_buffer() -> None:
    network = make_network(NetworkSettings(hidden=(3,)), spec())
    buffer = FlatBuffer(network, {}, CPU)
    for _ in range(2):
        network.act(observations((LEAF,), 2), {})[0].sum().backward()
    assert network.policy_head.bias.grad.tolist() == [4.0, 4.0, 4.0]
    assert buffer.gradients.abs().sum().item() == pytest.approx(
        sum(p.grad.abs().sum().item() for p in network.parameters()), rel=1e-5
    )


def test_adam_is_pytorchs_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, gradients = torch.randn(50, generator=generator), torch.zeros(50)
    reference = torch.nn.Parameter(ours.clone())
    adam, expected = (
        Adam(ours, gradients, epsilon=1e-5),
        torch.optim.Adam([reference], lr=1e-2, eps=1e-5),
    )
    for _ in range(100):
        gradients.copy_(torch.randn(50, generator=generator))
        reference.grad = gradients.clone()
        adam.step(1e-2)
        expected.step()
    torch.testing.assert_close(ours, reference.detach(), atol=1e-6, rtol=1e-5)


def test_loading_weights_of_another_size_is_refused() -> None:
    policy, _ = pair(config(), spec())
    with pytest.raises(ValueError, match="3 bytes"):
        policy.load(np.zeros(3, np.uint8))


class Bare(torch.nn.Module):
    """A plug-in network with `forward` only."""

    def __init__(self, settings: Any, env: EnvironmentSpec) -> None:
        super().__init__()
        self.both = torch.nn.Linear(5, env.action.mask_size + 1)

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        both = self.both(observation[""])
        return Output(both[..., 1:], both[..., 0], {})


def test_a_plug_in_module_with_forward_only_acts_and_learns() -> None:
    settings, env = config(network="tests.algorithms.test_on_policy:Bare"), spec()
    policy, learner = pair(settings, env)
    found = learner.step(LearnerBatch(rollout(policy, env)))
    assert found.finite
    assert found.statistics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_no_noise_gives_the_most_probable_action_within_the_mask() -> None:
    policy, _ = pair(config(), spec(mask=True))
    mask = torch.tensor([[False, True, False]]).expand(N, 3)
    made = policy.act(observations((LEAF,), N), {}, None, mask)
    assert made.action.tolist() == [1] * N


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_acting_on_arrays_follows_the_weights_and_selects_the_same_actions(
    action: ActionSpec,
) -> None:
    env = spec(action)
    policy, learner = pair(config(), env)
    arrays = policy.on_arrays(N)
    assert arrays is not None
    for seed in range(3):
        learner.step(LearnerBatch(rollout(policy, env, seed=seed)))
        policy.load(learner.flat())
        obs, noise = (
            observations((LEAF,), N, seed=seed),
            policy.noise(1, N, np.random.default_rng(seed))[0],
        )
        expected = policy.act(obs, {}, noise)
        parameters = np.full((N, arrays.size), np.nan, np.float32)
        chosen = np.full((N, *action.stored_shape), 9, action.stored_dtype)
        arrays({"": obs[""].numpy()}, noise.numpy(), parameters, chosen)
        torch.testing.assert_close(
            torch.from_numpy(parameters), expected.parameters, atol=1e-6, rtol=1e-5
        )
        torch.testing.assert_close(torch.from_numpy(chosen), expected.action, atol=1e-6, rtol=1e-5)
        recorded, tensors = (
            arrays.record(parameters[None], chosen[None]),
            policy.record(expected.parameters[None], expected.action[None]),
        )
        assert tensors.keys() == recorded.keys()
        for name, column in tensors.items():
            torch.testing.assert_close(
                torch.from_numpy(recorded[name]), column, atol=1e-5, rtol=1e-5
            )


def test_acting_on_arrays_is_offered_only_if_equal_and_faster() -> None:
    assert pair(config(), spec())[0].on_arrays(N) is not None
    assert pair(config(), spec())[0].on_arrays(1_000_000) is None
    assert pair(config(), spec(mask=True))[0].on_arrays(N) is None
    assert pair(config(normalise=True), spec())[0].on_arrays(N) is None
    assert pair(config(lstm=4), spec())[0].on_arrays(N) is None
    assert (
        pair(config(network="tests.algorithms.test_on_policy:Bare"), spec())[0].on_arrays(N) is None
    )


def test_continuous_actions_are_stored_unclipped() -> None:
    """The log-probability is of the sampled action, even far outside of the box."""
    policy, _ = pair(config(), spec(BOX))
    noise = torch.full((N, 2), 5.0)
    made = policy.act(observations((LEAF,), N), {}, noise)
    assert (made.action > 4.0).all()
    expected = -0.5 * 25.0 * 2 - math.log(2.0 * math.pi)
    assert policy.log_prob(made.parameters, made.action).tolist() == pytest.approx(
        [expected] * N, rel=1e-4
    )


def test_observation_statistics_are_those_of_all_valid_rows_and_reach_the_policy() -> None:
    leaves = (LeafSpec("x", (2,), "float32"), LeafSpec("n", (), "int64", (3,)))
    settings, env = config(normalise=True), spec(DISCRETE, *leaves)
    policy, learner = pair(settings, env)
    seen = []
    for seed in range(3):
        arrays = rollout(policy, env, seed=seed)
        arrays["obs/x"] = arrays["obs/x"] * 4.0 + 7.0
        seen.append(arrays["obs/x"][:-1][arrays["valid"]].double())
        learner.step(LearnerBatch(arrays))
    every = torch.cat(seen)
    extras = learner.model.buffer.extras
    assert {
        "observation/x/mean",
        "observation/x/variance",
        "observation/x/samples",
        "return/mean",
        "return/variance",
        "return/samples",
    } == set(extras)
    torch.testing.assert_close(extras["observation/x/mean"], every.mean(0))
    torch.testing.assert_close(extras["observation/x/variance"], every.var(0, correction=0))
    assert extras["observation/x/samples"].item() == len(every)
    policy.load(learner.flat())
    found = policy._model.observations({"x": every.mean(0).float(), "n": torch.tensor(1)})
    torch.testing.assert_close(found["x"], torch.zeros(2), atol=1e-5, rtol=0.0)
    assert found["n"].item() == 1


@pytest.mark.parametrize("network", ["nature_cnn", "impala_resnet"])
def test_pixels_are_normalised_individually_for_learner_and_actor_alike(network: str) -> None:
    """A constant background becomes 0; a pixel that moved once is visible, but not raised to the
    limit.
    """
    settings = config("impala", network=network, learning_rate=3e-2)
    pixels = settings.env.model_copy(update={"normalisation": NormalisationSettings(images=True)})
    settings = settings.model_copy(update={"env": pixels})
    env = spec(DISCRETE, LeafSpec("", (1, 36, 36), "uint8"))
    policy, learner = pair(settings, env)
    for seed in range(2):
        arrays = rollout(policy, env, seed=seed)
        arrays["obs/"][..., 0, 0] = 87
        learner.step(LearnerBatch(arrays))
        policy.load(learner.flat())
    observation = torch.full((1, 1, 36, 36), 87, dtype=torch.uint8)
    found = policy._model.observations({"": observation})[""]
    assert found.dtype == torch.float32
    assert found[..., 0, 0].item() == pytest.approx(0.0, abs=1e-5)
    observation[..., 0, 0] = 97
    assert policy._model.observations({"": observation})[""][..., 0, 0].item() == pytest.approx(
        2.0, rel=1e-3
    )
    arrays = rollout(policy, env, seed=9)
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    with torch.no_grad():
        output = learner.model.evaluate(samples.observation, samples.state, samples.start)
        log_ratio = (
            learner.model.distribution.log_prob(output.parameters[:-1], samples.action)
            - samples.log_prob
        )
    assert log_ratio.abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(4, 6, 7), (6, 7, 3)])
def test_bytes_are_normalised_as_their_scaled_values(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for views of some columns and any order of channels; the memory layout is that of
    convolutions.
    """
    monkeypatch.setattr(normalisers, "BLOCK_BYTES", 16 * 4 * math.prod(shape))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (3, 11, *shape), dtype=torch.uint8, generator=generator)
    normaliser = ObservationNormaliser([LeafSpec("", shape, "uint8")], clip=2.0)
    extras = {
        name: torch.zeros(each, dtype=torch.float64) for name, each in normaliser.shapes.items()
    }
    normaliser.bind(extras)
    valid = torch.ones(3, 11, dtype=torch.bool)
    for every in (True, False):
        valid[1, 2] = every
        normaliser.update({"": images}, valid)
    scaled, moments = (
        images.double() / 255.0,
        (extras["observation//mean"], extras["observation//variance"]),
    )
    kept = torch.cat([scaled.flatten(0, 1), scaled[valid]])
    torch.testing.assert_close(moments[0], kept.mean(0))
    torch.testing.assert_close(moments[1], kept.var(0, correction=0))
    expected = (
        ((scaled - moments[0]) / (moments[1] + IMAGE_EPSILON).sqrt()).clamp(-2.0, 2.0).float()
    )
    for columns in (slice(None), slice(1, 3)):
        found = normaliser({"": images[:, columns]})[""]
        torch.testing.assert_close(found, expected[:, columns], atol=1e-5, rtol=1e-5)
        assert torch.equal(normaliser.batch({"": images[:, columns]})[""], found)
    assert found.stride(-3 if shape[0] < shape[-1] else -1) == 1


def test_returns_are_scaled_by_the_deviation_of_the_discounted_return() -> None:
    settings, env = config("a2c", normalise=True), spec()
    policy, learner = pair(settings, env)
    arrays = rollout(policy, env)
    learner.step(LearnerBatch(arrays))
    deviation = arrays["return_so_far"][arrays["valid"]].std(correction=0).item()
    assert learner.model.rewards(torch.tensor([1.0])).item() == pytest.approx(
        1.0 / deviation, rel=1e-5
    )
    assert learner.model.rewards(torch.tensor([1e6])).item() == 10.0


def counting(lead: tuple[int, ...], start: Tensor) -> dict[str, Tensor]:
    return {"obs/": torch.zeros(*lead, 5), "state/count": torch.zeros(lead[1]), "start": start}


def test_next_values_are_of_the_last_observation_of_an_ended_episode() -> None:
    """A network whose value counts steps of the episode, with SAME_STEP: the final observation is
    one step further, while obs[t+1] starts a new count.
    """
    settings, env = (
        config(network="tests.networks.test_networks:Counter"),
        spec(autoreset="same_step"),
    )
    _, learner = pair(settings, env)
    assert isinstance(learner.model.network, Counter)
    start, flags = torch.zeros(5, 2, dtype=torch.bool), torch.zeros(4, 2, dtype=torch.bool)
    start[0], start[3, 0] = True, True
    truncated = flags.clone()
    truncated[2, 0] = True
    arrays = counting((5, 2), start) | {
        "final_obs/": torch.zeros(4, 2, 5),
        "action": torch.zeros(4, 2, dtype=torch.int64),
        "log_prob": torch.zeros(4, 2),
        "reward": torch.zeros(4, 2),
        "terminated": flags,
        "truncated": truncated,
        "valid": ~flags,
    }
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    output = learner.model.evaluate(samples.observation, samples.state, samples.start)
    assert output.value.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert learner.next_values(samples, output).tolist() == [
        [2.0, 2.0],
        [3.0, 3.0],
        [4.0, 4.0],
        [2.0, 5.0],
    ]


def test_the_value_of_a_truncated_step_comes_from_its_final_observation_only() -> None:
    settings, env = config(), spec(autoreset="same_step")
    policy, learner = pair(settings, env)
    arrays = rollout(policy, env)
    arrays["truncated"][2, 3], arrays["terminated"][2, 3], arrays["valid"][2, 3] = True, False, True
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    output = learner.model.evaluate(samples.observation, samples.state, samples.start)
    found = learner.next_values(samples, output)
    final = {"": samples.final_observation[""][2:3, 3:4]}
    expected = learner.model.evaluate(final, {}, torch.zeros(1, 1, dtype=torch.bool)).value
    assert found[2, 3].item() == pytest.approx(expected.item(), abs=1e-6)
    plain = ~samples.truncated_t
    torch.testing.assert_close(found[plain], output.value[1:].detach()[plain])


def test_the_gradient_of_an_update_is_the_slope_of_its_loss() -> None:
    """Central differences along random directions; a discount of 0 and PPO ratios of 1 keep targets
    constant.
    """
    for algorithm in ("a2c", "impala"):
        settings, env = config(algorithm, lstm=3, discount=0.0, entropy_cost=0.1), spec()
        _, learner = pair(settings, env)
        arrays = batch_for(settings, env, learner).arrays
        samples = read_batch(arrays, reward=arrays["reward"] + 1.0, discount=0.0)
        parameters, gradients = learner.model.buffer.parameters, learner.model.buffer.gradients
        frozen = learner.model.evaluate(
            samples.observation, samples.state, samples.start
        ).value.detach()[:-1]
        learner._train_on(learner.model, samples, samples.valid_t.sum(), 0.1)

        def loss(samples: Any = samples, learner: Any = learner, frozen: Tensor = frozen) -> float:
            with torch.no_grad():
                output = learner.model.evaluate(samples.observation, samples.state, samples.start)
                log_prob, entropy = learner.model.distribution.evaluate(
                    output.parameters[:-1], samples.action
                )
                advantage, error = samples.r_t - frozen, (output.value[:-1] - samples.r_t).square()
                terms = -log_prob * advantage + 0.5 * 0.5 * error - 0.1 * entropy
                return float(terms[samples.valid_t].double().mean())

        direction = torch.randn(parameters.shape, generator=torch.Generator().manual_seed(0))
        direction *= (gradients != 0).float()
        slope = (gradients * direction).sum().item()
        start = parameters.clone()
        parameters.copy_(start + 1e-3 * direction)
        above = loss()
        parameters.copy_(start - 1e-3 * direction)
        assert slope == pytest.approx((above - loss()) / 2e-3, rel=2e-2)


def test_chunks_of_image_columns_give_the_gradient_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config("impala", network="nature_cnn", lstm=4)
    env = spec(DISCRETE, LeafSpec("", (1, 36, 36), "uint8"))
    found = []
    for size in (10**6, 2 * T):
        monkeypatch.setattr("tianflow.algorithms.common.single_pass.CHUNK_SAMPLES", size)
        _, learner = pair(settings, env)
        found.append(
            (
                learner.step(batch_for(settings, env, learner)).statistics,
                learner.optimiser.mean.clone(),
            )
        )
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-4)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("lstm", [0, 4])
def test_parts_of_an_image_minibatch_give_the_gradient_of_the_whole(
    lstm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are not valid, so parts of recurrent networks have different weights."""
    settings, env = (
        config(network="nature_cnn", lstm=lstm, epochs=2, minibatch_size=4 * T),
        spec(DISCRETE, IMAGE),
    )
    found = []
    for size in (10**6, 2 * T if lstm else 7):
        monkeypatch.setattr("tianflow.algorithms.ppo.CHUNK_SAMPLES", size)
        policy, learner = pair(settings, env)
        arrays = rollout(policy, env)
        arrays["valid"][1:, 0] = False
        statistics = learner.step(LearnerBatch(arrays)).statistics
        found.append((statistics, learner.optimiser.mean.clone()))
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=1e-3)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("algorithm", "lstm"), [("ppo", 4), ("impala", 0)])
def test_threads_that_share_images_compute_the_same_as_one_and_are_reproducible(
    algorithm: str, lstm: int
) -> None:
    found = []
    for threads in (1, 3, 3):
        settings = config(algorithm, network="nature_cnn", lstm=lstm)
        settings = settings.model_copy(update={"learner": LearnerSettings(threads=threads)})
        policy, learner = pair(settings, env := spec(DISCRETE, IMAGE))
        assert learner.parallel.size == threads
        results = [learner.step(LearnerBatch(rollout(policy, env, seed=seed))) for seed in range(2)]
        assert not learner.model.gradients.any()
        found.append(
            (
                results[-1].statistics,
                learner.model.buffer.bytes.clone(),
                learner.model.buffer.parameters.clone(),
            )
        )
    assert torch.equal(found[1][1], found[2][1])
    torch.testing.assert_close(found[0][2], found[1][2], atol=1e-4, rtol=0.0)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2, abs=1e-4)


def test_an_exception_on_a_worker_thread_is_raised_after_all_threads_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config(network="nature_cnn").model_copy(
        update={"learner": LearnerSettings(threads=2)}
    )
    _, learner = pair(settings, spec(DISCRETE, IMAGE))
    done: list[int] = []

    def work(model: ActorCriticModel, item: int) -> int:
        if item == 1:
            raise ValueError("no")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="no"):
        learner.parallel.map(work, range(5))
    assert done == [0, 2, 4]
    assert learner.parallel.map(lambda _, item: 2 * item, range(5)) == [0, 2, 4, 6, 8]
    assert learner.parallel.map(lambda _, item: item, ()) == []
    with torch.no_grad():
        assert learner.parallel.map(lambda *_: torch.is_grad_enabled(), range(2)) == [False, False]


def test_ppo_does_not_evaluate_the_images_of_its_first_minibatch_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parameters are the same, so the gradient is that of a second evaluation."""
    settings, env = (
        config(network="nature_cnn", epochs=2, minibatch_size=T * N // 2),
        spec(DISCRETE, IMAGE),
    )
    found, seen = [], []

    def counting(self: Any, observation: Any, state: Any, start: Tensor) -> Output:
        seen[-1] += start.numel()
        return evaluate(self, observation, state, start)

    look, evaluate = PPOLearner._evaluate, ActorCriticModel.evaluate
    monkeypatch.setattr(ActorCriticModel, "evaluate", counting)
    for again in (False, True):
        if again:
            monkeypatch.setattr(PPOLearner, "_evaluate", lambda *args: (look(*args)[0], ()))
        seen.append(0)
        policy, learner = pair(settings, env)
        arrays = rollout(policy, env)
        arrays["valid"][:] = True
        found.append(
            (learner.step(LearnerBatch(arrays)).statistics, learner.model.buffer.parameters.clone())
        )
    assert [2 * T * N + N + T * N // 2, 3 * T * N + N] == seen
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("places", "viewed"), [([1, 2, 3], True), ([4], True), ([0, 2, 3], False), ([], False)]
)
def test_adjacent_images_are_evaluated_without_a_copy(places: list[int], viewed: bool) -> None:
    images, chosen = (
        torch.randint(256, (5, 2, 3), dtype=torch.uint8),
        torch.tensor(places, dtype=torch.int64),
    )
    found = ppo._rows(images, chosen)
    assert torch.equal(images[chosen], found)
    assert (found.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()) == viewed


def test_minibatches_of_images_are_in_memory_order() -> None:
    settings = config(network="nature_cnn", minibatch_size=T * N // 3)
    _, learner = pair(settings, spec(DISCRETE, IMAGE))
    for part in learner._minibatches(torch.ones(T, N, dtype=torch.bool)):
        assert torch.equal(part.sort().values, part)


def test_ppo_weights_stale_data_by_proximal_over_behaviour_up_to_the_limit() -> None:
    settings, env = config(max_behaviour_weight=1.5), spec()
    policy, learner = pair(settings, env)
    arrays = rollout(policy, env)
    arrays["log_prob"][0] -= math.log(1.2)
    arrays["log_prob"][1] -= math.log(3.0)
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    table, _ = learner._prepare(
        samples, learner._evaluate(samples, samples.valid_t.flatten().nonzero().squeeze(1))[0]
    )
    weight = table.constants[0, :, 1].view(T, N)
    for row, expected in ((0, 1.2), (1, 1.5), (2, 1.0)):
        torch.testing.assert_close(weight[row], torch.full((N,), expected), atol=1e-5, rtol=0.0)


def test_on_fresh_data_decoupled_ppo_is_ppo() -> None:
    found = []
    for decoupled in (True, False):
        settings, env = config(decoupled=decoupled), spec()
        _, learner = pair(settings, env)
        learner.step(batch_for(settings, env, learner))
        found.append(learner.model.buffer.parameters.clone())
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("lstm", [0, 5])
def test_every_valid_transition_is_in_one_minibatch_of_each_epoch(lstm: int) -> None:
    settings, env = config(lstm=lstm), spec()
    _, learner = pair(settings, env)
    arrays = batch_for(settings, env, learner).arrays
    samples = read_batch(arrays, reward=arrays["reward"], discount=0.9)
    table, _ = learner._prepare(
        samples, learner._evaluate(samples, samples.valid_t.flatten().nonzero().squeeze(1))[0]
    )
    parts = learner._minibatches(samples.valid_t)
    found = torch.cat([table.select(columns).constants.flatten(0, 1) for columns in parts])
    every = table.constants.flatten(0, 1)[samples.valid_t.flatten() if not lstm else slice(None)]
    torch.testing.assert_close(found.sort(0).values, every.sort(0).values)
    assert len(parts) > 1
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


def test_target_kl_ends_the_epochs_early() -> None:
    steps = []
    for target in (None, 1e-6):
        settings, env = config(learning_rate=1e-2, epochs=5, target_kl=target), spec()
        _, learner = pair(settings, env)
        learner.step(batch_for(settings, env, learner))
        steps.append(learner.optimiser.steps)
    assert steps[0] == 5 * steps[1]


BANDIT = {
    "ppo": {"learning_rate": 1e-2, "epochs": 4, "minibatch_size": 64},
    "impala": {"learning_rate": 1e-2},
    "a2c": {"learning_rate": 1e-2},
}


@pytest.mark.e2e
@every_algorithm
@pytest.mark.parametrize("lstm", [0, 8])
def test_learns_which_of_two_arms_pays_in_which_context(algorithm: str, lstm: int) -> None:
    """Contextual bandit: one step per episode; the arm equal to the context pays 1. Chance gives
    0.5.
    """
    arms = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(2,), start=(0,))
    env, settings = (
        spec(arms, LeafSpec("", (2,), "float32")),
        config(algorithm, lstm=lstm, **BANDIT[algorithm]),
    )
    policy, learner = pair(settings, env)
    generator = np.random.default_rng(0)
    columns, paid = 16, 0.5
    for _ in range(60):
        context = torch.from_numpy(generator.integers(0, 2, (9, columns)))
        obs = torch.nn.functional.one_hot(context, 2).float()
        noise, state = policy.noise(8, columns, generator), policy.initial_state(columns)
        made = [policy.act({"": obs[t]}, state, noise[t]) for t in range(8)]
        action = torch.stack([step.action for step in made])
        reward = (action == context[:8]).float()
        ones = torch.ones(8, columns, dtype=torch.bool)
        arrays = {f"state/{name}": leaf for name, leaf in state.items()} | {
            "obs/": obs,
            "action": action,
            "log_prob": policy.log_prob(torch.stack([step.parameters for step in made]), action),
            "reward": reward,
            "terminated": ones,
            "truncated": ~ones,
            "valid": ones,
            "start": torch.ones(9, columns, dtype=torch.bool),
        }
        learner.step(LearnerBatch({name: array.clone() for name, array in arrays.items()}))
        policy.load(learner.flat())
        paid = 0.9 * paid + 0.1 * reward.mean().item()
        if paid > 0.85:
            return
    pytest.fail(f"it is paid {paid:.2f}")


@every_algorithm
def test_values_of_one_state_converge_to_the_truth_through_truncations(algorithm: str) -> None:
    """Reward 1 in the only state, truncated every fourth step: V tends to 1 / (1 - gamma) = 5, not
    to that of 4 steps, 2.95.
    """
    settings = config(algorithm, discount=0.8, learning_rate=5e-2, max_grad_norm=100.0)
    env = spec(autoreset="same_step")
    policy, learner = pair(settings, env)
    arrays = rollout(policy, env, steps=8)
    for name in ("obs/", "final_obs/"):
        arrays[name][...] = 1.0
    arrays["reward"][...], arrays["valid"][...], arrays["terminated"][...] = 1.0, True, False
    arrays["truncated"][...] = (torch.arange(8) % 4 == 3)[:, None]
    for _ in range(20 if algorithm == "ppo" else 100):
        learner.step(LearnerBatch(arrays))
    with torch.no_grad():
        value = learner.model.evaluate(
            {"": torch.ones(1, 1, 5)}, {}, torch.zeros(1, 1, dtype=torch.bool)
        ).value.item()
    assert value == pytest.approx(5.0, rel=0.02)


def test_v_trace_limits_that_might_not_converge_are_refused_by_the_settings() -> None:
    with pytest.raises(ValueError, match=r"c_bar = 2.0 is above rho_bar = 1.0"):
        ImpalaSettings(c_bar=2.0)


def on(device: str, arrays: Any) -> LearnerBatch:
    return LearnerBatch({name: array.to(device) for name, array in arrays.items()})


@grid(algorithm=list(ALGORITHMS), network=["mlp", "nature_cnn"], lstm=[0, 5])
def test_a_batch_on_another_device_gives_the_update_of_a_cpu(
    algorithm: str, network: str, lstm: int
) -> None:
    leaf = LeafSpec("", (1, 40, 40), "uint8") if network == "nature_cnn" else LEAF
    # A minibatch of about 40 images is processed in two parts.
    changes = {"minibatch_size": 30} if algorithm == "ppo" else {}
    settings = config(algorithm, network=network, lstm=lstm, **changes)
    normalisation = NormalisationSettings(observations=True, images=True, returns=True)
    settings = settings.model_copy(
        update={"env": settings.env.model_copy(update={"normalisation": normalisation})}
    )
    env = spec(DISCRETE, leaf, mask=True, autoreset="same_step")
    policy, cpu = pair(settings, env)
    arrays = rollout(policy, env)
    expected = cpu.step(LearnerBatch(arrays))
    with pretended_device() as device:
        there = ALGORITHMS[algorithm].make_learner(settings, env, device)
        found = there.step(LearnerBatch({name: array.to(device) for name, array in arrays.items()}))
        there.load_state_dict(there.state_dict())
    assert expected.statistics == pytest.approx(found.statistics, rel=1e-3, abs=1e-5)
    np.testing.assert_allclose(
        there.model.buffer.parameters.numpy(),
        cpu.model.buffer.parameters.numpy(),
        rtol=0.0,
        atol=1e-6,
    )
    assert all(
        torch.allclose(value, there.model.buffer.extras[name])
        for name, value in cpu.model.buffer.extras.items()
    )


def test_parameters_that_a_step_of_a_plug_in_may_still_change_are_not_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled: list[FlatBuffer] = []

    def settle(buffer: FlatBuffer) -> None:
        settled.append(buffer)

    monkeypatch.setattr(FlatBuffer, "settle", settle)
    settings, env = config("impala"), spec()
    policy, learner = pair(settings, env)
    learner.step(on("cpu", rollout(policy, env)))
    assert [learner.model.buffer] == settled

    class Clamped(ALGORITHMS["impala"].make_learner):  # type: ignore[misc, name-defined]
        def step(self, batch: LearnerBatch) -> StepResult:
            found: StepResult = super().step(batch)
            self.model.buffer.parameters.clamp_(-1.0, 1.0)
            return found

    Clamped(settings, env, torch.device("cpu")).step(on("cpu", rollout(policy, env)))
    assert 1 == len(settled)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize(("network", "lstm"), [("mlp", 0), ("mlp", 5), ("nature_cnn", 0)])
def test_a_gpu_learner_does_what_a_cpu_learner_does_and_agrees_with_its_actors(
    algorithm: str, network: str, lstm: int
) -> None:
    leaf = LeafSpec("", (1, 40, 40), "uint8") if network == "nature_cnn" else LEAF
    settings, env = (
        config(algorithm, network=network, lstm=lstm, normalise=True),
        spec(DISCRETE, leaf, autoreset="same_step"),
    )
    policy, cpu = pair(settings, env)
    gpu = ALGORITHMS[algorithm].make_learner(settings, env, torch.device("cuda"))
    assert np.array_equal(cpu.flat(), gpu.flat())
    arrays = rollout(policy, env)
    expected, found = cpu.step(on("cpu", arrays)), gpu.step(on("cuda", arrays))
    assert expected.samples == found.samples
    assert expected.statistics == pytest.approx(found.statistics, rel=1e-2, abs=1e-4)
    gpu.set_live(1e-2, 0.0)
    for seed in range(1, 4):
        gpu.step(on("cuda", rollout(policy, env, seed=seed)))
        policy.load(gpu.flat())
        assert np.array_equal(gpu.model.buffer.bytes.cpu().numpy(), gpu.flat())
    gpu.set_live(0.0, 0.0)
    found = gpu.step(on("cuda", rollout(policy, env, seed=9)))
    assert abs(found.statistics["kl"]) < 0.5e-10
    assert found.statistics["clip_fraction"] == 0.0
    resumed = ALGORITHMS[algorithm].make_learner(settings, env, torch.device("cuda"))
    resumed.load_state_dict(gpu.state_dict())
    same_state(gpu.state_dict(), resumed.state_dict())
    gpu.load_state_dict(cpu.state_dict())
    assert np.array_equal(cpu.flat(), gpu.flat())
