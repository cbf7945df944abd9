"""rows of slots -> DeviceBatch -> answers in the slots, computed on a GPU.

Rows are copied straight from their slots, whose memory is pinned, to a fixed input on the device. A
batch is padded to the next of a few sizes, and each size is one captured CUDA graph: a server then
starts one operation a batch instead of some hundred. It waits for the device without computing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tianflow.channels.arena import MASK, OBSERVATION, STATE, input_rows
from tianflow.components.inference_batch import named, scatter
from tianflow.components.pinned_slots import PinnedSlots
from tianflow.components.requesting import NEXT
from tianflow.core.layout import ASKED_AT
from tianflow.logs import logger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena
    from tianflow.interfaces import Policy

    Array = NDArray[Any]
    Tensors = dict[str, torch.Tensor]

WARM_UP = 3
"""Calls before a graph is captured: libraries choose their algorithms in the first ones."""

log = logger("inference")


def _padded(rows: int) -> int:
    """The next size of a batch: a power of two."""
    return 1 << (rows - 1).bit_length()


class DeviceBatch:
    """`tianflow.components.inference_batch.BatchInference` on a GPU.

    Args:
        policy: computes the actions on ``device``.
        arena: where the slots lie.
        device: a CUDA device.
        precisely: context of the policy's operations.
    """

    def __init__(
        self,
        policy: Policy,
        arena: Arena,
        device: torch.device,
        precisely: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._policy, self._arena, self._device = policy, arena, device
        self._n, self._precisely = arena.layout.num_envs, precisely
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._pinned = PinnedSlots(arena, "inference")
        self._inputs: Tensors = {}
        self._sizes: dict[int, Callable[[], Tensors]] = {}
        self._results: Tensors = {}
        self._capturing = True

    def prepare(self, rows: int) -> None:
        """Make ready for batches of up to ``rows``, so that the first ones do not wait for that."""
        size = _padded(rows)  # first, because more room makes all graphs useless
        while size:
            self._prepared(size)
            size //= 2

    def answer(self, rows: Sequence[tuple[int, int]]) -> int:
        """Write the answers. Returns the number of padding rows."""
        self._pinned.follow()
        size = _padded(len(rows))
        compute, n = self._prepared(size), self._n
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for place, (slot, row) in enumerate(rows):
                part = slice(place * n, (place + 1) * n)
                for name, array in input_rows(self._arena, slot, row).items():
                    self._inputs[name][part].copy_(torch.from_numpy(array), non_blocking=True)
            found = compute()
            count = len(rows) * n
            for name, tensor in found.items():
                self._results[name][:count].copy_(tensor[:count], non_blocking=True)
            self._done.record(self._stream)
        self._done.synchronize()
        scatter(self._arena, rows, {name: self._results[name].numpy() for name in found}, n)
        return size - len(rows)

    def _prepared(self, size: int) -> Callable[[], Tensors]:
        """The computation of a batch of ``size`` rows, from the fixed input."""
        if size not in self._sizes:
            if not self._inputs or len(self._inputs["noise"]) < size * self._n:
                self._grow(size * self._n)
            self._sizes[size] = self._captured(size * self._n)
        return self._sizes[size]

    def _grow(self, count: int) -> None:
        """Make room for ``count`` observations. Graphs read the memory that they were captured
        with.
        """
        self._sizes.clear()
        rows = input_rows(self._arena, 0, 0)
        self._inputs = {
            name: torch.zeros(
                (count, *array.shape[1:]),
                dtype=torch.from_numpy(array).dtype,
                device=self._device,
            )
            for name, array in rows.items()
        }
        if MASK in self._inputs:  # a mask without allowed actions has no distribution
            self._inputs[MASK].fill_(True)
        self._results = {
            name: torch.zeros(
                (count, *array.shape[1:]), dtype=torch.from_numpy(array).dtype, pin_memory=True
            )
            for name, array in self._arena.request_views(0).items()
            if name not in ("noise", ASKED_AT) and not name.startswith(STATE)
        }

    def _captured(self, count: int) -> Callable[[], Tensors]:
        """The policy's call for the first ``count`` observations of the input, as a graph if that
        is possible.
        """

        def compute() -> Tensors:
            with self._precisely():
                return self._call({name: leaf[:count] for name, leaf in self._inputs.items()})

        if not self._capturing:
            return compute
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for _ in range(WARM_UP):
                compute()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self._stream):
                    found = compute()
            except RuntimeError as error:
                self._capturing = False
                log.warning("the policy cannot be captured as a CUDA graph", error=str(error))
                return compute

        def replay() -> Tensors:
            graph.replay()
            return found

        return replay

    def _call(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        chosen = self._policy.act(
            named(inputs, OBSERVATION),
            named(inputs, STATE),
            inputs["noise"].clone(),  # the policy may overwrite it
            inputs.get(MASK),
        )
        recorded = self._policy.record(chosen.parameters[None], chosen.action[None])
        return {
            "action": chosen.action,
            **{name: leaf[0] for name, leaf in recorded.items()},
            **{f"{NEXT}{name}": leaf for name, leaf in chosen.state.items()},
        }
