"""Axes: round ticks that cover the data, and short labels with the right number of digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DRAWABLE = 1e100
"""Beyond this the differences of two numbers may be infinite: such a number is not drawn."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_PREFIXES = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which number on, what is counted, and its name: four digits are still read at a glance."""
_TIME_UNITS = (
    (2.5 * 86400.0, 86400.0, "d"),
    (2.5 * 3600.0, 3600.0, "h"),
    (150.0, 60.0, "min"),
    (0.0, 1.0, "s"),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """From ``low`` to ``high``, with ticks in between. ``labels`` belong to ``ticks``; ``unit`` is
    what the labels count.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    unit: str = ""

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``."""
        return (value - self.low) / (self.high - self.low)


def drawable(value: object) -> float | None:
    """``value`` if it is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < DRAWABLE else None  # NaN compares as False


def value_axis(
    values: Iterable[float | None], *, zero: bool, whole: bool = False, count: int = 5
) -> Axis:
    """An axis that begins and ends at a tick; without ``zero``, a little beyond the values.

    Args:
        values: what is to be on it; None is nothing.
        zero: 0 is on it, too.
        whole: only whole numbers are ticks.
        count: about how many steps.
    """
    known = [value for value in values if value is not None]
    if zero or not known:
        known.append(0.0)
    low, high = min(known), max(known)
    if high - low <= max(
        1e-9 * max(abs(low), abs(high)), 1.0 / DRAWABLE
    ):  # constant: ticks need some room, but zero stays at the bottom
        room = max(abs(low), 1.0) * (1.0 if whole else 0.1)
        low, high = low - (0.0 if low == 0.0 else room), high + (1.0 if low == 0.0 else room)
    step = _step((high - low) / count, whole=whole)
    if not zero:
        room = 0.05 * (high - low)
        low, high = low - room, high + room
        ticks = tuple(step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1))
        return Axis(low, high, ticks, labels(ticks, step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * at for at in range(first, max(last, first + 1) + 1))
    return Axis(ticks[0], ticks[-1], ticks, labels(ticks, step))


def time_axis(times: Sequence[float], *, count: int = 5) -> Axis:
    """From the first time (0 if that is near) to the last, in seconds, with labels in the unit that
    suits them.
    """
    low, high = (min(times), max(times)) if times else (0.0, 1.0)
    if 0.0 < low < 0.05 * high:
        low = 0.0
    if high <= low:
        high = low + 1.0
    _, unit, name = next(entry for entry in _TIME_UNITS if high >= entry[0] or not entry[0])
    step = _step((high - low) / unit / count, whole=False)
    ticks = [
        step * at
        for at in range(
            math.ceil(low / unit / step - 1e-9), math.floor(high / unit / step + 1e-9) + 1
        )
    ]
    return Axis(low, high, tuple(tick * unit for tick in ticks), labels(ticks, step), name)


def labels(ticks: Sequence[float], step: float) -> tuple[str, ...]:
    """Ticks in words: as many digits as ``step`` asks for, thousands as k and so on."""
    largest = max(map(abs, ticks), default=0.0)
    if largest >= 1e16 or (0.0 < step < 1e-6):
        return tuple(f"{tick:.3g}" for tick in ticks)
    scale, prefix = next(
        ((scale, prefix) for least, scale, prefix in _PREFIXES if largest >= least), (1.0, "")
    )
    digits = next(
        (n for n in range(9) if math.isclose(round(step / scale, n), step / scale, rel_tol=1e-6)), 9
    )
    return tuple("0" if tick == 0.0 else f"{tick / scale:.{digits}f}{prefix}" for tick in ticks)


def _step(least: float, *, whole: bool) -> float:
    """The smallest round step that is no less."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    step = next(
        factor * magnitude for factor in _STEPS if factor * magnitude >= least * (1.0 - 1e-9)
    )
    return max(1.0, math.ceil(step)) if whole else step
