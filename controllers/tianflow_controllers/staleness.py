"""Controller ``staleness`` (default): as many credits as the staleness bound allows."""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetCredits
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import ceiling


class Staleness:
    """Sets credits to C_max = (max_staleness + 1 - publish lag) * B, or to all slots when
    unbounded.

    This gives the highest throughput that the bound permits. If the learner is slower than the
    actors, the mean staleness equals the bound; `tianflow_controllers.freshest.Freshest` keeps it
    lower.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> `SetCredits`; other events -> nothing."""
        return (
            (SetCredits(ceiling(event, event.publish_lag)),) if isinstance(event, Observed) else ()
        )
