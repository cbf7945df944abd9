"""Panels of the processes of runs: CPU time, memory, restarts, and the coordinator."""

from __future__ import annotations

from dashboards.panels import Json, lines, now, quantile, rate


def process_panels() -> list[Json]:
    """Use of the machine by each process of a run."""
    restarts = f"sum by (run, reason) (increase({now('component_restarts_total')}[1h]))"
    written = now("checkpoint_last_success_timestamp_seconds")
    return [
        lines(
            "CPU of processes",
            "Cores that each process uses. An environment's own processes are not included.",
            (rate("process_cpu_seconds_total"), "{{run}} {{process}}"),
        ),
        lines(
            "Memory of processes",
            "Resident memory of each process. Memory that processes share counts in each of them.",
            (now("process_resident_memory_bytes"), "{{run}} {{process}}"),
            unit="bytes",
        ),
        lines(
            "Actors",
            "Actors that report.",
            (now("actors"), "{{run}} reporting"),
            width=6,
        ),
        lines(
            "Restarts",
            "Restarts of host processes in the last hour.",
            (restarts, "{{run}} {{reason}}"),
            width=6,
        ),
        lines(
            "Event loop of the coordinator",
            "Delay of the event loop, 99th percentile.",
            (quantile(0.99, "loop_lag_seconds"), "{{run}}"),
            unit="s",
            width=6,
        ),
        lines(
            "Age of the checkpoint",
            "Time since the newest checkpoint was written.",
            (f"time() - ({written} > 0)", "{{run}}"),
            unit="s",
            width=6,
        ),
    ]
