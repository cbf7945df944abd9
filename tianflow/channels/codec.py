"""Trajectories, batches, events and statistics as msgpack-able lists, and back. Nothing but plain
values is ever accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tianflow.core import events
from tianflow.core.payloads import Batch, Grant, Trajectory, Version
from tianflow.core.statistics import ComponentStatistics, Histogram, TimeShares
from tianflow.errors import BrokenChannelError

_EVENTS: dict[str, type[events.Event]] = {
    cls.__name__: cls
    for cls in vars(events).values()
    if isinstance(cls, type) and issubclass(cls, events.Event) and cls is not events.Event
}


def encode_grant(grant: Grant) -> list[Any]:
    """All fields in order."""
    return [grant.ticket, grant.slot, *grant.version, grant.seed_epoch, grant.ahead]


def decode_grant(values: Sequence[Any]) -> Grant:
    """The inverse of `encode_grant`."""
    ticket, slot, lineage, number, seed_epoch, ahead = values
    return Grant(ticket, slot, Version(lineage, number), seed_epoch, ahead)


def encode_trajectory(trajectory: Trajectory) -> list[int]:
    """All fields in order."""
    return [
        trajectory.ticket,
        trajectory.slot,
        trajectory.length,
        trajectory.env_steps,
        *trajectory.version,
    ]


def decode_trajectory(values: Sequence[int]) -> Trajectory:
    """The inverse of `encode_trajectory`."""
    ticket, slot, length, env_steps, lineage, number = values
    return Trajectory(ticket, slot, length, env_steps, Version(lineage, number))


def encode_batch(batch: Batch) -> list[Any]:
    """All fields in order."""
    return [
        list(batch.for_version),
        [encode_trajectory(trajectory) for trajectory in batch.trajectories],
    ]


def decode_batch(values: Sequence[Any]) -> Batch:
    """The inverse of `encode_batch`."""
    for_version, trajectories = values
    return Batch(
        Version(*for_version), tuple(decode_trajectory(trajectory) for trajectory in trajectories)
    )


def encode_event(event: events.Event) -> tuple[str, list[Any]]:
    """Its name, and its fields in order."""
    return type(event).__name__, [getattr(event, field.name) for field in fields(event)]


def decode_event(name: str, values: list[Any]) -> events.Event:
    """The event.

    Raises:
        BrokenChannelError: there is no such event, or its fields do not fit.
    """
    cls = _EVENTS.get(name)
    if cls is None or len(values) != len(fields(cls)):
        raise BrokenChannelError(
            f"a message names an event that this version does not know: {name!r}"
        )
    return cls(*(tuple(value) if isinstance(value, list) else value for value in values))


def encode_statistics(statistics: ComponentStatistics) -> list[Any]:
    """All fields in order."""
    time = statistics.time
    return [
        statistics.name,
        statistics.role,
        statistics.host,
        [dict(time.seconds), time.current, time.since],
        statistics.generation,
        dict(statistics.counters),
        dict(statistics.gauges),
        {
            name: [d.edges, d.counts, d.total, d.squares, d.cubes]
            for name, d in statistics.distributions.items()
        },
    ]


def decode_statistics(values: list[Any]) -> ComponentStatistics:
    """The inverse of `encode_statistics`."""
    name, role, host, (seconds, current, since), generation, counters, gauges, distributions = (
        values
    )
    return ComponentStatistics(
        name=name,
        role=role,
        host=host,
        time=TimeShares(seconds, current, since),
        generation=generation,
        counters=counters,
        gauges=gauges,
        distributions={
            key: Histogram(tuple(edges), tuple(counts), *sums)
            for key, (edges, counts, *sums) in distributions.items()
        },
    )
