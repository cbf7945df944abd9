"""Convolution with activation, optimised for training on a CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_fused_convolution = (
    getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    else None
)
"""Fused convolution with activation of PyTorch's compiler; None in builds without it."""


class RectifiedConv2d(nn.Conv2d):
    """A convolution without padding, followed by a rectifier.

    Two optimisations apply with gradients, on a CPU, in float32, with channels innermost in memory:

    - ``g`` adjacent pixels of a row are combined, where g divides kernel and stride. g pixels of C
      channels are one pixel of g C channels, without a copy, and kernel and stride become g times
      narrower. The sums of products are the same. More channels make them faster, especially
      gradients.
    - The rectifier is applied before sums are written, if PyTorch was built with that.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__(inputs, outputs, kernel, stride)
        self._multiple = math.gcd(kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[M, C, H, W] -> [M, outputs, H', W']."""
        if not (
            torch.is_grad_enabled()
            and x.device.type == "cpu"
            and x.is_contiguous(memory_format=torch.channels_last)
        ):
            return torch.relu_(super().forward(x))
        group = math.gcd(self._multiple, x.shape[-1])
        weight, stride = self.weight, (self.stride[0], self.stride[1] // group)
        if group > 1:
            x, weight = _group_pixels(x, group), _group_weights(weight, group)
        if (
            _fused_convolution is not None
            and x.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        ):
            found: Tensor = _Rectified.apply(x, weight, self.bias, stride)  # type: ignore[no-untyped-call]
            return found
        return torch.relu_(functional.conv2d(x, weight, self.bias, stride))


def _group_pixels(x: Tensor, group: int) -> Tensor:
    """[M, C, H, W] -> [M, g C, H, W/g], a view; the channels of the first pixel of a group are
    first.
    """
    count, channels, height, width = x.shape
    return x.movedim(1, -1).reshape(count, height, width // group, group * channels).movedim(-1, 1)


def _group_weights(weight: Tensor, group: int) -> Tensor:
    """The equivalent weights [O, C, K, K] -> [O, g C, K, K/g] for grouped pixels."""
    outputs, channels, rows, columns = weight.shape
    grouped = weight.view(outputs, channels, rows, columns // group, group).permute(0, 4, 1, 2, 3)
    return grouped.reshape(outputs, group * channels, rows, columns // group)


class _Rectified(torch.autograd.Function):
    """``relu(conv2d(x, weight, bias, stride))``, rectified before sums are written."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: tuple[int, int]
    ) -> Tensor:
        assert _fused_convolution is not None
        y: Tensor = _fused_convolution(x, weight, bias, (0, 0), stride, (1, 1), 1, "relu", (), "")
        ctx.save_for_backward(x, weight, y)
        ctx.stride = stride
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        # Copied first: reading two tensors in two memory orders costs more than the copy.
        gradient = torch.ops.aten.threshold_backward(
            gradient.contiguous(memory_format=torch.channels_last), y, 0.0
        )
        wanted, outputs = ctx.needs_input_grad[:3], (weight.shape[0],)
        found = torch.ops.aten.convolution_backward(
            gradient, x, weight, outputs, ctx.stride, (0, 0), (1, 1), False, (0, 0), 1, wanted
        )
        return (*found, None)
