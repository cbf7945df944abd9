"""Rate limiter of replay: bounds how far draws run ahead of inserts, and inserts of draws.

Reverb's rate limiter (arXiv 2102.04736, section 3.2), for inserts and draws of many items at once.
It is a plain object: it permits or refuses, and its caller waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tianflow.core.limits import RateLimits


@dataclass(frozen=True, slots=True)
class LimiterStatistics:
    """State of a limiter. ``diff`` is in draws; the others count items since the run began."""

    inserts: int
    samples: int
    deletes: int
    diff: float

    @property
    def size(self) -> int:
        """Items in the table."""
        return self.inserts - self.deletes


class Limiter:
    """Counts of items, and the permissions that follow from them.

    ``diff`` is an accumulator: ``+ samples_per_insert * n`` for n inserted items, ``- m`` for m
    drawn items. **An insert of at most ``insert_size`` or a draw of at most ``draw_size`` is always
    permitted.** Below ``min_size`` it is the insert. Above it, if the insert is refused, ``diff >
    max_diff - samples_per_insert * n``, so ``diff - m > min_diff`` by the width of the band.

    Args:
        limits: limits in force until `change`.
    """

    def __init__(self, *, limits: RateLimits) -> None:
        self._limits = limits
        self._inserts = self._samples = self._deletes = 0
        self._diff = 0.0

    @property
    def limits(self) -> RateLimits:
        return self._limits

    def may_insert(self, n: int, *, ahead: int = 0) -> bool:
        """True if ``n`` items may be inserted now, after ``ahead`` admitted items that are not
        counted yet.

        Raises:
            ValueError: ``n`` exceeds ``insert_size``.
        """
        _check("insert", n, self._limits.insert_size)
        small = self._inserts - self._deletes + ahead < self._limits.min_size
        return (
            small
            or self._diff + self._limits.samples_per_insert * (ahead + n) <= self._limits.max_diff
        )

    def may_draw(self, m: int) -> bool:
        """True if ``m`` items may be drawn now.

        Raises:
            ValueError: ``m`` exceeds ``draw_size``.
        """
        _check("draw", m, self._limits.draw_size)
        return (
            self._inserts - self._deletes >= self._limits.min_size
            and self._diff - m >= self._limits.min_diff
        )

    def inserted(self, n: int) -> None:
        """Count ``n`` inserted items, permitted or not."""
        self._inserts += n
        self._diff += self._limits.samples_per_insert * n

    def drawn(self, m: int) -> None:
        """Count ``m`` drawn items."""
        self._samples += m
        self._diff -= m

    def deleted(self, n: int) -> None:
        """Count ``n`` items that were removed by the table's own rules.

        Raises:
            ValueError: the table holds fewer items.
        """
        if n > self._inserts - self._deletes:
            raise ValueError(
                f"{n} items were deleted, but the table holds {self._inserts - self._deletes}"
            )
        self._deletes += n

    def lost(self, n: int) -> None:
        """Count ``n`` items that disappeared with their shard, or that a checkpoint does not hold.

        Below ``min_size`` the table then counts as a new one with the remaining items. Otherwise
        the items that fill it again would permit the same draws a second time.

        Raises:
            ValueError: the table holds fewer items.
        """
        self.deleted(n)
        if n and self._fills:
            self._diff = self._as_new()

    def change(self, limits: RateLimits) -> None:
        """Put ``limits`` in force. Counts stay.

        If the band or the ratio changes, ``diff`` is clamped to the new band. While the table
        fills, ``diff`` becomes that of a new table: it is below the band until then.
        """
        old, self._limits = self._limits, limits
        if _ratio_and_band(old) != _ratio_and_band(limits):
            self._diff = self._within_band()

    def statistics(self) -> LimiterStatistics:
        return LimiterStatistics(self._inserts, self._samples, self._deletes, self._diff)

    def snapshot(self) -> dict[str, float | None]:
        """State for a checkpoint: counts, ``diff``, and the ratio and band in force.

        An unbounded side is None, because JSON has no infinity.
        """
        spi, low, high = _ratio_and_band(self._limits)
        counts = {"inserts": self._inserts, "samples": self._samples, "deletes": self._deletes}
        return {
            **counts,
            "diff": self._diff,
            "samples_per_insert": spi,
            "min_diff": _finite(low),
            "max_diff": _finite(high),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the counts of ``state``; the limits stay.

        If the ratio or band differs from the saved one, ``diff`` is clamped as by `change`.
        """
        self._inserts, self._samples, self._deletes = (
            int(state[name]) for name in ("inserts", "samples", "deletes")
        )
        self._diff = float(state["diff"])
        spi, low, high = _ratio_and_band(self._limits)
        if (spi, _finite(low), _finite(high)) != (
            state["samples_per_insert"],
            state["min_diff"],
            state["max_diff"],
        ):
            self._diff = self._within_band()

    @property
    def _fills(self) -> bool:
        """True below ``min_size``, where inserts are always permitted."""
        return self._inserts - self._deletes < self._limits.min_size

    def _as_new(self) -> float:
        """``diff`` of a new table that holds as many items."""
        return self._limits.samples_per_insert * (self._inserts - self._deletes)

    def _within_band(self) -> float:
        if self._fills:
            return self._as_new()
        return min(max(self._diff, self._limits.min_diff), self._limits.max_diff)


def _ratio_and_band(limits: RateLimits) -> tuple[float, float, float]:
    return limits.samples_per_insert, limits.min_diff, limits.max_diff


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check(what: str, given: int, most: int) -> None:
    if not 0 <= given <= most:
        raise ValueError(
            f"{what} of {given} items: the limits were checked for 0 .. {most} items; a larger "
            f"{what} might wait for ever"
        )
