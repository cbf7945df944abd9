"""What is left of a run when it has ended: the record that ``summary.json`` holds and ``--json``
prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tianflow.core.statistics import ReplayStatistics, RunStatistics, quantile

SUMMARY = "summary.json"
EOF = "standard input ended"
"""Reason of the end of a run whose starter vanished."""


def summarise(
    statistics: RunStatistics,
    *,
    reason: str,
    target_reached: bool,
    training_s: float | None,
    seed: int,
    error: str | None,
    checkpoint: int | None = None,
) -> dict[str, object]:
    """The record, JSON-able.

    ``reason``: why the run ended. ``training_s``: seconds from when learner and actors were first
    at work to when nothing was trained on any more, before the last evaluation. ``error``: the
    first one. ``checkpoint``: version of the newest one on disk.
    """
    ledger, returns = statistics.ledger, statistics.recent_returns
    return {
        "run": statistics.run,
        "state": statistics.state,
        "reason": reason,
        "target_return": statistics.target_return,
        "target_reached": target_reached,
        "evaluation": dict(statistics.evaluation),
        "time_to_target_s": statistics.time_to_target_s,
        "training_s": training_s,
        "env_steps": statistics.env_steps,
        "steps_per_s": ledger.steps_committed / training_s if training_s else None,
        "updates": max(0, ledger.version.number),
        "checkpoint": checkpoint,
        "episodes": statistics.episodes,
        "mean_return": sum(returns) / len(returns) if returns else None,
        "staleness": {
            "bound": "unbounded" if ledger.max_staleness is None else ledger.max_staleness,
            **_moments(ledger.staleness),
            "violations": ledger.violations,
        },
        "trajectories": {
            "begun": ledger.begun,
            "trained": ledger.trained,
            "inserted": ledger.inserted,
            "dropped": dict(ledger.dropped),
            "open": ledger.open,
        },
        "replay": None if statistics.replay is None else _replay(statistics.replay),
        "seed": seed,
        "error": error,
    }


def read_summary(directory: Path) -> dict[str, Any] | None:
    """What the newest life of the run in ``directory`` left; None where that is nothing that can be
    read. Waits for the disk.
    """
    try:
        found = json.loads((directory / SUMMARY).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def as_told(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What ``summary`` says of progress, returns and staleness, in the form in which a run that
    goes on tells it; {} where it is torn.
    """
    try:
        return {
            "progress": {"env_steps": summary["env_steps"], "updates": summary["updates"]},
            "returns": {"mean": summary["mean_return"]},
            "staleness": {
                name: summary["staleness"].get(name) for name in ("mean", "max", "bound")
            },
        }
    except (LookupError, TypeError, AttributeError):
        return {}


def lost(summary: Mapping[str, Any]) -> str:
    """What was learned and is in no checkpoint, in words; "" where nothing is lost, or ``summary``
    does not say.
    """
    updates, kept = summary.get("updates") or 0, summary.get("checkpoint")
    if "checkpoint" not in summary or updates <= (kept or 0):
        return ""
    if kept is None:
        return f"no checkpoint was written, so {updates:,} updates are lost"
    return f"the newest checkpoint is of version {kept:,}, so {updates - kept:,} updates are lost"


def _replay(replay: ReplayStatistics) -> dict[str, object]:
    """Items that went in and out (when it ends, no shard holds any), their ratio, and seconds for
    which either side was held back.
    """
    return {
        "inserted": replay.inserts,
        "removed": replay.deletes,
        "drawn": replay.drawn,
        "trained": replay.trained,
        "discarded": dict(replay.discarded),
        "held": replay.held,
        "samples_per_insert": replay.samples_per_insert,
        "samples_per_insert_target": replay.samples_per_insert_target,
        "blocked_s": dict(replay.blocked_s),
    }


def _moments(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Mean, 99th percentile and maximum of a histogram of integers."""
    total = sum(counts.values())
    mean = sum(value * count for value, count in counts.items()) / total if total else None
    return {"mean": mean, "p99": quantile(counts, 0.99), "max": max(counts, default=None)}
