"""Learning statistics of a run: exact means of any span, over restarts of its components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tianflow.core.learning import MOST_NAMES, StatisticSum, Sums, between, together
from tianflow.core.statistics import RunStatistics

LOSS = "train/loss"
"""The statistic that a screen shows as the loss; without it the first one with ``loss`` in its
name.
"""


class LearningTotals:
    """Sums of the statistics of a run that never decrease, while its components come and go.

    A component that restarts counts from 0, and ``earlier`` of the run has its values so far. One
    that has ended is ``gone``, with what it reported last.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Sums] = {}
        self._totals: dict[str, StatisticSum] = {}

    def update(self, run: RunStatistics) -> Mapping[str, StatisticSum]:
        """The sums with those of ``run``; they belong to the caller."""
        new = []
        for component in (*run.components, *run.gone):
            own: Sums = component.learning
            if not own and component.name not in self._seen:
                continue
            if component.name in run.earlier:
                own = together((run.earlier[component.name].learning, own))
            new.append(between(self._seen.get(component.name, {}), own))
            self._seen[component.name] = own
        self._totals = together((self._totals, *new), most=MOST_NAMES)
        return dict(self._totals)


def newest(run: RunStatistics, role: str) -> dict[str, float]:
    """Mean over the components of ``role`` of the newest value of each statistic."""
    found: dict[str, list[float]] = {}
    for component in run.components:
        if component.role == role:
            for name, values in component.learning.items():
                if name in found or len(found) < MOST_NAMES:
                    found.setdefault(name, []).append(values.last)
    return {name: sum(values) / len(values) for name, values in found.items()}


def loss_in(names: Iterable[str]) -> str | None:
    """The name among ``names`` that stands for the loss; None without one."""
    known = list(names)
    if LOSS in known:
        return LOSS
    return next((name for name in known if "loss" in name), None)
