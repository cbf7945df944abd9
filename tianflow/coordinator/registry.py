"""Who works in a run, what each component said of itself last, and for how long all together have
waited.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import ComponentStatistics


class ComponentRegistry:
    """The components of a run, as their hosts tell of them."""

    def __init__(self) -> None:
        self._reports: dict[str, ComponentStatistics] = {}
        self._ever: set[str] = set()
        self._waited = (0.0, 0.0)
        self.learner_works = False
        """The learner has started, and was not lost since."""

    def started(self, name: str) -> None:
        """A component does its work."""
        self._ever.add(name)
        self.learner_works |= name == "learner"

    def was_started(self, name: str) -> bool:
        """True if the component called ``name`` has ever worked."""
        return name in self._ever

    @property
    def an_actor_was_started(self) -> bool:
        """True if any actor has ever worked."""
        return any(name.startswith("actor-") for name in self._ever)

    def report(self, statistics: ComponentStatistics) -> None:
        """A component's newest numbers."""
        self._reports[statistics.name] = statistics

    def forget(self, name: str) -> None:
        """A component reports no more; what it waited before still counts, so that sums never go
        down.
        """
        gone = self._reports.pop(name, None)
        if gone is not None:
            learner, actors = waiting_seconds([gone], time.monotonic())
            self._waited = (self._waited[0] + learner, self._waited[1] + actors)

    @property
    def reports(self) -> Collection[ComponentStatistics]:
        """What those that report now said last."""
        return self._reports.values()

    def waiting_seconds(self) -> tuple[float, float]:
        """Cumulative seconds that the learner, and all actors together, have waited."""
        learner, actors = waiting_seconds(self._reports.values(), time.monotonic())
        return self._waited[0] + learner, self._waited[1] + actors
