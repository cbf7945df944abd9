"""action and reward of a step -> `PreviousStep` -> two leaves of the next observation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tianflow.config.networks import PREVIOUS_ACTION, PREVIOUS_REWARD, previous_leaves
from tianflow.core.payloads import ActionSpec, LeafSpec
from tianflow.envs.spec import Array, Arrays

STATE = "previous_action"
"""Name of the previous action in the state of a policy that is used outside of a run."""


class PreviousStep:
    """Writes the leaves of `tianflow.config.networks.previous_leaves` into observations."""

    def __init__(self, action: ActionSpec) -> None:
        self.leaves = previous_leaves(action)
        self._is_box = action.kind == "box"
        self._low, self._high = (
            np.array(bounds, np.float32).reshape(action.shape) if self._is_box else np.zeros(())
            for bounds in (action.low, action.high)
        )

    def require_new_names(self, leaves: Sequence[LeafSpec]) -> None:
        """Raise ValueError if one of the environment's own ``leaves`` has the same name."""
        taken = {leaf.name for leaf in leaves} & {leaf.name for leaf in self.leaves}
        if taken:
            raise ValueError(
                f"has an observation {min(taken)!r}, which is the name of an input that "
                "network.previous_step adds; rename it, or set network.previous_step = false"
            )

    def write(self, stored: Array, reward: Array, observation: Arrays) -> None:
        """Write actions ``stored`` [N, *stored] and their rewards [N]."""
        self.encode(stored, observation[PREVIOUS_ACTION])
        observation[PREVIOUS_REWARD][...] = reward

    def encode(self, stored: Array, destination: Array) -> None:
        """Write actions ``stored`` [N, *stored] as their leaf has them."""
        if self._is_box:
            np.clip(stored, self._low, self._high, out=destination)
        else:
            np.add(stored, 1, out=destination)

    @staticmethod
    def clear(observation: Arrays, where: Array | None = None) -> None:
        """Write zeros, in the environments ``where`` [N] bool (None: all) an episode begins."""
        for name in (PREVIOUS_ACTION, PREVIOUS_REWARD):
            observation[name][... if where is None else where] = 0
