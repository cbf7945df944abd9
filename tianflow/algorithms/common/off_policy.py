"""Policy and learner that replay algorithms share, and reading of windows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tianflow.algorithms.common.graphs import (
    Capture,
    GraphedStep,
    Tensors,
    captured,
    wants_graphs,
)
from tianflow.algorithms.common.off_policy_models import Module, Optimiser, QModel
from tianflow.algorithms.common.parameter_buffer import require_same_arrays
from tianflow.algorithms.common.precision import ActingNetwork, arithmetic, forward_in
from tianflow.algorithms.common.ranks import ALONE, Ranks, seed_of_rank
from tianflow.algorithms.common.scalars import as_numbers, is_scalar
from tianflow.algorithms.common.update import Tree, never_stop, subtree
from tianflow.config.model import Config
from tianflow.config.off_policy import OffPolicySettings
from tianflow.core.payloads import WeightsTable
from tianflow.interfaces import LearnerBatch, StepResult
from tianflow.ops.returns import NStep, n_step

Settings = TypeVar("Settings", bound=OffPolicySettings)


@dataclass(frozen=True, slots=True)
class Transitions:
    """First steps of n windows, summed over the window, for one-step algorithms.

    ``observation`` {leaf: [n, ...]} and ``action`` [n, *stored] are those of the first step;
    ``step`` is its n-step transition ([n] each). ``after`` {leaf: [n, ...]} and ``mask_after`` [n,
    A] are those of the bootstrap; after a termination, where it has no influence, the last
    observation. ``learned`` [n]: the window has a step. ``weight`` [n].
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
    """n-step transitions at the beginning of windows of L steps (`LearnerBatch`), n = L.

    ``observe`` normalises observations. The last row of a window is the observation after its last
    step, also in a shorter window: `tianflow.replay.columns.Columns.walk`. Other rows between the
    two are not read and may be absent (`AlgorithmSettings.ends_only`).
    """
    steps = summed(arrays, discount=discount, n=arrays["reward"].shape[0])
    step = NStep(*(rows[0] for rows in steps))
    stored = subtree(arrays, "obs/")
    mask = arrays.get("action_mask")
    return Transitions(
        observation=observe({name: leaf[0] for name, leaf in stored.items()}),
        action=arrays["action"][0],
        step=step,
        after=observe({name: leaf[-1] for name, leaf in stored.items()}),
        mask_after=None if mask is None else mask[-1],
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
    """Policy of an actor without `act` and `noise`; `tianflow.interfaces.Policy`."""

    def __init__(self, model: QModel[Module]) -> None:
        self.model = model
        self.model.network.requires_grad_(False)
        self.acting = ActingNetwork(self.model.network, model.buffer.bytes.device)
        """Network that `act` calls."""
        self.table = self.model.buffer.table
        self.index, self.count = 0, 1

    def load(self, flat: NDArray[np.uint8]) -> None:
        """Load weights by one copy of bytes.

        Raises:
            ValueError: the size differs from the table's.
        """
        self.model.buffer.load(flat)
        self.acting.refresh()
        self.model.observations.refresh()

    def act_in_bfloat16(self) -> None:
        """Act in bfloat16 from now on."""
        self.acting.in_bfloat16()

    def place(self, index: int, count: int) -> None:
        """Set the actor's place: ``index`` of ``count``.

        An actor beyond the count, which is about to retire, explores as the last one.
        """
        self.index, self.count = index, count

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        return {}

    def record(self, parameters: Tensor, action: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """An empty mapping: without critics an actor has no data for priorities."""
        return {}


@dataclass(frozen=True, slots=True)
class UpdateParts:
    """Result of a batch before any change: gradients are in their buffers.

    ``samples``: number of trained steps. ``norms``: norm of the gradient for each optimiser.
    ``statistics``: scalars, including ``loss``, and numbers that a subclass adds. ``priorities``
    [n].
    """

    samples: Tensor
    norms: Mapping[str, Tensor]
    statistics: Mapping[str, Any]
    priorities: Tensor

    def named(self) -> dict[str, Any]:
        """All fields by name, for `of`."""
        return {
            "samples": self.samples,
            "priorities": self.priorities,
            **{f"norms/{name}": norm for name, norm in self.norms.items()},
            **{f"statistics/{name}": value for name, value in self.statistics.items()},
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> UpdateParts:
        """The result whose fields are `named` so."""
        return cls(
            samples=fields["samples"],
            norms=subtree(fields, "norms/"),
            statistics=subtree(fields, "statistics/"),
            priorities=fields["priorities"],
        )


class OffPolicyLearner(ABC, Generic[Module, Settings]):
    """Learner; `tianflow.interfaces.Algorithm`. A subclass implements gradients and target updates.

    Updates are atomic: all gradients are computed before any parameter changes. If one of them is
    not finite, or the update is stopped, only the gradient buffers were written, and they are
    cleared.

    On a GPU, an update may be CUDA graphs: of the gradients, of the optimisers, and of the
    normaliser.

    Attributes:
        kinds: number of kinds of updates, see `kind`.
    """

    kinds: ClassVar[int] = 1

    def __init__(
        self, model: QModel[Module], config: Config, settings: Settings, device: torch.device
    ) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.table = model.buffer.table
        self.forward = forward_in(config.learner.precision, device)
        """Calls every network in `compute_gradients`."""
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.ranks = ALONE
        """Processes that share batches."""
        self._seed, self._precision = config.run.seed, config.learner.precision
        self.learning_rate = settings.learning_rate
        self.updates = 0
        self.optimisers = {
            "adam": Optimiser(model.buffer.parameters, model.buffer.gradients, settings)
        }
        self.saved_tensors: dict[str, Tensor] = {"flat": model.buffer.bytes}
        """Tensors in a checkpoint, except those of optimisers."""
        self.tables: dict[str, WeightsTable] = {"flat": self.table}
        """Names of what another run can take: `tianflow.interfaces.TransfersParameters`."""
        self._gradients: GraphedStep | None = None
        self._descent: GraphedStep | None = None
        self._keyed: tuple[Settings, str] | None = None
        if device.type == "cuda" and wants_graphs(config):
            self.use_graphs(required=config.learner.graphs == "on")

    def use_graphs(self, *, required: bool = False, capture: Capture = captured) -> None:
        """Compute updates as CUDA graphs from now on: `GraphedStep`."""
        self._gradients = GraphedStep(
            lambda arrays: self.compute_gradients(arrays).named(),
            required=required,
            graphs=self.kinds,
            capture=capture,
        )
        self._descent = GraphedStep(
            self._descend, required=required, graphs=self.kinds, capture=capture
        )
        self.model.observations.use_graphs(required=required, capture=capture)

    @abstractmethod
    def compute_gradients(self, arrays: Tree) -> UpdateParts:
        """Gradients and statistics of a batch at the current parameters, which stay unchanged.

        It computes with ``arrays``, which include those of `noise`, `settings`, tensors of this
        learner, and `kind`.
        """

    @abstractmethod
    def after_step(self) -> None:
        """Update target networks, after the optimisers' steps and the increment of ``updates``."""

    @abstractmethod
    def follow_parameters(self) -> None:
        """Copy the trained networks into their target networks."""

    @abstractmethod
    def exploration(self, settings: Settings, updates: int) -> Mapping[str, float]:
        """Exploration scalars after ``updates`` updates."""

    def noise(self, arrays: Tree) -> Tree:  # noqa: ARG002 - this one needs none
        """Random numbers of the update on ``arrays``, from the learner's generator. Default:
        none.
        """
        return {}

    def kind(self) -> int:
        """Kind of the next update, below `kinds`. Updates of one kind do the same operations."""
        return 0

    def normaliser_input(self, arrays: Tree) -> tuple[Tree, Tensor]:
        """Input of normalisers: observations {leaf: [T, n, ...]} and valid rows [T, n]. Default:
        first rows.
        """
        return {name: leaf[:1] for name, leaf in subtree(arrays, "obs/").items()}, arrays["valid"][
            :1
        ]

    def join(self, ranks: Ranks) -> None:
        """Train on a part of each batch, beside other ``ranks``;
        `tianflow.interfaces.SplitsOverRanks`.
        """
        self.ranks = ranks
        if ranks.rank:
            self.generator.manual_seed(seed_of_rank(self._seed, ranks.rank))

    def flat(self) -> NDArray[np.uint8]:
        """All published tensors, which the next update or call overwrites."""
        return self.model.buffer.host()

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:  # noqa: ARG002 - these losses have no entropy term
        """Set the learning rate of the next update. The caller computes schedules."""
        self.learning_rate = learning_rate

    def set_settings(self, settings: Settings, updates: int) -> None:
        """Set settings and schedules of the next update, after ``updates`` updates.

        The learning rate is set by `set_live`.
        """
        self.settings = settings
        self.model.explore(self.exploration(settings, updates))

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = never_stop) -> StepResult:
        """One update.

        ``samples`` 0 without statistics: it was stopped, or the batch has no trainable step;
        nothing has changed. ``finite`` False: nothing has changed, because a loss or gradient was
        not finite.
        """
        if should_stop():
            return StepResult(0, True, {})
        generator = self.generator.get_state()
        arrays = {**batch.arrays, **self.noise(batch.arrays)}
        with arithmetic(self.device, self._precision):
            found = self._over_ranks(self._compute(arrays))
        scalars = {
            "samples": found.samples,
            **found.statistics,
            **{f"{name}/norm": norm for name, norm in found.norms.items()},
        }
        numbers = as_numbers(scalars, self.device)
        count, norms = int(numbers["samples"]), [numbers[f"{name}/norm"] for name in found.norms]
        finite = all(map(math.isfinite, [numbers["loss"], *norms]))
        statistics = {name: numbers[name] for name in found.statistics} | {
            "grad_norm": math.hypot(*norms)
        }
        if not finite or count == 0 or should_stop():
            for optimiser in self.optimisers.values():
                optimiser.gradients.zero_()
            self.generator.set_state(generator)
            return StepResult(count, False, statistics) if not finite else StepResult(0, True, {})
        for name in found.norms:
            self.optimisers[name].advance(self.learning_rate)
        (self._descend if self._descent is None else self._descent)(found.norms)
        self.updates += 1
        self.after_step()
        self.model.observations.update(*self.normaliser_input(batch.arrays), self.ranks)
        return StepResult(count, True, statistics, found.priorities.cpu().numpy())

    def _compute(self, arrays: Tree) -> UpdateParts:
        """`compute_gradients`, as a CUDA graph where that is possible."""
        if self._gradients is None or self.ranks.size > 1:
            return self.compute_gradients(arrays)
        return UpdateParts.of(self._gradients(arrays, (self.kind(), self._settings_key())))

    def _settings_key(self) -> str:
        """The settings that `compute_gradients` computes with."""
        if self._keyed is None or self._keyed[0] is not self.settings:
            self._keyed = (
                self.settings,
                self.settings.model_dump_json(exclude={"learning_rate"}),
            )
        return self._keyed[1]

    def _descend(self, norms: Tensors) -> Tensors:
        """Let the optimisers step whose gradients have these ``norms``."""
        for name, norm in norms.items():
            self.optimisers[name].descend(norm)
        return {}

    def _over_ranks(self, found: UpdateParts) -> UpdateParts:
        """``found`` of the batches of all ranks. Their gradients are in the buffers.

        Gradients and statistics are means over trained steps, so those of each rank count by the
        number of its steps.
        """
        if self.ranks.size == 1:
            return found
        count = found.samples.float()
        names = [name for name, value in found.statistics.items() if is_scalar(value)]
        total, *sums = self.ranks.add_all(
            count, *(found.statistics[name].detach().reshape(()) * count for name in names)
        )
        divisor = total.clamp(min=1.0)
        for optimiser in self.optimisers.values():
            self.ranks.add(optimiser.gradients.mul_(count)).div_(divisor)
        return replace(
            found,
            samples=total,
            norms={
                name: torch.linalg.vector_norm(self.optimisers[name].gradients)
                for name in found.norms
            },
            statistics={
                **found.statistics,
                **{name: value / divisor for name, value in zip(names, sums, strict=True)},
            },
        )

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of weights with normalisers, targets, optimisers, generator and number of
        updates.
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
        """Restore the result of `state_dict`, bit for bit.

        Raises:
            CheckpointError: it belongs to another model; nothing was changed.
        """
        require_same_arrays(state, self.state_dict())
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
        return self.saved_tensors | moments
