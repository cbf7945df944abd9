"""Parts of the built-in networks: observation encoder, torsos, and an LSTM that resets per
episode.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tianflow.config.networks import NATURE, channels_first, image_size, is_image
from tianflow.core.payloads import LeafSpec
from tianflow.networks.base import Tree
from tianflow.networks.convolutions import RectifiedConv2d
from tianflow.ops.transforms import as_float, channels_innermost, one_hot

SQRT_2 = math.sqrt(2.0)


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights of ``gain`` and zero bias (arXiv 1312.6120)."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Vector(nn.Module):
    """Leaves as one float32 vector: categorical ones one-hot, uint8 scaled to 0..1, all flattened.

    {leaf: [M, *leaf]} -> [M, size]. It has no parameters.
    """

    def __init__(self, leaves: Sequence[LeafSpec]) -> None:
        super().__init__()
        self._leaves = tuple(leaves)
        self.plain = (
            leaves[0].name
            if len(leaves) == 1 and leaves[0].dtype == "float32" and len(leaves[0].shape) == 1
            else None
        )
        """Name of the only leaf, if that is a float32 vector."""
        self.size = sum(
            sum(leaf.categories) if leaf.categories else math.prod(leaf.shape) for leaf in leaves
        )

    def forward(self, observation: Tree) -> Tensor:
        if self.plain is not None:
            return observation[self.plain]
        parts = [self._encode(leaf, observation[leaf.name]) for leaf in self._leaves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def beside(self, features: Tensor, observation: Tree) -> Tensor:
        """``features`` [M, F] and the leaves: [M, F + size]; without leaves, ``features``."""
        return torch.cat([features, self(observation)], -1) if self.size else features

    @staticmethod
    def _encode(leaf: LeafSpec, x: Tensor) -> Tensor:
        return (
            one_hot(x, leaf.categories) if leaf.categories else as_float(x).reshape(x.shape[0], -1)
        )


class MlpTorso(nn.Module):
    """Fully connected layers over all leaves as one vector. {leaf: [M, *leaf]} -> [M, size]."""

    def __init__(self, leaves: Sequence[LeafSpec], hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        self.vector = Vector(leaves)
        sizes = (self.vector.size, *hidden)
        layers = [linear(a, b, SQRT_2) for a, b in pairwise(sizes)]
        self.layers = nn.ModuleList(layers)
        self.size = sizes[-1]
        self._weights = tuple((layer.weight, layer.bias) for layer in layers)
        # In place: the gradient needs the result only, and new memory costs more than the
        # arithmetic.
        self._activation = torch.tanh_ if activation == "tanh" else torch.relu_

    def forward(self, observation: Tree) -> Tensor:
        x: Tensor = self.vector(observation)
        for weight, bias in self._weights:
            x = self._activation(functional.linear(x, weight, bias))
        return x


class ImageTorso(nn.Module):
    """Convolutions per image leaf, then one layer of ``units`` over their outputs and all other
    leaves.

    {leaf: [M, *leaf]} -> [M, units]. ``trunks`` are the convolutions of each image leaf, [M, C, H,
    W] -> [M, F]. An image is uint8, which is scaled to 0..1, or float32, if normalised.
    """

    def __init__(self, leaves: Sequence[LeafSpec], trunks: Sequence[nn.Module], units: int) -> None:
        super().__init__()
        self._images = tuple(
            (leaf.name, channels_first(leaf.shape)) for leaf in leaves if is_image(leaf)
        )
        self.trunks = nn.ModuleList(trunks)
        self.vector = Vector([leaf for leaf in leaves if not is_image(leaf)])
        sizes = [
            _output_size(trunk, image_size(leaf.shape))
            for trunk, leaf in zip(trunks, filter(is_image, leaves), strict=True)
        ]
        self.head = linear(sum(sizes) + self.vector.size, units, SQRT_2)
        self.size = units

    def forward(self, observation: Tree) -> Tensor:
        parts = []
        for (name, first), trunk in zip(self._images, self.trunks, strict=True):
            x = observation[name] if first else observation[name].movedim(-1, 1)
            parts.append(trunk(as_float(channels_innermost(x))))
        if self.vector.size:
            parts.append(self.vector(observation))
        return torch.relu_(self._output(parts[0] if len(parts) == 1 else torch.cat(parts, -1)))

    def _output(self, x: Tensor) -> Tensor:
        """The last layer. Without gradients, weights come first: a third faster for few rows."""
        if torch.is_grad_enabled():
            return cast("Tensor", self.head(x))
        return torch.addmm(self.head.bias.unsqueeze(1), self.head.weight, x.t()).t()


def _output_size(trunk: nn.Module, shape: tuple[int, int, int]) -> int:
    with torch.no_grad():
        return int(trunk(torch.zeros(1, *shape)).shape[1])


def nature_trunk(channels: int) -> nn.Module:
    """The convolutions of "Human-level control through deep reinforcement learning" (Nature 518,
    2015).
    """
    layers: dict[str, nn.Module] = {}
    for k, (size, kernel, stride) in enumerate(NATURE):
        convolution = RectifiedConv2d(channels, size, kernel, stride)
        nn.init.orthogonal_(convolution.weight, SQRT_2)
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers[str(2 * k)] = convolution  # the published names number the activations, too
        channels = size
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten()))


class Residual(nn.Module):
    """Two convolutions with a skip connection (IMPALA, arXiv 1802.01561, figure 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu_(self.first(torch.relu(x))))
        return x + out


def impala_trunk(channels: int, sizes: Sequence[int]) -> nn.Module:
    """The residual convolutions of IMPALA's large network (arXiv 1802.01561, figure 3)."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [
            nn.Conv2d(channels, size, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            Residual(size),
            Residual(size),
        ]
        channels = size
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten())


class ResettingLstm(nn.Module):
    """An LSTM (Hochreiter and Schmidhuber, 1997) whose state is reset where an episode starts.

    Gates are in the order input, forget, cell, output. The initial forget bias is 1, so that the
    state persists.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.weight_input = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hidden = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.zeros(4 * units))
        nn.init.orthogonal_(self.weight_input)
        nn.init.orthogonal_(self.weight_hidden)
        with torch.no_grad():
            self.bias[units : 2 * units] = 1.0

    def forward(self, x: Tensor, state: Tree, start: Tensor) -> tuple[Tensor, Tree]:
        """[T, B, inputs], {"h", "c": [B, units]}, bool [T, B] -> hidden [T, B, units], state after
        each step.
        """
        gates = functional.linear(x, self.weight_input, self.bias)
        keep = (~start).to(x.dtype).unsqueeze(-1)
        h, c = state["h"], state["c"]
        hs, cs = [], []
        for t in range(x.shape[0]):
            h, c = self._cell(gates[t], h * keep[t], c * keep[t])
            hs.append(h)
            cs.append(c)
        hidden = torch.stack(hs)
        return hidden, {"h": hidden, "c": torch.stack(cs)}

    def step(self, x: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """[N, inputs] and the state before -> hidden [N, units] and the state after."""
        h, c = self._cell(
            functional.linear(x, self.weight_input, self.bias), state["h"], state["c"]
        )
        return h, {"h": h, "c": c}

    def _cell(self, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = torch.addmm(gates, h, self.weight_hidden.t()).chunk(4, -1)
        c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
        return torch.sigmoid(o) * torch.tanh(c), c
