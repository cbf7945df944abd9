"""Documents of a run at the service, ready for JSON: short for a list, full while the run does not
answer for itself.
"""

from __future__ import annotations

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


def _common(record: RunRecord, managed: ManagedRun | None) -> dict[str, Any]:
    document = _document(managed)
    ready = document is not None and bool(document.get("ready"))
    reasons = (
        list(document.get("reasons", ()))
        if document is not None
        else [managed.problem if managed is not None else record.reason]
    )
    return {
        "id": record.id,
        "state": record.state if document is None else document["state"],
        "ready": ready,
        "reasons": [reason for reason in reasons if reason],
        "href": href(record.id),
        "submitted": record.submitted,
        "started": record.started,
        "ended": record.ended,
    }


def _document(managed: ManagedRun | None) -> Mapping[str, Any] | None:
    """The run's own document, if its last poll succeeded."""
    return managed.document if managed is not None and not managed.problem else None
