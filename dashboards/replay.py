"""Panels of replay, for the dashboard of balance."""

from __future__ import annotations

from dashboards.panels import Json, figure, lines, mean, now, quantile, rate, time_shares


def replay_panels() -> list[Json]:
    """Contents, use and limiter of replay. The panels of a run without replay are empty."""
    items, capacity = f"sum by (run) ({now('replay_items')})", now("replay_capacity_items")
    lately = f"{rate('replay_items_drawn_total')} / {rate('replay_items_inserted_total')}"
    return [
        figure("Replay: items", "Items that can be drawn.", items),
        figure(
            "Replay: fill",
            "Items over capacity.",
            f"{items} / on (run) {capacity}",
            unit="percentunit",
        ),
        figure(
            "Samples per insert",
            "Draws per insert since the run began.",
            now("replay_samples_per_insert"),
        ),
        figure("Shards", "Replay shards that are up.", now("replay_shards")),
        figure(
            "Held items",
            "Drawn items, neither trained on nor discarded yet.",
            now("replay_items_held"),
        ),
        figure(
            "Draws unaccounted",
            "Items drawn minus trained on, discarded and held: always 0.",
            f"{now('replay_items_drawn_total')} - {now('replay_items_trained_total')} - "
            f"{now('replay_items_held')}"
            f" - on (run) sum by (run) ({now('replay_items_discarded_total')})",
            bad_from=1,
        ),
        lines(
            "Items",
            "Items of each shard, their capacity, and the minimum for the first draw.",
            (now("replay_items"), "{{run}} shard {{shard}}"),
            (capacity, "{{run}} capacity"),
            (now("replay_min_size_items"), "{{run}} minimum"),
        ),
        lines(
            "Draws per insert",
            "Recent ratio, ratio since the run began, and target of the limiter.",
            (lately, "{{run}} recent"),
            (now("replay_samples_per_insert"), "{{run}} since the run began"),
            (now("replay_samples_per_insert_target"), "{{run}} target"),
        ),
        lines(
            "Blocked by the limiter",
            "Share of time for which inserts, or draws, were blocked.",
            (rate("replay_limiter_blocked_seconds_total"), "{{run}} {{side}}"),
            unit="percentunit",
        ),
        lines(
            "Limiter",
            "Lead of inserting over drawing, in draws, and its limits.",
            (now("replay_limiter_diff"), "{{run}} lead"),
            (now("replay_limiter_min_diff"), "{{run}} minimum"),
            (now("replay_limiter_max_diff"), "{{run}} maximum"),
        ),
        lines(
            "Staleness of trained items",
            "Staleness in updates; the mean is exact.",
            (mean("staleness_updates"), "{{run}} mean"),
            (quantile(0.5, "staleness_updates"), "{{run}} median"),
            (quantile(0.99, "staleness_updates"), "{{run}} p99"),
        ),
        lines(
            "Discarded draws",
            "Drawn items discarded untrained, by reason.",
            (rate("replay_items_discarded_total"), "{{run}} {{reason}}"),
            unit="ops",
        ),
        lines(
            "Items in and out",
            "Items per second: inserted, removed, drawn and trained on.",
            (rate("replay_items_inserted_total"), "{{run}} inserted"),
            (rate("replay_items_removed_total"), "{{run}} removed"),
            (rate("replay_items_drawn_total"), "{{run}} drawn"),
            (rate("replay_items_trained_total"), "{{run}} trained on"),
            unit="ops",
        ),
        lines(
            "Work of shards",
            "Mean time to store a trajectory, to write a part of a draw, and to update its "
            "priorities.",
            (mean("replay_insert_seconds"), "{{run}} store"),
            (mean("replay_draw_seconds"), "{{run}} draw"),
            (mean("replay_prioritise_seconds"), "{{run}} priorities"),
            unit="s",
        ),
        time_shares("Shards' time", "replay-.+"),
        lines(
            "Memory of replay",
            "Memory allocated by each shard.",
            (now("replay_memory_bytes"), "{{run}} shard {{shard}}"),
            unit="bytes",
        ),
    ]
