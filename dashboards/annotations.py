"""Annotations of Grafana dashboards: changes, restarts, checkpoints and resumes, as vertical lines
in all panels.
"""

from __future__ import annotations

from dashboards.panels import RATE, SOURCE, Json, now


def rises(name: str) -> str:
    """Runs whose counter ``name`` rose within the last interval, by how much.

    A counter with labels has no series before it first counts. So a run that was scraped an
    interval ago without one had 0 then.
    """
    scraped = f"sum by (run) ({now('run_ready')} offset {RATE}) * 0"
    before = f"(sum by (run) ({now(name)} offset {RATE}) or {scraped})"
    return f"sum by (run) ({now(name)}) - {before} > 0"


def resumes() -> str:
    """Runs whose process has just replaced an earlier one.

    Counters of the new process begin at 0. After a pause longer than an interval, the run has steps
    that its process did not make, and was not scraped an interval ago.
    """
    steps = now("env_steps_total")
    earlier = f"sum by (run) ({now('run_env_steps')}) - sum by (run) ({steps}) > 0"
    return (
        f"sum by (run) (resets({steps}[{RATE}])) > 0 or ({earlier}) "
        f"unless on (run) ({now('run_ready')} offset {RATE})"
    )


def annotations() -> list[Json]:
    """Annotations of a dashboard."""
    return [
        annotation("Changes", "Settings changed", rises("settings_changes_total"), "blue"),
        annotation("Restarts", "A process was restarted", rises("component_restarts_total"), "red"),
        annotation("Checkpoints", "Checkpoint", rises("checkpoint_attempts_total"), "green"),
        annotation("Resumes", "The run was resumed", resumes(), "orange"),
    ]


def annotation(name: str, title: str, expression: str, colour: str) -> Json:
    """An annotation wherever ``expression`` has a value."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "expr": expression,
        "iconColor": colour,
        "titleFormat": title,
        "textFormat": "{{run}}",
        "tagKeys": "run",
        "step": "",
        "useValueForTime": False,
    }
