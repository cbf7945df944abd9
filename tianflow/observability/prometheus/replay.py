"""Computed metric families of replay. A run without replay has no series of them."""

from __future__ import annotations

from collections.abc import Callable

from tianflow.core.payloads import Holdings
from tianflow.core.statistics import ReplayStatistics, RunStatistics
from tianflow.observability.prometheus.family import Family, Reader, Rows, counter, gauge, one


def shard_of(component: str) -> str:
    """The shard of the component with this name, as holdings are labelled."""
    return component.rpartition("-")[2]


def _replay(read: Callable[[ReplayStatistics], float | None]) -> Reader:
    return one(lambda run: None if run.replay is None else read(run.replay))


def _shards(read: Callable[[Holdings], float]) -> Reader:
    """One series per shard that is up."""

    def rows(run: RunStatistics) -> Rows:
        for index, holdings in () if run.replay is None else run.replay.shards.items():
            yield (str(index),), read(holdings)

    return rows


def _shards_up(run: RunStatistics) -> Rows:
    """1 for every shard that replay draws from; 0 for one that reports, but is not ready yet or no
    longer.
    """
    if run.replay is None:
        return
    reporting = {
        int(shard_of(component.name)) for component in run.components if component.role == "replay"
    }
    for index in sorted(reporting | set(run.replay.shards)):
        yield (str(index),), float(index in run.replay.shards)


REPLAY_COMPUTED: tuple[Family, ...] = (
    gauge("replay_shards", "Replay shards that are up.", _replay(lambda r: len(r.shards))),
    gauge("replay_shard_up", "1 while replay draws from the shard.", _shards_up, "shard"),
    gauge("replay_items", "Items that can be drawn.", _shards(lambda h: h.items), "shard"),
    gauge("replay_steps", "Environment steps in the shard.", _shards(lambda h: h.steps), "shard"),
    gauge("replay_mass", "Sum of the items' sampling weights.", _shards(lambda h: h.mass), "shard"),
    gauge(
        "replay_memory_bytes",
        "Memory allocated for steps and items.",
        _shards(lambda h: h.nbytes),
        "shard",
    ),
    counter(
        "replay_items_inserted",
        "Items inserted.",
        _replay(lambda r: r.inserts - r.earlier_deletes),
    ),
    counter(
        "replay_items_removed",
        "Items removed: for room, by staleness, or with their shard.",
        _replay(lambda r: r.deletes - r.earlier_deletes),
    ),
    gauge(
        "replay_capacity_items",
        "Items that all shards together can hold.",
        _replay(lambda r: r.limits.capacity),
    ),
    gauge(
        "replay_min_size_items",
        "Items that must be there before the first draw.",
        _replay(lambda r: r.limits.min_size),
    ),
    gauge(
        "replay_samples_per_insert_target",
        "Ratio of draws to inserts that the limiter maintains.",
        _replay(lambda r: r.samples_per_insert_target),
    ),
    gauge(
        "replay_limiter_min_diff",
        "Lower limit of the lead of inserting over drawing.",
        _replay(lambda r: r.limits.min_diff),
    ),
    gauge(
        "replay_limiter_max_diff",
        "Upper limit of the lead of inserting over drawing.",
        _replay(lambda r: r.limits.max_diff),
    ),
)
"""Holdings are a payload and limits are settings: no statistics dataclass, no metadata."""
