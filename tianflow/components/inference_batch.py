"""rows of slots -> PolicyBatch -> answers in the slots.

One call of the policy for the rows of several actors. It remembers nothing between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tianflow.channels.arena import MASK, OBSERVATION, STATE, input_rows
from tianflow.components.acting import record
from tianflow.components.requesting import NEXT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.channels.arena import Arena
    from tianflow.interfaces import ArrayStep, Policy

    Array = NDArray[Any]


class BatchInference(Protocol):
    """Answers requests on one device."""

    def answer(self, rows: Sequence[tuple[int, int]]) -> int:
        """Compute the actions of ``rows`` (slot, row) and write the answers into their slots.
        Returns the number of rows that were added to fill the batch.
        """


class PolicyBatch:
    """`BatchInference` on a CPU.

    Args:
        policy: computes the actions.
        arena: where the slots lie.
    """

    def __init__(self, policy: Policy, arena: Arena) -> None:
        self._policy, self._arena, self._n = policy, arena, arena.layout.num_envs
        self._gathered: dict[str, Array] = {}
        self._steps: dict[int, tuple[ArrayStep, Array, Array] | None] = {}

    def answer(self, rows: Sequence[tuple[int, int]]) -> int:
        """Write the answers."""
        given = [input_rows(self._arena, slot, row) for slot, row in rows]
        inputs = given[0] if len(given) == 1 else self._side_by_side(given)
        # The policy may overwrite its noise; a request that is computed again needs it.
        noise = inputs["noise"].copy() if len(given) == 1 else inputs["noise"]
        on_arrays = self._array_step(len(rows) * self._n)
        if on_arrays is not None:
            step, parameters, action = on_arrays
            step(named(inputs, OBSERVATION), noise, parameters, action)
            recorded = step.record(parameters[None], action[None])
            found = {"action": action, **{name: column[0] for name, column in recorded.items()}}
        else:
            found = self._on_tensors(inputs, noise)
        scatter(self._arena, rows, found, self._n)
        return 0

    def _on_tensors(self, inputs: Mapping[str, Array], noise: Array) -> dict[str, Array]:
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.inference_mode():
            chosen = self._policy.act(
                named(tensors, OBSERVATION),
                named(tensors, STATE),
                torch.from_numpy(noise),
                tensors.get(MASK),
            )
            recorded = record(self._policy, chosen.parameters[None], chosen.action[None], axis=1)
        found = {"action": chosen.action, **{name: leaf[0] for name, leaf in recorded.items()}}
        found |= {f"{NEXT}{name}": leaf for name, leaf in chosen.state.items()}
        return {name: leaf.numpy() for name, leaf in found.items()}

    def _array_step(self, rows: int) -> tuple[ArrayStep, Array, Array] | None:
        """The policy on arrays for so many ``rows``, if that is faster, with its outputs."""
        if rows not in self._steps:
            offered = getattr(self._policy, "on_arrays", None)
            step: ArrayStep | None = None if offered is None else offered(rows)
            self._steps[rows] = None if step is None else self._with_outputs(step, rows)
        return self._steps[rows]

    def _with_outputs(self, step: ArrayStep, rows: int) -> tuple[ArrayStep, Array, Array]:
        action = self._arena.request_views(0)["action"]
        return (
            step,
            np.empty((rows, step.size), np.float32),
            np.empty((rows, *action.shape[1:]), action.dtype),
        )

    def _side_by_side(self, given: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """Copies of the rows, side by side."""
        n, size = self._n, len(given) * self._n
        found = {}
        for name, first in given[0].items():
            buffer = self._gathered.get(name)
            if buffer is None or len(buffer) < size:
                buffer = self._gathered[name] = np.empty((size, *first.shape[1:]), first.dtype)
            for place, row in enumerate(given):
                buffer[place * n : (place + 1) * n] = row[name]
            found[name] = buffer[:size]
        return found


def scatter(
    arena: Arena, rows: Sequence[tuple[int, int]], found: Mapping[str, Array], n: int
) -> None:
    """Write ``found``, [len(rows) * n or more, ...] each, into the requests of their slots."""
    for place, (slot, _) in enumerate(rows):
        request, part = arena.request_views(slot), slice(place * n, (place + 1) * n)
        for name, array in found.items():
            np.copyto(request[name], array[part])


def named(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
