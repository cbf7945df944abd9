"""Controller ``lockstep``: synchronous training, the baseline of every comparison."""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetBound, SetCredits
from tianflow.core.events import Event, Observed


class Lockstep:
    """Holds the bound at 0 and gives credits for exactly one batch: sample, then learn, then sample
    with the new version.
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> bound 0 and credits B; every other event -> nothing."""
        return (SetBound(0), SetCredits(event.batch)) if isinstance(event, Observed) else ()
