"""ComponentRegistry: which components of a run work, their newest numbers, and how long they have
waited.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import ComponentStatistics


class ComponentRegistry:
    """The components of a run, as their hosts report them."""

    def __init__(self) -> None:
        self._reports: dict[str, ComponentStatistics] = {}
        self._ever_started: set[str] = set()
        self._waited = (0.0, 0.0)
        self.learner_works = False
        """The learner has started, and was not lost since."""

    def started(self, name: str) -> None:
        """A component works."""
        self._ever_started.add(name)
        self.learner_works |= name == "learner"

    def was_started(self, name: str) -> bool:
        """True if the component ``name`` has ever worked."""
        return name in self._ever_started

    @property
    def an_actor_was_started(self) -> bool:
        """True if any actor has ever worked."""
        return any(name.startswith("actor-") for name in self._ever_started)

    def report(self, statistics: ComponentStatistics) -> None:
        """A component's newest numbers."""
        self._reports[statistics.name] = statistics

    def forget(self, name: str) -> None:
        """A component is gone. Its waiting time still counts, so that sums never decrease."""
        gone = self._reports.pop(name, None)
        if gone is not None:
            learner, actors = waiting_seconds([gone], time.monotonic())
            self._waited = (self._waited[0] + learner, self._waited[1] + actors)

    @property
    def reports(self) -> Collection[ComponentStatistics]:
        """The newest numbers of every component that is there."""
        return self._reports.values()

    def waiting_seconds(self) -> tuple[float, float]:
        """Cumulative seconds that the learner, and all actors together, have waited."""
        learner, actors = waiting_seconds(self._reports.values(), time.monotonic())
        return self._waited[0] + learner, self._waited[1] + actors
