"""Policy and learner that actor-critic algorithms share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tianflow.algorithms.common.data_parallel import DataParallel
from tianflow.algorithms.common.divergence import (
    chosen_columns,
    chosen_transitions,
    copy_weights,
)
from tianflow.algorithms.common.model import ActorCriticModel, act_of
from tianflow.algorithms.common.on_arrays import ActOnArrays
from tianflow.algorithms.common.parameter_buffer import Adam, require_same_arrays
from tianflow.algorithms.common.precision import ActingNetwork, arithmetic, forward_in
from tianflow.algorithms.common.ranks import ALONE, Ranks, seed_of_rank
from tianflow.algorithms.common.scalars import Statistics, as_numbers
from tianflow.algorithms.common.update import Tree, never_stop, subtree
from tianflow.config.model import AlgorithmSettings, Config
from tianflow.config.networks import is_image
from tianflow.core.payloads import EnvironmentSpec, WeightsTable
from tianflow.interfaces import ActorStep, LearnerBatch, StepResult
from tianflow.networks import Network, Output
from tianflow.ops.losses import (
    approximate_kl,
    effective_sample_ratio,
    explained_variance,
    masked_largest,
    masked_mean,
    normalised,
)
from tianflow.ops.transforms import indexed

CPU = torch.device("cpu")
PROBED_COLUMNS = 8
"""Columns of a batch that `ActorCriticLearner.explain_difference` evaluates."""


class ActorCriticPolicy:
    """Policy of an actor; `tianflow.interfaces.Policy`. ``act`` computes no value or
    log-probability.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device = CPU) -> None:
        self._model = ActorCriticModel(config, spec, device)
        self._model.network.requires_grad_(False)
        self._acting = ActingNetwork(self._model.network, device)
        self._act = act_of(self._acting.network)
        self.table = self._model.buffer.table
        self._arrays = self._arrays_of(spec) if device.type == "cpu" else None

    def load(self, flat: NDArray[np.uint8]) -> None:
        """Load weights by one copy of bytes.

        Raises:
            ValueError: the size differs from the table's.
        """
        self._model.buffer.load(flat)
        self._acting.refresh()
        self._model.observations.refresh()
        if self._arrays is not None:
            self._arrays.refresh()

    def act_in_bfloat16(self) -> None:
        """Act in bfloat16 from now on.

        The policy is then that of the rounded weights; its log-probabilities are recorded in
        float32.
        """
        self._acting.in_bfloat16()
        self._act, self._arrays = act_of(self._acting.network), None

    def on_arrays(self, num_envs: int) -> ActOnArrays | None:
        """`act` on arrays, if that is faster."""
        return (
            self._arrays if self._arrays is not None and self._arrays.is_faster(num_envs) else None
        )

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {
            name: torch.zeros(num_envs, *shape) for name, shape in self._model.state_shapes.items()
        }

    def noise(self, steps: int, num_envs: int, generator: np.random.Generator) -> Tensor:
        """[steps, num_envs, K]: Gumbel noise per logit, or normal noise per component of a
        continuous action.
        """
        return self._model.distribution.noise((steps, num_envs), generator)

    def act(
        self, observation: Tree, state: Tree, noise: Tensor | None, mask: Tensor | None = None
    ) -> ActorStep:
        """Select actions. The caller sets the state to zero where an episode begins."""
        distribution = self._model.distribution
        with torch.inference_mode():
            parameters, after = self._acting.forward(
                self._act, self._model.observations(observation), state
            )
            parameters = distribution.masked(parameters, mask)
            action = (
                distribution.mode(parameters)
                if noise is None
                else distribution.sample(parameters, noise)
            )
        return ActorStep(action, parameters, after)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Log-probabilities of stored actions: [..., P], [..., *stored] -> [...]."""
        with torch.inference_mode():
            return self._model.distribution.log_prob(parameters, action)

    def record(self, parameters: Tensor, action: Tensor) -> dict[str, Tensor]:
        return {"log_prob": self.log_prob(parameters, action)}

    def named(self, parameters: Tensor) -> dict[str, Tensor]:
        """``logits``, or ``mean`` and ``log_std`` of an unclipped action."""
        return self._model.distribution.named(parameters)

    def place(self, index: int, count: int) -> None:
        """No effect: all actors explore by sampling."""

    def _arrays_of(self, spec: EnvironmentSpec) -> ActOnArrays | None:
        offered = getattr(self._model.network, "on_arrays", lambda: None)()
        if offered is None or spec.action_mask or self._model.observations.shapes:
            return None
        return ActOnArrays(offered, self._model.distribution)


@dataclass(frozen=True, slots=True)
class Samples:
    """A batch for estimators: C = B*N columns, time first; row t is the transition from
    ``observation[t]``.

    ``observation`` [T+1, C, ...], ``start`` [T+1, C], ``state`` [C, ...], all others [T, C, ...].
    ``r_t`` is normalised if that is enabled. ``mask`` is None without action masks.
    ``final_observation`` has the true last observations where ``truncated_t`` (truncated, not
    terminated, valid); it is empty if ``observation[t+1]`` has them.
    """

    observation: Tree
    final_observation: Tree
    state: Tree
    start: Tensor
    action: Tensor
    mask: Tensor | None
    log_prob: Tensor
    r_t: Tensor
    discount_t: Tensor
    done_t: Tensor
    truncated_t: Tensor
    valid_t: Tensor

    def columns(self, first: int, last: int) -> Samples:
        """The columns first..last-1, as views."""

        def cut(value: Any, name: str) -> Any:
            if isinstance(value, Mapping):
                return {key: cut(leaf, name) for key, leaf in value.items()}
            return (
                value
                if value is None
                else value[first:last]
                if name == "state"
                else value[:, first:last]
            )

        return Samples(
            **{field.name: cut(getattr(self, field.name), field.name) for field in fields(self)}
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, with names that `of` understands."""
        found: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                found |= {f"{field.name}/{leaf}": tensor for leaf, tensor in value.items()}
            elif value is not None:
                found[field.name] = value
        return found

    @classmethod
    def of(cls, found: Tree) -> Samples:
        """The samples of `tensors`, which may be among others."""
        trees = ("observation", "final_observation", "state")
        arguments: dict[str, Any] = {
            field.name: subtree(found, f"{field.name}/")
            if field.name in trees
            else found.get(field.name)
            for field in fields(cls)
        }
        return cls(**arguments)


def read_batch(arrays: Tree, *, reward: Tensor, discount: float) -> Samples:
    """Samples from arrays of trajectories (`TrajectoryLayout`); ``reward`` is normalised
    already.
    """
    terminated, truncated, valid = arrays["terminated"], arrays["truncated"], arrays["valid"]
    mask = arrays.get("action_mask")
    return Samples(
        observation=subtree(arrays, "obs/"),
        final_observation=subtree(arrays, "final_obs/"),
        state=subtree(arrays, "state/"),
        start=arrays["start"],
        action=arrays["action"],
        mask=None if mask is None else mask[:-1],
        log_prob=arrays["log_prob"],
        r_t=reward,
        discount_t=torch.where(terminated, 0.0, torch.full_like(reward, discount)),
        done_t=terminated | truncated,
        truncated_t=truncated & ~terminated & valid,
        valid_t=valid,
    )


class ActorCriticLearner(ABC):
    """Learner; `tianflow.interfaces.Algorithm`. A subclass implements `update`.

    Updates are atomic. If an update is stopped, or its loss or a gradient is not finite,
    parameters, optimiser, normalisers and generator are restored. Only `descend` changes parameters
    and optimiser.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings: AlgorithmSettings = config.algorithm
        self.settings: Any = settings
        """Settings of the algorithm's own model; subclasses read their additional settings here."""
        self.model = ActorCriticModel(
            config, spec, device, forward_in(config.learner.precision, device)
        )
        self.optimiser = Adam(
            self.model.buffer.parameters, self.model.gradients, epsilon=settings.adam_epsilon
        )
        self.generator = torch.Generator().manual_seed(config.run.seed)
        self.table, self.device = self.model.buffer.table, device
        self.images = any(is_image(leaf) for leaf in spec.observation)
        self.parallel = DataParallel(
            self.model, config.learner.threads if self.images and device.type == "cpu" else 1
        )
        """Threads that share the parts of a batch."""
        self.ranks = ALONE
        """Processes that share batches."""
        self._seed, self._precision = config.run.seed, config.learner.precision
        self.learning_rate, self.entropy_cost = settings.learning_rate, settings.entropy_cost
        self._discount, self._max_grad_norm, self.value_cost = (
            settings.discount,
            settings.max_grad_norm,
            settings.value_cost,
        )
        self._make_retained = partial(ActorCriticModel, config, spec, device)
        self._retained: ActorCriticModel | None = None
        # Copy of `_changing` before an update's first step, unless that need not be undone.
        self._saved: tuple[Tensor, ...] = ()

    @abstractmethod
    def update(self, samples: Samples, should_stop: Callable[[], bool]) -> Statistics | None:
        """All optimiser steps of one update.

        Returns scalar statistics, including loss and grad_norm, or None if it was stopped.
        """

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

    def set_live(self, learning_rate: float, entropy_cost: float) -> None:
        """Set absolute values for the next update. The caller computes schedules."""
        self.learning_rate, self.entropy_cost = learning_rate, entropy_cost

    def step(self, batch: LearnerBatch, should_stop: Callable[[], bool] = never_stop) -> StepResult:
        """One update.

        ``samples`` 0 without statistics: it was stopped, or the batch has no valid transition;
        nothing has changed. ``finite`` False: it was undone because loss or gradient was not
        finite. With several ranks, ``should_stop`` has to say the same on each.
        """
        arrays = batch.arrays
        count = int(self.ranks.add(arrays["valid"].sum()))
        if count == 0 or should_stop():
            return StepResult(0, True, {})
        before = self._snapshot()
        self.model.buffer.expect_changes()
        self.model.rewards.update(arrays, self.ranks)
        samples = read_batch(
            arrays, reward=self.model.rewards(arrays["reward"]), discount=self._discount
        )
        with arithmetic(self.device, self._precision):
            found = self.update(samples, should_stop)
        if found is None:
            self._restore(before)
            return StepResult(0, True, {})
        statistics = as_numbers(found, self.device)
        finite = math.isfinite(statistics["loss"]) and math.isfinite(statistics["grad_norm"])
        if finite:
            self._saved = ()
            if type(self).step is ActorCriticLearner.step:  # else it may change parameters later
                self.model.buffer.settle()
            self.model.observations.update(samples.observation, samples.valid_t, self.ranks)
        else:
            self._restore(before)
        return StepResult(count, finite, statistics)

    def descend(self, only: Tensor | None = None) -> Tensor:
        """Clip the accumulated gradient, take one optimiser step, and clear the gradient.

        Returns the norm before clipping. ``only``: see `apply_gradient`.
        """
        self.optimiser.advance(self.learning_rate)
        return self.apply_gradient(only)

    def apply_gradient(self, only: Tensor | None = None) -> Tensor:
        """`descend`, in an optimiser step that has begun (`Adam.advance`).

        ``only``: the loss, if this is the only step of its update. On a CPU the step is then
        skipped unless loss and norm are finite, so it never has to be undone, and no copy of the
        parameters is needed. On a GPU the check would have to wait for the device.
        """
        self.parallel.sum_gradients()
        gradients = self.ranks.add(self.model.gradients)
        norm: Tensor = torch.linalg.vector_norm(gradients)
        checks = only is not None and self.device.type == "cpu"
        if not checks and not self._saved:
            self._saved = tuple(tensor.clone() for tensor in self._changing())
        if only is None or not checks or math.isfinite(only.item() + norm.item()):
            gradients.mul_((self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self.optimiser.apply()
        gradients.zero_()
        return norm

    def normalised(self, advantage_t: Tensor, valid_t: Tensor) -> Tensor:
        """`tianflow.ops.losses.normalised` over the batches of all ranks, of this rank's batch."""
        return self.ranks.own(normalised(*self.ranks.gather(advantage_t, valid_t)))

    def next_values(self, samples: Samples, output: Output) -> Tensor:
        """V(observation after transition t, before any reset) [T, C], without gradient.

        ``output`` has T+1 rows.
        """
        v_tp1 = output.value.detach()[1:]
        if not samples.final_observation:
            return v_tp1
        t, column = samples.truncated_t.nonzero(as_tuple=True)
        if t.numel() == 0:
            return v_tp1
        with torch.no_grad():
            last = {
                name: indexed(leaf, t, column).unsqueeze(0)
                for name, leaf in samples.final_observation.items()
            }
            state = {name: leaf[t, column] for name, leaf in output.state.items()}
            final = self.model.evaluate(
                last, state, torch.zeros(1, t.numel(), dtype=torch.bool, device=t.device)
            ).value[0]
        v_tp1 = v_tp1.clone()
        v_tp1[t, column] = final
        return v_tp1

    def retain_policy(self) -> None:
        """Copy the current policy for `divergence`; `tianflow.interfaces.MeasuresDivergence`."""
        if self._retained is None:
            self._retained = self._make_retained()
        copy_weights(self.model, self._retained)

    def divergence(self, batch: LearnerBatch, states: int) -> float:
        """Mean KL(retained || current) in nats, on at most ``states`` valid transitions.

        With recurrent state, both policies start from the stored states of whole columns. Both
        compute in float32, and each normalises with its own statistics.
        """
        assert self._retained is not None, "no policy was retained"
        choose = chosen_columns if self.model.state_shapes else chosen_transitions
        found, distribution = choose(batch.arrays, states), self.model.distribution
        if not found.valid.any():
            return 0.0
        with torch.no_grad(), arithmetic(self.device):
            retained, current = (
                distribution.masked(
                    model.evaluate(found.observation, found.state, found.start).parameters,
                    found.mask,
                )
                for model in (self._retained, self.model.in_float32())
            )
            return masked_mean(distribution.kl(retained, current), found.valid).item()

    def explain_difference(self, batch: LearnerBatch) -> str:
        """Why this learner's policy may differ from that of actors with the same weights.

        A few columns of ``batch`` are evaluated twice, one of them alone, and one row with two
        recurrent states.
        """
        arrays = batch.arrays
        part = read_batch(arrays, reward=arrays["reward"], discount=self._discount)
        part = part.columns(0, min(PROBED_COLUMNS, part.valid_t.shape[1]))

        def evaluate(samples: Samples) -> Output:
            with torch.no_grad():
                return self.model.evaluate(samples.observation, samples.state, samples.start)

        output = evaluate(part)
        whole = output.parameters
        if not torch.allclose(whole, evaluate(part).parameters, rtol=1e-3, atol=1e-3):
            return (
                "the network's forward is random: torch.nn.functional.dropout is active unless it "
                "gets training=self.training (torch.nn.Dropout does)"
            )
        norms = [
            name
            for name, module in self.model.network.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        ]
        alone = evaluate(part.columns(0, 1)).parameters
        if norms or not torch.allclose(whole[:, :1], alone, rtol=1e-3, atol=1e-3):
            named = f" ({', '.join(norms)})" if norms else ""
            return (
                f"an output of the network depends on other rows of the batch: batch "
                f"normalisation{named} uses the statistics of the batch"
            )
        later = {name: leaf[-1] for name, leaf in output.state.items()}
        if not self._forgets_at_start(part, later):
            return (
                "the network's forward does not set its recurrent state to zero before a row where "
                "start is true; the actors do"
            )
        if getattr(type(self.model.network), "act", Network.act) is not Network.act:
            return "the network's act computes another policy than its forward"
        return (
            "the network's forward computes another policy for several rows than for one row "
            "after another, as actors call it"
        )

    def _forgets_at_start(self, samples: Samples, state: Tree) -> bool:
        """Whether the first row of ``samples`` has the same results after ``state`` as after a
        state of zeros, if an episode begins there.
        """
        observation = {name: leaf[:1] for name, leaf in samples.observation.items()}
        start = torch.ones_like(samples.start[:1])
        zeros = {name: torch.zeros_like(leaf) for name, leaf in state.items()}
        with torch.no_grad():
            found, expected = (
                self.model.evaluate(observation, before, start) for before in (state, zeros)
            )
        pairs = [(found.parameters, expected.parameters)]
        pairs += [(found.state[name], expected.state[name]) for name in state]
        return all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in pairs)

    @property
    def tables(self) -> Mapping[str, WeightsTable]:
        """Names of what another run can take: `tianflow.interfaces.TransfersParameters`."""
        return {"flat": self.table}

    def follow_parameters(self) -> None:  # noqa: B027 - a subclass with a target network overrides it
        """No effect: nothing else depends on the parameters."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of weights with normalisers, optimiser and generator."""
        return {
            "flat": self.flat().copy(),
            "adam/mean": self.optimiser.mean.cpu().numpy().copy(),
            "adam/square": self.optimiser.square.cpu().numpy().copy(),
            "adam/steps": np.asarray(self.optimiser.steps, np.int64),
            "generator": self.generator.get_state().numpy().copy(),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `state_dict`, bit for bit.

        Raises:
            CheckpointError: it belongs to another model; nothing was changed.
        """
        require_same_arrays(state, self.state_dict())
        self.model.buffer.expect_changes()
        self.model.buffer.bytes.copy_(torch.tensor(state["flat"]))
        self.optimiser.mean.copy_(torch.tensor(state["adam/mean"]))
        self.optimiser.square.copy_(torch.tensor(state["adam/square"]))
        self.optimiser.steps = int(state["adam/steps"])
        self.generator.set_state(torch.tensor(state["generator"]))
        self.model.observations.refresh()

    def _changing(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.model.buffer.parameters, self.optimiser.mean, self.optimiser.square

    def _snapshot(self) -> tuple[Tensor, int, Tensor]:
        return self.model.buffer.rest.clone(), self.optimiser.steps, self.generator.get_state()

    def _restore(self, before: tuple[Tensor, int, Tensor]) -> None:
        rest, self.optimiser.steps, generator = before
        self.model.buffer.rest.copy_(rest)
        for tensor, saved in zip(self._changing(), self._saved, strict=bool(self._saved)):
            tensor.copy_(saved)
        self._saved = ()
        self.generator.set_state(generator)
        self.parallel.clear_gradients()
        self.model.observations.refresh()


def batch_statistics(
    log_ratio: Tensor, v_t: Tensor, target_t: Tensor, valid_t: Tensor, ranks: Ranks = ALONE
) -> Statistics:
    """Difference of current and behaviour policy on the batch before the update, and quality of
    values.

    ``log_ratio``: log of current over behaviour probability, [T, C]. The statistics are those of
    the batches of all ``ranks``.
    """
    log_ratio, v_t, target_t, valid_t = ranks.gather(log_ratio, v_t, target_t, valid_t)
    if valid_t.device.type == "cpu" and valid_t.any():
        return _statistics_on_arrays(log_ratio, v_t, target_t, valid_t)
    return {
        "kl": approximate_kl(log_ratio, valid_t),
        "log_ratio_max": masked_largest(log_ratio, valid_t),
        "ess_ratio": effective_sample_ratio(log_ratio, valid_t),
        "explained_variance": explained_variance(v_t, target_t, valid_t),
    }


def _statistics_on_arrays(
    log_ratio: Tensor, v_t: Tensor, target_t: Tensor, valid_t: Tensor
) -> Statistics:
    """`batch_statistics` of a small batch on a CPU, where NumPy takes a third of the time. A row
    must be valid.
    """
    valid = valid_t.numpy()
    ratios, value, target = (x.detach().numpy()[valid] for x in (log_ratio, v_t, target_t))
    with np.errstate(all="ignore"):  # an update that is not finite has such statistics
        bounded = np.minimum(ratios, 20.0)
        weight = np.exp(ratios - ratios.max())
        return {
            "kl": float((np.expm1(bounded) - bounded).mean()),
            "log_ratio_max": float(np.abs(ratios).max()),
            "ess_ratio": float(weight.sum() ** 2 / (np.dot(weight, weight) * len(weight))),
            "explained_variance": float(1.0 - (target - value).var() / max(target.var(), 1e-12)),
        }
