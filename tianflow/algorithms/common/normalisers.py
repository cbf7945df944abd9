"""Running normalisation of observations and rewards.

The state is in the flat buffer, so it is published with the weights. Statistics change only in the
learner, after each update: an update normalises observations exactly as the actors with the same
weights did. Only valid transitions count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from tianflow.algorithms.common.graphs import Capture, GraphedStep, captured
from tianflow.algorithms.common.ranks import ALONE, Ranks
from tianflow.algorithms.common.update import Tree, subtree
from tianflow.config.model import NormalisationSettings
from tianflow.config.networks import channels_first, is_image
from tianflow.core.payloads import EnvironmentSpec, LeafSpec
from tianflow.ops.transforms import (
    RunningMoments,
    as_float,
    batch_moments,
    channels_innermost,
    merged_moments,
    normalise,
)

EPSILON = 1e-8
"""Added to a variance before the square root of the divisor."""
IMAGE_EPSILON = (5.0 / 255.0) ** 2
"""The same for a pixel: a pixel that was constant stays near 0 when it changes."""


def moment_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Buffer entries of one set of moments."""
    return {f"{name}/mean": shape, f"{name}/variance": shape, f"{name}/samples": ()}


def moment_views(name: str, extras: Tree) -> RunningMoments:
    """Views of the entries of `moment_shapes`."""
    return RunningMoments(
        extras[f"{name}/mean"], extras[f"{name}/variance"], extras[f"{name}/samples"]
    )


def write(views: RunningMoments, values: RunningMoments) -> None:
    """Overwrite buffer entries."""
    for view, value in zip(views, values, strict=True):
        view.copy_(value)


def whole_batch_moments(samples: Tensor, valid: Tensor, ranks: Ranks) -> RunningMoments:
    """`batch_moments` of the batches of all ranks."""
    own = batch_moments(samples, valid)
    if ranks.size == 1:
        return own
    shape, flat = own.mean.shape, torch.cat([value.reshape(-1) for value in own])
    (parts,) = ranks.gather(flat.unsqueeze(-1))
    moments = [
        RunningMoments(
            part[:-1].chunk(2)[0].view(shape), part[:-1].chunk(2)[1].view(shape), part[-1]
        )
        for part in parts.unbind(-1)
    ]
    return reduce(merged_moments, moments)


VALID, LEAF = "valid", "leaf/"
"""Names of the inputs of a graph."""
BLOCK_BYTES = 512 << 10
"""Bytes of float images processed together: four stacks of four frames of 84 x 84."""


class ObservationNormaliser:
    """``leaves`` with mean 0 and variance 1, clipped to ``clip``; the identity without leaves.

    Images (uint8, pixel by pixel, as in arXiv 1810.12894) become float32 [..., *leaf shape], too,
    with channels innermost in memory for any shape. Before the first update mean is 0 and variance
    1.
    """

    def __init__(self, leaves: Sequence[LeafSpec], *, clip: float) -> None:
        self._names, self._clip = tuple(leaf.name for leaf in leaves), clip
        self._epsilon = {
            leaf.name: IMAGE_EPSILON if leaf.dtype == "uint8" else EPSILON for leaf in leaves
        }
        self._bytes = frozenset(leaf.name for leaf in leaves if leaf.dtype == "uint8")
        self._reordered = frozenset(
            leaf.name for leaf in leaves if is_image(leaf) and channels_first(leaf.shape)
        )
        """Images whose channels are moved innermost."""
        self._graphed: GraphedStep | None = None
        self._views: dict[str, RunningMoments] = {}
        self._scales: dict[str, tuple[Tensor, Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for leaf in leaves:
            self.shapes |= moment_shapes(f"observation/{leaf.name}", leaf.shape)

    @classmethod
    def of(cls, spec: EnvironmentSpec, settings: NormalisationSettings) -> ObservationNormaliser:
        """Normaliser of the leaves of ``spec`` that ``settings`` select: floats, images, or
        both.
        """
        wanted = [
            leaf
            for leaf in spec.observation
            if (settings.observations and leaf.dtype.startswith("float"))
            or (settings.images and is_image(leaf))
        ]
        return cls(wanted, clip=settings.clip)

    def bind(self, extras: Tree) -> None:
        """Store the state in these views, whose names and shapes are ``shapes``."""
        self._views = {name: moment_views(f"observation/{name}", extras) for name in self._names}
        for moments in self._views.values():
            moments.variance.fill_(1.0)
        self.refresh()

    def refresh(self) -> None:
        """Update the scales from the buffer, after it was overwritten."""
        for name, moments in self._views.items():
            unit = 255.0 if name in self._bytes else 1.0
            mean, inverse_std = (
                moments.mean * unit,
                torch.rsqrt(moments.variance + self._epsilon[name]) / unit,
            )
            scales = (
                self._in_order(name, mean.float()),
                self._in_order(name, inverse_std.float()),
            )
            if name not in self._scales:
                self._scales[name] = scales
            for place, value in zip(self._scales[name], scales, strict=True):
                place.copy_(value)  # in place: a captured graph reads this memory

    def __call__(self, observation: Tree) -> Tree:
        """{leaf: [..., *leaf shape]} with ``leaves`` normalised, as float32."""
        if not self._names:
            return observation
        return {
            **observation,
            **{name: self._normalised(name, observation[name]) for name in self._names},
        }

    def batch(self, observation: Tree) -> Tree:
        """`__call__` for a learner's batch. On a CPU, images are processed in blocks that fit into
        caches.
        """
        changed = {}
        for name in self._names:
            x = observation[name]
            in_blocks = name in self._bytes and x.device.type == "cpu"
            changed[name] = self._in_blocks(name, x) if in_blocks else self._normalised(name, x)
        return {**observation, **changed}

    def _normalised(self, name: str, x: Tensor) -> Tensor:
        """Bytes are scaled from 0..255 in place, because new memory costs as much as the
        arithmetic.
        """
        if name not in self._bytes:
            return normalise(as_float(x), *self._scales[name], self._clip)
        return self._scaled_(name, self._in_order(name, x).to(torch.float32))

    def _in_blocks(self, name: str, x: Tensor) -> Tensor:
        x = self._in_order(name, x)
        out = torch.empty_like(x, dtype=torch.float32)
        images = max(1, BLOCK_BYTES // (4 * math.prod(x.shape[-3:])))
        for block, place in zip(
            torch.split(x.flatten(0, -4), images),
            torch.split(out.flatten(0, -4), images),
            strict=True,
        ):
            self._scaled_(name, place.copy_(block))
        return out

    def _scaled_(self, name: str, x: Tensor) -> Tensor:
        mean, inverse_std = self._scales[name]
        return x.sub_(mean).mul_(inverse_std).clamp_(-self._clip, self._clip)

    def _in_order(self, name: str, x: Tensor) -> Tensor:
        return channels_innermost(x) if name in self._reordered else x

    def update(self, observation: Tree, valid: Tensor, ranks: Ranks = ALONE) -> None:
        """Merge the rows where ``valid`` ([T, C]) of {leaf: [T or more, C, ...]} into the
        statistics, with those of other ``ranks``.
        """
        if not self._views:
            return
        rows = {name: observation[name][: valid.shape[0]] for name in self._views}
        if self._graphed is None or ranks.size > 1:
            self._merge(rows, valid, ranks)
        else:
            leaves = {f"{LEAF}{name}": leaf for name, leaf in rows.items()}
            self._graphed({VALID: valid, **leaves})

    def use_graphs(self, *, required: bool = False, capture: Capture = captured) -> None:
        """`update` as a CUDA graph from now on: `GraphedStep`."""
        self._graphed = GraphedStep(self._merge_inputs, required=required, capture=capture)

    def _merge_inputs(self, inputs: Tree) -> Tree:
        self._merge(subtree(inputs, LEAF), inputs[VALID], ALONE)
        return {}

    def _merge(self, rows: Tree, valid: Tensor, ranks: Ranks) -> None:
        for name, moments in self._views.items():
            found = whole_batch_moments(rows[name].flatten(0, 1), valid.flatten(), ranks)
            write(moments, merged_moments(moments, found))
        self.refresh()


class RewardNormaliser:
    """Rewards divided by the standard deviation of the discounted return, clipped to ``clip``.

    It is the identity when disabled. The scale includes the current batch, because actors do not
    use rewards.
    """

    def __init__(self, enabled: bool, *, clip: float) -> None:
        self._enabled, self._clip = enabled, clip
        self._views: RunningMoments | None = None
        self.shapes = moment_shapes("return", ()) if enabled else {}

    def bind(self, extras: Tree) -> None:
        """Store the state in these views."""
        if self._enabled:
            self._views = moment_views("return", extras)
            self._views.variance.fill_(1.0)

    def update(self, arrays: Tree, ranks: Ranks = ALONE) -> None:
        """Merge ``return_so_far`` of valid rows into the statistics, with those of other
        ``ranks``.
        """
        if self._views is not None:
            own, valid = arrays["return_so_far"].flatten(), arrays["valid"].flatten()
            write(self._views, merged_moments(self._views, whole_batch_moments(own, valid, ranks)))

    def __call__(self, reward: Tensor) -> Tensor:
        if self._views is None:
            return reward
        scale = torch.rsqrt(self._views.variance + EPSILON).float()
        return (reward * scale).clamp(-self._clip, self._clip)
