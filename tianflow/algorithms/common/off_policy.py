"""What the algorithms that learn from replay share: reading windows, the actor's half, and the
frame of an update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tianflow.algorithms.common.off_policy_models import Module, Optimiser, QModel
from tianflow.algorithms.common.parameter_buffer import require_alike
from tianflow.algorithms.common.precision import ActingNetwork, forward_in, full_precision
from tianflow.algorithms.common.update import Tree, never, subtree
from tianflow.config.model import Config
from tianflow.config.off_policy import OffPolicySettings
from tianflow.interfaces import LearnerBatch, StepResult
from tianflow.ops.returns import NStep, n_step

Settings = TypeVar("Settings", bound=OffPolicySettings)


@dataclass(frozen=True, slots=True)
class Transitions:
    """The first step of each of n windows, summed over the window: what one-step algorithms learn
    from.

    ``observation`` {leaf: [n, ...]} and ``action`` [n, *stored] of the first step; ``step`` what
    follows from it ([n] each); ``after`` {leaf: [n, ...]}, and ``mask_after`` [n, A], where the
    value is taken that is bootstrapped from: after a termination, where it does not matter, the
    first observation again. ``learned`` [n]: the window has a step. ``weight`` [n].
    """

    observation: Tree
    action: Tensor
    step: NStep
    after: Tree
    mask_after: Tensor | None
    learned: Tensor
    weight: Tensor


def read_transitions(
    arrays: Tree, observe: Callable[[Tree], Tree], *, discount: float
) -> Transitions:
    """From windows of L steps (`LearnerBatch`): the n-step transition that begins with each, n = L.
    ``observe`` normalises.
    """
    steps = summed(arrays, discount=discount, n=arrays["reward"].shape[0])
    step = NStep(*(rows[0] for rows in steps))
    # What lies after a termination, or in a window without steps, is of no meaning, and may be
    # anything.
    end = torch.where(step.discount_t > 0.0, step.steps_t, 0)
    column = torch.arange(end.shape[0], device=end.device)
    stored = subtree(arrays, "obs/")
    mask = arrays.get("action_mask")
    return Transitions(
        observation=observe({name: leaf[0] for name, leaf in stored.items()}),
        action=arrays["action"][0],
        step=step,
        after=observe({name: leaf[end, column] for name, leaf in stored.items()}),
        mask_after=None if mask is None else mask[end, column],
        learned=arrays["valid"][0],
        weight=arrays["weight"],
    )


def summed(arrays: Tree, *, discount: float, n: int) -> NStep:
    """n-step rewards and discounts of all rows of windows, [L, n]."""
    terminated, reward = arrays["terminated"], arrays["reward"]
    return n_step(
        r_t=reward,
        discount_t=torch.where(terminated, 0.0, torch.full_like(reward, discount)),
        done_t=terminated | arrays["truncated"],
        valid_t=arrays["valid"],
        n=n,
    )


class OffPolicyPolicy(Generic[Module]):
    """The actor's half, but for `act` and `noise`; `tianflow.interfaces.Policy`."""

    def __init__(self, model: QModel[Module]) -> None:
        self.model = model
        self.model.network.requires_grad_(False)
        self.acting = ActingNetwork(self.model.network)
        """What `act` calls."""
        self.table = self.model.buffer.table
        self.index, self.count = 0, 1

    def load(self, flat: NDArray[np.uint8]) -> None:
        """One copy of bytes. ValueError when they are not of the table's size."""
        self.model.buffer.load(flat)
        self.acting.refresh()
        self.model.observations.refresh()

    def act_in_bfloat16(self) -> None:
        """From now on."""
        self.acting.in_bfloat16()

    def place(self, index: int, count: int) -> None:
        """Actor ``index`` of ``count``; one that is beyond the count, because it is about to
        retire, explores as the last one does.
        """
        self.index, self.count = index, count

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        return {}

    def record(self, parameters: Tensor, action: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Nothing: no priority follows from what an actor without critics knows."""
        return {}


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """What a batch says before anything has moved: gradients are in their buffers, norms and
    statistics are here.

    ``samples`` steps were learned from; ``norms`` has the gradient's for each optimiser;
    ``statistics`` are scalars, ``loss`` among them; ``priorities`` [n].
    """

    samples: Tensor
    norms: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]
    priorities: Tensor


class OffPolicyLearner(ABC, Generic[Module, Settings]):
    """The learner's half; `tianflow.interfaces.Algorithm`. A subclass gives the gradients, and what
    follows a step.

    An update is whole or not at all: all gradients are computed before any parameter moves, and
    when one of them is not finite, or the update is stopped on the way, nothing but the buffers of
    gradients has been written, and those are cleared.
    """

    def __init__(
        self, model: QModel[Module], config: Config, settings: Settings, device: torch.device
    ) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.table = model.buffer.table
        self.forward = forward_in(config.learner.precision, device)
        """How `look` calls every network."""
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.learning_rate = settings.learning_rate
        self.updates = 0
        self.optimisers = {
            "adam": Optimiser(model.buffer.parameters, model.buffer.gradients, settings)
        }
        self.kept: dict[str, Tensor] = {"flat": model.buffer.bytes}
        """Tensors that a checkpoint holds, besides what belongs to optimisers."""

    @abstractmethod
    def look(self, arrays: Tree) -> UpdateParts:
        """Gradients and statistics of a batch, all at the parameters as they are; moves nothing."""

    @abstractmethod
    def moved(self) -> None:
        """The optimisers have made their steps and ``updates`` has counted them: targets follow."""

    @abstractmethod
    def exploration(self, settings: Settings, updates: int) -> Mapping[str, float]:
        """Scalars of exploration in force after ``updates`` updates."""

    def observed(self, arrays: Tree) -> tuple[Tree, Tensor]:
        """What normalisers learn from: observations {leaf: [T, n, ...]} and which rows count [T,
        n]. By default the first rows.
        """
        return {name: leaf[:1] for name, leaf in subtree(arrays, "obs/").items()}, arrays["valid"][
            :1
        ]

    def flat(self) -> NDArray[np.uint8]:
        """All published tensors; on a CPU a view that the next update overwrites."""
        return self.model.buffer.bytes.cpu().numpy()

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:  # noqa: ARG002 - these losses have no such term
        """The learning rate of the next update; schedules are computed by whoever calls."""
        self.learning_rate = learning_rate

    def set_settings(self, settings: Settings, updates: int) -> None:
        """Settings in force for the next update, and schedules as ``updates`` updates in; but the
        learning rate is as `set_live` says.
        """
        self.settings = settings
        self.model.explore(self.exploration(settings, updates))

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = never) -> StepResult:
        """One update.

        ``samples`` 0 and no statistics: it was stopped, or the batch holds nothing to learn from;
        nothing has changed. ``finite`` False: nothing has changed, because a loss or gradient was
        not finite.
        """
        if should_stop():
            return StepResult(0, True, {})
        generator = self.generator.get_state()
        with full_precision(self.device):
            found = self.look(batch.arrays)
        scalars = {
            "samples": found.samples,
            **found.statistics,
            **{f"{name}/norm": norm for name, norm in found.norms.items()},
        }
        numbers = dict(
            zip(
                scalars,
                torch.stack([value.detach().float() for value in scalars.values()]).tolist(),
                strict=True,
            )
        )
        count, finite = int(numbers.pop("samples")), all(map(math.isfinite, numbers.values()))
        norms = [numbers[f"{name}/norm"] for name in found.norms]
        statistics = {name: numbers[name] for name in found.statistics} | {
            "grad_norm": math.hypot(*norms)
        }
        if not finite or count == 0 or should_stop():
            for optimiser in self.optimisers.values():
                optimiser.gradients.zero_()
            self.generator.set_state(generator)
            return StepResult(count, False, statistics) if not finite else StepResult(0, True, {})
        for name, norm in found.norms.items():
            self.optimisers[name].descend(norm, self.learning_rate)
        self.updates += 1
        self.moved()
        self.model.observations.learn(*self.observed(batch.arrays))
        return StepResult(count, True, statistics, found.priorities.cpu().numpy())

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Weights with normalisers, targets, optimisers, generator and number of updates, as
        copies.
        """
        state = {name: tensor.cpu().numpy().copy() for name, tensor in self._tensors().items()}
        state |= {
            f"{name}/steps": np.asarray(optimiser.adam.steps, np.int64)
            for name, optimiser in self.optimisers.items()
        }
        return state | {
            "generator": self.generator.get_state().numpy().copy(),
            "updates": np.asarray(self.updates, np.int64),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on bit for bit from what `state_dict` gave.

        Raises:
            CheckpointError: it is of another model; nothing was changed.
        """
        require_alike(state, self.state_dict())
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.tensor(state[name]))
        for name, optimiser in self.optimisers.items():
            optimiser.adam.steps = int(state[f"{name}/steps"])
        self.generator.set_state(torch.tensor(state["generator"]))
        self.updates = int(state["updates"])
        self.model.observations.refresh()

    def _tensors(self) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = {}
        for name, optimiser in self.optimisers.items():
            moments |= {
                f"{name}/mean": optimiser.adam.mean,
                f"{name}/square": optimiser.adam.square,
            }
        return self.kept | moments
