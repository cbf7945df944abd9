"""Flat byte buffer for all published tensors of a model, and Adam on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tianflow.core.payloads import TableEntry, WeightsTable, aligned
from tianflow.errors import CheckpointError


class FlatBuffer:
    """One byte buffer with views for a network's parameters and named float64 ``extras``.

    Publishing is one copy of bytes, gradient clipping one norm, and an optimiser step a few
    operations. Every tensor begins on a cache line; the gaps are zero.

    Attributes:
        table: names ("network/...", then the extras), shapes, dtypes and offsets.
        bytes: uint8 [table.nbytes].
        parameters: float32 vector, the trained part.
        gradients: float32 vector of the same length; every parameter's ``grad`` is a view of it.
        extras: {name: float64 view}, initially zero.
        rest: uint8, the part with the extras.
    """

    def __init__(
        self, network: nn.Module, extras: Mapping[str, tuple[int, ...]], device: torch.device
    ) -> None:
        named = {f"network/{name}": parameter for name, parameter in network.named_parameters()}
        entries, offset = [], 0
        shapes = [(name, tuple(parameter.shape), "float32", 4) for name, parameter in named.items()]
        shapes += [(name, shape, "float64", 8) for name, shape in extras.items()]
        for name, shape, dtype, size in shapes:
            entries.append(TableEntry(name, shape, dtype, offset, math.prod(shape) * size))
            offset += aligned(entries[-1].nbytes)
        self.table = WeightsTable(tuple(entries), offset)
        self.bytes = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._host: Tensor | None = None
        self._copies: Any = None
        """A stream for copies to the CPU."""
        self._settled: Any = None
        """A CUDA event: the parameters are final, until `expect_changes`."""
        trained = sum(aligned(entry.nbytes) for entry in entries[: len(named)])
        self.parameters = self.bytes[:trained].view(torch.float32)
        self.gradients = torch.zeros_like(self.parameters)
        self.extras, self.rest = {}, self.bytes[trained:]
        for entry in entries:
            if entry.name in named:
                view = self._view(self.parameters, entry)
                view.copy_(named[entry.name].detach())
                self._bind(named[entry.name], entry, self.gradients)
            else:
                self.extras[entry.name] = (
                    self.bytes[entry.offset : entry.offset + entry.nbytes]
                    .view(torch.float64)
                    .view(entry.shape)
                )

    def load(self, flat: NDArray[np.uint8]) -> None:
        """Overwrite all tensors with ``flat``, uint8 [table.nbytes], on a CPU.

        Raises:
            ValueError: the size differs.
        """
        if flat.nbytes != self.table.nbytes:
            raise ValueError(f"{flat.nbytes} bytes of weights, expected {self.table.nbytes}")
        if self.bytes.device.type == "cpu":
            np.copyto(self.bytes.numpy(), flat)
        else:
            self.bytes.copy_(torch.from_numpy(flat))

    def settle(self) -> None:
        """The parameters of the operations so far are final until `expect_changes`. `host` copies
        them from a GPU while later operations still compute extras.
        """
        if self.bytes.device.type == "cuda":
            self._settled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._settled.record()

    def expect_changes(self) -> None:
        """The parameters are about to change."""
        self._settled = None

    def host(self) -> NDArray[np.uint8]:
        """All tensors on the CPU: a view, or a copy in pinned memory that the next call
        overwrites.
        """
        if self.bytes.device.type == "cpu":
            return self.bytes.numpy()
        if self._host is None:
            pinned = self.bytes.device.type == "cuda"
            self._host = torch.empty(self.bytes.shape, dtype=torch.uint8, pin_memory=pinned)
        if self._settled is None:
            return self._host.copy_(self.bytes).numpy()
        trained = self.parameters.nbytes
        if self._copies is None:
            self._copies = torch.cuda.Stream(self.bytes.device)  # type: ignore[no-untyped-call]
        self._copies.wait_event(self._settled)
        with torch.cuda.stream(self._copies):
            self._host[:trained].copy_(self.bytes[:trained], non_blocking=True)
        self._host[trained:].copy_(self.rest)
        self._copies.synchronize()
        return self._host.numpy()

    def bind_replica(self, network: nn.Module) -> Tensor:
        """Make the parameters of ``network``, a copy of the original, views of this buffer.

        Returns a vector that accumulates the gradients of the copy.
        """
        gradients = torch.zeros_like(self.gradients)
        entries = {entry.name: entry for entry in self.table.entries}
        for name, parameter in network.named_parameters():
            self._bind(parameter, entries[f"network/{name}"], gradients)
        return gradients

    def _bind(self, parameter: nn.Parameter, entry: TableEntry, gradients: Tensor) -> None:
        """Make ``parameter`` and its gradient views of the buffers."""
        parameter.data = self._view(self.parameters, entry)
        parameter.grad = self._view(gradients, entry)

    @staticmethod
    def _view(flat: Tensor, entry: TableEntry) -> Tensor:
        return flat[entry.offset // 4 : (entry.offset + entry.nbytes) // 4].view(entry.shape)


class Adam:
    """Adam (arXiv 1412.6980, algorithm 1) on one flat vector.

    It equals ``torch.optim.Adam`` up to rounding. The first construction of PyTorch's class imports
    its compiler, which adds about a second to every start.

    Attributes:
        mean, square: running first and second moments of the gradient.
        steps: number of steps.
    """

    def __init__(
        self,
        parameters: Tensor,
        gradients: Tensor,
        *,
        epsilon: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self._parameters, self._gradients, self._epsilon, self._betas = (
            parameters,
            gradients,
            epsilon,
            betas,
        )
        self.mean, self.square, self.steps = (
            torch.zeros_like(parameters),
            torch.zeros_like(parameters),
            0,
        )
        self._learning_rate = 0.0
        # A CUDA graph reads these numbers from memory of the GPU.
        on_device = parameters.device.type != "cpu"
        self._rate_there = parameters.new_zeros(()) if on_device else None
        self._steps_there = parameters.new_zeros(()) if on_device else None

    def step(self, learning_rate: float) -> None:
        """Move the parameters against the gradients."""
        self.advance(learning_rate)
        self.apply()

    def advance(self, learning_rate: float) -> None:
        """Begin the next step: `apply` moves by ``learning_rate``."""
        self.steps += 1
        self._learning_rate = learning_rate
        if self._rate_there is not None and self._steps_there is not None:
            self._rate_there.fill_(learning_rate)
            self._steps_there.fill_(self.steps)

    def apply(self) -> None:
        """End the step: one operation, one pass over memory, as ``torch.optim.Adam(fused=True)``.

        On a GPU it may be part of a CUDA graph.
        """
        beta_1, beta_2 = self._betas
        steps, rate = self._steps_there, self._rate_there
        torch._fused_adam_(
            [self._parameters],
            [self._gradients],
            [self.mean],
            [self.square],
            [],
            [torch.tensor(float(self.steps)) if steps is None else steps],
            lr=self._learning_rate if rate is None else rate,
            beta1=beta_1,
            beta2=beta_2,
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
        )


def require_same_arrays(
    state: Mapping[str, NDArray[Any]], needed: Mapping[str, NDArray[Any]]
) -> None:
    """Check that ``state`` has every array of ``needed`` with its dtype and shape.

    Raises:
        CheckpointError: an array is missing or differs.
    """
    for name, array in needed.items():
        found = f"{state[name].dtype}{list(state[name].shape)}" if name in state else "missing"
        if found != f"{array.dtype}{list(array.shape)}":
            raise CheckpointError(f"{name} is {found}, expected {array.dtype}{list(array.shape)}")
