"""CUDA graphs: a step of fixed shapes, whose hundreds of operations one call starts on the GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tianflow.config.model import BUILT_IN_ALGORITHMS, Config
from tianflow.config.networks import BUILT_IN
from tianflow.errors import ConfigError, Problem
from tianflow.logs import logger

Tensors: TypeAlias = Mapping[str, Tensor]
Step: TypeAlias = Callable[[Tensors], Mapping[str, Any]]
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


def wants_graphs(config: Config) -> bool:
    """True if an update on a GPU is to be a CUDA graph.

    A plug-in may compute with numbers that change, which a graph would not notice, so it has to be
    asked for.
    """
    shipped = config.algorithm.name in BUILT_IN_ALGORITHMS and config.network.name in BUILT_IN
    wanted = config.learner.graphs == "on" or (config.learner.graphs == "auto" and shipped)
    return wanted and config.algorithm.fixed_shapes


@dataclass(slots=True)
class _Variant:
    """The calls of a step that do the same operations, and their graph once it is made."""

    calls: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    results: Tensors = field(default_factory=dict)
    replay: Callable[[], None] | None = None


class GraphedStep:
    """A function of tensors that is called as a CUDA graph, from its third call on.

    A graph repeats the operations of one call on the memory of that call. The function must
    therefore read its inputs and tensors that outlive the call, which it may also change. Other
    numbers are those of the call that was captured. It must not wait for the GPU. Inputs are copied
    to memory of the graph, and the next call overwrites the results.

    Inputs of other shapes, and another key, make another graph. A step that cannot be captured is
    called without a graph.

    Args:
        step: {name: tensor} -> {name: tensor}, all on one GPU. With another result than tensors, it
            has no graph.
        required: True: it is an error if the step cannot be captured.
        graphs: number of graphs that stay in memory: those of the last calls.
        capture: see `Capture`.
    """

    def __init__(
        self,
        step: Step,
        *,
        required: bool = False,
        graphs: int = 1,
        capture: Capture = captured,
    ) -> None:
        self._step, self._required, self._graphs, self._capture = step, required, graphs, capture
        self._possible = True
        self._variants: OrderedDict[Hashable, _Variant] = OrderedDict()

    def __call__(self, inputs: Tensors, key: Hashable = None) -> dict[str, Any]:
        """The results of the step on ``inputs``.

        ``key`` stands for everything else that it computes with and that may change.

        Raises:
            ConfigError: the step cannot be captured, and that is required.
        """
        variant = self._variant_of(inputs, key)
        if variant.replay is None:
            found = dict(self._step(inputs))
            others = [name for name, value in found.items() if not isinstance(value, Tensor)]
            if others and self._possible:
                self._give_up(f"its result {others[0]} is not a tensor")
            return found
        for name, tensor in inputs.items():
            variant.inputs[name].copy_(tensor)
        variant.replay()
        return dict(variant.results)

    def _variant_of(self, inputs: Tensors, key: Hashable) -> _Variant:
        """The variant that computes the step on ``inputs``, with a graph if it is due."""
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        variant = self._variants.setdefault((shapes, key), _Variant())
        self._variants.move_to_end((shapes, key))
        if len(self._variants) > self._graphs:
            self._variants.popitem(last=False)
        variant.calls += 1
        if variant.replay is None and self._possible and variant.calls > WARM_UP:
            self._make_graph(variant, inputs)
        return variant

    def _make_graph(self, variant: _Variant, inputs: Tensors) -> None:
        variant.inputs = {name: torch.empty_like(tensor) for name, tensor in inputs.items()}
        try:
            variant.replay, variant.results = self._capture(lambda: self._step(variant.inputs))
        except RuntimeError as error:
            variant.inputs = {}
            self._give_up(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _give_up(self, why: str) -> None:
        """Make no graphs from now on."""
        self._possible = False
        if self._required:
            reason = f"the update cannot be captured as a CUDA graph: {why}"
            raise ConfigError([Problem("learner.graphs", "on", reason, "auto, or off")])
        log.warning("the update is computed without a CUDA graph", error=why)
