"""Drawing over several shards as if they were one: each shard's probability, and weights from an
item's probability over all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def shard_probabilities(masses: Sequence[float], counts: Sequence[int]) -> Floats:
    """[K] the probability of each shard: in proportion to mass; by number of items if nothing has
    mass; 0 if nothing is anywhere.
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
        beta: 0 .. 1, how much of the bias is taken back.

    Returns:
        [n] float64 in (0, 1]. The maximum is that of these n, not of all items: it differs by a
        factor common to the batch.
    """
    weights = (count * probability) ** -beta
    scaled: Floats = weights / weights.max()
    return scaled
