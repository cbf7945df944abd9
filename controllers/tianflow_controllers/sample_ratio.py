"""Controller ``sample_ratio``: for replay. Every slot is a credit; the limiter holds back whichever
of actors and learner is ahead.
"""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetCredits
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class SampleRatio:
    """Gives a credit for every slot: a credit returns when a shard has copied its trajectory, so
    actors run as far ahead as the limiter lets trajectories in (`replay.samples_per_insert`,
    `replay.error_buffer`; Reverb, arXiv 2102.04736).
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> credits for all slots; every other event -> nothing."""
        return (
            (SetCredits(feeding(event.slots, event.batch)),) if isinstance(event, Observed) else ()
        )
