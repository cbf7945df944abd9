"""Controller ``open_loop``: no balance; only the number of slots limits actors.

It reproduces systems without flow control, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetBound, SetCredits, SetOrder
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class OpenLoop:
    """Sets no bound, a credit for every slot, and batches in order of arrival.

    A stricter controller that runs at the same time overrides each setting.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> bound None, credits for all slots, order of arrival; other events ->
        nothing.
        """
        if not isinstance(event, Observed):
            return ()
        return SetBound(None), SetCredits(feeding(event.slots, event.batch)), SetOrder("arrival")
