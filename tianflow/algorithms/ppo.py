"""PPO (arXiv 1707.06347) with GAE, and the decoupled objective (arXiv 2110.00641) for data of older policies.

The proximal policy is that of the parameters at the start of the update. The clip holds the new policy near the proximal
one, and each sample weighs proximal over behaviour probability, at most ``max_behaviour_weight``. On fresh data every
weight is 1, and this is ordinary PPO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tianflow.algorithms.actor_critic import ActorCriticLearner, ActorCriticPolicy, Samples, batch_statistics
from tianflow.config import Config, PPOSettings
from tianflow.networks import Output
from tianflow.ops.losses import approximate_kl, decoupled_ppo_loss, masked_mean, normalised, value_loss
from tianflow.ops.returns import gae
from tianflow.payloads import EnvironmentSpec


class Table(NamedTuple):
    """What minibatches are columns of, [rows, C, ...] (``state`` [C, ...]): whole fragments, or one row of all transitions.

    ``constants`` [rows, C, 5] stay the same through all epochs: the log-probability that the clip is around, the behaviour
    weight, the advantage, the value target and the value before the update. They lie side by side to be selected at once.
    ``valid`` is None where only valid columns are ever selected.
    """

    observation: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    start: Tensor
    action: Tensor
    mask: Tensor | None
    constants: Tensor
    valid: Tensor | None

    def select(self, columns: Tensor) -> Table:
        """The table of some of its columns."""
        return Table(
            observation={name: leaf.index_select(1, columns) for name, leaf in self.observation.items()},
            state={name: leaf.index_select(0, columns) for name, leaf in self.state.items()},
            start=self.start.index_select(1, columns),
            action=self.action.index_select(1, columns),
            mask=None if self.mask is None else self.mask.index_select(1, columns),
            constants=self.constants.index_select(1, columns),
            valid=None if self.valid is None else self.valid.index_select(1, columns),
        )

    def as_transitions(self) -> Table:
        """The same transitions as one row, for networks without memory."""

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1).unsqueeze(0)

        return Table(
            observation={name: flat(leaf) for name, leaf in self.observation.items()},
            state={},
            start=flat(self.start),
            action=flat(self.action),
            mask=None if self.mask is None else flat(self.mask),
            constants=flat(self.constants),
            valid=None,
        )


class PPOLearner(ActorCriticLearner):
    """Epochs of minibatches over one batch.

    A network without memory gets single transitions, drawn from all valid ones; one with memory gets whole columns, so
    that its state is recomputed through the fragment. Advantages are normalised once, over all valid transitions.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, PPOSettings)
        self._settings = settings

    def update(self, samples: Samples, should_stop: Callable[[], bool]) -> dict[str, Tensor] | None:
        table, statistics = self._prepare(samples, self._look(samples))
        results: list[dict[str, Tensor]] = []
        for _ in range(self._settings.epochs):
            divergences = []
            for columns in self._minibatches(samples.valid_t):
                if should_stop():
                    return None
                results.append(self._learn_from(table.select(columns)))
                divergences.append(results[-1].pop("divergence"))
            if self._settings.target_kl is not None and torch.stack(divergences).mean().item() > self._settings.target_kl:
                break
        means = {name: torch.stack([result[name] for result in results]).mean() for name in results[0]}
        return means | statistics

    def _look(self, samples: Samples) -> Output:
        """All T+1 rows under the parameters before the update; images a minibatch at a time, to bound memory."""
        rows, columns = samples.start.shape
        width = max(1, self._settings.minibatch_size // rows) if self.images else columns
        with torch.no_grad():
            looks = []
            for first in range(0, columns, width):
                part = samples.columns(first, min(first + width, columns))
                looks.append(self.model.evaluate(part.observation, part.state, part.start))
            parameters, value = torch.cat([look.parameters for look in looks], 1), torch.cat([look.value for look in looks], 1)
            return Output(parameters, value, {name: torch.cat([look.state[name] for look in looks], 1) for name in looks[0].state})

    def _prepare(self, samples: Samples, before: Output) -> tuple[Table, dict[str, Tensor]]:
        """Advantages, targets and weights, and how far the batch is from the policy."""
        distribution, settings, valid = self.model.distribution, self._settings, samples.valid_t
        with torch.no_grad():
            proximal = distribution.log_prob(distribution.masked(before.parameters[:-1], samples.mask), samples.action)
            v_t = before.value[:-1]
            advantage_t, target_t = gae(
                r_t=samples.r_t,
                discount_t=samples.discount_t,
                v_t=v_t,
                v_tp1=self.next_values(samples, before),
                done_t=samples.done_t,
                valid_t=valid,
                lambda_=settings.gae_lambda,
            )
            log_ratio = proximal - samples.log_prob
            if settings.normalise_advantages:
                advantage_t = normalised(advantage_t, valid)
            reference, weight = samples.log_prob, torch.ones_like(proximal)
            if settings.decoupled:
                reference, weight = proximal, log_ratio.exp().clamp(max=settings.max_behaviour_weight)
            table = Table(
                observation={name: leaf[:-1] for name, leaf in samples.observation.items()},
                state=samples.state,
                start=samples.start[:-1],
                action=samples.action,
                mask=samples.mask,
                constants=torch.stack([reference, weight, advantage_t, target_t, v_t], -1),
                valid=valid,
            )
        table = table if self.model.state_shapes else table.as_transitions()
        return table, batch_statistics(log_ratio, v_t, target_t, valid)

    def _minibatches(self, valid_t: Tensor) -> tuple[Tensor, ...]:
        """All columns of the table with a valid row, in an order drawn anew, in equal parts of about ``minibatch_size`` samples."""
        whole = bool(self.model.state_shapes)
        columns = (valid_t.any(0) if whole else valid_t.flatten()).nonzero().squeeze(1)
        count = columns.numel()
        parts = max(1, min(count, round(count * (valid_t.shape[0] if whole else 1) / self._settings.minibatch_size)))
        return columns[torch.randperm(count, generator=self.generator).to(columns.device)].tensor_split(parts)

    def _learn_from(self, part: Table) -> dict[str, Tensor]:
        """One optimiser step."""
        settings, distribution = self._settings, self.model.distribution
        output = self.model.evaluate(part.observation, part.state, part.start)
        log_prob, entropy_t = distribution.evaluate(distribution.masked(output.parameters, part.mask), part.action)
        reference, weight, advantage_t, target_t, old_value = part.constants.unbind(-1)
        log_ratio = log_prob - reference
        policy = decoupled_ppo_loss(log_ratio, weight, advantage_t, part.valid, clip=settings.clip)
        value = value_loss(output.value, target_t, part.valid, old_value=old_value, clip=settings.value_clip)
        entropy = masked_mean(entropy_t, part.valid)
        loss = policy + self.value_cost * value - self.entropy_cost * entropy
        torch.autograd.backward(loss)
        with torch.no_grad():
            clipped = ((log_ratio.exp() - 1.0).abs() > settings.clip).float()
            return {
                "loss": loss.detach(),
                "policy_loss": policy.detach(),
                "value_loss": value.detach(),
                "entropy": entropy.detach(),
                "clip_fraction": masked_mean(clipped, part.valid),
                "divergence": approximate_kl(log_ratio, part.valid),
                "grad_norm": self.descend(),
            }


class PPO:
    """Entry point ``ppo``; `tianflow.interfaces.AlgorithmFactory`."""

    settings: type = PPOSettings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> ActorCriticPolicy:
        """The actor's half."""
        return ActorCriticPolicy(config, spec)

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> PPOLearner:
        """The learner's half, on ``device``."""
        return PPOLearner(config, spec, device)
