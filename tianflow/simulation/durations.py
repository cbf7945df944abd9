"""Times that are drawn: of a mean, a spread and a skew, in blocks, since a simulation asks for
hundreds of thousands.
"""

from __future__ import annotations

import numpy as np

BLOCK = 1024
NEGLIGIBLE = 1e-6
"""What varies by less than this part of its mean is constant."""


class Durations:
    """Positive times from a gamma distribution that may begin above 0 (Pearson's type III).

    It is told by what is easily recorded, and it has what is seen: without a spread all are the
    same; sums of many small times are nearly normal; exponential ones have a spread of 1; and what
    takes mostly the same time and seldom much longer has a skew of more than twice its spread: then
    no time is far below the mean.

    Args:
        mean: in seconds.
        spread: standard deviation over the mean.
        skew: third central moment over the cube of the standard deviation. What is less than twice
            the spread would let times be negative, and counts as that.
        random: where they come from.
    """

    def __init__(
        self, *, mean: float, spread: float, skew: float, random: np.random.Generator
    ) -> None:
        self._least, self._shape, self._scale = mean, 0.0, 0.0
        self._floor = NEGLIGIBLE * mean  # where most draws are next to nothing, some round to it
        if spread > NEGLIGIBLE:
            skew = max(skew, 2.0 * spread)
            self._shape, self._scale = 4.0 / skew**2, mean * spread * skew / 2.0
            self._least = max(0.0, mean - self._shape * self._scale)
        self._random = random
        self._drawn: list[float] = []

    def draw(self) -> float:
        """The next one, in seconds."""
        if not self._drawn:
            if self._scale == 0.0:
                return self._least
            drawn = self._least + self._random.gamma(self._shape, self._scale, BLOCK)
            self._drawn = np.maximum(drawn, self._floor).tolist()
        return self._drawn.pop()
