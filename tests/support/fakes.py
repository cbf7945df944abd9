"""Stand-ins for slots and policies: small, deterministic, and honest about what they were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tianflow.core.layout import make_layout, views
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, Grant, Version
from tianflow.interfaces import ActorStep

Tree = Mapping[str, torch.Tensor]


class FakeSlot:
    """A `SlotView` on memory of its own, filled with garbage that no field may keep. ``cut_at``:
    the progress at which a cut is wanted.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        steps: int,
        state: Mapping[str, tuple[int, ...]] | None = None,
        *,
        returns: bool = False,
    ) -> None:
        layout = make_layout(spec, steps=steps, state_spec=state or {}, return_accumulator=returns)
        self.arrays: Mapping[str, NDArray[Any]] = views(layout, np.zeros(layout.nbytes, np.uint8))
        self.fill_with_garbage()
        self.steps: list[int] = []
        self.cut_at: int | None = None

    def fill_with_garbage(self) -> None:
        """Make anything that is left unwritten stand out."""
        for name, array in self.arrays.items():
            array[...] = (
                np.nan
                if array.dtype.kind == "f"
                else True
                if array.dtype.kind == "b"
                else 0
                if name == "action"
                else 99
            )

    def progress(self, step: int) -> None:
        self.steps.append(step)

    def cut_requested(self) -> bool:
        return self.cut_at is not None and self.steps[-1] >= self.cut_at


class FakePolicy:
    """Uniform over discrete actions, a standard Gaussian over continuous ones; the masked ones
    never. Remembers what it was shown.
    """

    def __init__(self, action: ActionSpec) -> None:
        self.action = action
        self.loaded: list[int] = []
        self.shown: list[dict[str, NDArray[Any]]] = []

    def load(self, flat: NDArray[np.uint8]) -> None:
        self.loaded.append(int(flat[0]))

    def initial_state(self, num_envs: int) -> Tree:
        return {}

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> torch.Tensor:
        size = (steps, num_envs, sum(self.action.categories) or int(np.prod(self.action.shape)))
        draw = (
            generator.standard_normal(size)
            if self.action.kind == "box"
            else generator.gumbel(size=size)
        )
        return torch.from_numpy(draw.astype(np.float32))

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> ActorStep:
        self.shown.append({name: leaf.numpy().copy() for name, leaf in observation.items()})
        first = next(iter(observation.values()))
        noise = (
            torch.zeros(len(first), sum(self.action.categories) or int(np.prod(self.action.shape)))
            if noise is None
            else noise
        )
        if self.action.kind == "box":
            return ActorStep(
                (3.0 * noise).reshape(len(first), *self.action.shape),
                torch.zeros_like(noise),
                state,
            )
        logits = (
            torch.zeros_like(noise)
            if mask is None
            else torch.zeros_like(noise).masked_fill(~mask, -1e9)
        )
        groups = (logits + noise).split(list(self.action.categories), dim=1)
        chosen = torch.stack([group.argmax(1) for group in groups], 1)
        return ActorStep(chosen[:, 0] if self.action.kind == "discrete" else chosen, logits, state)

    def place(self, index: int, count: int) -> None: ...

    def record(self, parameters: torch.Tensor, action: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"log_prob": self.log_prob(parameters, action)}

    def log_prob(self, parameters: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        if self.action.kind == "box":
            return torch.distributions.Normal(0.0, 3.0).log_prob(action).flatten(2).sum(-1)
        parts = parameters.split(list(self.action.categories), dim=-1)
        actions = action.unsqueeze(-1) if self.action.kind == "discrete" else action
        picked = [
            part.log_softmax(-1).gather(-1, actions[..., k : k + 1]) for k, part in enumerate(parts)
        ]
        return torch.cat(picked, -1).sum(-1)


class CountingPolicy(FakePolicy):
    """Its recurrent state counts the observations since the state was last zero; ``counts`` has the
    state of every call.
    """

    def __init__(self, action: ActionSpec) -> None:
        super().__init__(action)
        self.counts: list[NDArray[Any]] = []

    def initial_state(self, num_envs: int) -> Tree:
        return {"count": torch.zeros(num_envs, 1)}

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> ActorStep:
        self.counts.append(state["count"][:, 0].numpy().copy())
        step = super().act(observation, state, noise, mask)
        return ActorStep(step.action, step.parameters, {"count": state["count"] + 1})


class VersionPolicy(FakePolicy):
    """Its action is the version of its weights, so that the data prove their own age. ``version``
    is what `load` last took.
    """

    def __init__(self, action: ActionSpec) -> None:
        super().__init__(action)
        self.version = 0

    def load(self, flat: NDArray[np.uint8]) -> None:
        self.version = int(flat[:8].view(np.int64)[0])

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> torch.Tensor:
        return torch.zeros(steps, num_envs, 1)

    def act(
        self,
        observation: Tree,
        state: Tree,
        noise: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> ActorStep:
        num_envs = len(next(iter(observation.values())))
        dtype = torch.float32 if self.action.kind == "box" else torch.int64
        return ActorStep(
            torch.full((num_envs, *self.action.stored_shape), self.version, dtype=dtype),
            torch.zeros(num_envs, 1),
            state,
        )

    def log_prob(self, parameters: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.zeros(parameters.shape[:-1])


def granted(epoch: int = 0) -> Grant:
    """A grant of ticket 0 in slot 0."""
    return Grant(0, 0, Version(1, 0), epoch)


def versions(*numbers: int) -> Callable[[], Version]:
    """A ``load_weights`` that answers one number after the other, and then the last one for
    ever.
    """
    left = list(numbers)
    return lambda: Version(1, left.pop(0) if len(left) > 1 else left[0])
