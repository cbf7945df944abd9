"""Controller ``consume_only``: filters stale samples where they are consumed, without pacing.

It reproduces systems that discard stale samples at the learner, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetAdmission, SetBound, SetCredits, SetOrder
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class ConsumeOnly:
    """Sets the configured bound, a credit for every slot, and batches in order of arrival.

    As with every controller, no sample beyond the bound is used in training. Trajectories that
    exceed it are dropped as expired, and their work is lost. A stricter controller that runs at the
    same time overrides each setting.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> bound, credits for all slots, open admission, order of arrival; others ->
        nothing.

        The credits may exceed C_max.
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
