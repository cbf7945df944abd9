"""Initial priorities of items: actor errors (Ape-X) and mixed sequence errors (R2D2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from tianflow.core.payloads import PRIORITY_EPSILON
from tianflow.replay.observations import Flags
from tianflow.replay.sum_tree import Floats, Indices


@dataclass(frozen=True, slots=True)
class WindowSteps:
    """Steps of W windows, padded to L rows. Rows past a window's length are undefined."""

    reward: Floats
    """[L, W]"""
    q_taken: Floats
    """[L, W] the acting network's value of the chosen action."""
    q_next: Floats
    """[L, W] its largest value of the observation after the step.

    The value is 0 after a termination, and NaN where the actor did not compute it.
    """
    length: Indices
    """[W] 1 .. L"""
    begins: Flags
    """[W] True if the window begins with its episode."""


class InitialPriority(Protocol):
    """Computes the initial priority of new items from the estimates of their actor."""

    columns: ClassVar[tuple[str, ...]]
    """Arrays [T, N] of a fragment that it needs besides the rewards."""

    def __call__(self, steps: WindowSteps) -> Floats:
        """[W] priorities; NaN where unknown, which means the largest priority so far."""
        ...


@dataclass(frozen=True, slots=True)
class RunningMaximum:
    """The largest priority so far for every new item (PER, arXiv 1511.05952, algorithm 1)."""

    columns: ClassVar[tuple[str, ...]] = ()

    def __call__(self, steps: WindowSteps) -> Floats:
        return np.full(len(steps.length), np.nan)


@dataclass(frozen=True, slots=True)
class ActorError:
    """Absolute n-step error of a window's first step, n its length (Ape-X, arXiv 1803.00933,
    algorithm 1), plus PER's epsilon.
    """

    discount: float
    columns: ClassVar[tuple[str, ...]] = ("q_taken", "q_max")

    def __call__(self, steps: WindowSteps) -> Floats:
        first: Floats = n_step_errors(steps, discount=self.discount, n=len(steps.reward))[0]
        return first + PRIORITY_EPSILON


@dataclass(frozen=True, slots=True)
class SequenceError:
    """R2D2's mixture of absolute n-step errors over the trained steps (OpenReview r1lyTjAqYX,
    section 2.3).

    Trained steps are those after ``burn_in``, or all steps of a window that begins with its
    episode. PER's epsilon is added. A window without trained steps has priority 0. With
    ``rescaling`` the recorded values are h(returns).
    """

    discount: float
    n: int
    eta: float = 0.9
    burn_in: int = 0
    rescaling: float | None = None
    columns: ClassVar[tuple[str, ...]] = ("q_taken", "q_max")

    def __call__(self, steps: WindowSteps) -> Floats:
        errors = n_step_errors(steps, discount=self.discount, n=self.n, rescaling=self.rescaling)
        k = np.arange(len(errors))[:, None]
        trained = ((k >= self.burn_in) | steps.begins) & (k < steps.length)
        known = trained & ~np.isnan(errors)
        priorities = sequence_priority(errors, known, eta=self.eta)
        priorities = np.where(known.any(axis=0), priorities + PRIORITY_EPSILON, priorities)
        return np.where(trained.any(axis=0) & ~known.any(axis=0), np.nan, priorities)


def sequence_priority(errors: Floats, trained: Flags, *, eta: float) -> Floats:
    """``eta max_t |delta_t| + (1 - eta) mean_t |delta_t|`` over the trained steps.

    Source: R2D2, OpenReview r1lyTjAqYX, section 2.3.

    Args:
        errors: [L, W] temporal-difference errors; NaN is allowed where not trained.
        trained: [L, W] True on steps after burn-in, False on padding.
        eta: 0 .. 1.

    Returns:
        [W] float64; 0 for a window without trained steps.
    """
    absolute = np.where(trained, np.abs(errors), 0.0)
    mean = absolute.sum(axis=0) / np.maximum(trained.sum(axis=0), 1)
    priorities: Floats = eta * absolute.max(axis=0) + (1.0 - eta) * mean
    return priorities


def n_step_errors(
    steps: WindowSteps, *, discount: float, n: int, rescaling: float | None = None
) -> Floats:
    """``|sum_{i<m} discount^i r_{k+i} + discount^m q_next_{k+m-1} - q_taken_k|`` of each step k.

    m is min(n, steps left). If the value after a window's last step is unknown (a truncated
    episode, or an actor that has not continued yet), the sum ends one step earlier, at the value
    before that step. The error is NaN where no step remains, and past the length.

    With ``rescaling`` values are h(returns): ``|h(sum + discount^m h^-1(q_next)) - q_taken|``
    (R2D2, section 2.3).
    """
    q_next = steps.q_next if rescaling is None else _unrescaled(steps.q_next, rescaling)
    rows, windows = steps.reward.shape
    last, k = steps.length - 1, np.arange(rows)[:, None]
    usable = steps.length - np.isnan(steps.q_next[last, np.arange(windows)])
    m = np.minimum(n, usable - k)
    total = np.zeros((rows, windows))
    for i in range(min(n, rows)):
        total[: rows - i] += np.where(i < m[: rows - i], discount**i * steps.reward[i:], 0.0)
    ends = np.clip(k + m - 1, 0, rows - 1)
    total += discount ** np.maximum(m, 0) * np.take_along_axis(q_next, ends, axis=0)
    if rescaling is not None:
        total = _rescaled(total, rescaling)
    errors: Floats = np.where(m >= 1, np.abs(total - steps.q_taken), np.nan)
    return errors


def _rescaled(x: Floats, epsilon: float) -> Floats:
    """h(x) = sign(x) (sqrt(abs(x) + 1) - 1) + epsilon x (arXiv 1805.11593), in float64."""
    h: Floats = np.sign(x) * (np.sqrt(np.abs(x) + 1.0) - 1.0) + epsilon * x
    return h


def _unrescaled(y: Floats, epsilon: float) -> Floats:
    """The inverse of `_rescaled`."""
    root = np.sqrt(1.0 + 4.0 * epsilon * (np.abs(y) + 1.0 + epsilon))
    x: Floats = np.sign(y) * (np.square((root - 1.0) / (2.0 * epsilon)) - 1.0)
    return x
