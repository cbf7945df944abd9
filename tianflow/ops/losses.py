"""Losses, as means over valid rows. All tensors of one call have one shape; ``valid`` is boolean,
or None for all rows.

Advantages and targets are constants here: give them without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST = -1e30


def masked_mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Mean of ``x`` over the rows where ``valid``; 0 when there is none. What lies in other rows
    does not matter.
    """
    if valid is None:
        return x.mean()
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def policy_gradient_loss(
    log_prob: Tensor, advantage: Tensor, valid: Tensor | None = None
) -> Tensor:
    """``-mean(log_prob * advantage)``: its gradient is the policy gradient (A3C, arXiv
    1602.01783).
    """
    return -masked_mean(log_prob * advantage, valid)


def value_loss(
    value: Tensor,
    target: Tensor,
    valid: Tensor | None = None,
    *,
    old_value: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """``mean((value - target)^2) / 2``.

    With ``clip`` (the form of OpenAI's PPO2 code) the worse of the error of ``value`` and of
    ``value`` held within ``clip`` of ``old_value`` counts.

    Raises:
        ValueError: ``clip`` without ``old_value``.
    """
    error = (value - target).square()
    if clip is not None:
        if old_value is None:
            raise ValueError("clip needs old_value, what the value was before the update")
        held = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (held - target).square())
    return 0.5 * masked_mean(error, valid)


def ppo_loss(
    log_ratio: Tensor, advantage: Tensor, valid: Tensor | None = None, *, clip: float
) -> Tensor:
    """PPO's clipped objective, negated (arXiv 1707.06347, eq. 7): ``-mean(min(r A, clip(r, 1-e,
    1+e) A))``, r = exp(log_ratio).
    """
    return -masked_mean(_clipped_surrogate(log_ratio, advantage, clip), valid)


def decoupled_ppo_loss(
    log_ratio: Tensor,
    behaviour_weight: Tensor,
    advantage: Tensor,
    valid: Tensor | None = None,
    *,
    clip: float,
) -> Tensor:
    """PPO for data of an older policy (arXiv 2110.00641, eq. 9): the clip is around a proximal
    policy, not the behaviour.

    ``log_ratio`` is the log of new over *proximal* probability; ``behaviour_weight`` is proximal
    over behaviour probability, a constant. Where it is 1 this is `ppo_loss`.
    """
    return -masked_mean(behaviour_weight * _clipped_surrogate(log_ratio, advantage, clip), valid)


def _clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


def normalised(x: Tensor, valid: Tensor) -> Tensor:
    """``x`` with mean 0 and standard deviation 1 over valid rows; 0 elsewhere. A constant ``x``
    becomes 0.
    """
    count = valid.sum().clamp(min=1)
    mean = torch.where(valid, x, 0.0).sum() / count
    centred = torch.where(valid, x - mean, 0.0)
    return centred / ((centred.square().sum() / count).sqrt() + 1e-8)


def approximate_kl(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """KL(p || q) in nats from samples of p, ``log_ratio`` = log q - log p.

    The mean of ``exp(l) - 1 - l`` is unbiased and never negative (Schulman, "Approximating KL
    divergence", 2020, k3). The ratio is bounded at e^20 so that one improbable sample cannot
    overflow it.
    """
    bounded = log_ratio.clamp(max=20.0)
    return masked_mean(torch.expm1(bounded) - bounded, valid)


def effective_sample_ratio(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """Effective sample size of the importance weights ``exp(log_ratio)`` over their number: 1 when
    all are equal, in (0, 1]; 0 when no row is valid.
    """
    largest = torch.where(valid, log_ratio, _LOWEST).max()
    weight = torch.where(valid, torch.exp(log_ratio - largest), 0.0)
    return weight.sum().square() / (weight.square().sum() * valid.sum()).clamp(min=1.0)


def explained_variance(value: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """``1 - var(target - value) / var(target)`` over valid rows: 1 is perfect, 0 no better than a
    constant.
    """
    spread = _variance(target, valid)
    return 1.0 - _variance(target - value, valid) / spread.clamp(min=1e-12)


def _variance(x: Tensor, valid: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, valid)).square(), valid)
