"""R2D2 (Kapturowski et al., ICLR 2019): recurrent Q-learning from replayed windows.

It uses stored states, burn-in and value rescaling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tianflow.algorithms.common.off_policy import UpdateParts, summed
from tianflow.algorithms.common.q_learning import QLearner, QPolicy
from tianflow.algorithms.common.update import Tree, subtree
from tianflow.config.model import Config
from tianflow.config.off_policy import R2D2Settings
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks.q_values import QOutput
from tianflow.ops.losses import masked_mean
from tianflow.ops.q_values import (
    double_q_value,
    n_step_target,
    priority,
    rows_after,
    sequence_priority,
    taken,
    weighted_loss,
)
from tianflow.ops.transforms import filled, indexed

Unroll = Callable[[Tree, Tree, Tensor], QOutput]
"""A network on a sequence: {leaf: [T, C, ...]}, {leaf: [C, ...]}, start [T, C] -> `QOutput`."""


class R2D2Learner(QLearner[R2D2Settings]):
    """Learner of R2D2.

    The first ``burn_in`` steps of a window only update its stored state with the current weights,
    without loss or gradient. A window that begins with its episode has the correct state, zero, so
    all of its steps are trained on.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings = config.algorithm
        assert isinstance(settings, R2D2Settings)
        super().__init__(config, spec, settings, device)

    def compute_gradients(self, arrays: Tree) -> UpdateParts:
        settings, valid = self.settings, arrays["valid"]
        observation, state = (
            self.model.observations(zero_undefined(arrays)),
            subtree(arrays, "state/"),
        )
        fresh, burn_in = arrays["start"][0], settings.burn_in
        values = unroll(
            partial(self.forward, self.model.network), observation, state, fresh, burn_in
        )
        learned = trained_rows(valid, fresh, burn_in)
        with torch.no_grad():
            valued = self.forward(
                self.target.network, observation, state, first_row(fresh, valid.shape[0] + 1)
            ).values
            bootstrap = double_q_value(
                values.detach() if settings.double else valued, valued, arrays.get("action_mask")
            )
            step = summed(arrays, discount=settings.discount, n=settings.n_step)
            target = n_step_target(
                step, rows_after(bootstrap, step.steps_t), rescaling=settings.value_rescaling
            )
        value = taken(values[:-1], arrays["action"])
        error = target - value
        loss = weighted_loss(error, arrays["weight"], learned, delta=settings.huber_delta)
        torch.autograd.backward(loss)
        size = error.detach().abs()
        statistics = {
            "loss": loss.detach(),
            "td_error": masked_mean(size, learned),
            "q_value": masked_mean(value.detach(), learned),
        }
        return UpdateParts(
            learned.sum(),
            {"adam": self.model.norm()},
            statistics,
            priority(sequence_priority(size, learned, eta=settings.priority_eta), learned.any(0)),
        )

    def normaliser_input(self, arrays: Tree) -> tuple[Tree, Tensor]:
        return subtree(arrays, "obs/"), arrays["valid"]


def zero_undefined(arrays: Tree) -> dict[str, Tensor]:
    """Observations {leaf: [L+1, n, ...]} with undefined ones set to 0: after a termination, in
    padding.

    They are not part of any loss, but a zero gradient times an infinite value would be NaN. uint8
    leaves stay unchanged.
    """
    continues = arrays["valid"] & ~arrays["terminated"]
    defined = torch.cat([torch.ones_like(continues[:1]), continues])

    return {
        name: leaf if leaf.dtype == torch.uint8 else filled(leaf, ~defined)
        for name, leaf in subtree(arrays, "obs/").items()
    }


def trained_rows(valid: Tensor, fresh: Tensor, burn_in: int) -> Tensor:
    """Trained rows, bool [L, n]: valid ones after burn-in, or all valid ones at an episode
    start.
    """
    row = torch.arange(valid.shape[0], device=valid.device).unsqueeze(1)
    return valid & (fresh | (row >= burn_in))


def first_row(fresh: Tensor, rows: int) -> Tensor:
    """``start`` [rows, n] of windows, which never cross an episode: True only in the first row."""
    start = fresh.new_zeros(rows, fresh.shape[0])
    start[0] = fresh
    return start


def unroll(network: Unroll, observation: Tree, state: Tree, fresh: Tensor, burn_in: int) -> Tensor:
    """Values of all rows [L+1, n, A] from ``state`` [n, ...] before the first; 0 in burn-in rows.

    ``fresh`` (bool [n]) marks windows that begin an episode. The others pass through their first
    ``burn_in`` rows without gradient, and continue from a constant state.
    """
    rows, columns = next(iter(observation.values())).shape[0], fresh.shape[0]
    if burn_in == 0:
        return network(observation, state, first_row(fresh, rows)).values
    first = None
    for part, trained in (
        ((~fresh).nonzero().squeeze(1), False),
        (fresh.nonzero().squeeze(1), True),
    ):
        if part.numel() == 0:
            continue
        head = {
            name: leaf[:burn_in] if part.numel() == columns else indexed(leaf, slice(burn_in), part)
            for name, leaf in observation.items()
        }
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            output = network(
                head,
                {name: leaf[part] for name, leaf in state.items()},
                first_row(fresh[part], burn_in),
            )
        state = {
            name: leaf.index_copy(0, part, output.state[name][-1]) for name, leaf in state.items()
        }
        first = output.values.new_zeros(burn_in, columns, output.values.shape[-1])
        if trained:
            first = first.index_copy(1, part, output.values)
    assert first is not None  # a batch has at least one window
    rest = {name: leaf[burn_in:] for name, leaf in observation.items()}
    return torch.cat(
        [first, network(rest, state, torch.zeros_like(first_row(fresh, rows - burn_in))).values]
    )


class R2D2:
    """Entry point ``r2d2``; `tianflow.interfaces.AlgorithmFactory`. Its policy is DQN's."""

    settings, make_policy, make_learner = R2D2Settings, QPolicy, R2D2Learner
