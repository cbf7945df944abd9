"""`Deployed`: a policy in the form that is exported, from raw observations to the greedy action and
the parameters of its distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD, previous_leaves
from tianflow.core.payloads import LeafSpec
from tianflow.envs.previous_step import STATE
from tianflow.interfaces import NamesParameters
from tianflow.policy import LoadedPolicy

Tree = Mapping[str, Tensor]


class Deployed(nn.Module):
    """Everything between an environment and the network, and back, as one function of a batch of
    any size.

    The weights are not parameters of this module, so that tracing omits what a program does
    not need, such as the value.
    """

    def __init__(self, loaded: LoadedPolicy) -> None:
        super().__init__()
        self._policy, self._spec, self._raw = loaded.policy, loaded.spec, loaded.observations.raw
        self._leaves = loaded.observations.leaves
        self._single = [leaf.name for leaf in self._leaves] == [""]
        action = loaded.spec.action
        self._previous = previous_leaves(action) if loaded.config.previous_step else None
        self._action, self._dtype = action, getattr(torch, action.dtype)
        if action.kind == "box":
            self._low, self._high = (
                torch.tensor(bounds, dtype=self._dtype).view(action.shape)
                for bounds in (action.low, action.high)
            )
        else:
            self._start = torch.tensor(
                action.start[0] if action.kind == "discrete" else action.start, dtype=torch.int64
            )

    def forward(
        self,
        observation: Tensor | Tree,
        state: Tree | None = None,
        action_mask: Tensor | None = None,
        previous_reward: Tensor | None = None,
    ) -> dict[str, Any]:
        """One step of N environments, with the most probable actions.

        Args:
            observation: {leaf: [N, *leaf shape]} with the dtypes of the environment; a tensor if
                there is only one leaf.
            state: {leaf: [N, ...]}; all 0 at the first step of an episode, then the output of the
                last step; None without memory. With ``network.previous_step`` it includes
                ``previous_action``.
            action_mask: bool [N, mask size], for environments with a mask.
            previous_reward: float32 [N], reward of the last step, 0 at the first step of an
                episode; with ``network.previous_step`` only.

        Returns:
            ``action`` [N, *action shape] as the environment takes it, the parameters by name, and
                ``state`` for a policy with memory.
        """
        leaves: Any = {"": observation} if self._single else observation
        stored = {leaf.name: self._stored(leaf, leaves[leaf.name]) for leaf in self._leaves}
        before = dict(state or {})
        if self._previous is not None:
            assert previous_reward is not None
            clips = self._spec.clips_rewards
            stored[PREVIOUS_ACTION] = before.pop(STATE)
            stored[PREVIOUS_REWARD] = previous_reward.clamp(-1, 1) if clips else previous_reward
        step = self._policy.act(stored, before, None, action_mask)
        after = dict(step.state)
        if self._previous is not None:
            after[STATE] = self._seen(step.action)
        named = (
            self._policy.named(step.parameters)
            if isinstance(self._policy, NamesParameters)
            else {"parameters": step.parameters}
        )
        return {
            "action": self._decoded(step.action),
            **named,
            **({"state": after} if after else {}),
        }

    def inputs(self, batch: int, generator: np.random.Generator) -> dict[str, Any]:
        """Possible arguments of `forward`. Floats are standard normal, and every action
        is allowed.
        """
        leaves = {leaf.name: self._sampled(leaf, batch, generator) for leaf in self._leaves}
        found: dict[str, Any] = {"observation": leaves[""] if self._single else leaves}
        state = self._policy.initial_state(batch)
        if state:
            found["state"] = {
                name: torch.from_numpy(generator.normal(size=leaf.shape)).float()
                for name, leaf in state.items()
            }
        if self._previous is not None:
            action, reward = (self._values(leaf, batch, generator) for leaf in self._previous)
            found["state"] = {**found.get("state", {}), STATE: action}
            found["previous_reward"] = reward
        if self._spec.action_mask:
            found["action_mask"] = torch.ones(batch, self._spec.action.mask_size, dtype=torch.bool)
        return found

    def _stored(self, leaf: LeafSpec, x: Tensor) -> Tensor:
        """Encode a leaf as `tianflow.envs.spec.ObservationCodec` stores it."""
        start = self._raw[leaf.name].start
        return (x if start is None else x - torch.from_numpy(start)).to(getattr(torch, leaf.dtype))

    def _decoded(self, stored: Tensor) -> Tensor:
        """Decode an action as `tianflow.envs.spec.ActionCodec` does."""
        if self._action.kind == "box":
            return stored.to(self._dtype).clamp(self._low, self._high)
        return (stored + self._start).to(self._dtype).reshape(-1, *self._action.shape)

    def _seen(self, stored: Tensor) -> Tensor:
        """As `tianflow.envs.previous_step.PreviousStep` stores it."""
        if self._action.kind == "box":
            return stored.clamp(self._low.to(stored.dtype), self._high.to(stored.dtype))
        return stored + 1

    @staticmethod
    def _values(leaf: LeafSpec, batch: int, generator: np.random.Generator) -> Tensor:
        shape = (batch, *leaf.shape)
        values = (
            generator.integers(0, np.asarray(leaf.categories).reshape(leaf.shape), shape)
            if leaf.categories
            else generator.normal(size=shape)
        )
        return torch.from_numpy(np.asarray(values).astype(leaf.dtype))

    def _sampled(self, leaf: LeafSpec, batch: int, generator: np.random.Generator) -> Tensor:
        raw, shape = self._raw[leaf.name], (batch, *leaf.shape)
        if leaf.categories:
            values: NDArray[Any] = generator.integers(
                0, np.asarray(leaf.categories).reshape(leaf.shape), shape
            )
            values += 0 if raw.start is None else raw.start
        elif raw.dtype.startswith("float"):
            values = generator.normal(size=shape)
        else:
            values = generator.integers(0, 256 if raw.dtype == "uint8" else 2, shape)
        return torch.from_numpy(values.astype(raw.dtype))
