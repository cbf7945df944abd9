"""The families of replay. A run without it has no series of them."""

from __future__ import annotations

from collections.abc import Callable

from tianflow.core.payloads import Holdings
from tianflow.core.statistics import ReplayStatistics, RunStatistics
from tianflow.observability.prometheus.family import (
    Family,
    Reader,
    Rows,
    counter,
    gauge,
    histogram,
    of_components,
)

DISCARD_REASONS = ("expired", "learner_lost", "shard_lost", "unwanted", "stopped")
"""Reasons shown at 0 before they first occur, so that the first increase is seen; others appear
when they do.
"""


def _replay(read: Callable[[ReplayStatistics], Rows]) -> Reader:
    """No series for a run without replay."""
    return lambda run: [] if run.replay is None else read(run.replay)


def _of_replay(read: Callable[[ReplayStatistics], float | None]) -> Reader:
    """One series per run with replay; none while the number does not exist."""

    def rows(replay: ReplayStatistics) -> Rows:
        value = read(replay)
        return [] if value is None else [((), value)]

    return _replay(rows)


def _of_shards(read: Callable[[Holdings], float]) -> Reader:
    """One series per shard that is up."""
    return _replay(
        lambda replay: [
            ((str(index),), read(holdings)) for index, holdings in replay.shards.items()
        ]
    )


def _shards_up(run: RunStatistics) -> Rows:
    """1 for every shard that replay draws from, 0 for one that reports and is not ready yet, or no
    more.
    """
    if run.replay is None:
        return
    reporting = {
        int(component.name.rpartition("-")[2])
        for component in run.components
        if component.role == "replay"
    }
    for index in sorted(reporting | set(run.replay.shards)):
        yield (str(index),), float(index in run.replay.shards)


def _of_shard_components(key: str) -> Reader:
    """Distributions that shards report, by the same label as what they hold."""
    read = of_components("distributions", key)
    return lambda run: [
        ((name.rpartition("-")[2],), distribution) for (name,), distribution in read(run)
    ]


REPLAY_FAMILIES: tuple[Family, ...] = (
    gauge("replay_shards", "Replay shards that are up.", _of_replay(lambda r: len(r.shards))),
    gauge("replay_shard_up", "1 while replay draws from the shard.", _shards_up, "shard"),
    gauge("replay_items", "Items that can be drawn.", _of_shards(lambda h: h.items), "shard"),
    gauge("replay_steps", "Environment steps kept.", _of_shards(lambda h: h.steps), "shard"),
    gauge(
        "replay_mass", "Sum of the items' sampling weights.", _of_shards(lambda h: h.mass), "shard"
    ),
    gauge(
        "replay_memory_bytes",
        "Memory that was allocated for steps and items.",
        _of_shards(lambda h: h.nbytes),
        "shard",
    ),
    counter(
        "replay_steps_inserted",
        "Environment steps stored.",
        _of_shards(lambda h: h.inserted_steps),
        "shard",
    ),
    histogram(
        "replay_insert_seconds",
        "Time to store a trajectory.",
        _of_shard_components("insert_seconds"),
        "shard",
    ),
    histogram(
        "replay_draw_seconds",
        "Time to write one part of a draw.",
        _of_shard_components("draw_seconds"),
        "shard",
    ),
    histogram(
        "replay_prioritise_seconds",
        "Time to take the priorities of a part.",
        _of_shard_components("prioritise_seconds"),
        "shard",
    ),
    gauge(
        "replay_capacity_items",
        "Items that all shards together can hold.",
        _of_replay(lambda r: r.limits.capacity),
    ),
    gauge(
        "replay_min_size_items",
        "Items that must be there before anything is drawn.",
        _of_replay(lambda r: r.limits.min_size),
    ),
    counter("replay_items_inserted", "Items inserted.", _of_replay(lambda r: r.inserts)),
    counter(
        "replay_items_removed",
        "Items removed: for room, by age, or with their shard.",
        _of_replay(lambda r: r.deletes),
    ),
    counter(
        "replay_items_drawn", "Items drawn, as often as they were.", _of_replay(lambda r: r.drawn)
    ),
    counter(
        "replay_items_trained", "Drawn items that were trained on.", _of_replay(lambda r: r.trained)
    ),
    counter(
        "replay_items_discarded",
        "Drawn items that nobody trained on.",
        _replay(
            lambda r: [
                ((key,), count)
                for key, count in (dict.fromkeys(DISCARD_REASONS, 0) | dict(r.discarded)).items()
            ]
        ),
        "reason",
    ),
    gauge(
        "replay_items_held",
        "Drawn items, neither trained on nor discarded yet.",
        _of_replay(lambda r: r.held),
    ),
    gauge(
        "replay_samples_per_insert",
        "Draws for each insert since the run began.",
        _of_replay(lambda r: r.samples_per_insert),
    ),
    gauge(
        "replay_samples_per_insert_target",
        "Draws for each insert to keep to.",
        _of_replay(lambda r: r.samples_per_insert_target),
    ),
    gauge(
        "replay_limiter_diff",
        "How far inserting is ahead of drawing, in draws.",
        _of_replay(lambda r: r.diff),
    ),
    gauge(
        "replay_limiter_min_diff",
        "Nothing is drawn that would bring it lower.",
        _of_replay(lambda r: r.limits.min_diff),
    ),
    gauge(
        "replay_limiter_max_diff",
        "Nothing is inserted that would bring it higher.",
        _of_replay(lambda r: r.limits.max_diff),
    ),
    counter(
        "replay_limiter_blocked_seconds",
        "Time for which inserts, or draws, were wanted and held back.",
        _replay(lambda r: [((side,), seconds) for side, seconds in r.blocked_s.items()]),
        "side",
    ),
)
