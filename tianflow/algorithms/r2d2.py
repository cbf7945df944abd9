"""R2D2 (Kapturowski et al., ICLR 2019): recurrent Q-learning from replayed windows, with stored
states, burn-in and value rescaling.
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
    rows_after,
    sequence_priority,
    taken,
    weighted_loss,
)

Unroll = Callable[[Tree, Tree, Tensor], QOutput]
"""A network on a sequence: {leaf: [T, C, ...]}, {leaf: [C, ...]}, start [T, C] -> values [T, C, A]
and the states after each step.
"""


class R2D2Learner(QLearner[R2D2Settings]):
    """The learner's half.

    The first ``burn_in`` steps of a window only bring its stored state up to date with the current
    weights: no loss, no gradient. A window that begins with its episode has the right state
    already, zero, so all its steps are learned from.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, device: torch.device) -> None:
        settings = config.algorithm
        assert isinstance(settings, R2D2Settings)
        super().__init__(config, spec, settings, device)

    def look(self, arrays: Tree) -> UpdateParts:
        settings, valid = self.settings, arrays["valid"]
        observation, state = self.model.observations(harmless(arrays)), subtree(arrays, "state/")
        fresh, burn_in = arrays["start"][0], settings.burn_in
        values = unrolled(
            partial(self.forward, self.model.network), observation, state, fresh, burn_in
        )
        learned = learned_rows(valid, fresh, burn_in)
        with torch.no_grad():
            valued = self.forward(
                self.target.network, observation, state, only_first(fresh, valid.shape[0] + 1)
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
            sequence_priority(size, learned, eta=settings.priority_eta),
        )

    def observed(self, arrays: Tree) -> tuple[Tree, Tensor]:
        return subtree(arrays, "obs/"), arrays["valid"]


def harmless(arrays: Tree) -> dict[str, Tensor]:
    """Observations {leaf: [L+1, n, ...]}, those that mean nothing set to 0: after a termination,
    and in padding.

    They have no part in any loss, but a gradient of 0 through a number too large would be no
    number. uint8 is left alone.
    """
    goes_on = arrays["valid"] & ~arrays["terminated"]
    seen = torch.cat([torch.ones_like(goes_on[:1]), goes_on])

    def wiped(leaf: Tensor) -> Tensor:
        return (
            leaf
            if leaf.dtype == torch.uint8
            else leaf.masked_fill(~seen.view(*seen.shape, *[1] * (leaf.dim() - 2)), 0)
        )

    return {name: wiped(leaf) for name, leaf in subtree(arrays, "obs/").items()}


def learned_rows(valid: Tensor, fresh: Tensor, burn_in: int) -> Tensor:
    """Rows that are learned from, bool [L, n]: the valid ones after burn-in, and all valid ones of
    windows that begin an episode.
    """
    row = torch.arange(valid.shape[0], device=valid.device).unsqueeze(1)
    return valid & (fresh | (row >= burn_in))


def only_first(fresh: Tensor, rows: int) -> Tensor:
    """``start`` [rows, n] of windows, which never cross an episode: at most the first row begins
    one.
    """
    start = fresh.new_zeros(rows, fresh.shape[0])
    start[0] = fresh
    return start


def unrolled(
    network: Unroll, observation: Tree, state: Tree, fresh: Tensor, burn_in: int
) -> Tensor:
    """Values of all rows [L+1, n, A], from ``state`` [n, ...] before the first; 0 in rows that are
    burn-in.

    Windows that are not ``fresh`` (bool [n]: they begin an episode) run through their first
    ``burn_in`` rows without gradient, and their state goes on from there as a constant.
    """
    rows, columns = next(iter(observation.values())).shape[0], fresh.shape[0]
    if burn_in == 0:
        return network(observation, state, only_first(fresh, rows)).values
    first = None
    for part, learns in (
        ((~fresh).nonzero().squeeze(1), False),
        (fresh.nonzero().squeeze(1), True),
    ):
        if part.numel() == 0:
            continue
        head = {
            name: leaf[:burn_in] if part.numel() == columns else leaf[:burn_in, part]
            for name, leaf in observation.items()
        }
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            output = network(
                head,
                {name: leaf[part] for name, leaf in state.items()},
                only_first(fresh[part], burn_in),
            )
        state = {
            name: leaf.index_copy(0, part, output.state[name][-1]) for name, leaf in state.items()
        }
        first = output.values.new_zeros(burn_in, columns, output.values.shape[-1])
        if learns:
            first = first.index_copy(1, part, output.values)
    assert first is not None  # a batch has at least one window
    rest = {name: leaf[burn_in:] for name, leaf in observation.items()}
    return torch.cat(
        [first, network(rest, state, torch.zeros_like(only_first(fresh, rows - burn_in))).values]
    )


class R2D2:
    """Entry point ``r2d2``; `tianflow.interfaces.AlgorithmFactory`."""

    settings: type = R2D2Settings

    @staticmethod
    def make_policy(config: Config, spec: EnvironmentSpec) -> QPolicy:
        """The actor's half: DQN's, with memory."""
        return QPolicy(config, spec)

    @staticmethod
    def make_learner(config: Config, spec: EnvironmentSpec, device: torch.device) -> R2D2Learner:
        """The learner's half, on ``device``."""
        return R2D2Learner(config, spec, device)
