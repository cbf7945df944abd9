"""Controller ``staleness``: as many credits as the bound allows, and not one more. The default."""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetCredits
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import ceiling


class Staleness:
    """Credits C = (max_staleness + 1 - publish lag) * B; all slots when the staleness is unbounded.

    It gives the most throughput that the bound permits. With a learner slower than the actors the
    mean staleness is the bound itself; `tianflow_controllers.freshest.Freshest` is for less.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> `SetCredits`; every other event -> nothing."""
        return (
            (SetCredits(ceiling(event, event.publish_lag)),) if isinstance(event, Observed) else ()
        )
