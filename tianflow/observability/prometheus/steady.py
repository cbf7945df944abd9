"""Monotonic times of components, from reports that may correct each other.

Between two reports of a host, the time since the last one counts for the state of that report. The
next report may disagree. Prometheus takes a counter that falls for a restart, and every rate over
it would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tianflow.core.statistics import ComponentStatistics, RunStatistics, TimeShares

ROUNDING_S = 1e-6
"""A sum of seconds that is lower by less than this is the same sum in another order, and not that
of a new clock.
"""


class MonotonicTimes:
    """Remembers the times shown of each component, and corrects them only forwards. A component
    that is gone may come back, so it is remembered, too.

    At every scrape the shown times add up to the time since the component's clock began. If a state
    was shown too high, the other states grow slower until the report has caught up.
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], dict[str, float]] = {}

    def correct(self, runs: tuple[RunStatistics, ...]) -> tuple[RunStatistics, ...]:
        """``runs`` with monotonic times."""
        shown, corrected = self._shown, []
        for run in runs:
            components = []
            for component in run.components:
                key = (run.run, component.name)
                shown[key] = steady(self._shown.get(key, {}), component.time.at(run.now))
                components.append(_with_time(component, shown[key], run.now))
            corrected.append(replace(run, components=tuple(components)))
        return tuple(corrected)


def steady(before: Mapping[str, float], reported: Mapping[str, float]) -> dict[str, float]:
    """Seconds to show by state: none is below ``before``, and their sum is that of ``reported``.

    A sum below the one before is that of a new clock, and is shown as reported.
    """
    passed = sum(reported.values()) - sum(before.values())
    if passed < -ROUNDING_S:
        return dict(reported)
    grown = {
        state: max(0.0, reported.get(state, 0.0) - before.get(state, 0.0))
        for state in {**before, **reported}
    }
    total = sum(grown.values())
    scale = max(0.0, passed) / total if total > 0.0 else 0.0
    return {state: before.get(state, 0.0) + growth * scale for state, growth in grown.items()}


def _with_time(
    component: ComponentStatistics, seconds: dict[str, float], now: float
) -> ComponentStatistics:
    return replace(component, time=TimeShares(seconds, component.time.current, now))
