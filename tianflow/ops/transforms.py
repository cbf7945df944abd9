"""Transforms of observations and rewards: scaling, image layout, one-hot, running moments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ROWS_AT_ONCE = 8
"""Rows of uint8 that are summed at once.

They fit into 16 bits, and their frame stacks into a core's caches.
"""
ROWS_IN_32_BITS = 1 << 16
"""Number of uint8 squares whose sum is below 2**32."""


class RunningMoments(NamedTuple):
    """Mean, biased variance and number of samples, in float64.

    Mean and variance have the shape of one sample; samples is [].
    """

    mean: Tensor
    variance: Tensor
    samples: Tensor


def batch_moments(x: Tensor, valid: Tensor | None = None) -> RunningMoments:
    """Moments over the first axis of ``x`` [M, *shape], in float64; uint8 is scaled to 0..1.

    ``valid`` (bool [M]): the samples that count; None: all. The call never waits for a GPU. Without
    samples: mean 0, variance 1, samples 0.
    """
    if valid is not None and x.device.type != "cpu":
        return _masked_moments(x, valid)
    if valid is not None and not bool(valid.all()):
        x = x[valid]
    if x.shape[0] == 0:
        shape = x.shape[1:]
        return RunningMoments(
            x.new_zeros(shape, dtype=torch.float64),
            x.new_ones(shape, dtype=torch.float64),
            _count(x),
        )
    if x.dtype == torch.uint8:
        total, squares = _exact_sums(x) if x.device.type == "cpu" else _integer_sums(x)
        mean, square = total / x.shape[0], squares / x.shape[0]
        return RunningMoments(
            mean / 255.0, (square - mean.square()).clamp(min=0.0) / 255.0**2, _count(x)
        )
    x = x.double()
    mean = x.mean(0)
    return RunningMoments(mean, (x - mean).square().mean(0), _count(x))


def _masked_moments(x: Tensor, valid: Tensor) -> RunningMoments:
    """`batch_moments` without a selection, whose size a GPU would have to report."""
    rows, samples = valid.view(-1, *[1] * (x.dim() - 1)), valid.sum().double()
    count = samples.clamp(min=1.0)
    if x.dtype == torch.uint8:
        total, squares = _integer_sums(torch.where(rows, x, 0))
        mean = total / count / 255.0
        variance = (squares / count - (total / count).square()).clamp(min=0.0) / 255.0**2
    else:
        x = x.double()
        mean = torch.where(rows, x, 0.0).sum(0) / count
        variance = torch.where(rows, (x - mean).square(), 0.0).sum(0) / count
    return RunningMoments(mean, torch.where(samples == 0.0, 1.0, variance), samples)


def _exact_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of uint8 and of their squares over the first axis, float64, without rounding.

    NumPy adds integers of 16 and 32 bits faster than PyTorch adds floats, which need more memory.
    """
    rows = x.reshape(x.shape[0], -1).numpy()
    total, squares = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for first in range(0, len(rows), ROWS_IN_32_BITS):
        part = rows[first : first + ROWS_IN_32_BITS]
        total_32, squares_32 = (
            np.zeros(rows.shape[1], np.uint32),
            np.zeros(rows.shape[1], np.uint32),
        )
        for k in range(0, len(part), ROWS_AT_ONCE):
            values = part[k : k + ROWS_AT_ONCE].astype(np.uint16)
            total_32 += np.add.reduce(values, axis=0, dtype=np.uint16)
            values *= values  # at most 255**2, which is below 2**16
            squares_32 += np.add.reduce(values, axis=0, dtype=np.uint32)
        total += total_32
        squares += squares_32
    return torch.from_numpy(total).view(x.shape[1:]), torch.from_numpy(squares).view(x.shape[1:])


def _integer_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """`_exact_sums` in a few operations over all of ``x``, which avoids launch overhead on a
    GPU.
    """
    return x.sum(0, dtype=torch.int64).double(), x.to(torch.int32).square_().sum(
        0, dtype=torch.int64
    ).double()


def merged_moments(a: RunningMoments, b: RunningMoments) -> RunningMoments:
    """Moments of both sets of samples together (Chan, Golub and LeVeque, 1979).

    The result does not depend on the order of merges.
    """
    samples = a.samples + b.samples
    share = b.samples / samples.clamp(min=1.0)
    delta = b.mean - a.mean
    variance = (
        a.variance * (1.0 - share) + b.variance * share + delta.square() * share * (1.0 - share)
    )
    empty = samples == 0
    return RunningMoments(
        torch.where(empty, a.mean, a.mean + delta * share),
        torch.where(empty, a.variance, variance),
        samples,
    )


def normalise(x: Tensor, mean: Tensor, inverse_std: Tensor, clip: float) -> Tensor:
    """``(x - mean) * inverse_std``, clipped to plus and minus ``clip``."""
    return (x - mean).mul_(inverse_std).clamp_(-clip, clip)


SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed types of the same width as unsigned ones, for which PyTorch lacks operations."""


def indexed(x: Tensor, *index: Tensor | slice) -> Tensor:
    """``x[index]`` for any stored dtype; a GPU cannot index unsigned integers of 16 to 64 bits."""
    signed = SIGNED.get(x.dtype)
    return x[index] if signed is None else x.view(signed)[index].view(x.dtype)


def filled(x: Tensor, where: Tensor) -> Tensor:
    """``x`` with 0 in the rows ``where``, for any stored dtype; ``where`` has leading axes of
    ``x``.
    """
    signed = SIGNED.get(x.dtype)
    y = x if signed is None else x.view(signed)
    y = y.masked_fill(where.view(*where.shape, *[1] * (x.dim() - where.dim())), 0)
    return y if signed is None else y.view(x.dtype)


def as_float(x: Tensor) -> Tensor:
    """Any stored dtype as float32; uint8 is scaled from 0..255 to 0..1."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32).mul_(1.0 / 255.0)
    return x.to(torch.float32)


def channels_innermost(x: Tensor) -> Tensor:
    """Images [..., C, H, W] in the memory order of [..., H, W, C]; not copied if they have it.

    Convolutions of the built-in sizes are about a third faster on a CPU in this order. It is
    applied to bytes, because they are faster to move than floats.
    """
    inner = x.movedim(-3, -1)
    if not inner.is_contiguous():
        # torch.stack copies in two thirds of the time of contiguous().
        inner = torch.stack(x.unbind(-3), -1) if x.device.type == "cpu" else inner.contiguous()
    return inner.movedim(-1, -3)


def one_hot(x: Tensor, categories: tuple[int, ...]) -> Tensor:
    """One-hot of zero-based categorical values, concatenated.

    [M, *leaf] with prod(leaf) = len(categories) -> float32 [M, sum].
    """
    columns = x.long().reshape(x.shape[0], len(categories))
    parts = [functional.one_hot(columns[:, k], size) for k, size in enumerate(categories)]
    return torch.cat(parts, -1).to(torch.float32)


def _count(x: Tensor) -> Tensor:
    return torch.tensor(float(x.shape[0]), dtype=torch.float64, device=x.device)
