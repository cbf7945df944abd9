"""How actors explore: an epsilon for each environment, and scores that choose at random."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def apex_epsilons(
    first: int, count: int, total: int, *, epsilon: float, alpha: float
) -> NDArray[np.float64]:
    """``epsilon ** (1 + alpha i / (total - 1))`` for environments i = first .. first + count - 1 of
    ``total``.

    float64 [count] (Ape-X, arXiv 1803.00933, section 4.1). A single environment has ``epsilon``
    itself; alpha 0 gives all the same.
    """
    place = np.arange(first, first + count) / max(total - 1, 1)
    return np.asarray(epsilon ** (1.0 + alpha * np.minimum(place, 1.0)), np.float64)


def epsilon_noise(
    steps: int, epsilons: NDArray[np.float64], actions: int, generator: np.random.Generator
) -> Tensor:
    """Noise for `scores_of`, float32 [steps, N, actions]: with probability ``epsilons`` [N] a score
    in (0, 1] for each action, else 0.
    """
    explores = generator.random((steps, len(epsilons))) < epsilons
    scores = 1.0 - generator.random((steps, len(epsilons), actions), dtype=np.float32)
    return torch.from_numpy(scores * explores[..., None])


def scores_of(q: Tensor, noise: Tensor) -> Tensor:
    """What the greatest is to be taken of, [..., A]: the noise where there is any, else ``q``.

    All actions have a score where one explores, so that the choice is uniform over whichever are
    allowed.
    """
    return torch.where(noise[..., :1] > 0.0, noise, q)
