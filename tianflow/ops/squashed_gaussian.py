"""A Gaussian squashed into -1..1 by tanh (SAC, arXiv 1801.01290, appendix C)."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from tianflow.ops.distributions import DiagonalGaussian

_LOG_2 = math.log(2.0)
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """``tanh(mean + exp(log_std) noise)`` and its log-probability, differentiable in both
    parameters.

    All inputs are [..., D]; ``noise`` is standard normal. The action is [..., D] in -1..1, the
    log-probability [...] in nats.
    """
    before = mean + log_std.exp() * noise
    return before.tanh(), (_normal(noise, log_std) - log_slope(before)).sum(-1)


def squashed_log_prob(before: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability of ``tanh(before)`` in nats [...], all inputs [..., D].

    ``log N(before) - log(1 - tanh(before)^2)`` (eq. 21).
    """
    noise = (before - mean) * (-log_std).exp()
    return (_normal(noise, log_std) - log_slope(before)).sum(-1)


def squashed_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) in nats [...] of two squashed Gaussians, exact.

    ``p`` and ``q`` are [..., 2D], means and log standard deviations side by side. The divergence is
    that of the Gaussians before squashing, because tanh is the same bijection for both.
    """
    return DiagonalGaussian((p.shape[-1] // 2,)).kl(p, q)


def log_slope(x: Tensor) -> Tensor:
    """``log(1 - tanh(x)^2)`` as ``2 (log 2 - x - softplus(-2 x))``, exact where tanh rounds to
    1.
    """
    return 2.0 * (_LOG_2 - x - functional.softplus(-2.0 * x))


def _normal(noise: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * noise.square() - log_std - _HALF_LOG_2PI
