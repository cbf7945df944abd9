"""`RunsOnDisk`: runs in the directory of a service that it did not start, to be read only.

They were started by hand, or by a service whose store is lost. Their files are those of others
(`tianflow.rundir.foreign`). No request goes to them, and nothing in their directories changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.config.relevance import relevant
from tianflow.rundir.audit_log import AuditPage
from tianflow.rundir.foreign import ENDED, ForeignRun, is_run, names_of_runs
from tianflow.rundir.history import Row, is_number
from tianflow.rundir.summary import partial_document
from tianflow.server.run.app import href

MOST = 100
"""Largest number of runs on disk in a list."""
OTHER = "it is on disk and not in the store of this service"
LONGEST = 200
"""Characters of the names of environment and algorithm."""


@dataclass(frozen=True, slots=True)
class RunsListed:
    """Short documents of runs on disk, the newest first, and the number of older ones."""

    runs: Sequence[dict[str, Any]] = ()
    more: int = 0


class RunsOnDisk:
    """The runs in the directory ``runs``. Every method waits for the disk.

    Args:
        runs: directory of the service.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._read: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Stamp and parts of the documents of a list, by name: few of them change."""

    def names(self) -> Sequence[str]:
        """Names of all runs on disk, the newest first."""
        return names_of_runs(self._runs)

    def has(self, name: str) -> bool:
        """True if the run ``name`` is on disk."""
        return is_run(self._runs, name)

    def listed(self, names: Sequence[str]) -> RunsListed:
        """Short documents of at most `MOST` of the runs ``names``."""
        shown = names[:MOST]
        return RunsListed([self._short(name) for name in shown], len(names) - len(shown))

    def refusal(self, name: str) -> str:
        """What a client may know about a run that it asks to change."""
        found = self._common(name)
        state = f"has ended ({found['state']}) and " if found["state"] in ENDED else ""
        return f"run {name!r} {state}can only be read: {found['reasons'][0]}"

    def document(self, name: str) -> dict[str, Any]:
        """The full document of a run."""
        return self._common(name) | {"summary": self._run(name).summary()}

    def settings(self, name: str) -> dict[str, dict[str, Any]]:
        """The settings of a run that have an effect on its training."""
        return relevant(self._run(name).settings() or {})

    def rows(self, name: str) -> list[Row]:
        """The history of a run."""
        return self._run(name).rows()

    def audit(self, name: str, *, before: int | None, limit: int) -> AuditPage:
        """A page of the audit log of a run."""
        return self._run(name).audit(before=before, limit=limit)

    def _run(self, name: str) -> ForeignRun:
        return ForeignRun(self._runs / name)

    def _short(self, name: str) -> dict[str, Any]:
        """For a list: with the results so far."""
        parts = self._parts(name)
        summary, last = parts["summary"], parts["extent"].last
        results = partial_document(summary) if summary is not None else {}
        ended = summary or {}
        reason = ended.get("error") or ended.get("reason")
        return {
            **self._common(name),
            **(results or _results(last)),
            "end_reason": reason[:LONGEST] if isinstance(reason, str) else None,
        }

    def _common(self, name: str) -> dict[str, Any]:
        parts = self._parts(name)
        run, summary = self._run(name), parts["summary"]
        contact, extent = run.contact(), parts["extent"]
        advice, ended = f"`tianflow train --resume {name}` continues it", None
        if contact is not None and run.is_active(contact, extent.last, time.time()):
            state, advice = "running", f"it answers at {contact.address[:LONGEST]}"
        elif contact is not None or summary is None:
            state, ended = "interrupted", extent.last.get("time")
        else:
            state = summary.get("state", "")
            state = state if state in ENDED else "stopped"
            ended = run.ended()
        return {
            "id": name,
            "state": state,
            "ready": False,
            "reasons": [f"{OTHER}; {advice}"],
            "href": href(name),
            "environment": parts["environment"],
            "algorithm": parts["algorithm"],
            "submitted": None,
            "started": _start(extent.first),
            "ended": ended if is_number(ended) else None,
            "elapsed_s": extent.last.get("t"),
            "on_disk": True,
        }

    def _parts(self, name: str) -> dict[str, Any]:
        """What the documents of a run have from its files."""
        run = self._run(name)
        stamp = run.stamp
        known = self._read.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        settings = run.settings() or {}
        parts = {
            "summary": run.summary(),
            "extent": run.extent(),
            "environment": _text(settings.get("env"), "id"),
            "algorithm": _text(settings.get("algorithm"), "name"),
        }
        if len(self._read) >= 2 * MOST:  # a list has fewer, and directories come and go
            self._read = {}
        self._read[name] = (stamp, parts)
        return parts


def _results(last: Mapping[str, Any]) -> dict[str, Any]:
    """Results so far from the last line of a history."""
    if "env_steps" not in last:
        return {}
    return {
        "progress": {"env_steps": last["env_steps"], "updates": last.get("updates")},
        "returns": {"mean": last.get("mean_return")},
    }


def _start(first: Mapping[str, Any]) -> float | None:
    """Unix time at which the first line of a history began."""
    if not is_number(first.get("time")):
        return None
    return float(first["time"]) - float(first.get("span_s") or 0.0)


def _text(section: Mapping[str, Any] | None, key: str) -> str | None:
    value = (section or {}).get(key)
    return value[:LONGEST] if isinstance(value, str) else None
