"""Text of numbers and durations, on every screen and page."""

from __future__ import annotations

import math

DASH = "–"
"""Stands for an unknown value."""


def number(value: float | None) -> str:
    """A number with about four digits; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == int(value) or abs(value) >= 1000.0:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds as ``1:02:03`` or ``2:03``; a dash for None, NaN and infinity."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
