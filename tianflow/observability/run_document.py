"""A run in words and numbers for people and programs: what the HTTP API answers, the screen shows
and the summary keeps.

Pure functions of `RunStatistics`; JSON-ready: no NaN, no infinity, plain types only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tianflow.config.model import Config
from tianflow.core.jsonable import json_ready
from tianflow.core.payloads import Version
from tianflow.core.statistics import (
    ComponentStatistics,
    Histogram,
    LedgerSnapshot,
    ReplayStatistics,
    RunStatistics,
    coarse,
    quantile,
)
from tianflow.observability.rates import WINDOWS, RunRates

ENDED = ("done", "failed", "stopped")
TRAJECTORIES = (
    "granted",
    "begun",
    "committed",
    "trained",
    "inserted",
    "open",
    "dropped",
    "late_commits",
    "cuts",
)
"""Counts of the ledger that are shown as they are."""


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Staleness of the last 1,000 trained trajectories against the bound (None: unbounded); None
    before the first.
    """

    min: int | None
    mean: float | None
    p99: int | None
    max: int | None
    bound: int | None


def staleness_summary(ledger: LedgerSnapshot) -> StalenessSummary:
    """Minimum, mean, 99th percentile (nearest rank) and maximum."""
    recent = ledger.recent_staleness
    if not recent:
        return StalenessSummary(None, None, None, None, ledger.max_staleness)
    p99 = quantile(Counter(recent), 0.99)
    return StalenessSummary(
        min(recent), sum(recent) / len(recent), p99, max(recent), ledger.max_staleness
    )


def by_age(counts: Mapping[int, int]) -> dict[str, int]:
    """``counts`` by staleness, which from 16 on is told to three binary digits: however old data
    gets, there are few keys.
    """
    found: dict[str, int] = {}
    for age, count in sorted(counts.items()):
        key = str(coarse(max(0, age)))
        found[key] = found.get(key, 0) + count
    return found


def credits_target(run: RunStatistics) -> int:
    """Credits that the winning controller asks for; those in force while no controller has asked
    for any.
    """
    asked = [
        controller.credits
        for controller in run.controllers
        if controller.winning and controller.credits is not None
    ]
    return min(asked, default=run.ledger.credits_limit)


def time_shares(component: ComponentStatistics, now: float) -> dict[str, float]:
    """Fractions of the component's time in each state since its clock began, the one now running
    included.
    """
    seconds = component.time.at(now)
    total = sum(seconds.values())
    return (
        {state: share / total for state, share in seconds.items()}
        if total > 0.0
        else {component.time.current: 1.0}
    )


def time_left(run: RunStatistics, config: Config, rates: RunRates) -> dict[str, float]:
    """Seconds until each limit of the run, at the pace of the last minute; limits that it does not
    approach are absent.

    Of a run that is stopping and evaluates it is the time after which that is given up,
    ``evaluation.timeout_s``. ``target`` continues the mean return's slope in a straight line, which
    no learning curve is: an order of magnitude.
    """
    limits = config.run
    left: dict[str, float] = {}
    if run.state == "stopping" and run.evaluation_left_s is not None:
        return {"evaluation.timeout_s": run.evaluation_left_s}
    if run.state in ENDED or run.state == "stopping":
        return left
    if limits.max_env_steps is not None:
        left |= _remaining(
            "max_env_steps", limits.max_env_steps - run.env_steps, rates.steps_per_s(60.0)
        )
    if limits.max_updates is not None:
        left |= _remaining(
            "max_updates", limits.max_updates - run.ledger.version.number, rates.updates_per_s(60.0)
        )
    if limits.max_seconds is not None:
        left["max_seconds"] = max(0.0, limits.max_seconds - run.trained_s)
    if run.target_return is not None and run.time_to_target_s is None and run.recent_returns:
        missing = run.target_return - sum(run.recent_returns) / len(run.recent_returns)
        left |= _remaining("target", missing, rates.return_per_s(60.0))
    return left


def _remaining(name: str, missing: float, pace: float | None) -> dict[str, float]:
    return {name: max(0.0, missing) / pace} if pace is not None and pace > 0.0 else {}


def describe(run: RunStatistics, config: Config, rates: RunRates) -> dict[str, Any]:
    """Everything a status screen needs, JSON-ready."""
    ledger = run.ledger
    described: dict[str, Any] = json_ready(
        {
            "id": run.run,
            "state": run.state,
            "ready": run.ready,
            "reasons": run.reasons,
            "environment": config.env.id,
            "algorithm": config.algorithm.name,
            "elapsed_s": run.elapsed_s,
            "bottleneck": run.diagnosis.verdict,
            "evaluating": run.evaluating,
            "diagnosis": describe_diagnosis(run),
            "progress": {
                "env_steps": run.env_steps,
                "env_frames": run.env_frames,
                "episodes": run.episodes,
                "updates": max(0, ledger.version.number),  # below 0 before there is a learner
                "skipped_updates": ledger.skipped_updates,
                "time_left_s": time_left(run, config, rates),
            },
            "throughput": _throughput(rates),
            "shares": rates.shares(60.0),
            "returns": _returns(run),
            "target": {"return": run.target_return, "reached_after_s": run.time_to_target_s},
            "evaluation": run.evaluation or None,
            "versions": {
                "learner": _version(ledger.version),
                "published": _version(ledger.published),
                "publish_lag": ledger.publish_lag,
            },
            "staleness": _staleness(ledger),
            "trajectories": {key: getattr(ledger, key) for key in TRAJECTORIES},
            "replay": None if run.replay is None else _replay(run.replay, rates),
            "queue": {"trajectories": ledger.queue, "oldest_age_s": queue_age(run)},
            "credits": {
                "limit": ledger.credits_limit,
                "in_use": ledger.in_use,
                "ceiling": ledger.credits_ceiling,
                "target": credits_target(run),
            },
            "controllers": [asdict(controller) for controller in run.controllers],
            "settings": {
                "generation": run.generation,
                "changes": run.settings_changes,
                "refused": run.settings_refused,
            },
            "actors": {
                "wanted": run.actors_wanted,
                "reporting": sum(c.role == "actor" for c in run.components),
            },
            "components": [_component(component, run.now) for component in run.components],
            "restarts": [
                {"component": place, "reason": reason, "count": count}
                for (place, reason), count in run.restarts.items()
            ],
            "checkpoint": {
                key: getattr(run.checkpoint, key)
                for key in ("attempts", "failures", "last_success")
            },
        }
    )
    return described


def describe_diagnosis(run: RunStatistics) -> dict[str, Any]:
    """What holds the run back; JSON-ready."""
    described: dict[str, Any] = json_ready(asdict(run.diagnosis))
    return described


def describe_components(run: RunStatistics) -> list[dict[str, Any]]:
    """Every component in full: time, counters, gauges, and distributions by count and mean;
    JSON-ready.
    """
    return [
        json_ready(
            _component(component, run.now)
            | {
                "seconds": component.time.at(run.now),
                "counters": component.counters,
                "gauges": component.gauges,
                "distributions": {
                    name: _distribution(value) for name, value in component.distributions.items()
                },
            }
        )
        for component in run.components
    ]


def _throughput(rates: RunRates) -> dict[str, dict[str, float | None]]:
    return {
        "env_steps_per_s": {f"{window:.0f}": rates.steps_per_s(window) for window in WINDOWS},
        "updates_per_s": {f"{window:.0f}": rates.updates_per_s(window) for window in WINDOWS},
    }


def _returns(run: RunStatistics) -> dict[str, float | int | None]:
    returns = run.recent_returns
    if not returns:
        return {"episodes": 0, "mean": None, "min": None, "max": None}
    return {
        "episodes": len(returns),
        "mean": sum(returns) / len(returns),
        "min": min(returns),
        "max": max(returns),
    }


def _staleness(ledger: LedgerSnapshot) -> dict[str, object]:
    summary = staleness_summary(ledger)
    return {
        "bound": "unbounded" if summary.bound is None else summary.bound,
        "min": summary.min,
        "mean": summary.mean,
        "p99": summary.p99,
        "max": summary.max,
        "violations": ledger.violations,
        "counts": by_age(ledger.staleness),
    }


def _replay(replay: ReplayStatistics, rates: RunRates) -> dict[str, object]:
    """``samples_per_insert`` is that of the last minute where there is one; ``held_back`` are
    shares of the last ten seconds.
    """
    lately = rates.samples_per_insert(60.0)
    return {
        "shards": len(replay.shards),
        "items": replay.items,
        "steps": sum(holdings.steps for holdings in replay.shards.values()),
        "memory_bytes": sum(holdings.nbytes for holdings in replay.shards.values()),
        "capacity": replay.limits.capacity,
        "fill": replay.items / replay.limits.capacity,
        "min_size": replay.limits.min_size,
        "inserted": replay.inserts,
        "removed": replay.deletes,
        "drawn": replay.drawn,
        "trained": replay.trained,
        "discarded": replay.discarded,
        "held": replay.held,
        "samples_per_insert": replay.samples_per_insert if lately is None else lately,
        "samples_per_insert_target": replay.samples_per_insert_target,
        "limiter": {
            "diff": replay.diff,
            "min_diff": replay.limits.min_diff,
            "max_diff": replay.limits.max_diff,
        },
        "blocked_s": replay.blocked_s,
        "held_back": rates.held_back(10.0),
    }


def queue_age(run: RunStatistics) -> float | None:
    """Seconds since the commit of the oldest trajectory in the queue; None while it is empty."""
    return (
        None
        if run.ledger.oldest_committed_at is None
        else max(0.0, run.now - run.ledger.oldest_committed_at)
    )


def _version(version: Version) -> dict[str, int]:
    return {"lineage": version.lineage, "number": version.number}


def _component(component: ComponentStatistics, now: float) -> dict[str, object]:
    return {
        "name": component.name,
        "role": component.role,
        "host": component.host,
        "state": component.time.current,
        "shares": time_shares(component, now),
        "generation": component.generation,
    }


def _distribution(distribution: Histogram) -> dict[str, float | int | None]:
    return {
        "count": distribution.count,
        "mean": distribution.total / distribution.count if distribution.count else None,
    }
