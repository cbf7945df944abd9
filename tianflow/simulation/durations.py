"""Random durations with a given mean, spread and skew. They are drawn in blocks, because a
simulation needs hundreds of thousands.
"""

from __future__ import annotations

import numpy as np

BLOCK = 1024
NEGLIGIBLE = 1e-6
"""Fraction of the mean: a duration that varies by less is constant."""


class Durations:
    """Positive durations from a shifted gamma distribution (Pearson's type III).

    Its parameters are easy to record, and it covers the cases that occur. A spread of 0 gives a
    constant. Sums of many small durations are nearly normal. A spread of 1 without skew is
    exponential. Durations that are mostly equal and rarely much longer have a skew of more than
    twice their spread; none of them is far below the mean.

    Args:
        mean: in seconds.
        spread: standard deviation over the mean.
        skew: third central moment over the cube of the standard deviation. A value below twice the
            spread would allow negative durations, and counts as twice the spread.
        random: source of randomness.
    """

    def __init__(
        self, *, mean: float, spread: float, skew: float, random: np.random.Generator
    ) -> None:
        self._least, self._shape, self._scale = mean, 0.0, 0.0
        self._floor = (
            NEGLIGIBLE * mean
        )  # with a large spread most draws are near 0; some round to 0
        if spread > NEGLIGIBLE:
            skew = max(skew, 2.0 * spread)
            self._shape, self._scale = 4.0 / skew**2, mean * spread * skew / 2.0
            self._least = max(0.0, mean - self._shape * self._scale)
        self._random = random
        self._drawn: list[float] = []

    def draw(self) -> float:
        """Draw the next duration, in seconds."""
        if not self._drawn:
            if self._scale == 0.0:
                return self._least
            drawn = self._least + self._random.gamma(self._shape, self._scale, BLOCK)
            self._drawn = np.maximum(drawn, self._floor).tolist()
        return self._drawn.pop()
