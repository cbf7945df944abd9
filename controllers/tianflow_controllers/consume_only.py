"""Controller ``consume_only``: the bound is kept where data are consumed and nowhere else. What
filters of stale samples do; for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetAdmission, SetBound, SetCredits, SetOrder
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class ConsumeOnly:
    """Keeps the configured bound, but paces nobody: a credit for every slot, batches in order of
    arrival.

    No sample beyond the bound is trained on, as under every controller. What was begun in vain is
    dropped(expired), and the work that went into it is lost. Any stricter controller that runs
    beside it wins, setting by setting.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> the bound, credits for all slots beyond C_max too, order of arrival; every
        other event -> nothing.
        """
        if not isinstance(event, Observed):
            return ()
        credit_count = feeding(event.slots, event.batch)
        return (
            SetBound(event.max_staleness),
            SetCredits(credit_count),
            SetAdmission("open"),
            SetOrder("arrival"),
        )
