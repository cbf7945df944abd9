"""The summary of a run that has ended: ``summary.json``, and the line that ``--json`` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt

from tianflow.core.files import read_regular
from tianflow.core.jsonable import JsonDocument, json_ready
from tianflow.core.statistics import (
    BestVersion,
    LedgerSnapshot,
    ReplayStatistics,
    RunStatistics,
    quantile,
)

if TYPE_CHECKING:
    from tianflow.rundir.checkpoints import Checkpoint

SUMMARY = "summary.json"
EOF = "standard input ended"
"""Reason of a run whose parent process ended."""
REQUESTED = "stopped on request"
"""Reason of a run that a command, a program or the console stopped. The audit log says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStaleness(JsonDocument):
    """Staleness of everything trained on since the process began."""

    bound: NonNegativeInt | Literal["unbounded"]
    """Maximum staleness in force at the end."""
    mean: float | None
    p99: int | None
    max: int | None
    violations: NonNegativeInt
    """Trajectories trained on beyond the bound: always 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalTrajectories(JsonDocument):
    """Trajectories by their outcome."""

    begun: NonNegativeInt
    trained: NonNegativeInt
    inserted: NonNegativeInt
    dropped: Mapping[str, NonNegativeInt]
    """By reason."""
    open: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalWeights(JsonDocument):
    """Versions by their publication, since the process began."""

    published: NonNegativeInt
    """With the first version of each learner."""
    skipped: NonNegativeInt
    """Updates settled without being published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReplay(JsonDocument):
    """Items that replay took and gave. At the end, shards hold none."""

    inserted: NonNegativeInt
    removed: NonNegativeInt
    drawn: NonNegativeInt
    trained: NonNegativeInt
    discarded: Mapping[str, NonNegativeInt]
    """Drawn items discarded untrained, by reason."""
    held: NonNegativeInt
    samples_per_insert: float
    samples_per_insert_target: float | None
    blocked_s: Mapping[str, float]
    """Seconds for which inserts and draws were blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(JsonDocument):
    """A run that has ended. A summary of an older version lacks some fields."""

    run: str
    state: str
    reason: str
    """Reason of its end."""
    target_return: float | None
    target_reached: bool
    evaluation: Mapping[str, float]
    """Newest evaluation: ``version``, ``mean_return``, ``episodes``, and the mean of each metric of
    its environment; empty without one.
    """
    further_evaluations: Mapping[str, Mapping[str, float]]
    """The same of each further evaluation, by its name."""
    best: BestVersion | None
    """The version with the best evaluation whose checkpoint is on disk."""
    time_to_target_s: float | None
    training_s: float | None
    """Seconds from the first work of learner and actors to the last update, before the final
    evaluation."""
    env_steps: NonNegativeInt
    steps_per_s: float | None
    """Environment steps per second of training since the process began."""
    updates: NonNegativeInt
    checkpoint: NonNegativeInt | None
    """Version of the newest checkpoint on disk; None without one."""
    episodes: NonNegativeInt
    mean_return: float | None
    """Mean return of the last ``recent_episodes`` episodes of training, of unclipped rewards."""
    recent_episodes: NonNegativeInt
    """Up to 100, since the process began."""
    clipped_rewards: bool
    """True if rewards were clipped to -1..1 for learning. Returns never are."""
    staleness: FinalStaleness
    trajectories: FinalTrajectories
    weights: FinalWeights
    replay: FinalReplay | None
    """None without replay."""
    seed: int
    error: str | None
    """First error of a failed run."""


def summarise(
    statistics: RunStatistics,
    *,
    reason: str,
    target_reached: bool,
    training_s: float | None,
    seed: int,
    error: str | None,
    checkpoint: int | None = None,
    clipped_rewards: bool = False,
) -> dict[str, Any]:
    """A `RunSummary` as JSON; arguments are its fields that statistics do not have."""
    ledger, returns = statistics.ledger, statistics.recent_returns
    summary: dict[str, Any] = json_ready(
        RunSummary(
            run=statistics.run,
            state=statistics.state,
            reason=reason,
            target_return=statistics.target_return,
            target_reached=target_reached,
            evaluation=statistics.evaluation,
            further_evaluations=statistics.further_evaluations,
            best=statistics.checkpoint.best,
            time_to_target_s=statistics.time_to_target_s,
            training_s=training_s,
            env_steps=statistics.env_steps,
            steps_per_s=ledger.steps_committed / training_s if training_s else None,
            updates=max(0, ledger.version.number),
            checkpoint=checkpoint,
            episodes=statistics.episodes,
            mean_return=sum(returns) / len(returns) if returns else None,
            recent_episodes=len(returns),
            clipped_rewards=clipped_rewards,
            staleness=_staleness(ledger),
            trajectories=FinalTrajectories(
                begun=ledger.begun,
                trained=ledger.trained,
                inserted=ledger.inserted,
                dropped=ledger.dropped,
                open=ledger.open,
            ),
            weights=FinalWeights(published=ledger.publishes, skipped=ledger.unpublished_updates),
            replay=None if statistics.replay is None else _replay(statistics.replay),
            seed=seed,
            error=error,
        )
    )
    return summary


def read_summary(directory: Path) -> dict[str, Any] | None:
    """The summary in ``directory``; None where it is missing or torn. Waits for the disk."""
    try:
        found = json.loads(read_regular(directory / SUMMARY))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def summary_of_used_up(checkpoint: Checkpoint, limit: str) -> dict[str, Any]:
    """The summary of a run that cannot continue from ``checkpoint``, because ``limit`` is used up.

    It has the values of ``summary.json`` if they are of the same version, else what the checkpoint
    records. Waits for the disk.
    """
    manifest, number = checkpoint.manifest, checkpoint.version.number
    directory = checkpoint.path.parent.parent
    found = read_summary(directory) or {}
    if found.get("updates") != number:
        found = {
            "run": manifest.get("run", directory.name),
            "env_steps": manifest["env_steps"],
            "episodes": manifest["episodes"],
            "updates": number,
            "evaluation": manifest.get("evaluation", {}),
        }
    return {**found, "state": "done", "reason": limit, "checkpoint": number}


def partial_document(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Progress, returns, evaluation, target and staleness of ``summary`` in the form of the run
    document; {} where they are missing.
    """
    try:
        return {
            "progress": {"env_steps": summary["env_steps"], "updates": summary["updates"]},
            "returns": {"mean": summary["mean_return"]},
            "evaluation": summary.get("evaluation") or None,
            "target": {
                "return": summary.get("target_return"),
                "reached_after_s": summary.get("time_to_target_s"),
            },
            "staleness": {
                name: summary["staleness"].get(name) for name in ("mean", "max", "bound")
            },
        }
    except (LookupError, TypeError, AttributeError):
        return {}


def ended_document(directory: Path) -> dict[str, Any] | None:
    """The run document of a run that has ended, from its summary; None without a valid one. Waits
    for the disk.
    """
    summary = read_summary(directory) or {}
    document = partial_document(summary)
    if not document or "state" not in summary:
        return None
    reasons = [reason] if (reason := summary.get("error") or summary.get("reason")) else []
    return {
        "id": directory.name,
        "state": summary["state"],
        "reasons": reasons,
        **document,
        "checkpoint": {"best": summary.get("best")},
        "summary": summary,
    }


def lost(summary: Mapping[str, Any]) -> str:
    """The updates that no checkpoint holds, in words; "" if there are none, or if ``summary`` does
    not say.
    """
    updates, kept = summary.get("updates") or 0, summary.get("checkpoint")
    if "checkpoint" not in summary or updates <= (kept or 0):
        return ""
    if kept is None:
        return f"no checkpoint was written, so {updates:,} updates are lost"
    return f"the newest checkpoint is of version {kept:,}, so {updates - kept:,} updates are lost"


def _staleness(ledger: LedgerSnapshot) -> FinalStaleness:
    counts = ledger.staleness
    total = sum(counts.values())
    return FinalStaleness(
        bound="unbounded" if ledger.max_staleness is None else ledger.max_staleness,
        mean=sum(value * count for value, count in counts.items()) / total if total else None,
        p99=quantile(counts, 0.99),
        max=max(counts, default=None),
        violations=ledger.violations,
    )


def _replay(replay: ReplayStatistics) -> FinalReplay:
    return FinalReplay(
        inserted=replay.inserts,
        removed=replay.deletes,
        drawn=replay.drawn,
        trained=replay.trained,
        discarded=replay.discarded,
        held=replay.held,
        samples_per_insert=replay.samples_per_insert,
        samples_per_insert_target=replay.samples_per_insert_target,
        blocked_s=replay.blocked_s,
    )
