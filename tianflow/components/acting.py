"""row -> actions in it. How a rollout asks its policy: with tensors, or with NumPy arrays where the
policy offers that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tianflow.components.rows import Row
    from tianflow.interfaces import ArrayStep, Policy, Tree


class ActionSelector(Protocol):
    """Chooses the actions of one trajectory after the other, row by row, with noise that was drawn
    beforehand.
    """

    state: Tree
    """Recurrent state after the last row."""

    def begin(self, noise: torch.Tensor, state: Tree) -> None:
        """A trajectory, from recurrent ``state``, with ``noise`` [T, N, K], which is used up."""

    def choose(self, row: Row, t: int) -> None:
        """Write the actions of row ``t``, and the recurrent state before it where rows have one."""

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """What the policy records of the rows chosen, whose actions are ``action`` [T, N, *stored]:
        {name: [T, N]}.
        """


class TensorActionSelector:
    """By `Policy.act`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state: Tree = {}

    def begin(self, noise: torch.Tensor, state: Tree) -> None:
        self._noise, self.state = noise.unbind(0), state
        self._parameters: list[torch.Tensor] = []

    def choose(self, row: Row, t: int) -> None:
        if self.state and t:
            self.state = zeroed(self.state, row.start)
        for name, state in row.state.items():
            state[:] = self.state[name].numpy()
        observation = {name: torch.from_numpy(leaf) for name, leaf in row.observation.items()}
        mask = None if row.mask is None else torch.from_numpy(row.mask)
        chosen = self._policy.act(observation, self.state, self._noise[t], mask)
        row.action[:] = chosen.action.numpy()
        self._parameters.append(chosen.parameters)
        self.state = chosen.state

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        recorded = self._policy.record(
            torch.stack(self._parameters[: len(action)]), torch.from_numpy(action)
        )
        return {name: column.numpy() for name, column in recorded.items()}


class ArrayActionSelector:
    """By the policy's `ArrayStep`, which has no memory. Nothing of PyTorch is touched while a
    trajectory is made.
    """

    def __init__(self, step: ArrayStep, steps: int, num_envs: int) -> None:
        self._choose, self._record = step.__call__, step.record
        self.state: Tree = {}
        self._parameters = np.empty((steps, num_envs, step.size), np.float32)
        self._rows = list(self._parameters)  # views that are made once

    def begin(self, noise: torch.Tensor, state: Tree) -> None:
        self._noise, self.state = list(noise.numpy()), state

    def choose(self, row: Row, t: int) -> None:
        self._choose(row.observation, self._noise[t], self._rows[t], row.action)

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        return self._record(self._parameters[: len(action)], action)


def acting(policy: Policy, steps: int, num_envs: int) -> ActionSelector:
    """The quicker way to ask ``policy`` for actions, in trajectories of up to ``steps`` steps."""
    offered = getattr(policy, "on_arrays", None)
    step: ArrayStep | None = None if offered is None else offered(num_envs)
    return (
        TensorActionSelector(policy) if step is None else ArrayActionSelector(step, steps, num_envs)
    )


def zeroed(state: Tree, start: NDArray[np.bool_]) -> Tree:
    """``state`` with zeros where an episode begins."""
    if not state or not np.count_nonzero(start):
        return state
    begins = torch.from_numpy(start.copy())
    return {
        name: leaf.masked_fill(begins.view(-1, *[1] * (leaf.dim() - 1)), 0.0)
        for name, leaf in state.items()
    }
