"""Value networks, critics and actors: shapes on every torso, seeds, and scaled actions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.networks.test_networks import observations
from tianflow.config.model import NetworkSettings
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError
from tianflow.networks.q_values import (
    ActionRange,
    Critics,
    Deterministic,
    QNetwork,
    SquashedGaussian,
    make_torso,
    seeded,
)

torch.set_num_threads(1)
CHOICE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
FORCE = ActionSpec(kind="box", shape=(2, 1), dtype="float32", low=(-1.0, 0.0), high=(3.0, 1.0))
IMAGE, VECTOR = LeafSpec("camera", (4, 40, 40), "uint8"), LeafSpec("arm", (3,), "float32")
TORSOS = [
    ("mlp", (VECTOR,)),
    ("mlp", (IMAGE, VECTOR)),
    ("nature_cnn", (IMAGE, VECTOR)),
    ("impala_resnet", (IMAGE,)),
]
every_torso = pytest.mark.parametrize(("name", "leaves"), TORSOS)
KWARGS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "nature_cnn": {"units": 16},
    "impala_resnet": {"units": 16, "channels": [4]},
}


def spec(action: ActionSpec, leaves: tuple[LeafSpec, ...]) -> EnvironmentSpec:
    return EnvironmentSpec("Test-v0", leaves, action, 4, "next_step")


@every_torso
@pytest.mark.parametrize("lstm", [0, 6])
@pytest.mark.parametrize("duelling", [False, True])
def test_values_step_by_step_equal_values_of_the_sequence(
    name: str, leaves: tuple[LeafSpec, ...], lstm: int, duelling: bool
) -> None:
    settings = NetworkSettings(name=name, hidden=(8,), lstm=lstm, kwargs=KWARGS[name])
    network = QNetwork(settings, spec(CHOICE, leaves), duelling=duelling)
    obs = observations(leaves, 3, 5)
    state: Any = {leaf: torch.zeros(5, lstm) for leaf in "hc"} if lstm else {}
    together = network(obs, state, torch.zeros(3, 5, dtype=torch.bool))
    assert (3, 5, 3) == together.values.shape
    for t in range(3):
        values, state = network.act({leaf: seen[t] for leaf, seen in obs.items()}, state)
        torch.testing.assert_close(values, together.values[t], atol=1e-5, rtol=1e-4)
    assert all(torch.allclose(state[leaf], together.state[leaf][-1], atol=1e-5) for leaf in state)


def test_duelling_adds_advantages_without_their_mean() -> None:
    network = QNetwork(NetworkSettings(hidden=(8,)), spec(CHOICE, (VECTOR,)), duelling=True)
    obs = observations((VECTOR,), 6)
    values, _ = network.act(obs, {})
    assert network.value is not None
    torch.testing.assert_close(values.mean(-1), network.value(network.torso(obs)).squeeze(-1))


@every_torso
def test_critics_depend_on_actions_and_differ(name: str, leaves: tuple[LeafSpec, ...]) -> None:
    critics = Critics(
        NetworkSettings(name=name, hidden=(8,), kwargs=KWARGS[name]), spec(FORCE, leaves)
    )
    obs, action = observations(leaves, 7), torch.rand(7, 2, requires_grad=True)
    values = critics(obs, action)
    assert (2, 7) == values.shape
    assert not torch.allclose(values[0], values[1])
    for value in values:
        (gradient,) = torch.autograd.grad(value.sum(), action, retain_graph=True)
        assert (gradient != 0.0).any()


@every_torso
def test_actors_stay_in_range(name: str, leaves: tuple[LeafSpec, ...]) -> None:
    settings = NetworkSettings(name=name, hidden=(8,), kwargs=KWARGS[name])
    obs = observations(leaves, 7)
    gaussian, certain = (
        SquashedGaussian(settings, spec(FORCE, leaves)),
        Deterministic(settings, spec(FORCE, leaves)),
    )
    gaussian.head.weight.data.mul_(1e6)
    certain.head.weight.data.mul_(1e6)
    assert (7, 4) == gaussian(obs).shape
    log_std = gaussian(obs)[:, 2:]
    assert (log_std.min(), log_std.max()) >= (-20.0, -20.0)
    assert log_std.max() <= 2.0
    assert (7, 2) == certain(obs).shape
    assert certain(obs).abs().max() <= 1.0


def test_actions_are_scaled_to_their_range_and_back() -> None:
    bounds = ActionRange(FORCE, torch.device("cpu"))
    stored = torch.tensor([[[-1.0], [1.0]], [[3.0], [0.5]]])
    assert [[-1.0, 1.0], [1.0, 0.0]] == bounds.scaled(stored).tolist()
    assert stored.tolist() == bounds.stored(bounds.scaled(stored)).tolist()
    single = ActionRange(
        ActionSpec(kind="box", shape=(), dtype="float32", low=(0.0,), high=(4.0,)),
        torch.device("cpu"),
    )
    assert [[-1.0], [0.5]] == single.scaled(torch.tensor([0.0, 3.0])).tolist()
    assert [0.0, 3.0] == single.stored(torch.tensor([[-1.0], [0.5]])).tolist()


def test_one_seed_is_one_network_and_the_global_generator_is_unchanged() -> None:
    before = torch.get_rng_state()
    one, two, other = (
        seeded(seed, lambda: Deterministic(NetworkSettings(), spec(FORCE, (VECTOR,))))
        for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_plug_in_torso_is_refused() -> None:
    with pytest.raises(ConfigError, match="mlp, nature_cnn, impala_resnet"):
        make_torso(NetworkSettings(name="my.networks:Net"), (VECTOR,))
