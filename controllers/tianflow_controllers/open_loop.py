"""Controller ``open_loop``: no balance at all, only memory pushes back. What other systems do; for
comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetBound, SetCredits, SetOrder
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class OpenLoop:
    """Lets the bound go, gives a credit for every slot, and takes batches in order of arrival.

    Any stricter controller that runs beside it wins, setting by setting.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> bound None, credits for all slots, order of arrival; every other event ->
        nothing.
        """
        if not isinstance(event, Observed):
            return ()
        return SetBound(None), SetCredits(feeding(event.slots, event.batch)), SetOrder("arrival")
