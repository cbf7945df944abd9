"""Controller ``sample_ratio``, for replay: a credit for every slot; the rate limiter paces."""

from __future__ import annotations

from collections.abc import Iterable

from tianflow.core.directives import Directive, SetCredits
from tianflow.core.events import Event, Observed
from tianflow_controllers._limits import feeding


class SampleRatio:
    """Sets a credit for every slot.

    A credit returns when a shard has copied its trajectory. Actors therefore run as far ahead as
    the rate limiter admits trajectories (`replay.samples_per_insert`, `replay.error_buffer`;
    Reverb, arXiv 2102.04736).
    """

    def handle(self, event: Event) -> Iterable[Directive]:
        """`Observed` -> credits for all slots; other events -> nothing."""
        return (
            (SetCredits(feeding(event.slots, event.batch)),) if isinstance(event, Observed) else ()
        )
