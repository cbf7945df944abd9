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
        self._weights = [(np.ascontiguousarray(weight.T), bias) for weight, bias in self._layers]
        self._scratch = [np.empty((0, len(bias)), np.float32) for _, bias in self._layers]
        self._outputs = len(self._layers[-1][1])
        self.size = self._outputs if log_std is None else 2 * self._outputs
        """P, number of parameters of the action distribution."""
        self.products = sum(weight.size for weight, _ in self._layers)
        """Number of multiplications for one observation."""

    def refresh(self) -> None:
        """Copy overwritten weights, with inputs first, which is faster for BLAS."""
        for (ours, _), (weight, _) in zip(self._weights, self._layers, strict=True):
            np.copyto(ours, weight.T)

    def __call__(self, observation: Mapping[str, Array], out: Array) -> None:
        """Write the parameters of the action distribution of {leaf: [N, size]} to ``out`` float32
        [N, P].
        """
        x = observation[self._leaf]
        if len(x) != len(self._scratch[0]):
            self._scratch = [np.empty((len(x), len(bias)), np.float32) for _, bias in self._layers]
        for (weight, bias), y in zip(self._weights[:-1], self._scratch[:-1], strict=True):
            np.matmul(x, weight, out=y)
            np.add(y, bias, out=y)
            x = self._activate(y)
        weight, bias = self._weights[-1]
        np.add(np.matmul(x, weight, out=self._scratch[-1]), bias, out=out[:, : self._outputs])
        if self._log_std is not None:
            out[:, self._outputs :] = self._log_std


def _tanh(x: Array) -> Array:
    return np.tanh(x, out=x)


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0, out=x)
