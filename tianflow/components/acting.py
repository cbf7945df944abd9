"""row -> ActionSelector -> actions in it.

A selector calls the policy with tensors, or with NumPy arrays if the policy supports them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tianflow.components.rows import Row
    from tianflow.interfaces import ArrayStep, Policy, SlotView, Tree

WHOLE = 64
"""Values that fill vector instructions, on every machine."""


class ActionSelector(Protocol):
    """Selects the actions of a trajectory, row by row, with noise drawn in advance."""

    state: Tree
    """Recurrent state after the last row."""

    def begin(self, slot: SlotView, noise: torch.Tensor, state: Tree) -> None:
        """Begin a trajectory in ``slot`` in ``state``. ``noise`` [T, N, K] is overwritten."""

    def choose(self, row: Row, t: int) -> None:
        """Write the actions of row ``t``, and the recurrent state before it if rows store it."""

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """Fields that the policy records for the actions ``action`` [T, N, *stored]: {name: [T,
        N]}.
        """


class TensorActionSelector:
    """Selects actions with `Policy.act`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state: Tree = {}

    def begin(self, slot: SlotView, noise: torch.Tensor, state: Tree) -> None:  # noqa: ARG002 - the policy is here
        self._noise, self.state = noise.unbind(0), state
        self._parameters: list[torch.Tensor] = []

    def choose(self, row: Row, t: int) -> None:
        if self.state and t:
            self.state = zeroed(self.state, row.start)
        for name, state in row.state.items():
            state[:] = self.state[name].numpy()
        observation = {name: torch.from_numpy(leaf) for name, leaf in row.observation.items()}
        mask = None if row.mask is None else torch.from_numpy(row.mask)
        with torch.inference_mode():
            chosen = self._policy.act(observation, self.state, self._noise[t], mask)
        row.action[:] = chosen.action.numpy()
        self._parameters.append(chosen.parameters)
        self.state = chosen.state

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        with torch.inference_mode():
            recorded = record(
                self._policy, torch.stack(self._parameters[: len(action)]), torch.from_numpy(action)
            )
        return {name: column.numpy() for name, column in recorded.items()}


class ArrayActionSelector:
    """Selects actions with the policy's `ArrayStep`, which has no recurrent state.

    It calls no PyTorch function during a trajectory.
    """

    def __init__(self, step: ArrayStep, steps: int, num_envs: int) -> None:
        self._choose, self._record = step.__call__, step.record
        self.state: Tree = {}
        self._parameters = np.empty((steps, num_envs, step.size), np.float32)
        self._rows = list(self._parameters)  # views, created once

    def begin(self, slot: SlotView, noise: torch.Tensor, state: Tree) -> None:  # noqa: ARG002 - as above
        self._noise, self.state = list(noise.numpy()), state

    def choose(self, row: Row, t: int) -> None:
        self._choose(row.observation, self._noise[t], self._rows[t], row.action)

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        return self._record(self._parameters[: len(action)], action)


def action_selector(policy: Policy, steps: int, num_envs: int) -> ActionSelector:
    """The faster selector for ``policy``, for trajectories of up to ``steps`` steps."""
    offered = getattr(policy, "on_arrays", None)
    step: ArrayStep | None = None if offered is None else offered(num_envs)
    return (
        TensorActionSelector(policy) if step is None else ArrayActionSelector(step, steps, num_envs)
    )


def record(
    policy: Policy, parameters: torch.Tensor, action: torch.Tensor, *, axis: int = 0
) -> Tree:
    """`Policy.record` of ``parameters`` [T, N, P] and ``action`` [T, N, *stored], on a CPU: {name:
    [T, N]}.

    The last values that do not fill a vector instruction are rounded in another way. Padding along
    ``axis`` gives every value the same result, in a trajectory and in a batch of any size.
    """
    rows, columns = action.shape[:2]
    missing = -(rows, columns)[axis] % (WHOLE // math.gcd(WHOLE, (columns, rows)[axis]))
    if missing:
        added = (rows, missing) if axis else (missing, columns)
        parameters, action = (
            torch.cat((given, given.new_zeros(*added, *given.shape[2:])), axis)
            for given in (parameters, action)
        )
    return {
        name: found[:rows, :columns] for name, found in policy.record(parameters, action).items()
    }


def zeroed(state: Tree, start: NDArray[np.bool_]) -> Tree:
    """``state``, set to zero where an episode begins."""
    if not state or not np.count_nonzero(start):
        return state
    begins = torch.from_numpy(start.copy())
    return {
        name: leaf.masked_fill(begins.view(-1, *[1] * (leaf.dim() - 1)), 0.0)
        for name, leaf in state.items()
    }
