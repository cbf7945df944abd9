"""Controller ``freshest``: the fewest credits with which the learner does not wait."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from tianflow.core.directives import Directive, SetCredits
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import between, ceiling, feeding, turnover, whole


class Freshest:
    """Searches credits C in [B, C_max] from measured waiting times, window by window.

    A window is ``window_updates`` updates long. At its end:

    - The learner *and* the actors waited: C increases by max(1, ``raise_batches`` * B). The next
      window begins ceil(C/B) updates later, when all samples in training were granted after the
      increase. If only the learner waits, sampling is the bottleneck and more credits cannot help.
    - The learner has not waited for ``quiet_updates`` updates: C decreases by 1. For
      ``hold_updates`` updates after an increase, C stays at least at the value that it set.

    C changes at most once in ceil(C/B) updates. It begins at B, because it rises faster than it
    falls, and never exceeds C_max.

    Args:
        quiet_updates: updates without waiting of the learner before C decreases by one.
        hold_updates: updates after an increase during which C does not fall below it; limits how
            often a decrease may starve the learner.
        window_updates: length of a window, in updates.
        raise_batches: size of an increase, in batches.
        learner_waiting: share of the window's time above which the learner counts as waiting.
        actors_waiting: share of the window's actor-seconds above which the actors count as waiting.

    Raises:
        ValueError: a parameter is out of range; the message gives the consequence.
    """

    def __init__(
        self,
        *,
        quiet_updates: float = 4,
        hold_updates: float = 200,
        window_updates: float = 4,
        raise_batches: float = 0.25,
        learner_waiting: float = 0.03,
        actors_waiting: float = 0.03,
    ) -> None:
        self._window = whole(
            "window_updates",
            window_updates,
            at_least=1,
            otherwise="waiting cannot be measured over an empty window",
        )
        self._quiet = whole(
            "quiet_updates",
            quiet_updates,
            at_least=1,
            otherwise="credits would decrease while the learner waits",
        )
        self._hold = whole(
            "hold_updates",
            hold_updates,
            at_least=self._quiet,
            otherwise="a hold shorter than quiet_updates has no effect",
        )
        self._step = between(
            "raise_batches",
            raise_batches,
            low=0,
            high=inf,
            otherwise="a starving learner would get no more credits",
        )
        never = "waiting would be detected always or never"
        self._learner_share = between(
            "learner_waiting", learner_waiting, low=0, high=1, otherwise=never
        )
        self._actors_share = between(
            "actors_waiting", actors_waiting, low=0, high=1, otherwise=never
        )
        self._credits = 0
        self._start: Observed | None = None
        self._changed = self._shows_from = self._quiet_since = 0
        self._floor = self._floor_until = 0

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> `SetCredits`; every other event -> nothing."""
        if not isinstance(event, Observed):
            return ()
        if self._start is None or event.version < self._start.version:
            # First observation, or the learner returned to a checkpoint: counting restarts.
            self._changed = self._shows_from = self._quiet_since = self._floor_until = event.version
            self._start = event
        elif event.version <= self._shows_from:
            self._start = event
        elif event.version - self._start.version >= self._window:
            self._judge(self._start, event)
            self._start = event
        self._credits = feeding(self._credits, event.batch)
        return (SetCredits(min(self._credits, ceiling(event, event.publish_lag))),)

    def _judge(self, start: Observed, end: Observed) -> None:
        # C_max without publish lag: the lag varies with each publish, and must not reset the value
        # that the controller has found.
        highest, seconds = ceiling(end, 0), end.now - start.now
        self._credits = min(self._credits, highest)
        may_change = end.version - self._changed >= turnover(self._credits, end.batch)
        if end.learner_waiting_s - start.learner_waiting_s > self._learner_share * seconds:
            self._quiet_since = end.version
            if (
                may_change
                and end.actors_waiting_s - start.actors_waiting_s
                > self._actors_share * seconds * end.actors
            ):
                self._raise(end, highest)
        elif may_change and end.version - self._quiet_since >= self._quiet:
            self._lower(end)

    def _raise(self, end: Observed, highest: int) -> None:
        # Start from the value in force: while a stricter limit holds the credits, the target must
        # not grow beyond it.
        raised = min(highest, end.credits_limit + max(1, int(self._step * end.batch)))
        if raised > self._credits:
            self._credits = self._floor = raised
            self._changed, self._floor_until = end.version, end.version + self._hold
            # Waiting until then is caused by the previous credits; an increase based on it would
            # overshoot.
            self._shows_from = end.version + turnover(raised, end.batch)

    def _lower(self, end: Observed) -> None:
        if self._credits > (self._floor if end.version < self._floor_until else end.batch):
            self._credits -= 1
            self._changed = self._quiet_since = end.version
