"""How far a simulation is that takes a while, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Where a simulation stands, ``part`` of the way to its end. ``now``: virtual time in
    seconds.
    """

    updates: int
    now: float
    part: float


class Progress:
    """Says it every few seconds, the first time when one that is quick would be over.

    Args:
        say: takes a line.
        clock: seconds of real time.
    """

    def __init__(
        self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._began = clock()
        self._due = self._began + EVERY_S

    def __call__(self, standing: Callable[[], ProgressState]) -> None:
        """Look at the clock, and only when it is time at where the simulation is."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + EVERY_S
        at = standing()
        left = (
            f"about {_long((now - self._began) * (1.0 - at.part) / at.part)} to go"
            if at.part > 0.0
            else "no end in sight yet"
        )
        self._say(f"{at.updates} updates, {at.now:.4g} s of virtual time, {at.part:.1%}; {left}")


def _long(seconds: float) -> str:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"
