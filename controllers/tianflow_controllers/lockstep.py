"""Controller ``lockstep``: synchronous training, the baseline for comparisons."""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import Event, Observed


class Lockstep:
    """Sets the bound to 0 and credits to one batch: sample, train, then sample with the new
    version.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> bound 0 and credits B; other events -> nothing."""
        return (SetBound(0), SetCredits(event.batch)) if isinstance(event, Observed) else ()
