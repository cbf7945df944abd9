"""Facts about networks without PyTorch: recurrent state, image leaves, sizes, and checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tianflow import plugins
from tianflow.config.model import Config, NetworkSettings
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError, Problem

BUILT_IN = {
    "mlp": "tianflow.networks:Mlp",
    "nature_cnn": "tianflow.networks:NatureCnn",
    "impala_resnet": "tianflow.networks:ImpalaResnet",
}
OF_BUILT_IN = ("hidden", "activation", "lstm", "share_torso")
"""Settings that only the built-in networks are sure to use."""
KEYWORDS = {
    "mlp": ("log_std",),
    "nature_cnn": ("log_std", "units"),
    "impala_resnet": ("log_std", "units", "channels"),
}
"""``network.kwargs`` of the built-in networks."""
UNITS = {"nature_cnn": 512, "impala_resnet": 256}
"""Default number of units of the layer after the convolutions."""
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride of the convolutions (Nature 518, 2015)."""
RESNET = (16, 32, 32)
"""Channels of IMPALA's large network (arXiv 1802.01561, figure 3)."""
SMALLEST_IMAGE = {"nature_cnn": 36, "impala_resnet": 1}
"""Smallest image side, in pixels, with which all convolutions have an output.

For nature_cnn: 36 -> 8 -> 3 -> 1 by strides 4, 2, 1.
"""
PREVIOUS_ACTION, PREVIOUS_REWARD = "previous action", "previous reward"
"""Names of the leaves that ``network.previous_step`` adds to the observation.

The spaces make a clash with other leaves unlikely.
"""


def previous_leaves(action: ActionSpec) -> tuple[LeafSpec, LeafSpec]:
    """Leaves for action and reward of the previous step. Both are 0 where an episode begins.

    Discrete actions are stored plus 1, so that no previous action is a category of its own. Actions
    of a Box are stored clipped to it.
    """
    dtype, categories = action.stored_dtype, tuple(count + 1 for count in action.categories)
    return (
        LeafSpec(PREVIOUS_ACTION, action.stored_shape, dtype, categories),
        LeafSpec(PREVIOUS_REWARD, (), "float32"),
    )


def torso_leaves(
    settings: NetworkSettings, leaves: Sequence[LeafSpec]
) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
    """Inputs of the torso, and further inputs of the LSTM: those of the previous step, if any.

    As in R2D2 (Kapturowski et al., ICLR 2019, section 2.3) and IMPALA (arXiv 1802.01561, figure 3).
    """
    further = tuple(
        leaf for leaf in leaves if settings.lstm and leaf.name in (PREVIOUS_ACTION, PREVIOUS_REWARD)
    )
    return tuple(leaf for leaf in leaves if leaf not in further), further


def load_network(settings: NetworkSettings) -> object:
    """The class or function named by ``settings.name``. Imports PyTorch.

    Raises:
        ConfigError: the name is unknown, or its import failed.
    """
    return plugins.load(
        "tianflow.networks", BUILT_IN.get(settings.name, settings.name), path="network.name"
    )


def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:
    """{leaf: shape for one environment} of the float32 recurrent state; empty without one.

    A plug-in network declares it with a static method ``state_spec(settings)``.

    Raises:
        ConfigError: the name is unknown, or its import failed.
    """
    if settings.name in BUILT_IN:
        return {"h": (settings.lstm,), "c": (settings.lstm,)} if settings.lstm else {}
    declared = getattr(load_network(settings), "state_spec", None)
    if declared is None:
        return {}
    shapes: Mapping[str, tuple[int, ...]] = declared(settings)
    return {name: tuple(shape) for name, shape in shapes.items()}


def is_image(leaf: LeafSpec) -> bool:
    """True for uint8 leaves with three axes. A frame stack counts as channels."""
    return leaf.dtype == "uint8" and len(leaf.shape) == 3


def channels_first(shape: tuple[int, ...]) -> bool:
    """True for [channels, height, width], False for [height, width, channels].

    The smaller outer axis is the channels.
    """
    return shape[0] <= shape[-1]


def image_size(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of an image leaf of ``shape``."""
    return (
        (shape[0], shape[1], shape[2]) if channels_first(shape) else (shape[2], shape[0], shape[1])
    )


def check_network(config: Config, spec: EnvironmentSpec) -> list[Problem]:
    """Reasons why the network cannot be built for these observations; empty if it can.

    Built-in networks are checked without PyTorch.
    """
    name = config.network.name
    if name not in BUILT_IN:
        return _check_own(config.network)
    problems = _check_sizes(config.network.kwargs)
    problems += [
        Problem(
            f"network.kwargs.{key}",
            value,
            f"is not a keyword of {name}",
            ", ".join(KEYWORDS[name]),
            plugins.nearest(key, KEYWORDS[name]),
        )
        for key, value in config.network.kwargs.items()
        if key not in KEYWORDS[name]
    ]
    return problems if name == "mlp" else problems + _check_images(name, spec)


def units(settings: NetworkSettings, kind: str = "") -> int:
    """Number of units of the layer after the convolutions.

    ``kind``: the built-in network; default: ``settings.name``. A plug-in that derives from a
    built-in network has another name.
    """
    return int(settings.kwargs.get("units", UNITS[kind or settings.name]))


def resnet_channels(settings: NetworkSettings) -> tuple[int, ...]:
    """Channels of each stage of ``impala_resnet``."""
    return tuple(int(size) for size in settings.kwargs.get("channels", RESNET))


def torso_parameters(settings: NetworkSettings, leaves: Sequence[LeafSpec]) -> int:
    """Number of parameters of one torso over ``leaves``, with its LSTM: a minimum for every
    algorithm.

    The result is 0 for a plug-in network.
    """
    if settings.name not in BUILT_IN:
        return 0
    leaves, further = torso_leaves(settings, leaves)
    images = [leaf for leaf in leaves if is_image(leaf) and settings.name != "mlp"]
    vector = sum(_width(leaf) for leaf in leaves if leaf not in images)
    trunks = [_trunk(settings, image_size(leaf.shape)) for leaf in images]
    inputs = vector + sum(size for _, size in trunks)
    widths = settings.hidden if settings.name == "mlp" else (units(settings),)
    sizes = (inputs, *widths)
    dense = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))
    lstm_inputs = sizes[-1] + sum(map(_width, further))
    return (
        sum(count for count, _ in trunks)
        + dense
        + 4 * settings.lstm * (lstm_inputs + settings.lstm + 1 if settings.lstm else 0)
    )


def _width(leaf: LeafSpec) -> int:
    """Number of inputs of a leaf, one-hot encoded if it is categorical."""
    return sum(leaf.categories) if leaf.categories else math.prod(leaf.shape)


def _trunk(settings: NetworkSettings, image: tuple[int, int, int]) -> tuple[int, int]:
    """Number of parameters of the convolutions over an image, and number of their outputs.

    ``image`` is (channels, rows, columns).
    """
    channels, *sides = image
    count = 0
    if settings.name == "nature_cnn":
        for size, kernel, stride in NATURE:
            count += (channels * kernel**2 + 1) * size
            channels, sides = size, [(side - kernel) // stride + 1 for side in sides]
    else:
        for size in resnet_channels(settings):
            count += (channels * 9 + 1) * size + 4 * (size * 9 + 1) * size
            channels, sides = size, [(side + 1) // 2 for side in sides]
    return count, channels * math.prod(sides)


def _check_sizes(kwargs: Mapping[str, object]) -> list[Problem]:
    problems = []
    if not _is_size(kwargs.get("units", 1)):
        problems.append(
            Problem(
                "network.kwargs.units",
                kwargs["units"],
                "is not a number of units",
                "a whole number > 0",
            )
        )
    channels = kwargs.get("channels", RESNET)
    if not (isinstance(channels, list | tuple) and channels and all(map(_is_size, channels))):
        problems.append(
            Problem(
                "network.kwargs.channels",
                channels,
                "is not a list of channels",
                "a list of whole numbers > 0",
            )
        )
    return problems


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_own(settings: NetworkSettings) -> list[Problem]:
    try:
        found = load_network(settings)
    except ConfigError as error:
        return list(error.problems)
    if callable(found):
        return []
    accepted = "a class or function (config.network, EnvironmentSpec) -> torch.nn.Module"
    return [Problem("network.name", settings.name, "is not callable", accepted)]


def _check_images(name: str, spec: EnvironmentSpec) -> list[Problem]:
    images = [leaf for leaf in spec.observation if is_image(leaf)]
    if not images:
        seen = ", ".join(
            f"{leaf.name or 'observation'} {leaf.dtype}{list(leaf.shape)}"
            for leaf in spec.observation
        )
        return [
            Problem(
                "network.name",
                name,
                f"needs an image, and the observations of {spec.id} are {seen}",
                "mlp, or uint8 images of three axes",
            )
        ]
    least = SMALLEST_IMAGE[name]
    return [
        Problem(
            "network.name",
            name,
            f"image {leaf.name or 'observation'} of {spec.id} is {list(leaf.shape)}: its "
            "convolutions would have no output",
            f"images of at least {least} x {least} pixels, impala_resnet (any size), or mlp",
        )
        for leaf in images
        if min(image_size(leaf.shape)[1:]) < least
    ]
