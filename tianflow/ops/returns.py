"""Returns and advantages: GAE, n-step, A3C's returns and V-trace, as one backward recursion.

All tensors are time first, ``[T, ...]``. Index ``t`` is the transition from ``obs[t]``:

- ``r_t``: its reward,
- ``discount_t``: gamma, or 0 where the episode terminated,
- ``v_t``: V(obs[t]),
- ``v_tp1``: V(observation after the transition, before any reset); a truncated step bootstraps from
  it,
- ``done_t``: terminated or truncated. The recursion is cut there, because row t+1 belongs to
  another episode,
- ``valid_t``: False on rows without a transition (the reset step of NEXT_STEP autoreset, rows past
  the length of a cut fragment). They contribute nothing, and the row before them bootstraps from
  its own ``v_tp1``.

Results carry no gradient. They have the dtype of ``r_t`` (float32 or float64) and its device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Advantages(NamedTuple):
    """``advantage_t`` and ``target_t`` (the target of ``v_t``), both [T, ...].

    Invalid rows have 0 and ``v_t``.
    """

    advantage_t: Tensor
    target_t: Tensor


class NStep(NamedTuple):
    """n-step transitions: target = ``reward_t + discount_t * V(observation after steps_t steps)``.

    ``steps_t`` is int64. All three are 0 on invalid rows.
    """

    reward_t: Tensor
    discount_t: Tensor
    steps_t: Tensor


def gae(
    *,
    r_t: Tensor,
    discount_t: Tensor,
    v_t: Tensor,
    v_tp1: Tensor,
    done_t: Tensor,
    valid_t: Tensor,
    lambda_: float,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16).

    ``delta_t = r_t + discount_t v_tp1 - v_t``;  ``A_t = delta_t + discount_t lambda (1 - done_t)
    A_{t+1}``.

    Raises:
        ValueError: shapes differ.
    """
    _check_shapes(
        r_t=r_t, discount_t=discount_t, v_t=v_t, v_tp1=v_tp1, done_t=done_t, valid_t=valid_t
    )
    with torch.no_grad():
        delta_t = torch.where(valid_t, r_t + discount_t * v_tp1 - v_t, 0.0)
        decay_t = torch.where(valid_t & ~done_t, discount_t * lambda_, 0.0)
        advantage_t = _accumulate(delta_t, decay_t)
        return Advantages(advantage_t, advantage_t + v_t)


def actor_critic_returns(
    *, r_t: Tensor, discount_t: Tensor, v_t: Tensor, v_tp1: Tensor, done_t: Tensor, valid_t: Tensor
) -> Advantages:
    """A3C's returns (arXiv 1602.01783, algorithm S3), to the end of the episode or fragment.

    ``R_t = r_t + discount_t R_{t+1}``, and ``R_t = r_t + discount_t v_tp1`` where the recursion is
    cut. The advantage is ``R_t - v_t``.

    Raises:
        ValueError: shapes differ.
    """
    _check_shapes(
        r_t=r_t, discount_t=discount_t, v_t=v_t, v_tp1=v_tp1, done_t=done_t, valid_t=valid_t
    )
    with torch.no_grad():
        continues_t = valid_t & ~done_t
        continues_t[:-1] &= valid_t[1:]
        continues_t[-1] = False
        reward_t = torch.where(
            continues_t, r_t, torch.where(valid_t, r_t + discount_t * v_tp1, v_t)
        )
        target_t = _accumulate(reward_t, torch.where(continues_t, discount_t, 0.0))
        return Advantages(target_t - v_t, target_t)


def vtrace(
    *,
    log_rho_t: Tensor,
    r_t: Tensor,
    discount_t: Tensor,
    v_t: Tensor,
    v_tp1: Tensor,
    done_t: Tensor,
    valid_t: Tensor,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> Advantages:
    """V-trace targets and policy-gradient advantages (IMPALA, arXiv 1802.01561, eq. 1, section
    4.2).

    With ``delta_t = min(rho_bar, rho_t) (r_t + discount_t v_tp1 - v_t)`` and ``c_t = lambda
    min(c_bar, rho_t)``, ``vs_t - v_t = delta_t + discount_t c_t (1 - done_t) (vs_{t+1} -
    v_{t+1})``.

    The advantage is ``min(pg_rho_bar, rho_t) (r_t + discount_t vs_next_t - v_t)``. ``vs_next_t`` is
    ``v_tp1``, plus the correction of row t+1 if that row continues the episode. (This is DeepMind's
    form, not the variant of the seed_rl code.)

    ``log_rho_t`` is the log of target over behaviour probability. It is clipped before exp, so any
    finite value is safe with finite clips. An infinite ``*_bar`` means no clipping.

    Raises:
        ValueError: shapes differ, or ``c_bar > rho_bar`` (the operator might not contract).
    """
    _check_shapes(
        r_t=r_t,
        log_rho_t=log_rho_t,
        discount_t=discount_t,
        v_t=v_t,
        v_tp1=v_tp1,
        done_t=done_t,
        valid_t=valid_t,
    )
    if c_bar > rho_bar:
        raise ValueError(
            f"c_bar = {c_bar} is above rho_bar = {rho_bar}: V-trace might not converge; lower c_bar"
        )
    with torch.no_grad():
        weights = {bar: _clipped_exp(log_rho_t, bar) for bar in {rho_bar, c_bar, pg_rho_bar}}
        continues_t = valid_t & ~done_t
        delta_t = torch.where(valid_t, weights[rho_bar] * (r_t + discount_t * v_tp1 - v_t), 0.0)
        decay_t = torch.where(continues_t, discount_t * weights[c_bar] * lambda_, 0.0)
        correction_t = _accumulate(delta_t, decay_t)
        vs_next_t = v_tp1.clone()
        vs_next_t[:-1] += torch.where(continues_t[:-1], correction_t[1:], 0.0)
        advantage_t = weights[pg_rho_bar] * (r_t + discount_t * vs_next_t - v_t)
        return Advantages(torch.where(valid_t, advantage_t, 0.0), v_t + correction_t)


def n_step(*, r_t: Tensor, discount_t: Tensor, done_t: Tensor, valid_t: Tensor, n: int) -> NStep:
    """Rewards and discounts over at most ``n`` transitions (Sutton and Barto, 2nd ed., eq. 7.1).

    Row t sums ``m = min(n, transitions left in the episode or fragment)`` rewards. Its discount is
    the product of the m discounts: gamma^m, or 0 after a termination.

    Raises:
        ValueError: shapes differ, or ``n < 1``.
    """
    _check_shapes(r_t=r_t, discount_t=discount_t, done_t=done_t, valid_t=valid_t)
    if n < 1:
        raise ValueError(f"n = {n}: at least one transition is required")
    with torch.no_grad():
        reward = torch.where(valid_t, r_t, 0.0)
        discount = torch.where(valid_t, discount_t, 0.0)
        steps = valid_t.long()
        alive = valid_t & ~done_t
        for k in range(1, min(n, r_t.shape[0])):
            alive = alive[:-1] & valid_t[k:]
            rows = slice(0, alive.shape[0])
            reward[rows] += torch.where(alive, discount[rows] * r_t[k:], 0.0)
            discount[rows] = torch.where(alive, discount[rows] * discount_t[k:], discount[rows])
            steps[rows] += alive.long()
            alive = alive & ~done_t[k:]
        return NStep(reward, discount, steps)


def _clipped_exp(log_x: Tensor, limit: float) -> Tensor:
    """``min(exp(log_x), limit)``, clipped before exp to avoid overflow."""
    return torch.exp(log_x if math.isinf(limit) else log_x.clamp(max=math.log(limit)))


def _accumulate(delta_t: Tensor, decay_t: Tensor) -> Tensor:
    """``x_t = delta_t + decay_t x_{t+1}``, with x = 0 past the end.

    On a CPU the rows are NumPy arrays, whose calls cost a third of PyTorch's at this size. On a GPU
    the sums reach twice as many rows with each step (Hillis and Steele, 1986), since there a row
    costs as much as all of them.
    """
    if delta_t.device.type == "cpu":
        x = delta_t.numpy().copy()
        xs, decays = list(x.reshape(x.shape[0], -1)), list(decay_t.numpy().reshape(x.shape[0], -1))
        carried = np.empty_like(xs[0])
        for t in range(len(xs) - 2, -1, -1):
            np.multiply(decays[t], xs[t + 1], out=carried)
            np.add(xs[t], carried, out=xs[t])
        return torch.from_numpy(x)
    reach, steps = 1, delta_t.shape[0]
    while reach < steps:
        further = torch.addcmul(delta_t[:-reach], decay_t[:-reach], delta_t[reach:])
        delta_t = torch.cat((further, delta_t[-reach:]))
        decay_t = torch.cat((decay_t[:-reach] * decay_t[reach:], decay_t[-reach:]))
        reach *= 2
    return delta_t


def _check_shapes(*, r_t: Tensor, **others: Tensor) -> None:
    """Check that all shapes are equal, and time first."""
    if r_t.dim() < 1 or any(tensor.shape != r_t.shape for tensor in others.values()):
        shapes = ", ".join(
            f"{name} {tuple(tensor.shape)}" for name, tensor in {"r_t": r_t, **others}.items()
        )
        raise ValueError(f"all must have one shape [T, ...]: {shapes}")
