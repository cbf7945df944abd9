"""Panels of a service that holds many runs, and of what holds each of them back."""

from __future__ import annotations

from dashboards.panels import Json, lines, now

HELD = "tianflow_service_runs"
"""Of the service, which no run is the label of."""


def service_panels() -> list[Json]:
    """How many runs are in each state, and what they wait for. Without a service the first two are
    empty.
    """
    return [
        lines("Service: runs", "That the service remembers, by state.", (HELD, "{{state}}")),
        lines(
            "Service: runs that failed or were started again",
            "In the last hour.",
            (f'delta({HELD}{{state="failed"}}[1h])', "failed"),
            ("increase(tianflow_service_run_restarts_total[1h])", "processes started again"),
        ),
        lines(
            "Who waits",
            "Share of the last seconds in which the learner waited for samples, and actors for "
            "permission: what the diagnosis looks at.",
            (now("waiting_ratio"), "{{run}} {{role}}"),
            unit="percentunit",
        ),
        lines(
            "Diagnosis",
            "What holds each run back.",
            (f"{now('diagnosis')} == 1", "{{run}} {{verdict}}"),
        ),
    ]
