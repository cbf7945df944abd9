"""Built-in and plug-in networks: one interface, resetting state, leaves of every kind, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tianflow.config.model import Config, EnvSettings, NetworkSettings, PPOSettings
from tianflow.config.networks import (
    channels_first,
    check_network,
    image_size,
    previous_leaves,
    state_spec,
    torso_parameters,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError
from tianflow.networks import (
    ImpalaResnet,
    Mlp,
    NatureCnn,
    Network,
    Output,
    convolutions,
    make_network,
)
from tianflow.networks.convolutions import RectifiedConv2d
from tianflow.networks.parts import ResettingLstm, Vector
from tianflow.networks.q_values import QNetwork

DISCRETE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
BOX = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=(1.0, 1.0))
VECTOR, IMAGE = LeafSpec("", (5,), "float32"), LeafSpec("", (4, 36, 36), "uint8")
EVERYTHING = (
    LeafSpec("camera", (36, 40, 3), "uint8"),
    LeafSpec("arm/joints", (2, 3), "float64"),
    LeafSpec("goal", (), "int64", (4,)),
    LeafSpec("switches", (2,), "int64", (2, 3)),
    LeafSpec("lamp", (3,), "int8"),
)


def spec(*leaves: LeafSpec, action: ActionSpec = DISCRETE) -> EnvironmentSpec:
    return EnvironmentSpec(
        id="Test-v0", observation=leaves, action=action, num_envs=4, autoreset="next_step"
    )


def config(network: NetworkSettings) -> Config:
    return Config(env=EnvSettings(id="Test-v0"), algorithm=PPOSettings(), network=network)


def observations(leaves: tuple[LeafSpec, ...], *lead: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for leaf in leaves:
        top = 256 if leaf.dtype == "uint8" else min(leaf.categories, default=2)
        shape = (*lead, *leaf.shape)
        floats = leaf.dtype.startswith("float")
        values = (
            torch.randn(shape, generator=generator)
            if floats
            else torch.randint(top, shape, generator=generator)
        )
        found[leaf.name] = values.to(getattr(torch, leaf.dtype))
    return found


def zero_state(settings: NetworkSettings, columns: int) -> dict[str, Tensor]:
    return {name: torch.zeros(columns, *shape) for name, shape in state_spec(settings).items()}


CASES = [
    pytest.param(
        NetworkSettings(name=name, lstm=lstm, share_torso=shared),
        leaves,
        action,
        id=f"{name}-{lstm}-{shared}-{kind}",
    )
    for name, shared, leaves, kind, action in [
        ("mlp", False, (VECTOR,), "discrete", DISCRETE),
        ("mlp", True, (VECTOR,), "box", BOX),
        ("mlp", False, EVERYTHING, "discrete", DISCRETE),
        ("mlp", False, (VECTOR, *previous_leaves(DISCRETE)), "previous", DISCRETE),
        ("nature_cnn", False, (IMAGE,), "discrete", DISCRETE),
        ("nature_cnn", False, (IMAGE, *previous_leaves(BOX)), "previous", BOX),
        ("nature_cnn", False, EVERYTHING, "box", BOX),
        ("impala_resnet", False, (LeafSpec("", (9, 7, 3), "uint8"),), "discrete", DISCRETE),
    ]
    for lstm in (0, 6)
]


@pytest.mark.parametrize(("settings", "leaves", "action"), CASES)
def test_acting_step_by_step_equals_evaluating_the_sequence(
    settings: NetworkSettings, leaves: tuple[LeafSpec, ...], action: ActionSpec
) -> None:
    """With zero state where an episode starts, and the same state after each step."""
    steps, columns = 5, 3
    network = make_network(settings, spec(*leaves, action=action), seed=1)
    obs = observations(leaves, steps, columns)
    start = torch.zeros(steps, columns, dtype=torch.bool)
    start[0], start[2, 1] = True, True
    with torch.inference_mode():
        output = network(obs, zero_state(settings, columns), start)
        state: Any = zero_state(settings, columns)
        for t in range(steps):
            state = {
                name: torch.where(start[t, :, None], 0.0, leaf) for name, leaf in state.items()
            }
            parameters, state = network.act({name: leaf[t] for name, leaf in obs.items()}, state)
            torch.testing.assert_close(parameters, output.parameters[t], atol=2e-6, rtol=0.0)
            for name, leaf in state.items():
                torch.testing.assert_close(leaf, output.state[name][t], atol=2e-6, rtol=0.0)
    assert output.value.shape == (steps, columns)
    assert set(output.state) == set(state_spec(settings))
    assert 1e-3 < output.value.std()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a_small_network_gives_the_same_on_arrays(
    action: ActionSpec, activation: Literal["relu", "tanh"]
) -> None:
    """For any number of observations, and for overwritten weights after a refresh."""
    network = make_network(
        NetworkSettings(hidden=(16, 8), activation=activation, kwargs={"log_std": -0.5}),
        spec(VECTOR, action=action),
    )
    assert isinstance(network, Mlp)
    arrays = network.on_arrays()
    assert arrays is not None
    assert arrays.products == 5 * 16 + 16 * 8 + 8 * (2 if action is BOX else 3)
    for seed, count in enumerate((7, 7, 4)):
        obs = observations((VECTOR,), count, seed=seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(
                    0.3
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
            expected = network.act(obs, {})[0]
        arrays.refresh()
        found = np.full((count, arrays.size), np.nan, np.float32)
        arrays({"": obs[""].numpy()}, found)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-6, rtol=1e-5)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        (NetworkSettings(lstm=6), (VECTOR,)),
        (NetworkSettings(), EVERYTHING),
        (NetworkSettings(), (LeafSpec("", (5,), "int8"),)),
        (NetworkSettings(name="nature_cnn"), (IMAGE,)),
    ],
    ids=["memory", "leaves", "bytes", "images"],
)
def test_other_networks_do_not_act_on_arrays(
    settings: NetworkSettings, leaves: tuple[LeafSpec, ...]
) -> None:
    network = make_network(settings, spec(*leaves))
    assert isinstance(network, Network)
    assert network.on_arrays() is None


@pytest.mark.parametrize(("settings", "leaves", "action"), CASES)
def test_every_parameter_gets_a_gradient(
    settings: NetworkSettings, leaves: tuple[LeafSpec, ...], action: ActionSpec
) -> None:
    network = make_network(settings, spec(*leaves, action=action))
    output = network(
        observations(leaves, 3, 2), zero_state(settings, 2), torch.zeros(3, 2, dtype=torch.bool)
    )
    (output.value.sum() + output.parameters.square().sum()).backward()
    assert [] == [name for name, parameter in network.named_parameters() if parameter.grad is None]


def test_the_first_policy_is_nearly_uniform() -> None:
    network = make_network(NetworkSettings(), spec(VECTOR))
    parameters, _ = network.act(observations((VECTOR,), 100), {})
    assert parameters.abs().max() < 0.1


def test_a_gaussian_starts_with_the_log_deviation_asked_for() -> None:
    network = make_network(NetworkSettings(kwargs={"log_std": -0.5}), spec(VECTOR, action=BOX))
    parameters, _ = network.act(observations((VECTOR,), 2), {})
    assert parameters[:, 2:].tolist() == [[-0.5, -0.5]] * 2


def test_weights_come_from_the_seed_alone_and_the_global_generator_is_unchanged() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        make_network(NetworkSettings(), spec(VECTOR), seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    weights = [
        nn.utils.parameters_to_vector(network.parameters()) for network in (first, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "group"),
    [
        pytest.param((4, 20, 28), 8, 4, 4, id="four pixels at once"),
        pytest.param((4, 20, 26), 8, 4, 2, id="two, because the width is no multiple of four"),
        pytest.param((5, 9, 11), 4, 2, 1, id="an odd width"),
        pytest.param((3, 8, 8), 3, 1, 1, id="without a stride"),
    ],
)
def test_a_rectified_convolution_equals_pytorchs_convolution_and_rectifier(
    shape: tuple[int, int, int], kernel: int, stride: int, group: int, dtype: torch.dtype
) -> None:
    ours, plain = (
        RectifiedConv2d(shape[0], 6, kernel, stride).to(dtype),
        nn.Conv2d(shape[0], 6, kernel, stride).to(dtype),
    )
    plain.load_state_dict(ours.state_dict())
    assert convolutions._group_pixels(torch.zeros(1, *shape), group).shape == (
        1,
        group * shape[0],
        shape[1],
        shape[2] // group,
    )
    found, expected = [], []
    for convolve, told in ((ours, found), (lambda x: torch.relu(plain(x)), expected)):
        images = torch.randn(3, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        images = images.contiguous(memory_format=torch.channels_last).requires_grad_()
        result = convolve(images)
        (
            result.flatten(1) * torch.arange(result[0].numel())
        ).sum().backward()  # the gradient has channels outermost
        told += [result.detach(), images.grad]
    found += [parameter.grad for parameter in ours.parameters()]
    expected += [parameter.grad for parameter in plain.parameters()]
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(
            mine,
            its,
            rtol=1e-4 if dtype == torch.float32 else 1e-9,
            atol=1e-3 if dtype == torch.float32 else 1e-9,
        )


def test_a_rectified_convolution_groups_pixels_and_fuses_the_rectifier_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gradients, on a CPU, with channels innermost; fused in float32 only. Otherwise it is a
    plain convolution.
    """
    channels: list[int] = []
    convolve = functional.conv2d

    def conv2d(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        channels.append(x.shape[1])
        return convolve(x, *rest, **named)

    monkeypatch.setattr(functional, "conv2d", conv2d)
    layer, images = (
        RectifiedConv2d(4, 6, 8, 4),
        torch.randn(2, 4, 20, 28).contiguous(memory_format=torch.channels_last),
    )
    at_once = layer(images)
    assert channels == []
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images).dtype == torch.bfloat16
    with torch.no_grad():
        alone = layer(images)
    outermost = layer(images.contiguous())
    assert channels == [16, 4, 4]
    monkeypatch.setattr(convolutions, "_fused_convolution", None)
    apart = layer(images)
    assert channels == [16, 4, 4, 16]
    for found in (alone, outermost, apart):
        torch.testing.assert_close(found, at_once)


def test_an_lstm_agrees_with_pytorch() -> None:
    ours, reference = ResettingLstm(3, 4), nn.LSTM(3, 4)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(ours.weight_input)
        reference.weight_hh_l0.copy_(ours.weight_hidden)
        reference.bias_ih_l0.copy_(ours.bias)
        reference.bias_hh_l0.zero_()
    x, state = torch.randn(6, 2, 3), {"h": torch.randn(2, 4), "c": torch.randn(2, 4)}
    expected, (h, c) = reference(x, (state["h"][None], state["c"][None]))
    hidden, states = ours(x, state, torch.zeros(6, 2, dtype=torch.bool))
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(states["h"][-1], h[0])
    torch.testing.assert_close(states["c"][-1], c[0])


def test_steps_before_a_start_do_not_influence_steps_after_it() -> None:
    lstm = ResettingLstm(3, 4)
    start = torch.zeros(6, 2, dtype=torch.bool)
    start[3, 0] = True
    x = torch.randn(6, 2, 3, requires_grad=True)
    state = {"h": torch.randn(2, 4), "c": torch.randn(2, 4)}
    hidden, _ = lstm(x, state, start)
    (gradient,) = torch.autograd.grad(hidden[3:].sum(), x)
    assert not gradient[:3, 0].any()
    assert gradient[:3, 1].all()
    fresh, _ = lstm(
        x[3:], {name: torch.zeros(2, 4) for name in state}, torch.zeros(3, 2, dtype=torch.bool)
    )
    torch.testing.assert_close(hidden[3:, 0], fresh[:, 0])


def test_an_observation_vector_is_scaled_and_one_hot() -> None:
    leaves = (
        LeafSpec("byte", (1,), "uint8"),
        LeafSpec("choice", (), "int64", (3,)),
        LeafSpec("x", (), "float32"),
    )
    vector = Vector(leaves)
    observation = {
        "byte": torch.tensor([[51]], dtype=torch.uint8),
        "choice": torch.tensor([2]),
        "x": torch.tensor([7.0]),
    }
    assert vector.size == 5
    assert vector(observation)[0].tolist() == pytest.approx([0.2, 0.0, 0.0, 1.0, 7.0])


@pytest.mark.parametrize("name", ["nature_cnn", "impala_resnet"])
def test_channels_first_and_channels_last_images_are_the_same_image(name: str) -> None:
    first, last = spec(LeafSpec("", (3, 40, 36), "uint8")), spec(LeafSpec("", (40, 36, 3), "uint8"))
    obs = observations(first.observation, 2)[""]
    networks = [make_network(NetworkSettings(name=name), each, seed=5) for each in (first, last)]
    a, _ = networks[0].act({"": obs}, {})
    b, _ = networks[1].act({"": obs.movedim(1, -1)}, {})
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 84, 84), (4, 84, 84)), ((210, 160, 3), (3, 210, 160)), ((7, 7, 3), (3, 7, 7))],
)
def test_the_smaller_outer_axis_is_channels(
    shape: tuple[int, ...], expected: tuple[int, int, int]
) -> None:
    assert expected == image_size(shape)
    assert channels_first(shape) == (shape == expected)


class Counter(Network):
    """Counts steps: its state and its value are the number of observations in this episode."""

    def __init__(self, settings: NetworkSettings, env: EnvironmentSpec) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(env.action.mask_size))

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:
        return {"count": ()}

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        count, counts = state["count"], []
        for t in range(start.shape[0]):
            count = torch.where(start[t], 0.0, count) + 1.0
            counts.append(count)
        value = torch.stack(counts)
        return Output(self.logits.expand(*start.shape, -1), value, {"count": value})


def test_a_plug_in_network_is_found_by_module_and_attribute_and_acts_by_its_forward() -> None:
    settings = NetworkSettings(name="tests.networks.test_networks:Counter")
    network = make_network(settings, spec(VECTOR))
    assert {"count": ()} == state_spec(settings)
    parameters, state = network.act(observations((VECTOR,), 2), {"count": torch.tensor([0.0, 4.0])})
    assert parameters.shape == (2, 3)
    assert state["count"].tolist() == [1.0, 5.0]
    assert [] == check_network(config(settings), spec(VECTOR))


class DerivedCnn(NatureCnn):
    """A plug-in that derives from a built-in network."""


class DerivedResnet(ImpalaResnet):
    """A plug-in that derives from a built-in network."""


@pytest.mark.parametrize(("attribute", "units"), [("DerivedCnn", 512), ("DerivedResnet", 256)])
def test_a_plug_in_that_derives_from_a_built_in_network_has_its_sizes(
    attribute: str, units: int
) -> None:
    settings = NetworkSettings(name=f"{__name__}:{attribute}")
    network: Any = make_network(settings, spec(IMAGE))
    assert units == network.torso.size


class Doubled(Mlp):
    """A plug-in whose policy is not that of its base class."""

    def _policy(self, features: Tensor) -> Tensor:
        return super()._policy(features) * 2.0


def test_a_derived_network_with_another_policy_does_not_act_on_the_arrays_of_its_base() -> None:
    settings = NetworkSettings(name=f"{__name__}:Doubled", hidden=(8,))
    network: Any = make_network(settings, spec(VECTOR))
    assert network.on_arrays() is None
    plain: Any = make_network(NetworkSettings(name="mlp", hidden=(8,)), spec(VECTOR))
    assert plain.on_arrays() is not None


def with_buffer(settings: NetworkSettings, env: EnvironmentSpec) -> nn.Module:
    return nn.BatchNorm1d(3)


def of_doubles(settings: NetworkSettings, env: EnvironmentSpec) -> nn.Module:
    return nn.Linear(2, 2).double()


def no_module(settings: NetworkSettings, env: EnvironmentSpec) -> object:
    return 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [("with_buffer", "is a buffer"), ("of_doubles", "not float32"), ("no_module", "returned int")],
)
def test_a_network_that_could_not_be_published_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_network(NetworkSettings(name=f"tests.networks.test_networks:{name}"), spec(VECTOR))


def test_a_plug_in_network_without_state_spec_has_no_recurrent_state() -> None:
    assert {} == state_spec(NetworkSettings(name="tests.networks.test_networks:no_module", lstm=5))


@pytest.mark.parametrize(
    ("settings", "leaf", "words"),
    [
        (NetworkSettings(name="nature_cnn"), LeafSpec("", (4, 35, 84), "uint8"), "no output"),
        (NetworkSettings(name="nature_cnn"), LeafSpec("camera", (7, 7, 3), "uint8"), "camera"),
        (NetworkSettings(name="nature_cnn"), VECTOR, "needs an image"),
        (NetworkSettings(name="impala_resnet"), LeafSpec("", (84, 84), "uint8"), "needs an image"),
        (NetworkSettings(name="nature_cnn", kwargs={"unit": 3}), IMAGE, "did you mean 'units'"),
        (NetworkSettings(name="mpl"), VECTOR, "is not an installed name"),
        (
            NetworkSettings(name="tests.networks.test_networks:Countre"),
            VECTOR,
            "did you mean 'Counter'",
        ),
        (NetworkSettings(name="tests.networks.test_networks:VECTOR"), VECTOR, "not callable"),
    ],
)
def test_a_network_that_cannot_work_is_refused_with_the_reason(
    settings: NetworkSettings, leaf: LeafSpec, words: str
) -> None:
    (problem,) = check_network(config(settings), spec(leaf))
    assert words in str(problem)


@pytest.mark.parametrize(
    ("settings", "leaf"),
    [
        (NetworkSettings(name="nature_cnn"), LeafSpec("", (36, 36, 1), "uint8")),
        (NetworkSettings(name="impala_resnet"), LeafSpec("", (1, 1, 1), "uint8")),
        (NetworkSettings(name="mlp"), IMAGE),
    ],
)
def test_the_smallest_image_that_is_accepted_works(
    settings: NetworkSettings, leaf: LeafSpec
) -> None:
    env = replace(spec(leaf), num_envs=2)
    assert [] == check_network(config(settings), env)
    parameters, _ = make_network(settings, env).act(observations((leaf,), 2), {})
    assert parameters.isfinite().all()


@pytest.mark.parametrize("make", [make_network, partial(QNetwork, duelling=True)])
def test_action_and_reward_of_the_previous_step_bypass_the_torso_to_the_lstm(
    make: Callable[..., Any],
) -> None:
    """As in R2D2 and IMPALA; without an LSTM they are inputs of the torso."""
    leaves = (VECTOR, *previous_leaves(DISCRETE))
    recurrent = make(NetworkSettings(hidden=(8,), lstm=6), spec(*leaves))
    assert (8, 5) == tuple(recurrent.torso.layers[0].weight.shape)
    assert (4 * 6, 8 + 4 + 1) == tuple(recurrent.lstm.weight_input.shape)
    plain = make(NetworkSettings(hidden=(8,)), spec(*leaves))
    assert (8, 5 + 4 + 1) == tuple(plain.torso.layers[0].weight.shape)


def test_an_mlp_with_an_lstm_shares_its_torso() -> None:
    assert isinstance(network := make_network(NetworkSettings(lstm=4), spec(VECTOR)), Mlp)
    assert network.value_torso is None


def test_checking_a_built_in_network_does_not_import_torch() -> None:
    code = (
        "import sys; from tianflow.config import networks as network_rules; from tianflow.core.payloads import *;"
        "from tianflow.config.model import Config, EnvSettings, NetworkSettings, PPOSettings;"
        "leaf = LeafSpec('', (5,), 'float32'); action = ActionSpec('discrete', (), 'int64', (2,), "
        "(0,));"
        "config = Config(env=EnvSettings(id='x'), algorithm=PPOSettings(), "
        "network=NetworkSettings(lstm=3));"
        "assert not network_rules.check_network(config, EnvironmentSpec('x', (leaf,), action, 1, "
        "'next_step'));"
        "assert network_rules.state_spec(config.network) == {'h': (3,), 'c': (3,)}; assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("lstm", [0, 7])
@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        (NetworkSettings(hidden=(8, 16)), EVERYTHING),
        (NetworkSettings(hidden=()), (VECTOR,)),
        (NetworkSettings(hidden=(8,)), (VECTOR, *previous_leaves(DISCRETE))),
        (NetworkSettings(name="nature_cnn"), (IMAGE, *previous_leaves(BOX))),
        (NetworkSettings(name="nature_cnn"), (IMAGE,)),
        (
            NetworkSettings(name="nature_cnn", kwargs={"units": 9}),
            (LeafSpec("", (84, 61, 3), "uint8"),),
        ),
        (
            NetworkSettings(name="impala_resnet", kwargs={"channels": [4, 6]}),
            (LeafSpec("", (3, 37, 42), "uint8"),),
        ),
        (NetworkSettings(name="impala_resnet"), EVERYTHING),
    ],
)
def test_the_number_of_torso_parameters_is_known_without_creating_it(
    settings: NetworkSettings, leaves: tuple[LeafSpec, ...], lstm: int
) -> None:
    settings = settings.model_copy(update={"lstm": lstm})
    network = QNetwork(settings, spec(*leaves), duelling=False)
    made = [network.torso, *([network.lstm] if network.lstm else [])]
    assert sum(tensor.numel() for part in made for tensor in part.parameters()) == torso_parameters(
        settings, leaves
    )


def test_a_plug_in_network_may_have_any_number_of_parameters() -> None:
    assert 0 == torso_parameters(
        NetworkSettings(name="tests.networks.test_networks:Mlp", hidden=(10**9,)), (VECTOR,)
    )


@pytest.mark.parametrize(
    ("kwargs", "path"),
    [
        ({"units": "many"}, "units"),
        ({"units": 0}, "units"),
        ({"channels": []}, "channels"),
        ({"channels": 16}, "channels"),
    ],
)
def test_invalid_sizes_are_refused(kwargs: dict[str, Any], path: str) -> None:
    (problem,) = check_network(
        config(NetworkSettings(name="impala_resnet", kwargs=kwargs)), spec(IMAGE)
    )
    assert f"network.kwargs.{path}" == problem.path
