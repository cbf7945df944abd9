"""Learner with a single pass over each batch: one forward, one gradient, one step.

A2C and IMPALA use it with different estimators. On a GPU all of that may be one CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tianflow.algorithms.common.actor_critic import ActorCriticLearner, Samples, batch_statistics
from tianflow.algorithms.common.graphs import (
    Capture,
    GraphedStep,
    Tensors,
    captured,
    wants_graphs,
)
from tianflow.algorithms.common.model import ActorCriticModel
from tianflow.algorithms.common.scalars import Statistics
from tianflow.algorithms.common.update import never_stop
from tianflow.config.model import Config
from tianflow.core.payloads import EnvironmentSpec
from tianflow.ops.losses import masked_mean, policy_gradient_loss, value_loss
from tianflow.ops.returns import Advantages

CHUNK_SAMPLES = 256
"""Samples per chunk of image columns. Gradients of chunks add up, and activations stay in cache."""
COST, SAVED = "entropy_cost", "saved/"
"""Names of an input of a graph that is not of the batch, and of results that are not statistics."""


class ChunkOutputs(NamedTuple):
    """Outputs of one chunk for statistics, [T, C], without gradient.

    Losses are scalars, weighted by the chunk's share.
    """

    log_ratio: Tensor
    v_t: Tensor
    target_t: Tensor
    valid_t: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor


class SinglePassLearner(ActorCriticLearner):
    """Policy gradient, value error and entropy, each a mean over valid transitions of the batch."""

    normalise_advantages: bool

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        self.graphed: GraphedStep | None = None
        """The update up to the optimiser step as a CUDA graph; None: operation by operation."""
        if device.type == "cuda" and wants_graphs(config):
            self.use_graphs(required=config.learner.graphs == "on")

    def use_graphs(self, *, required: bool = False, capture: Capture = captured) -> None:
        """Compute updates as CUDA graphs from now on: `GraphedStep`."""
        self.graphed = GraphedStep(self.step_on, required=required, capture=capture)
        self.model.observations.use_graphs(required=required, capture=capture)

    @abstractmethod
    def estimate(
        self, samples: Samples, log_ratio: Tensor, v_t: Tensor, v_tp1: Tensor
    ) -> Advantages:
        """Advantages and value targets. ``log_ratio``: log of current over behaviour
        probability.
        """

    @abstractmethod
    def clipped(self, log_ratio: Tensor) -> Tensor:
        """True where an importance weight was clipped."""

    def update(self, samples: Samples, should_stop: Callable[[], bool]) -> Statistics | None:
        self.optimiser.advance(self.learning_rate)
        if self.graphed is None or self.ranks.size > 1 or samples.final_observation:
            return self._update(samples, self.entropy_cost, should_stop)
        if should_stop():
            return None
        cost = samples.r_t.new_full((), self.entropy_cost)
        found = self.graphed({**samples.tensors(), COST: cost})
        saved = sorted(name for name in found if name.startswith(SAVED))
        self._saved = tuple(found.pop(name) for name in saved)
        return found

    def step_on(self, inputs: Tensors) -> Statistics:
        """The update on `Samples.tensors`. It reads only ``inputs`` and tensors of this learner."""
        self._saved = ()  # from an earlier graph
        found = self._update(Samples.of(inputs), inputs[COST], never_stop)
        assert found is not None
        saved: tuple[Tensor, ...] = self._saved
        return found | {f"{SAVED}{index}": tensor for index, tensor in enumerate(saved)}

    def _update(
        self, samples: Samples, entropy_cost: Tensor | float, should_stop: Callable[[], bool]
    ) -> Statistics | None:
        steps, columns = samples.valid_t.shape
        width = (
            min(CHUNK_SAMPLES // steps, -(-columns // self.parallel.size))
            if self._in_chunks()
            else columns
        )
        cuts = range(0, columns, max(1, width))
        total = self.ranks.add(samples.valid_t.sum())

        def train(model: ActorCriticModel, first: int) -> ChunkOutputs | None:
            if should_stop():
                return None
            part = (
                samples
                if len(cuts) == 1
                else samples.columns(first, min(first + cuts.step, columns))
            )
            return self._train_on(model, part, total, entropy_cost)

        found = self.parallel.map(train, cuts)
        chunks = [chunk for chunk in found if chunk is not None]
        if len(chunks) < len(found):
            return None
        log_ratio, v_t, target_t, valid_t, policy, value, entropy = (
            chunks[0] if len(chunks) == 1 else _joined(chunks)
        )
        clipped = (self.clipped(log_ratio) & valid_t).sum() / total
        policy, value, entropy, clipped = self.ranks.add_all(policy, value, entropy, clipped)
        loss = policy + self.value_cost * value - entropy_cost * entropy
        return {
            "loss": loss,
            "policy_loss": policy,
            "value_loss": value,
            "entropy": entropy,
            "clip_fraction": clipped,
            "grad_norm": self.apply_gradient(loss),
            **batch_statistics(log_ratio, v_t, target_t, valid_t, self.ranks),
        }

    def _in_chunks(self) -> bool:
        return self.images and self.device.type == "cpu" and not self.normalise_advantages

    def _train_on(
        self,
        model: ActorCriticModel,
        samples: Samples,
        total: Tensor,
        entropy_cost: Tensor | float,
    ) -> ChunkOutputs:
        """Add the gradient of one chunk of columns to the model's.

        ``total`` is the number of valid transitions in the batches of all ranks.
        """
        distribution, valid_t = self.model.distribution, samples.valid_t
        output = model.evaluate(samples.observation, samples.state, samples.start)
        parameters = distribution.masked(output.parameters[:-1], samples.mask)
        log_prob, entropy_t = distribution.evaluate(parameters, samples.action)
        log_ratio = log_prob.detach() - samples.log_prob
        v_t = output.value[:-1]
        advantage_t, target_t = self.estimate(
            samples, log_ratio, v_t, self.next_values(samples, output)
        )
        if self.normalise_advantages:
            advantage_t = self.normalised(advantage_t, valid_t)
        policy = policy_gradient_loss(log_prob, advantage_t, valid_t, count=total)
        value = value_loss(v_t, target_t, valid_t, count=total)
        entropy = masked_mean(entropy_t, valid_t, total)
        torch.autograd.backward(policy + self.value_cost * value - entropy_cost * entropy)
        return ChunkOutputs(
            log_ratio,
            v_t.detach(),
            target_t,
            valid_t,
            policy.detach(),
            value.detach(),
            entropy.detach(),
        )


def _joined(chunks: Sequence[ChunkOutputs]) -> ChunkOutputs:
    """Chunks with their columns concatenated and losses added."""
    parts = list(zip(*chunks, strict=True))
    return ChunkOutputs(
        *(torch.cat(columns, 1) for columns in parts[:4]),
        *(torch.stack(losses).sum() for losses in parts[4:]),
    )
