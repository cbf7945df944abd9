"""Panels of replay, for the dashboard of balance."""

from __future__ import annotations

from dashboards.panels import Json, figure, lines, mean, now, quantile, rate, time_shares


def replay_panels() -> list[Json]:
    """What lies in replay, how it is used, and who waits for whom. Empty for runs without one."""
    items, capacity = f"sum by (run) ({now('replay_items')})", now("replay_capacity_items")
    lately = f"{rate('replay_items_drawn_total')} / {rate('replay_items_inserted_total')}"
    return [
        figure("Replay: items", "Items that can be drawn.", items),
        figure(
            "Replay: fill",
            "Of what it can hold.",
            f"{items} / on (run) {capacity}",
            unit="percentunit",
        ),
        figure(
            "Samples per insert",
            "Draws for each insert since the run began.",
            now("replay_samples_per_insert"),
        ),
        figure("Shards", "Replay shards that are up.", now("replay_shards")),
        figure(
            "Held", "Drawn items, neither trained on nor discarded yet.", now("replay_items_held")
        ),
        figure(
            "Draws unaccounted",
            "Items drawn, less trained on, discarded and held: always 0.",
            f"{now('replay_items_drawn_total')} - {now('replay_items_trained_total')} - "
            f"{now('replay_items_held')}"
            f" - on (run) sum by (run) ({now('replay_items_discarded_total')})",
            bad_from=1,
        ),
        lines(
            "Items",
            "Those of each shard, how many there can be, and how many there must be before "
            "anything is drawn.",
            (now("replay_items"), "{{run}} shard {{shard}}"),
            (capacity, "{{run}} capacity"),
            (now("replay_min_size_items"), "{{run}} least"),
        ),
        lines(
            "Draws for each insert",
            "Lately and since the run began, against the ratio that is kept to.",
            (lately, "{{run}} lately"),
            (now("replay_samples_per_insert"), "{{run}} since it began"),
            (now("replay_samples_per_insert_target"), "{{run}} target"),
        ),
        lines(
            "Held back",
            "Share of time for which inserts, or draws, were wanted and held back.",
            (rate("replay_limiter_blocked_seconds_total"), "{{run}} {{side}}"),
            unit="percentunit",
        ),
        lines(
            "Limiter",
            "How far inserting is ahead of drawing, in draws, and the band that it is kept in.",
            (now("replay_limiter_diff"), "{{run}} ahead"),
            (now("replay_limiter_min_diff"), "{{run}} least"),
            (now("replay_limiter_max_diff"), "{{run}} most"),
        ),
        lines(
            "Age of what is trained on",
            "In updates; the mean is exact.",
            (mean("staleness_updates"), "{{run}} mean"),
            (quantile(0.5, "staleness_updates"), "{{run}} median"),
            (quantile(0.99, "staleness_updates"), "{{run}} p99"),
        ),
        lines(
            "Discarded draws",
            "Items that were drawn and that nobody trained on, by reason.",
            (rate("replay_items_discarded_total"), "{{run}} {{reason}}"),
            unit="ops",
        ),
        lines(
            "Items in and out",
            "Inserted, removed, drawn and trained on.",
            (rate("replay_items_inserted_total"), "{{run}} inserted"),
            (rate("replay_items_removed_total"), "{{run}} removed"),
            (rate("replay_items_drawn_total"), "{{run}} drawn"),
            (rate("replay_items_trained_total"), "{{run}} trained on"),
            unit="ops",
        ),
        lines(
            "Work of shards",
            "Mean time to store a trajectory, to write a part of a draw, and to take its "
            "priorities.",
            (mean("replay_insert_seconds"), "{{run}} store"),
            (mean("replay_draw_seconds"), "{{run}} draw"),
            (mean("replay_prioritise_seconds"), "{{run}} priorities"),
            unit="s",
        ),
        time_shares("Shards' time", "replay-.+"),
        lines(
            "Memory of replay",
            "Allocated by each shard.",
            (now("replay_memory_bytes"), "{{run}} shard {{shard}}"),
            unit="bytes",
        ),
    ]
