"""Q-learning: n-step targets, value rescaling, errors and their priorities.

Rows are time, ``[T, ...]``, as in `tianflow.ops.returns`. Targets carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tianflow.core.payloads import PRIORITY_EPSILON
from tianflow.ops.returns import NStep

MASKED_VALUE = -1e9
"""Value of a forbidden action: lower than any other, and finite."""


def masked_values(q: Tensor, mask: Tensor | None) -> Tensor:
    """``q`` [..., A] with `MASKED_VALUE` where ``mask`` is False (bool, same shape; None allows
    all).
    """
    return q if mask is None else q.masked_fill(~mask, MASKED_VALUE)


def taken(q: Tensor, action: Tensor) -> Tensor:
    """Values of the chosen actions: [..., A], int64 [...] -> [...]."""
    return q.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def double_q_value(selecting: Tensor, valuing: Tensor, mask: Tensor | None = None) -> Tensor:
    """Value of the action that another network selects (double Q-learning, arXiv 1509.06461, eq.
    4).

    ``valuing[argmax_a selecting]`` over allowed actions: two [..., A] -> [...]. If ``selecting`` is
    ``valuing``, this is the maximum of ordinary Q-learning.
    """
    return taken(valuing, masked_values(selecting, mask).argmax(-1))


def rows_after(rows: Tensor, steps_t: Tensor) -> Tensor:
    """``rows[t + steps_t]`` for each row and column: [T+1, C], int64 [T, C] -> [T, C]."""
    t = torch.arange(steps_t.shape[0], device=steps_t.device).unsqueeze(1)
    return rows.gather(0, t + steps_t)


def n_step_target(step: NStep, bootstrap: Tensor, *, rescaling: float | None = None) -> Tensor:
    """Target of a state-action value, [...], from n rewards and the value n steps later.

    ``reward_t + discount_t * bootstrap``. Where the discount is 0, after a termination,
    ``bootstrap`` has no influence. With ``rescaling`` values are h(returns): ``h(reward_t +
    discount_t h^-1(bootstrap))`` (R2D2, ICLR 2019, section 2.3).
    """
    value = bootstrap if rescaling is None else unrescaled(bootstrap, rescaling)
    target = step.reward_t + torch.where(step.discount_t > 0.0, step.discount_t * value, 0.0)
    return (target if rescaling is None else rescaled(target, rescaling)).detach()


def rescaled(x: Tensor, epsilon: float) -> Tensor:
    """``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x`` (arXiv 1805.11593, proposition A.2).

    ``sqrt(|x| + 1) - 1`` is computed as ``|x| / (sqrt(|x| + 1) + 1)``, without cancellation near 0.
    """
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + epsilon * x


def unrescaled(y: Tensor, epsilon: float) -> Tensor:
    """The inverse of `rescaled`.

    ``sign(y) (((sqrt(1 + 4 epsilon (|y| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1)``. With ``s``
    the square root and ``z`` the quotient, ``z - 1 = |y| (2 - 4 epsilon / (s + 1 + 2 epsilon)) / (s
    + 1)``, and the result is ``(z - 1) (z - 1 + 2)``. Without cancellation, float32 retains its
    precision near 0.
    """
    s = (1.0 + 4.0 * epsilon * (y.abs() + 1.0 + epsilon)).sqrt()
    below = y.abs() * (2.0 - 4.0 * epsilon / (s + (1.0 + 2.0 * epsilon))) / (s + 1.0)
    return y.sign() * below * (below + 2.0)


def huber(error: Tensor, delta: float | None) -> Tensor:
    """``error^2 / 2`` up to ``delta``, ``delta (|error| - delta / 2)`` above it (Huber, 1964).

    With ``delta`` None the loss is squared everywhere.
    """
    if delta is None:
        return 0.5 * error.square()
    size = error.abs()
    within = size.clamp(max=delta)
    return within * (size - 0.5 * within)


def weighted_loss(error: Tensor, weight: Tensor, learned: Tensor, *, delta: float | None) -> Tensor:
    """Mean of ``weight * huber(error)`` over the rows where ``learned``.

    Source: PER, arXiv 1511.05952, algorithm 1, line 12. ``error`` and ``learned`` (bool) are [...,
    C]; ``weight`` [C] is the importance weight of each item. The result is 0 without learned rows.
    """
    losses = torch.where(learned, weight * huber(error, delta), 0.0)
    return losses.sum() / learned.sum().clamp(min=1)


def sequence_priority(error: Tensor, learned: Tensor, *, eta: float) -> Tensor:
    """``eta max_t |error_t| + (1 - eta) mean_t |error_t|`` over the rows where ``learned``.

    Source: R2D2, ICLR 2019, section 2.3. Two [T, C] (``learned`` bool) -> [C]; 0 without learned
    rows.
    """
    size = torch.where(learned, error.abs(), 0.0)
    mean = size.sum(0) / learned.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1.0 - eta) * mean


def priority(size: Tensor, learned: Tensor) -> Tensor:
    """``|error| + epsilon`` of the items where ``learned`` (bool), 0 of the others; all [C].

    Source: PER, arXiv 1511.05952, section 3.3. An item whose error is 0 remains in the draws.
    """
    return torch.where(learned, size + PRIORITY_EPSILON, 0.0)
