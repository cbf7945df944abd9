"""Losses, as means over valid rows.

The tensors of one call have the same shape. ``valid`` is boolean, or None for all rows. Advantages
and targets are constants: pass them without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST = -1e30


def masked_mean(x: Tensor, valid: Tensor | None, count: Tensor | None = None) -> Tensor:
    """Mean of ``x`` over the rows where ``valid``; 0 without such rows. Other rows have no
    influence.

    ``count``: the number of valid rows of a larger batch of which ``x`` is a part. The result is
    then this part's contribution to the mean over that batch.
    """
    if count is not None:
        return (x if valid is None else torch.where(valid, x, 0.0)).sum() / count
    if valid is None:
        return x.mean()
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def masked_largest(x: Tensor, valid: Tensor | None) -> Tensor:
    """Largest absolute value of ``x`` over the rows where ``valid``; 0 without such rows."""
    return (x if valid is None else torch.where(valid, x, 0.0)).abs().amax()


def policy_gradient_loss(
    log_prob: Tensor,
    advantage: Tensor,
    valid: Tensor | None = None,
    *,
    count: Tensor | None = None,
) -> Tensor:
    """``-mean(log_prob * advantage)``; its gradient is the policy gradient (A3C, arXiv
    1602.01783). ``count``: see `masked_mean`.
    """
    return -masked_mean(log_prob * advantage, valid, count)


def value_loss(
    value: Tensor,
    target: Tensor,
    valid: Tensor | None = None,
    *,
    old_value: Tensor | None = None,
    clip: float | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """``mean((value - target)^2) / 2``. ``count``: see `masked_mean`.

    With ``clip`` (as in OpenAI's PPO2 code) the larger of two errors counts: that of ``value``, and
    that of ``value`` clipped to within ``clip`` of ``old_value``.

    Raises:
        ValueError: ``clip`` without ``old_value``.
    """
    error = (value - target).square()
    if clip is not None:
        if old_value is None:
            raise ValueError("clip requires old_value, the value before the update")
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - target).square())
    return 0.5 * masked_mean(error, valid, count)


def ppo_loss(
    log_ratio: Tensor, advantage: Tensor, valid: Tensor | None = None, *, clip: float
) -> Tensor:
    """PPO's clipped objective, negated (arXiv 1707.06347, eq. 7).

    ``-mean(min(r A, clip(r, 1-e, 1+e) A))`` with r = exp(log_ratio).
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
    """PPO for data of an older policy (arXiv 2110.00641, eq. 9): clipped around a proximal policy.

    ``log_ratio`` is the log of new over *proximal* probability. ``behaviour_weight`` is proximal
    over behaviour probability, a constant. Where it is 1, the loss is `ppo_loss`.
    """
    return -masked_mean(behaviour_weight * _clipped_surrogate(log_ratio, advantage, clip), valid)


def _clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


def normalised(x: Tensor, valid: Tensor) -> Tensor:
    """``x`` with mean 0 and standard deviation 1 over valid rows, 0 elsewhere. A constant becomes
    0.
    """
    count = valid.sum().clamp(min=1)
    mean = torch.where(valid, x, 0.0).sum() / count
    centred = torch.where(valid, x - mean, 0.0)
    return centred / ((centred.square().sum() / count).sqrt() + 1e-8)


def approximate_kl(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """KL(p || q) in nats from samples of p, with ``log_ratio`` = log q - log p.

    The mean of ``exp(l) - 1 - l`` is unbiased and never negative (Schulman, "Approximating KL
    divergence", 2020, k3). The ratio is limited to e^20, so that one improbable sample cannot
    overflow it.
    """
    bounded = log_ratio.clamp(max=20.0)
    return masked_mean(torch.expm1(bounded) - bounded, valid)


def effective_sample_ratio(log_ratio: Tensor, valid: Tensor | None = None) -> Tensor:
    """Effective sample size of the weights ``exp(log_ratio)`` over their number, in (0, 1].

    The result is 1 if all weights are equal, and 0 without valid rows.
    """
    if valid is None:
        weight = torch.exp(log_ratio - log_ratio.max())
        return weight.sum().square() / (weight.square().sum() * weight.numel())
    largest = torch.where(valid, log_ratio, _LOWEST).max()
    weight = torch.where(valid, torch.exp(log_ratio - largest), 0.0)
    return weight.sum().square() / (weight.square().sum() * valid.sum()).clamp(min=1.0)


def explained_variance(value: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """``1 - var(target - value) / var(target)`` over valid rows: 1 is perfect, 0 as a constant."""
    spread = _variance(target, valid)
    return 1.0 - _variance(target - value, valid) / spread.clamp(min=1e-12)


def _variance(x: Tensor, valid: Tensor | None) -> Tensor:
    return masked_mean((x - masked_mean(x, valid)).square(), valid)
