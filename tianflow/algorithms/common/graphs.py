"""CUDA graphs: a step of fixed shapes, whose hundreds of operations one call starts on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger

Tensors: TypeAlias = Mapping[str, Tensor]
Capture: TypeAlias = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]
"""Captures a call without computing it. Returns what computes it, and the memory of its results."""

WARM_UP = 2
"""Calls without a graph: libraries allocate and choose their algorithms in the first ones."""

log = logger("learner")


def captured(step: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """`Capture` on the current GPU.

    Other threads, which copy batches meanwhile, may call what is forbidden during a capture.

    Raises:
        RuntimeError: the step waits for the GPU, or an operation of it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    return graph.replay, results


class GraphedStep:
    """A function of tensors that is called as a CUDA graph, from its third call on.

    A graph repeats the operations of one call on the memory of that call. The function must
    therefore read its inputs and tensors that outlive the call, which it may also change. Other
    numbers are those of the call that was captured. It must not wait for the GPU. Inputs are copied
    to memory of the graph, and the next call overwrites the results.

    Inputs of other shapes make another graph in place of the one before. A step that cannot be
    captured is called without a graph.

    Args:
        step: {name: tensor} -> {name: tensor}, all on one GPU.
        required: True: it is an error if the step cannot be captured.
        capture: see `Capture`.
    """

    def __init__(
        self,
        step: Callable[[Tensors], Tensors],
        *,
        required: bool = False,
        capture: Capture = captured,
    ) -> None:
        self._step, self._required, self._capture = step, required, capture
        self._possible, self._calls = True, 0
        self._shapes: object = None
        self._inputs: dict[str, Tensor] = {}
        self._results: Tensors = {}
        self._replay: Callable[[], None] | None = None

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """The results of the step on ``inputs``.

        Raises:
            ConfigError: the step cannot be captured, and that is required.
        """
        replay = self._graph_for(inputs)
        if replay is None:
            return dict(self._step(inputs))
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        replay()
        return dict(self._results)

    def _graph_for(self, inputs: Tensors) -> Callable[[], None] | None:
        """What computes the step on `_inputs`, made if it is due; None without a graph."""
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
        if shapes != self._shapes:
            self._shapes, self._calls, self._replay = shapes, 0, None
            self._inputs, self._results = {}, {}
        self._calls += 1
        if self._replay is None and self._possible and self._calls > WARM_UP:
            self._make_graph(inputs)
        return self._replay

    def _make_graph(self, inputs: Tensors) -> None:
        self._inputs = {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
        try:
            self._replay, self._results = self._capture(lambda: self._step(self._inputs))
        except RuntimeError as error:
            self._possible, self._inputs = False, {}
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if self._required:
                reason = f"the update cannot be captured as a CUDA graph: {why}"
                found = Problem("learner.graphs", "on", reason, "auto, or off")
                raise ConfigError([found]) from error
            log.warning("the update is computed without a CUDA graph", error=why)
