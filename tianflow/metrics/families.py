"""The table of metric families: what of a run is shown, under which name. A new metric is one line of `FAMILIES`.

Names, kinds and readers only; `tianflow.metrics.prometheus` writes them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tianflow.statistics import Distribution, RunStatistics
from tianflow.status import credits_target, staleness_summary

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
STATES = ("starting", "running", "paused", "draining", "stopping", "done", "failed", "stopped")
BOTTLENECKS = ("sampling-bound", "learning-bound", "transport-bound", "balance-bound", "balanced", "starting", "paused", "stalled")
DROP_REASONS = (
    "expired",
    "straggler",
    "lineage",
    "learner_lost",
    "given_back",
    "env_error",
    "env_hang",
    "poisoned",
    "died",
    "silent",
    "start_timeout",
    "stopped",
)
"""Reasons shown at 0 before they first occur, so that the first increase is seen; others appear when they do."""

Kind = Literal["counter", "gauge", "histogram"]
Row = tuple[tuple[str, ...], float | Distribution]
Rows = Iterable[Row]
Reader = Callable[[RunStatistics], Rows]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. ``labels`` come after ``run``; ``read`` gives (label values, value or distribution) of one run.

    ``name`` has neither the prefix nor the ``_total`` of counters: the exposition adds that.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Reader


def _counter(name: str, text: str, read: Reader, *labels: str) -> Family:
    return Family("counter", name, text, labels, read)


def _gauge(name: str, text: str, read: Reader, *labels: str) -> Family:
    return Family("gauge", name, text, labels, read)


def _histogram(name: str, text: str, read: Reader, *labels: str) -> Family:
    return Family("histogram", name, text, labels, read)


# Readers ------------------------------------------------------------------------------------------------------------


def _one(read: Callable[[RunStatistics], float | None]) -> Reader:
    """One series per run; none while the number does not exist."""

    def rows(run: RunStatistics) -> Rows:
        value = read(run)
        return [] if value is None else [((), value)]

    return rows


def _each(read: Callable[[RunStatistics], Mapping[str, float]]) -> Reader:
    """One series per key of a mapping."""
    return lambda run: [((key,), value) for key, value in read(run).items()]


def _flags(read: Callable[[RunStatistics], str], names: tuple[str, ...]) -> Reader:
    """One series per name: 1 for the one that holds, 0 for the others."""
    return lambda run: [((name,), float(name == read(run))) for name in names]


def _of_components(kind: Literal["counters", "gauges", "distributions"], key: str) -> Reader:
    """One series per component that has ``key``."""

    def rows(run: RunStatistics) -> Rows:
        for component in run.components:
            values: Mapping[str, float | Distribution] = getattr(component, kind)
            if key in values:
                yield (component.name,), values[key]

    return rows


def _times(run: RunStatistics) -> Rows:
    for component in run.components:
        for state, seconds in component.time.at(run.now).items():
            yield (component.name, state), seconds


def _staleness(read: Callable[[RunStatistics], Mapping[int, int]]) -> Reader:
    return lambda run: [((), staleness_distribution(read(run)))]


def _recent(read: Callable[[tuple[float, ...]], float]) -> Callable[[RunStatistics], float | None]:
    return lambda run: read(run.recent_returns) if run.recent_returns else None


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _queue_age(run: RunStatistics) -> float:
    oldest = run.ledger.oldest_committed_at
    return 0.0 if oldest is None else max(0.0, run.now - oldest)


def _shares(field: str) -> Reader:
    return lambda run: [((holder,), float(getattr(share, field))) for holder, share in run.ledger.shares.items()]


def staleness_distribution(counts: Mapping[int, int]) -> Distribution:
    """Exact counts of the ledger as a distribution over `STALENESS_BUCKETS` (a negative one, a bug, is in the first)."""
    totals = [0] * (len(STALENESS_BUCKETS) + 1)
    for staleness, count in counts.items():
        totals[next((i for i, edge in enumerate(STALENESS_BUCKETS) if staleness <= edge), -1)] += count
    total = sum(staleness * count for staleness, count in counts.items())
    return Distribution(tuple(float(edge) for edge in STALENESS_BUCKETS), tuple(totals), float(total))


# The table ----------------------------------------------------------------------------------------------------------

FAMILIES: tuple[Family, ...] = (
    # Progress
    _counter("env_steps", "Environment steps made (reset steps do not count).", _one(lambda r: r.env_steps)),
    _counter("env_frames", "Frames of the environments behind those steps.", _one(lambda r: r.env_frames)),
    _counter("episodes", "Finished episodes of training.", _one(lambda r: r.episodes)),
    _gauge("episode_return_mean", "Mean return of the last 100 episodes of training.", _one(_recent(_mean))),
    _gauge("episode_return_min", "Lowest return of the last 100 episodes of training.", _one(_recent(min))),
    _gauge("episode_return_max", "Highest return of the last 100 episodes of training.", _one(_recent(max))),
    _gauge("target_return", "Return that training is to reach.", _one(lambda r: r.target_return)),
    _gauge("time_to_target_seconds", "Training time until the target was first reached.", _one(lambda r: r.time_to_target_s)),
    _gauge("evaluation_return_mean", "Mean return of the newest evaluation.", _one(lambda r: r.evaluation.get("mean_return"))),
    _gauge("evaluation_version", "Version that the newest evaluation was of.", _one(lambda r: r.evaluation.get("version"))),
    _counter("evaluations_failed", "Evaluations that came to nothing.", _one(lambda r: r.evaluation_failures)),
    _gauge("run_elapsed_seconds", "Time since the run began.", _one(lambda r: r.elapsed_s)),
    _gauge("run_state", "1 for the state that the run is in.", _flags(lambda r: r.state, STATES), "state"),
    _gauge("run_ready", "1 while training can proceed.", _one(lambda r: float(r.ready))),
    _gauge("run_bottleneck", "1 for what bounds the throughput now.", _flags(lambda r: r.bottleneck, BOTTLENECKS), "reason"),
    # Trajectories: one snapshot of the ledger
    _counter("trajectories_granted", "Tickets granted.", _one(lambda r: r.ledger.granted)),
    _counter("trajectories_returned", "Tickets given back before their trajectory began.", _one(lambda r: r.ledger.returned)),
    _counter("trajectories_begun", "Trajectories begun.", _one(lambda r: r.ledger.begun)),
    _counter("trajectories_committed", "Trajectories committed.", _one(lambda r: r.ledger.committed)),
    _counter("trajectories_trained", "Trajectories trained on.", _one(lambda r: r.ledger.trained)),
    _counter(
        "trajectories_dropped",
        "Trajectories begun and given up.",
        _each(lambda r: dict.fromkeys(DROP_REASONS, 0) | r.ledger.dropped),
        "reason",
    ),
    _gauge("trajectories_open", "Trajectories begun, neither trained on nor dropped yet.", _one(lambda r: r.ledger.open)),
    _counter("trajectories_late_commits", "Commits refused because the ticket had been given up.", _one(lambda r: r.ledger.late_commits)),
    _counter("trajectories_cut", "Trajectories asked to commit what they had.", _one(lambda r: r.ledger.cuts)),
    _counter("steps_committed", "Environment steps in committed trajectories.", _shares("committed_steps"), "component"),
    _counter("steps_trained", "Environment steps trained on.", _shares("trained_steps"), "component"),
    _counter("steps_dropped", "Environment steps committed and then dropped.", _shares("dropped_steps"), "component"),
    # Balance
    _histogram("staleness_updates", "Staleness at use of every trained trajectory.", _staleness(lambda r: r.ledger.staleness)),
    _histogram("staleness_in_flight_updates", "Part of staleness until commit.", _staleness(lambda r: r.ledger.in_flight)),
    _histogram("staleness_in_queue_updates", "Part of staleness from commit to use.", _staleness(lambda r: r.ledger.in_queue)),
    _gauge(
        "staleness_bound_updates",
        "Bound on staleness in force (+Inf: unbounded).",
        _one(lambda r: math.inf if r.ledger.max_staleness is None else r.ledger.max_staleness),
    ),
    _gauge("staleness_min_updates", "Lowest of the last 1,000 trajectories.", _one(lambda r: staleness_summary(r.ledger).lowest)),
    _gauge("staleness_mean_updates", "Mean of the last 1,000 trajectories.", _one(lambda r: staleness_summary(r.ledger).mean)),
    _gauge("staleness_p99_updates", "99th percentile of the last 1,000 trajectories.", _one(lambda r: staleness_summary(r.ledger).p99)),
    _gauge("staleness_max_updates", "Highest of the last 1,000 trajectories.", _one(lambda r: staleness_summary(r.ledger).highest)),
    _counter("staleness_violations", "Trajectories trained on beyond the bound: always 0.", _one(lambda r: r.ledger.violations)),
    _gauge("publish_lag_updates", "Updates since the last published version.", _one(lambda r: r.ledger.publish_lag)),
    _gauge("credits_limit", "Credits in force.", _one(lambda r: r.ledger.credits_limit)),
    _gauge("credits_in_use", "Credits held by tickets.", _one(lambda r: r.ledger.in_use)),
    _gauge("credits_ceiling", "Most credits that the bound allows.", _one(lambda r: r.ledger.credits_ceiling)),
    _gauge("credits_target", "Credits that the winning law asks for.", _one(credits_target)),
    _gauge("queue_trajectories", "Committed trajectories that wait for the learner.", _one(lambda r: r.ledger.queue)),
    _gauge("queue_oldest_age_seconds", "Age of the oldest of them since its commit.", _one(_queue_age)),
    _gauge("slots", "Slots that exist.", _one(lambda r: r.ledger.slots)),
    _gauge("slots_free", "Slots that nobody holds.", _one(lambda r: r.ledger.free_slots)),
    _gauge("slots_quarantined", "Slots of given-up tickets that may still be written.", _one(lambda r: r.ledger.quarantined_slots)),
    _counter("balance_directives", "Directives given by a law.", lambda r: [((w.name,), w.directives) for w in r.laws], "controller"),
    _gauge("balance_law_winning", "1 for a law that is obeyed.", lambda r: [((w.name,), float(w.winning)) for w in r.laws], "controller"),
    _gauge("balance_settings_generation", "Newest generation of the live settings.", _one(lambda r: r.generation)),
    _gauge(
        "component_settings_generation",
        "Generation of the settings in force in a component.",
        lambda r: [((c.name,), c.generation) for c in r.components],
        "component",
    ),
    _counter("settings_changes", "Live changes put in force.", _one(lambda r: r.settings_changes)),
    _counter("settings_refused", "Live changes refused.", _one(lambda r: r.settings_refused)),
    # Learner and weights
    _counter("learner_updates", "Updates settled.", _one(lambda r: r.ledger.updates)),
    _counter("learner_updates_skipped", "Updates whose step was skipped as not finite.", _one(lambda r: r.ledger.skipped_updates)),
    _histogram("learner_update_seconds", "Time of one update.", _of_components("distributions", "update_seconds"), "component"),
    _gauge("learner_last_update_timestamp_seconds", "Unix time of the last settled update.", _one(lambda r: r.last_update_timestamp)),
    _counter("samples_trained", "Steps trained on, as the learner counts them.", _of_components("counters", "samples"), "component"),
    _gauge("off_policy_kl_nats", "KL of the acting from the learning policy on a batch.", _of_components("gauges", "kl"), "component"),
    _gauge(
        "effective_sample_ratio",
        "Effective sample size of the importance weights over the batch size.",
        _of_components("gauges", "ess_ratio"),
        "component",
    ),
    _counter("weights_published", "Versions published.", _one(lambda r: r.ledger.publishes)),
    _counter("weights_skipped", "Updates settled without being published.", _one(lambda r: r.ledger.unpublished_updates)),
    _counter("weights_bytes", "Bytes of weights published.", _of_components("counters", "weights_bytes"), "component"),
    _histogram("weights_publish_seconds", "Time to publish a version.", _of_components("distributions", "publish_seconds"), "component"),
    # Components and the coordinator
    _counter("component_time_seconds", "Where a component's time goes, the state now running included.", _times, "component", "state"),
    _counter("component_starts", "Starts of a host process, by its place.", _each(lambda r: r.starts), "component"),
    _counter(
        "component_restarts",
        "Starts of a host process that replaced one that was lost, by its place.",
        lambda r: [(key, count) for key, count in r.restarts.items()],
        "component",
        "reason",
    ),
    _gauge("actors_wanted", "Actors that the settings ask for.", _one(lambda r: r.actors_wanted)),
    _gauge("actors", "Actors that report.", _one(lambda r: sum(c.role == "actor" for c in r.components))),
    _counter("events_received", "Events that reached the coordinator.", _one(lambda r: r.events_received)),
    _counter("events_dropped", "Events lost on the way to it.", _one(lambda r: r.events_dropped)),
    _histogram("loop_lag_seconds", "How late the coordinator's event loop runs.", lambda r: [((), r.loop_lag)]),
    _counter("checkpoint_attempts", "Checkpoints begun.", _one(lambda r: r.checkpoint.attempts)),
    _counter("checkpoint_failures", "Checkpoints that could not be written.", _one(lambda r: r.checkpoint.failures)),
    _histogram("checkpoint_seconds", "Time to write a checkpoint.", lambda r: [((), r.checkpoint.seconds)]),
    _gauge(
        "checkpoint_last_success_timestamp_seconds",
        "Unix time of the newest checkpoint, 0 before the first.",
        _one(lambda r: r.checkpoint.last_success),
    ),
)
