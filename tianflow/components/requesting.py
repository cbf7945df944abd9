"""row -> RequestSelector -> a request to an inference server -> actions in the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tianflow.components.rows import Row
    from tianflow.core.payloads import Version
    from tianflow.interfaces import Bell, SlotView, Tree

NEXT = "next_state/"
"""Prefix of the recurrent state after a row."""


class RequestSelector:
    """Requests the actions of a trajectory, row by row, from the inference server of its slot.

    Observation and mask already lie in the slot. Noise and recurrent state are written beside them,
    so that a server needs nothing that it would have to remember.

    Args:
        place: place of this host among the doorbells; the server rings it.
        bells: doorbells of the inference servers.
    """

    def __init__(self, *, place: int, bells: Sequence[Bell]) -> None:
        self._place, self._bells = place, bells
        self._taken = True

    def begin(self, slot: SlotView, noise: torch.Tensor, state: Tree) -> None:
        """Begin a trajectory in ``slot`` in ``state``, with ``noise`` [T, N, K]."""
        self._slot, self._fields = slot, slot.request
        self._bell = self._bells[slot.number % len(self._bells)]
        room, drawn = self._fields["noise"], noise.numpy()
        if room.shape != drawn.shape:
            raise ValueError(
                f"the policy drew noise {drawn.shape}, but noise_size of the algorithm's settings "
                f"has room for {room.shape}"
            )
        np.copyto(room, drawn)
        self._states = [
            (name, self._fields[f"state/{name}"], self._fields[f"{NEXT}{name}"]) for name in state
        ]
        for name, before, _ in self._states:
            np.copyto(before, state[name].numpy())
        answers = (name for name in self._fields if "/" not in name)
        self._recorded = [
            (self._fields[name], slot.arrays[name])
            for name in answers
            if name not in ("noise", "action")
        ]
        self._taken = True

    def ask(self, row: Row, t: int) -> None:
        """Request the actions of row ``t``."""
        for name, before, after in self._states:
            if t:
                np.copyto(before, after)
                before[row.start] = 0.0
            if name in row.state:
                np.copyto(row.state[name], before)
        self._taken = False
        self._slot.ask(t, self._place)
        self._bell.ring()

    def answered(self) -> bool:
        """True once the answer is there."""
        return self._slot.answered()

    def take(self, row: Row, t: int) -> Version:
        """Write the answer into row ``t``. The version that computed it."""
        np.copyto(row.action, self._fields["action"])
        for answer, column in self._recorded:
            column[t] = answer
        self._taken = True
        return self._slot.answer_version()

    @property
    def state(self) -> Tree:
        """Recurrent state after the last row that was taken."""
        # A request without an answer may be answered at any moment: its own state is this state.
        return {
            name: torch.from_numpy((after if self._taken else before).copy())
            for name, before, after in self._states
        }

    def record(self, action: NDArray[Any]) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002 - as `ActionSelector.record`
        """Nothing: the server has recorded it."""
        return {}
