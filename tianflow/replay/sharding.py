"""Equations for draws over several shards: shard probabilities and importance weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def shard_probabilities(masses: Sequence[float], counts: Sequence[int]) -> Floats:
    """[K] probability of each shard, in proportion to its mass.

    The probabilities are in proportion to the numbers of items if no shard has mass, and 0 if no
    shard has items.
    """
    weights = np.asarray(masses, np.float64)
    if not weights.sum() > 0.0:
        weights = np.asarray(counts, np.float64)
    probabilities: Floats = weights / max(weights.sum(), np.finfo(np.float64).tiny)
    return probabilities


def importance_weights(probability: Floats, *, count: int, beta: float) -> Floats:
    """``w_i = (N P(i))^-beta / max_j w_j`` (PER, arXiv 1511.05952, section 3.4).

    Args:
        probability: [n] of each drawn item among **all** items of all shards.
        count: N, the number of items of all shards.
        beta: 0 .. 1, the degree of bias correction.

    Returns:
        [n] float64 in (0, 1]. The maximum is taken over these n items. Compared with the maximum
            over all items, the weights differ by a factor common to the batch.
    """
    weights = (count * probability) ** -beta
    scaled: Floats = weights / weights.max()
    return scaled
