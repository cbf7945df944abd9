"""Text of numbers and durations, on every screen and page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LEVELS = "▁▂▃▄▅▆▇█"
DASH = "–"
"""Stands for an unknown value."""


def number(value: float | None) -> str:
    """A number with about four digits; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == int(value) or abs(value) >= 1000.0:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def steady_speed(
    speeds: Mapping[Any, float | None], updates: Mapping[Any, float | None]
) -> float | None:
    """Of ``speeds`` by the seconds of their window, that of the shortest one with two updates:
    steps of slow updates arrive in bursts. ``updates``: updates per second, by the same windows.
    """
    windows = sorted((key for key in speeds if key.isdecimal()), key=int)
    known = [key for key in windows if (updates.get(key) or 0.0) > 0.0]
    if not known:
        return speeds[windows[0]] if windows else None
    enough = (key for key in known if (updates[key] or 0.0) * int(key) >= 2.0)
    return speeds[next(enough, windows[-1])]


def sparkline(values: Sequence[float | None]) -> str:
    """One character for each value, as high as the value is between the extremes; a space for a
    missing one.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    # Halves, because the difference of two numbers may not be finite.
    span = (high / 2.0 - low / 2.0) or 1.0

    def level(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return LEVELS[round((value / 2.0 - low / 2.0) / span * (len(LEVELS) - 1))]

    return "".join(map(level, values))


def duration(seconds: float | None) -> str:
    """Seconds as ``1:02:03`` or ``2:03``; a dash for None, NaN and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
