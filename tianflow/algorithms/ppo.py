"""PPO (arXiv 1707.06347) with GAE, and the decoupled objective (arXiv 2110.00641) for data of older
policies.

The proximal policy is that of the parameters at the start of the update. The clip holds the new
policy near the proximal one, and each sample weighs proximal over behaviour probability, at most
``max_behaviour_weight``. On fresh data every weight is 1, and this is ordinary PPO.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tianflow.algorithms.common.actor_critic import (
    ActorCriticLearner,
    ActorCriticPolicy,
    Samples,
    batch_statistics,
)
from tianflow.algorithms.common.model import ActorCriticModel
from tianflow.config.model import Config, PPOSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks import Output
from tianflow.ops.losses import (
    approximate_kl,
    decoupled_ppo_loss,
    masked_mean,
    normalised,
    value_loss,
)
from tianflow.ops.returns import gae

CHUNK_SAMPLES = 256
"""Images are looked at and learned from so many at a time on a CPU, so that what is computed of
them stays in its caches.
"""


class MinibatchTable(NamedTuple):
    """What minibatches are columns of, [rows, C, ...] (``state`` [C, ...]): whole fragments, or one
    row of all transitions.

    ``constants`` [rows, C, 5] stay the same through all epochs: the log-probability that the clip
    is around, the behaviour weight, the advantage, the value target and the value before the
    update. They lie side by side to be selected at once. ``valid`` is None where only valid columns
    are ever selected.
    """

    observation: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    start: Tensor
    action: Tensor
    mask: Tensor | None
    constants: Tensor
    valid: Tensor | None

    def select(self, columns: Tensor) -> MinibatchTable:
        """The table of some of its columns."""
        return MinibatchTable(
            observation={
                name: leaf.index_select(1, columns) for name, leaf in self.observation.items()
            },
            state={name: leaf.index_select(0, columns) for name, leaf in self.state.items()},
            start=self.start.index_select(1, columns),
            action=self.action.index_select(1, columns),
            mask=None if self.mask is None else self.mask.index_select(1, columns),
            constants=self.constants.index_select(1, columns),
            valid=None if self.valid is None else self.valid.index_select(1, columns),
        )

    def as_transitions(self) -> MinibatchTable:
        """The same transitions as one row, for networks without memory."""

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1).unsqueeze(0)

        return MinibatchTable(
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

    A network without memory gets single transitions, drawn from all valid ones; one with memory
    gets whole columns, so that its state is recomputed through the fragment. Advantages are
    normalised once, over all valid transitions.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, PPOSettings)
        self._settings = settings

    def update(self, samples: Samples, should_stop: Callable[[], bool]) -> dict[str, Tensor] | None:
        minibatches = self._minibatches(samples.valid_t)
        before, kept = self._look(samples, minibatches[0])
        table, statistics = self._prepare(samples, before)
        results: list[dict[str, Tensor]] = []
        only = self._settings.epochs * len(minibatches) == 1
        for epoch in range(self._settings.epochs):
            divergences = []
            for columns in self._minibatches(samples.valid_t) if epoch else minibatches:
                if should_stop():
                    return None
                results.append(self._learn_from(table, columns, kept, only=only))
                divergences.append(results[-1].pop("divergence"))
                kept = ()
            if (
                self._settings.target_kl is not None
                and torch.stack(divergences).mean().item() > self._settings.target_kl
            ):
                break
        means = {
            name: torch.stack([result[name] for result in results]).mean() for name in results[0]
        }
        return means | statistics

    def _look(self, samples: Samples, first: Tensor) -> tuple[Output, Sequence[Output]]:
        """All T+1 rows under the parameters before the update; images in parts, to bound memory.

        ``first`` are the transitions that are learned from first, under the same parameters: where
        images have been looked at one by one, what the network said of them is given as well, with
        its gradient, and saves another look.
        """
        if self.images and not self.model.state_shapes:
            return self._look_and_keep(samples, first)
        rows, columns = samples.start.shape
        width = self._width(rows) if self.images else columns
        with torch.no_grad():
            looks = []
            for begin in range(0, columns, width):
                part = samples.columns(begin, min(begin + width, columns))
                looks.append(self.model.evaluate(part.observation, part.state, part.start))
            parameters, value = (
                torch.cat([look.parameters for look in looks], 1),
                torch.cat([look.value for look in looks], 1),
            )
            state = {
                name: torch.cat([look.state[name] for look in looks], 1) for name in looks[0].state
            }
        return Output(parameters, value, state), ()

    def _look_and_keep(self, samples: Samples, first: Tensor) -> tuple[Output, Sequence[Output]]:
        rows, columns = samples.start.shape
        others = torch.ones(rows * columns, dtype=torch.bool, device=first.device)
        others[first] = False
        observation = {name: leaf.flatten(0, 1) for name, leaf in samples.observation.items()}
        start = samples.start.flatten()

        def look(model: ActorCriticModel, places: Tensor) -> Output:
            chosen = {name: _rows(leaf, places).unsqueeze(0) for name, leaf in observation.items()}
            return model.evaluate(chosen, {}, start.index_select(0, places).unsqueeze(0))

        kept = self.crew.each(look, self._parts(first, 1))
        with torch.no_grad():
            rest = others.nonzero().squeeze(1)
            looks = [*kept, *self.crew.each(look, self._parts(rest, 1))]
            order = torch.cat([first, rest]).argsort()
            parameters = torch.cat([look.parameters for look in looks], 1)[0, order].view(
                rows, columns, -1
            )
            value = torch.cat([look.value for look in looks], 1)[0, order].view(rows, columns)
        return Output(parameters, value, {}), kept

    def _width(self, rows: int) -> int:
        """Columns of ``rows`` images each that are looked at together."""
        samples = CHUNK_SAMPLES if self.device.type == "cpu" else self._settings.minibatch_size
        return max(1, min(samples, self._settings.minibatch_size) // rows)

    def _prepare(
        self, samples: Samples, before: Output
    ) -> tuple[MinibatchTable, dict[str, Tensor]]:
        """Advantages, targets and weights, and how far the batch is from the policy."""
        distribution, settings, valid = self.model.distribution, self._settings, samples.valid_t
        with torch.no_grad():
            proximal = distribution.log_prob(
                distribution.masked(before.parameters[:-1], samples.mask), samples.action
            )
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
                reference, weight = (
                    proximal,
                    log_ratio.exp().clamp(max=settings.max_behaviour_weight),
                )
            table = MinibatchTable(
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
        """All columns of the table with a valid row, in an order drawn anew, in equal parts of
        about ``minibatch_size`` samples.
        """
        whole = bool(self.model.state_shapes)
        columns = (valid_t.any(0) if whole else valid_t.flatten()).nonzero().squeeze(1)
        count = columns.numel()
        parts = max(
            1,
            min(
                count,
                round(count * (valid_t.shape[0] if whole else 1) / self._settings.minibatch_size),
            ),
        )
        drawn = columns[
            torch.randperm(count, generator=self.generator).to(columns.device)
        ].tensor_split(parts)
        # A minibatch has no order. In that of memory, images that follow one another need not be
        # copied together.
        return tuple(part.sort().values for part in drawn) if self.images else drawn

    def _learn_from(
        self, table: MinibatchTable, columns: Tensor, kept: Sequence[Output], *, only: bool
    ) -> dict[str, Tensor]:
        """One optimiser step, perhaps the ``only`` one. Images are learned from in parts whose
        gradients add up; ``kept``: see `_look`.
        """
        if kept:
            table = table._replace(observation={})  # which are the bulk of a table
        parts = self._parts(columns, table.start.shape[0]) if self.images else (columns,)
        shares = self._shares(table, columns, parts)

        def learn(model: ActorCriticModel, index: int) -> dict[str, Tensor]:
            part = table.select(parts[index])
            output = (
                kept[index] if kept else model.evaluate(part.observation, part.state, part.start)
            )
            return self._add_gradient(part, output, shares[index])

        found = self.crew.each(learn, range(len(parts)))
        if len(found) > 1:
            weights = torch.stack([torch.as_tensor(share, device=self.device) for share in shares])
            found = [
                {
                    name: (torch.stack([each[name] for each in found]) * weights).sum()
                    for name in found[0]
                }
            ]
        return found[0] | {"grad_norm": self.descend(found[0]["loss"] if only else None)}

    def _parts(self, columns: Tensor, rows: int) -> tuple[Tensor, ...]:
        """Columns of ``rows`` images each, as equal parts as can be that `_width` allows, and one
        at least for everybody.
        """
        count = columns.numel()
        return columns.tensor_split(max(-(-count // self._width(rows)), min(self.crew.size, count)))

    def _shares(
        self, table: MinibatchTable, columns: Tensor, parts: Sequence[Tensor]
    ) -> list[Tensor | float]:
        """Of the valid transitions of ``columns``, how many are in each part."""
        if table.valid is None or len(parts) == 1:
            return [part.numel() / columns.numel() for part in parts]
        counts = table.valid.sum(0)
        total = counts[columns].sum()
        return [counts[part].sum() / total for part in parts]

    def _add_gradient(
        self, part: MinibatchTable, output: Output, share: Tensor | float
    ) -> dict[str, Tensor]:
        """Add ``share`` of the gradient of the mean over ``part`` to the buffer; means over
        ``part``.
        """
        settings, distribution = self._settings, self.model.distribution
        log_prob, entropy_t = distribution.evaluate(
            distribution.masked(output.parameters, part.mask), part.action
        )
        reference, weight, advantage_t, target_t, old_value = part.constants.unbind(-1)
        log_ratio = log_prob - reference
        policy = decoupled_ppo_loss(log_ratio, weight, advantage_t, part.valid, clip=settings.clip)
        value = value_loss(
            output.value, target_t, part.valid, old_value=old_value, clip=settings.value_clip
        )
        entropy = masked_mean(entropy_t, part.valid)
        loss = policy + self.value_cost * value - self.entropy_cost * entropy
        torch.autograd.backward(loss if share == 1.0 else loss * share)
        with torch.no_grad():
            clipped = ((log_ratio.exp() - 1.0).abs() > settings.clip).float()
            return {
                "loss": loss.detach(),
                "policy_loss": policy.detach(),
                "value_loss": value.detach(),
                "entropy": entropy.detach(),
                "clip_fraction": masked_mean(clipped, part.valid),
                "divergence": approximate_kl(log_ratio, part.valid),
            }


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """The rows of ``x`` at ``places``, which ascend; on a CPU a view where they follow one
    another.
    """
    if places.numel() and places.device.type == "cpu":
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == places.numel():
            return x[first : last + 1]
    return x.index_select(0, places)


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
