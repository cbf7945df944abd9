"""Shares of time that never go backwards, although they come from reports.

Between two reports of a host, the time since the last one belongs to the state that was running
then; the next report may tell otherwise. A counter that goes down reads as a restart, and every
rate over it would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tianflow.core.statistics import ComponentStatistics, RunStatistics, TimeShares

ROUNDING_S = 1e-6
"""A sum of seconds that is lower by less than this is the same sum in another order, not a new
clock.
"""


class MonotonicTimes:
    """Remembers what was shown of each component, and corrects only forwards.

    Shown times sum to the time since the component's clock began, at every look. Where a state was
    shown too much, the other states get less until the truth has caught up.
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], dict[str, float]] = {}

    def correct(self, runs: tuple[RunStatistics, ...]) -> tuple[RunStatistics, ...]:
        """``runs`` with steady times; what was shown of components that are gone is forgotten."""
        shown: dict[tuple[str, str], dict[str, float]] = {}
        corrected = []
        for run in runs:
            components = []
            for component in run.components:
                key = (run.run, component.name)
                shown[key] = steady(self._shown.get(key, {}), component.time.at(run.now))
                components.append(_with_time(component, shown[key], run.now))
            corrected.append(replace(run, components=tuple(components)))
        self._shown = shown
        return tuple(corrected)


def steady(before: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Seconds to show: none below ``before``, and summing to those ``told``.

    A sum below the one before is a new clock, which begins again as it is.
    """
    passed = sum(told.values()) - sum(before.values())
    if passed < -ROUNDING_S:
        return dict(told)
    grown = {
        state: max(0.0, told.get(state, 0.0) - before.get(state, 0.0))
        for state in {**before, **told}
    }
    total = sum(grown.values())
    scale = max(0.0, passed) / total if total > 0.0 else 0.0
    return {state: before.get(state, 0.0) + growth * scale for state, growth in grown.items()}


def _with_time(
    component: ComponentStatistics, seconds: dict[str, float], now: float
) -> ComponentStatistics:
    return replace(component, time=TimeShares(seconds, component.time.current, now))
