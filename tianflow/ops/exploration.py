"""Exploration of actors: an epsilon per environment, and scores for random choices."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def apex_epsilons(
    first: int, count: int, total: int, *, epsilon: float, alpha: float
) -> NDArray[np.float64]:
    """``epsilon ** (1 + alpha i / (total - 1))`` of environments i = first .. first + count - 1.

    The result is float64 [count] (Ape-X, arXiv 1803.00933, section 4.1). A single environment has
    ``epsilon``. With alpha 0, all values are ``epsilon``.
    """
    place = np.arange(first, first + count) / max(total - 1, 1)
    return np.asarray(epsilon ** (1.0 + alpha * np.minimum(place, 1.0)), np.float64)


def epsilon_noise(
    steps: int, epsilons: NDArray[np.float64], actions: int, generator: np.random.Generator
) -> Tensor:
    """Noise for `scores_of`, float32 [steps, N, actions].

    With probability ``epsilons`` [N] every action has a random score in (0, 1], else 0.
    """
    explores = generator.random((steps, len(epsilons))) < epsilons
    scores = 1.0 - generator.random((steps, len(epsilons), actions), dtype=np.float32)
    return torch.from_numpy(scores * explores[..., None])


def scores_of(q: Tensor, noise: Tensor) -> Tensor:
    """Scores [..., A] for a maximum: the noise where it is above 0, else ``q``.

    An exploring environment has a score for every action, so the choice is uniform over the allowed
    actions.
    """
    return torch.where(noise[..., :1] > 0.0, noise, q)
