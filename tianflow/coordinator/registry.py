"""ComponentRegistry: which components of a run work, their newest numbers, and how long they have
waited.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tianflow.coordinator.counters import waiting_seconds
from tianflow.core.statistics import ComponentStatistics, TimeShares
from tianflow.planning.placement import servers_of

if TYPE_CHECKING:
    from tianflow.config.model import Config

SAME_CLOCK_S = 0.01
"""Clocks of components that began this close to each other are one clock: sums of seconds round,
and a process takes longer to start.
"""


class ComponentRegistry:
    """The components of a run, as their hosts report them."""

    def __init__(self) -> None:
        self._reports: dict[str, ComponentStatistics] = {}
        self._newest: dict[str, ComponentStatistics] = {}
        """Of the newest incarnation of each component, present or gone."""
        self._earlier: dict[str, ComponentStatistics] = {}
        self._ever_started: set[str] = set()
        self.learner_works = False
        """The learner has started, and was not lost since."""
        self._servers: set[str] = set()

    def started(self, name: str) -> None:
        """A component works."""
        self._ever_started.add(name)
        self.learner_works |= name == "learner"
        if name.startswith("inference-"):
            self._servers.add(name)

    def was_started(self, name: str) -> bool:
        """True if the component ``name`` has ever worked."""
        return name in self._ever_started

    @property
    def an_actor_was_started(self) -> bool:
        """True if any actor has ever worked."""
        return any(name.startswith("actor-") for name in self._ever_started)

    def server_lost(self, name: str) -> None:
        """The inference server ``name`` is gone."""
        self._servers.discard(name)

    def missing_servers(self, config: Config) -> list[str]:
        """Inference servers of ``config`` that do not work."""
        wanted = [f"inference-{index}" for index in range(servers_of(config))]
        return [name for name in wanted if name not in self._servers]

    def report(self, statistics: ComponentStatistics) -> None:
        """A component's newest numbers. They count since its incarnation began."""
        name, before = statistics.name, self._newest.get(statistics.name)
        if before is not None and not _same_incarnation(before, statistics):
            ended = _ended(before) if name in self._reports else before
            earlier = self._earlier.get(name)
            self._earlier[name] = ended if earlier is None else ended.after(earlier)
        self._reports[name] = self._newest[name] = statistics

    def forget(self, name: str) -> None:
        """A component is gone. Its numbers still count, so that sums never decrease."""
        gone = self._reports.pop(name, None)
        if gone is not None:
            self._newest[name] = _ended(gone)

    @property
    def reports(self) -> Collection[ComponentStatistics]:
        """The newest numbers of every component that is there."""
        return self._reports.values()

    @property
    def gone(self) -> tuple[ComponentStatistics, ...]:
        """The last numbers of every component that has ended."""
        return tuple(last for name, last in self._newest.items() if name not in self._reports)

    @property
    def earlier(self) -> Mapping[str, ComponentStatistics]:
        """Sums over the earlier incarnations of components, by name."""
        return dict(self._earlier)

    def waiting_seconds(self) -> tuple[float, float]:
        """Cumulative seconds that the learner, and all actors together, have waited."""
        now = time.monotonic()
        learner, actors = waiting_seconds(self._reports.values(), now)
        for ended in (*self._earlier.values(), *self.gone):
            more = waiting_seconds([ended], ended.time.since)
            learner, actors = learner + more[0], actors + more[1]
        return learner, actors


def _ended(statistics: ComponentStatistics) -> ComponentStatistics:
    """``statistics`` of a component whose clock stops now."""
    now = time.monotonic()
    time_ = statistics.time
    return replace(statistics, time=TimeShares(time_.at(now), time_.current, max(now, time_.since)))


def _same_incarnation(before: ComponentStatistics, after: ComponentStatistics) -> bool:
    """True if both were measured by one clock."""
    return abs(_clock_began(before.time) - _clock_began(after.time)) < SAME_CLOCK_S


def _clock_began(shares: TimeShares) -> float:
    return shares.since - sum(shares.seconds.values())
