"""PPO (arXiv 1707.06347) with GAE, and the decoupled objective (arXiv 2110.00641) for stale data.

The proximal policy is the one at the start of the update. The clip range is around the proximal
policy, and each sample has the weight proximal over behaviour probability, at most
``max_behaviour_weight``. On fresh data every weight is 1, and the objective is that of ordinary
PPO.
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
from tianflow.algorithms.common.scalars import Statistics
from tianflow.config.model import Config, PPOSettings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks import Output
from tianflow.ops.losses import (
    approximate_kl,
    decoupled_ppo_loss,
    masked_mean,
    value_loss,
)
from tianflow.ops.returns import gae

CHUNK_SAMPLES = 256
"""Number of images per evaluation on a CPU, so that intermediate results fit into its caches."""


MEANS = ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "divergence")
"""Results of a minibatch, each a mean over its samples."""


class MinibatchTable(NamedTuple):
    """Table whose columns minibatches select, [rows, C, ...] (``state`` [C, ...]).

    Columns are whole fragments, or all transitions in one row. ``constants`` [rows, C, 5] do not
    change during an update: reference log-probability of the clip, behaviour weight, advantage,
    value target, and value before the update. One tensor holds them, so that one operation selects
    them. ``valid`` is None if only valid columns are selected.
    """

    observation: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    start: Tensor
    action: Tensor
    mask: Tensor | None
    constants: Tensor
    valid: Tensor | None

    def select(self, columns: Tensor) -> MinibatchTable:
        """The table of ``columns``."""
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
        """The transitions as one row, for networks without recurrent state."""

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

    Networks without recurrent state train on single transitions, drawn from all valid ones.
    Recurrent networks train on whole columns, so that their state is recomputed through the
    fragment. Advantages are normalised once, over all valid transitions.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        settings = config.algorithm
        assert isinstance(settings, PPOSettings)
        self._settings = settings

    def set_settings(self, settings: PPOSettings, updates: int) -> None:  # noqa: ARG002 - the caller computes schedules
        """Set the clip range of the next update."""
        self._settings = settings

    def update(self, samples: Samples, should_stop: Callable[[], bool]) -> Statistics | None:
        minibatches = self._minibatches(samples.valid_t)
        before, reusable = self._evaluate(samples, minibatches[0])
        table, statistics = self._prepare(samples, before)
        results: list[dict[str, Tensor]] = []
        only = self._settings.epochs * len(minibatches) == 1
        for epoch in range(self._settings.epochs):
            divergences = []
            for columns in self._minibatches(samples.valid_t) if epoch else minibatches:
                if should_stop():
                    return None
                results.append(self._train_on(table, columns, reusable, only=only))
                divergences.append(results[-1].pop("divergence"))
                reusable = ()
            if (
                self._settings.target_kl is not None
                and torch.stack(divergences).mean().item() > self._settings.target_kl
            ):
                break
        means = {
            name: torch.stack([result[name] for result in results]).mean() for name in results[0]
        }
        # of the last epoch, which ``target_kl`` compares
        return means | statistics | {"approx_kl": torch.stack(divergences).mean()}

    def _evaluate(self, samples: Samples, first: Tensor) -> tuple[Output, Sequence[Output]]:
        """Evaluate all T+1 rows with the parameters before the update; images in parts, to limit
        memory.

        ``first`` are the transitions of the first minibatch, which uses the same parameters. If
        images are evaluated transition by transition, their outputs are returned with gradients, to
        be reused.
        """
        if self.images and not self.model.state_shapes:
            return self._evaluate_transitions(samples, first)
        rows, columns = samples.start.shape
        width = self._width(rows) if self.images else columns
        with torch.no_grad():
            outputs = []
            for begin in range(0, columns, width):
                part = samples.columns(begin, min(begin + width, columns))
                outputs.append(self.model.evaluate(part.observation, part.state, part.start))
            parameters, value = (
                torch.cat([output.parameters for output in outputs], 1),
                torch.cat([output.value for output in outputs], 1),
            )
            state = {
                name: torch.cat([output.state[name] for output in outputs], 1)
                for name in outputs[0].state
            }
        return Output(parameters, value, state), ()

    def _evaluate_transitions(
        self, samples: Samples, first: Tensor
    ) -> tuple[Output, Sequence[Output]]:
        rows, columns = samples.start.shape
        others = torch.ones(rows * columns, dtype=torch.bool, device=first.device)
        others[first] = False
        observation = {name: leaf.flatten(0, 1) for name, leaf in samples.observation.items()}
        start = samples.start.flatten()

        def evaluate(model: ActorCriticModel, places: Tensor) -> Output:
            chosen = {name: _rows(leaf, places).unsqueeze(0) for name, leaf in observation.items()}
            return model.evaluate(chosen, {}, start.index_select(0, places).unsqueeze(0))

        reusable = self.parallel.map(evaluate, self._parts(first, 1))
        with torch.no_grad():
            rest = others.nonzero().squeeze(1)
            outputs = [*reusable, *self.parallel.map(evaluate, self._parts(rest, 1))]
            order = torch.cat([first, rest]).argsort()
            parameters = torch.cat([output.parameters for output in outputs], 1)[0, order].view(
                rows, columns, -1
            )
            value = torch.cat([output.value for output in outputs], 1)[0, order].view(rows, columns)
        return Output(parameters, value, {}), reusable

    def _width(self, rows: int) -> int:
        """Number of columns, of ``rows`` images each, that are evaluated together."""
        samples = CHUNK_SAMPLES if self.device.type == "cpu" else self._settings.minibatch_size
        return max(1, min(samples, self._settings.minibatch_size) // rows)

    def _prepare(self, samples: Samples, before: Output) -> tuple[MinibatchTable, Statistics]:
        """Advantages, targets and weights, and statistics of the difference between batch and
        policy.
        """
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
                advantage_t = self.normalised(advantage_t, valid)
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
        return table, batch_statistics(log_ratio, v_t, target_t, valid, self.ranks)

    def _minibatches(self, valid_t: Tensor) -> tuple[Tensor, ...]:
        """All columns with a valid row, in random order, in equal parts. Those of all ranks
        together have about ``minibatch_size`` samples.
        """
        whole = bool(self.model.state_shapes)
        columns = (valid_t.any(0) if whole else valid_t.flatten()).nonzero().squeeze(1)
        count = columns.numel()
        of_all = int(self.ranks.add(torch.tensor(count, device=self.device)))
        parts = max(
            1,
            min(
                of_all,
                round(of_all * (valid_t.shape[0] if whole else 1) / self._settings.minibatch_size),
            ),
        )
        drawn = columns[
            torch.randperm(count, generator=self.generator).to(columns.device)
        ].tensor_split(parts)
        # The order within a minibatch is irrelevant. In memory order, adjacent images need no copy.
        return tuple(part.sort().values for part in drawn) if self.images else drawn

    def _train_on(
        self, table: MinibatchTable, columns: Tensor, reusable: Sequence[Output], *, only: bool
    ) -> dict[str, Tensor]:
        """Take one optimiser step, possibly the ``only`` one of its update.

        Images are processed in parts whose gradients add up. ``reusable``: see `_evaluate`.
        """
        if reusable:
            table = table._replace(observation={})  # not needed, and most of the table
        parts = self._parts(columns, table.start.shape[0])
        shares = self._shares(table, columns, parts)

        def learn(model: ActorCriticModel, index: int) -> dict[str, Tensor]:
            part = table.select(parts[index])
            output = (
                reusable[index]
                if reusable
                else model.evaluate(part.observation, part.state, part.start)
            )
            return self._add_gradient(part, output, shares[index])

        found = self.parallel.map(learn, range(len(parts)))
        means = (
            found[0] if len(found) == 1 and self.ranks.size == 1 else self._summed(found, shares)
        )
        return means | {"grad_norm": self.descend(means["loss"] if only else None)}

    def _summed(
        self, found: Sequence[dict[str, Tensor]], shares: Sequence[Tensor | float]
    ) -> dict[str, Tensor]:
        """Means over a minibatch, from those over its parts and their ``shares`` of it."""
        totals = [torch.zeros((), device=self.device)] * len(MEANS)
        if found:
            weights = torch.stack([torch.as_tensor(share, device=self.device) for share in shares])
            totals = [
                (torch.stack([each[name] for each in found]) * weights).sum() for name in MEANS
            ]
        return dict(zip(MEANS, self.ranks.add_all(*totals), strict=True))

    def _parts(self, columns: Tensor, rows: int) -> tuple[Tensor, ...]:
        """``columns`` in nearly equal parts. Images: at most `_width`, and at least one part per
        thread. A rank may have no columns, and then no part.
        """
        count = columns.numel()
        if not count or not self.images:
            return (columns,) if count else ()
        return columns.tensor_split(
            max(-(-count // self._width(rows)), min(self.parallel.size, count))
        )

    def _shares(
        self, table: MinibatchTable, columns: Tensor, parts: Sequence[Tensor]
    ) -> list[Tensor | float]:
        """Share of the minibatch's valid transitions, ``columns`` of all ranks, in each part."""
        if self.ranks.size == 1 and (table.valid is None or len(parts) == 1):
            return [part.numel() / columns.numel() for part in parts]
        counts = (
            torch.ones(table.start.shape[1], device=self.device)
            if table.valid is None
            else table.valid.sum(0)
        )
        total = self.ranks.add(counts[columns].sum())
        return [counts[part].sum() / total for part in parts]

    def _add_gradient(
        self, part: MinibatchTable, output: Output, share: Tensor | float
    ) -> dict[str, Tensor]:
        """Add ``share`` of the gradient of the mean over ``part`` to the buffer. Returns means over
        it.
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
    """The rows of ``x`` at ascending ``places``; on a CPU a view if they are adjacent."""
    if places.numel() and places.device.type == "cpu":
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == places.numel():
            return x[first : last + 1]
    return x.index_select(0, places)


class PPO:
    """Entry point ``ppo``; `tianflow.interfaces.AlgorithmFactory`."""

    settings, make_policy, make_learner = PPOSettings, ActorCriticPolicy, PPOLearner
