"""row -> actions in it. How a rollout asks its policy: with tensors, or with NumPy arrays where the policy offers that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tianflow.components.rows import Row
    from tianflow.interfaces import ArrayStep, Policy, Tree


class Acting(Protocol):
    """Chooses the actions of one trajectory, row after row, with noise that was drawn beforehand."""

    state: Tree
    """Recurrent state after the last row."""

    def choose(self, row: Row, t: int) -> None:
        """Write the actions of row ``t``, and the recurrent state before it where rows have one."""

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        """What the policy records of the rows chosen, whose actions are ``action`` [T, N, *stored]: {name: [T, N]}."""


class TensorActing:
    """By `Policy.act`."""

    def __init__(self, policy: Policy, noise: torch.Tensor, state: Tree) -> None:
        self._policy, self._noise = policy, noise.unbind(0)
        self.state = state
        self._parameters: list[torch.Tensor] = []

    def choose(self, row: Row, t: int) -> None:
        if self.state and t:
            self.state = zeroed(self.state, row.start)
        for name, state in row.state.items():
            state.copy_(self.state[name])
        chosen = self._policy.act(row.observation, self.state, self._noise[t], row.mask)
        row.action_tensor.copy_(chosen.action)
        self._parameters.append(chosen.parameters)
        self.state = chosen.state

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        recorded = self._policy.record(torch.stack(self._parameters[: len(action)]), torch.from_numpy(action))
        return {name: column.numpy() for name, column in recorded.items()}


class ArrayActing:
    """By the policy's `ArrayStep`, which has no memory. Nothing of PyTorch is touched while a trajectory is made."""

    def __init__(self, step: ArrayStep, noise: torch.Tensor) -> None:
        self._step = step
        self.state: Tree = {}
        self._parameters = np.empty((*noise.shape[:2], step.size), np.float32)
        self._rows = list(zip(noise.numpy(), self._parameters, strict=True))

    def choose(self, row: Row, t: int) -> None:
        noise, parameters = self._rows[t]
        self._step(row.seen, noise, parameters, row.action)

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:
        return self._step.record(self._parameters[: len(action)], action)


def acting(policy: Policy, noise: torch.Tensor, state: Tree) -> Acting:
    """The quicker way to ask ``policy`` for actions. ``noise``: [T, N, K], which is its own."""
    offered = getattr(policy, "on_arrays", None)
    step: ArrayStep | None = None if offered is None else offered(noise.shape[1])
    return TensorActing(policy, noise, state) if step is None else ArrayActing(step, noise)


def zeroed(state: Tree, start: NDArray[np.bool_]) -> Tree:
    """``state`` with zeros where an episode begins."""
    if not state or not np.count_nonzero(start):
        return state
    begins = torch.from_numpy(start.copy())
    return {name: leaf.masked_fill(begins.view(-1, *[1] * (leaf.dim() - 1)), 0.0) for name, leaf in state.items()}
