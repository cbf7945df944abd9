"""Forward pass of a small network on NumPy arrays, for actors.

A call to PyTorch costs more than the arithmetic of such a small layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


class ArrayMlp:
    """Fully connected layers over one float32 vector, with an activation after each but the last.

    The input of each layer has one more column, which is 1, and the bias is one more row of its
    weights. Adding the bias would take half as long as the product.

    Args:
        leaf: name of the observation leaf [N, size].
        layers: weight [out, in] and bias [out] of each layer; `refresh` reads their memory.
        activation: "tanh" or "relu".
        log_std: appended to the output of the last layer; None: nothing.
    """

    def __init__(
        self,
        *,
        leaf: str,
        layers: Sequence[tuple[Tensor, Tensor]],
        activation: str,
        log_std: Tensor | None,
    ) -> None:
        self._leaf, self._activate = leaf, _tanh if activation == "tanh" else _relu
        self._layers = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in layers]
        self._log_std = None if log_std is None else log_std.detach().numpy()
        self._weights = [
            np.empty((weight.shape[1] + 1, len(weight)), np.float32) for weight, _ in self._layers
        ]
        self.refresh()
        self._allocate(0)
        self._outputs = len(self._layers[-1][1])
        self.size = self._outputs if log_std is None else 2 * self._outputs
        """P, number of parameters of the action distribution."""
        self.products = sum(weight.size for weight, _ in self._layers)
        """Number of multiplications for one observation."""

    def refresh(self) -> None:
        """Copy overwritten weights, with inputs first, which is faster for BLAS."""
        for ours, (weight, bias) in zip(self._weights, self._layers, strict=True):
            ours[:-1], ours[-1] = weight.T, bias

    def __call__(self, observation: Mapping[str, Array], out: Array) -> None:
        """Write the parameters of the action distribution of {leaf: [N, size]} to ``out`` float32
        [N, P].
        """
        x = observation[self._leaf]
        if len(x) != len(self._first):
            self._allocate(len(x))
        self._first[...] = x
        for given, weights, values, found, ones in self._hidden:
            np.matmul(given, weights, out=values)
            self._activate(found)  # all of it: a view without the ones takes longer
            ones.fill(1.0)
        means = out if self._log_std is None else out[:, : self._outputs]
        np.matmul(self._inputs[-1], self._weights[-1], out=means)
        if self._log_std is not None:
            out[:, self._outputs :] = self._log_std

    def _allocate(self, count: int) -> None:
        """Memory for ``count`` observations."""
        self._inputs = [np.ones((count, len(weights)), np.float32) for weights in self._weights]
        self._first = self._inputs[0][:, :-1]
        self._hidden = [
            (given, weights, found[:, :-1], found, found[:, -1])
            for given, weights, found in zip(
                self._inputs[:-1], self._weights[:-1], self._inputs[1:], strict=True
            )
        ]


_ZERO = np.float32(0.0)  # NumPy converts a number of Python at every call


def _tanh(x: Array) -> Array:
    return np.tanh(x, out=x)


def _relu(x: Array) -> Array:
    return np.maximum(x, _ZERO, out=x)
