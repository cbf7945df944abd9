"""Progress reports of a simulation that takes a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Progress of a simulation: updates, virtual time in seconds, and the completed fraction."""

    updates: int
    now: float
    fraction: float


class Progress:
    """Reports every few seconds, first after `EVERY_S`, so that a quick simulation reports nothing.

    Args:
        write: takes a line.
        clock: seconds of real time.
    """

    def __init__(
        self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._began = clock()
        self._due = self._began + EVERY_S

    def __call__(self, progress: Callable[[], ProgressState]) -> None:
        """Report if it is time, and call ``progress`` only then."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        at = progress()
        left = (
            f"about {_long((now - self._began) * (1.0 - at.fraction) / at.fraction)} to go"
            if at.fraction > 0.0
            else "time to go is unknown yet"
        )
        self._write(
            f"{at.updates} updates, {at.now:.4g} s of virtual time, {at.fraction:.1%}; {left}"
        )


def _long(seconds: float) -> str:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
