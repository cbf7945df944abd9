"""Documents of a run at the service, ready for JSON: short for a list, full while the run does not
answer for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tianflow.rundir.summary import partial_document
from tianflow.server.run.app import href
from tianflow.server.service.run_manager import ManagedRun
from tianflow.server.service.store import RunRecord

SHOWN = (
    "environment",
    "algorithm",
    "elapsed_s",
    "bottleneck",
    "progress",
    "throughput",
    "returns",
    "evaluation",
    "target",
    "staleness",
    "actors",
)
"""Fields of an active run's own document that a list shows."""


def short(
    record: RunRecord, managed: ManagedRun | None, summary: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """For a list. ``summary``: of the latest process of a finished run."""
    left = partial_document(summary) if summary is not None else {}
    return (
        _common(record, managed)
        | left
        | {key: value for key, value in (_document(managed) or {}).items() if key in SHOWN}
    )


def full(
    record: RunRecord, managed: ManagedRun | None, summary: Mapping[str, Any] | None
) -> dict[str, Any]:
    """For a run that is pending, starting or finished. ``summary``: of its latest process."""
    return _common(record, managed) | {"summary": summary}


def settings(record: RunRecord, in_force: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a run that does not answer for itself, by section.

    Args:
        record: with the submitted settings, all of them.
        in_force: tables of the run's directory, with live changes. TOML has no null, so a missing
            setting of a table has no value.
    """
    found = submitted_settings(record)
    for section, values in (in_force or {}).items():
        if section in found and isinstance(values, dict):
            found[section] = {key: values.get(key) for key in _table(found[section])}
    return found


def submitted_settings(record: RunRecord) -> dict[str, Any]:
    """The settings of ``record``; {} if the store is damaged there."""
    try:
        found = json.loads(record.config)
    except (ValueError, RecursionError):
        return {}
    return _table(found)


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _common(record: RunRecord, managed: ManagedRun | None) -> dict[str, Any]:
    document = _document(managed)
    ready = document is not None and bool(document.get("ready"))
    reasons = (
        list(document.get("reasons", ()))
        if document is not None
        else [managed.problem if managed is not None else record.reason]
    )
    submitted = submitted_settings(record)
    return {
        "id": record.id,
        "state": record.state if document is None else document["state"],
        "ready": ready,
        "reasons": [reason for reason in reasons if reason],
        "href": href(record.id),
        "environment": _table(submitted.get("env")).get("id"),
        "algorithm": _table(submitted.get("algorithm")).get("name"),
        "submitted": record.submitted,
        "started": record.started,
        "ended": record.ended,
    }


def _document(managed: ManagedRun | None) -> Mapping[str, Any] | None:
    """The run's own document, if its last poll succeeded."""
    return managed.document if managed is not None and not managed.problem else None
