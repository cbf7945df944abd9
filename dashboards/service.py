"""Panels of a service that holds many runs, and of their bottlenecks."""

from __future__ import annotations

from dashboards.panels import Json, lines, now

HELD = "tianflow_service_runs"
"""A metric of the service itself, without the label ``run``."""


def service_panels() -> list[Json]:
    """Runs by state. Without a service the panels are empty."""
    return [
        lines("Service: runs", "Runs of the service, by state.", (HELD, "{{state}}")),
        lines(
            "Service: failures and restarts",
            "Failed runs and restarted processes of the last hour.",
            (f'delta({HELD}{{state="failed"}}[1h])', "failed"),
            ("increase(tianflow_service_run_restarts_total[1h])", "restarted processes"),
        ),
    ]


def waiting_panels() -> list[Json]:
    """Waits and bottleneck of each run."""
    return [
        lines(
            "Waiting",
            "Share of the last seconds in which the learner waited for samples, and actors for "
            "credits, as the diagnosis sees it.",
            (now("waiting_ratio"), "{{run}} {{role}}"),
            unit="percentunit",
        ),
        lines(
            "Diagnosis",
            "Bottleneck of each run.",
            (f"{now('diagnosis')} == 1", "{{run}} {{verdict}}"),
        ),
    ]
