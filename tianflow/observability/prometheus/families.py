"""The table of metric families: what of a run is shown, under which name. A new metric is one line
of `FAMILIES`.

Names, kinds and readers only; `tianflow.observability.prometheus.prometheus` writes them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tianflow.core.statistics import Histogram, RunStatistics
from tianflow.observability.prometheus.family import (
    Family,
    Reader,
    Rows,
    counter,
    each,
    gauge,
    histogram,
    of_components,
    one,
)
from tianflow.observability.prometheus.replay import REPLAY_FAMILIES
from tianflow.observability.run_document import credits_target, staleness_summary

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)
"""To 256 for what is used once; beyond for what lies in replay."""
STATES = ("starting", "running", "paused", "draining", "stopping", "done", "failed", "stopped")
VERDICTS = (
    "sampling-bound",
    "learning-bound",
    "transport-bound",
    "balance-bound",
    "balanced",
    "starting",
    "paused",
    "stalled",
)
DROP_REASONS = (
    "expired",
    "straggler",
    "lineage",
    "learner_lost",
    "env_error",
    "env_hang",
    "poisoned",
    "died",
    "silent",
    "start_timeout",
    "shard_lost",
    "stopped",
)
"""Reasons shown at 0 before they first occur, so that the first increase is seen; others appear
when they do.
"""


# Readers
# --------------------------------------------------------------------------------------------------


def _flags(read: Callable[[RunStatistics], str], names: tuple[str, ...]) -> Reader:
    """One series per name: 1 for the one that holds, 0 for the others."""
    return lambda run: [((name,), float(name == read(run))) for name in names]


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
    return lambda run: [
        ((holder,), float(getattr(share, field))) for holder, share in run.ledger.shares.items()
    ]


def staleness_distribution(counts: Mapping[int, int]) -> Histogram:
    """Exact counts of the ledger as a distribution over `STALENESS_BUCKETS` (a negative one, a bug,
    is in the first).
    """
    totals = [0] * (len(STALENESS_BUCKETS) + 1)
    for staleness, count in counts.items():
        totals[next((i for i, edge in enumerate(STALENESS_BUCKETS) if staleness <= edge), -1)] += (
            count
        )
    total = sum(staleness * count for staleness, count in counts.items())
    return Histogram(tuple(float(edge) for edge in STALENESS_BUCKETS), tuple(totals), float(total))


# The table
# --------------------------------------------------------------------------------------------------

FAMILIES: tuple[Family, ...] = (
    # Progress
    counter(
        "env_steps",
        "Environment steps made (reset steps do not count).",
        one(lambda r: r.env_steps),
    ),
    counter(
        "env_frames", "Frames of the environments behind those steps.", one(lambda r: r.env_frames)
    ),
    counter("episodes", "Finished episodes of training.", one(lambda r: r.episodes)),
    gauge(
        "episode_return_mean",
        "Mean return of the last 100 episodes of training.",
        one(_recent(_mean)),
    ),
    gauge(
        "episode_return_min",
        "Lowest return of the last 100 episodes of training.",
        one(_recent(min)),
    ),
    gauge(
        "episode_return_max",
        "Highest return of the last 100 episodes of training.",
        one(_recent(max)),
    ),
    gauge("target_return", "Return that training is to reach.", one(lambda r: r.target_return)),
    gauge(
        "time_to_target_seconds",
        "Training time until the target was first reached.",
        one(lambda r: r.time_to_target_s),
    ),
    gauge(
        "evaluation_return_mean",
        "Mean return of the newest evaluation.",
        one(lambda r: r.evaluation.get("mean_return")),
    ),
    gauge(
        "evaluation_version",
        "Version that the newest evaluation was of.",
        one(lambda r: r.evaluation.get("version")),
    ),
    counter(
        "evaluations_failed",
        "Evaluations that came to nothing.",
        one(lambda r: r.evaluation_failures),
    ),
    gauge("run_elapsed_seconds", "Time since the run began.", one(lambda r: r.elapsed_s)),
    gauge(
        "run_state",
        "1 for the state that the run is in.",
        _flags(lambda r: r.state, STATES),
        "state",
    ),
    gauge("run_ready", "1 while training can proceed.", one(lambda r: float(r.ready))),
    gauge(
        "diagnosis",
        "1 for what bounds the throughput now.",
        _flags(lambda r: r.diagnosis.verdict, VERDICTS),
        "verdict",
    ),
    gauge(
        "waiting_ratio",
        "Share of the last seconds for which the learner waited for a batch, and actors on "
        "average for a credit.",
        lambda r: [((role,), share) for role, share in r.diagnosis.waits.items()],
        "role",
    ),
    # Trajectories: one snapshot of the ledger
    counter("trajectories_granted", "Tickets granted.", one(lambda r: r.ledger.granted)),
    counter(
        "trajectories_returned",
        "Tickets given back before their trajectory began.",
        one(lambda r: r.ledger.returned),
    ),
    counter("trajectories_begun", "Trajectories begun.", one(lambda r: r.ledger.begun)),
    counter("trajectories_committed", "Trajectories committed.", one(lambda r: r.ledger.committed)),
    counter("trajectories_trained", "Trajectories trained on.", one(lambda r: r.ledger.trained)),
    counter(
        "trajectories_inserted",
        "Trajectories that went into replay; 0 without one.",
        one(lambda r: r.ledger.inserted),
    ),
    counter(
        "trajectories_dropped",
        "Trajectories begun and given up.",
        each(lambda r: dict.fromkeys(DROP_REASONS, 0) | r.ledger.dropped),
        "reason",
    ),
    gauge(
        "trajectories_open",
        "Trajectories begun, neither trained on, inserted nor dropped yet.",
        one(lambda r: r.ledger.open),
    ),
    counter(
        "trajectories_late_commits",
        "Commits refused because the ticket had been given up.",
        one(lambda r: r.ledger.late_commits),
    ),
    counter(
        "trajectories_cut",
        "Trajectories asked to commit what they had.",
        one(lambda r: r.ledger.cuts),
    ),
    counter(
        "steps_committed",
        "Environment steps in committed trajectories.",
        _shares("committed_steps"),
        "component",
    ),
    counter(
        "steps_trained", "Environment steps trained on.", _shares("trained_steps"), "component"
    ),
    counter(
        "steps_dropped",
        "Environment steps committed and then dropped.",
        _shares("dropped_steps"),
        "component",
    ),
    # Balance
    histogram(
        "staleness_updates",
        "Staleness at use of all that was trained on: trajectories, with replay items.",
        _staleness(lambda r: r.ledger.staleness),
    ),
    histogram(
        "staleness_in_flight_updates",
        "Part of staleness until commit.",
        _staleness(lambda r: r.ledger.in_flight),
    ),
    histogram(
        "staleness_in_queue_updates",
        "Part of staleness from commit to use.",
        _staleness(lambda r: r.ledger.in_queue),
    ),
    gauge(
        "staleness_bound_updates",
        "Bound on staleness in force (+Inf: unbounded).",
        one(lambda r: math.inf if r.ledger.max_staleness is None else r.ledger.max_staleness),
    ),
    gauge(
        "staleness_min_updates",
        "Lowest of the last 1,000 trajectories.",
        one(lambda r: staleness_summary(r.ledger).lowest),
    ),
    gauge(
        "staleness_mean_updates",
        "Mean of the last 1,000 trajectories.",
        one(lambda r: staleness_summary(r.ledger).mean),
    ),
    gauge(
        "staleness_p99_updates",
        "99th percentile of the last 1,000 trajectories.",
        one(lambda r: staleness_summary(r.ledger).p99),
    ),
    gauge(
        "staleness_max_updates",
        "Highest of the last 1,000 trajectories.",
        one(lambda r: staleness_summary(r.ledger).highest),
    ),
    counter(
        "staleness_violations",
        "Trajectories trained on beyond the bound: always 0.",
        one(lambda r: r.ledger.violations),
    ),
    gauge(
        "publish_lag_updates",
        "Updates since the last published version.",
        one(lambda r: r.ledger.publish_lag),
    ),
    gauge("credits_limit", "Credits in force.", one(lambda r: r.ledger.credits_limit)),
    gauge("credits_in_use", "Credits held by tickets.", one(lambda r: r.ledger.in_use)),
    gauge(
        "credits_ceiling",
        "Most credits that the bound allows.",
        one(lambda r: r.ledger.credits_ceiling),
    ),
    gauge("credits_target", "Credits that the winning controller asks for.", one(credits_target)),
    gauge(
        "queue_trajectories",
        "Committed trajectories that wait for the learner.",
        one(lambda r: r.ledger.queue),
    ),
    gauge(
        "queue_oldest_age_seconds", "Age of the oldest of them since its commit.", one(_queue_age)
    ),
    gauge("slots", "Slots that exist.", one(lambda r: r.ledger.slots)),
    gauge("slots_free", "Slots that nobody holds.", one(lambda r: r.ledger.free_slots)),
    gauge(
        "slots_quarantined",
        "Slots of given-up tickets that may still be written.",
        one(lambda r: r.ledger.quarantined_slots),
    ),
    counter(
        "balance_directives",
        "Directives given by a controller.",
        lambda r: [((w.name,), w.directives) for w in r.controllers],
        "controller",
    ),
    gauge(
        "balance_controller_winning",
        "1 for a controller that is obeyed.",
        lambda r: [((w.name,), float(w.winning)) for w in r.controllers],
        "controller",
    ),
    gauge(
        "balance_settings_generation",
        "Newest generation of the live settings.",
        one(lambda r: r.generation),
    ),
    gauge(
        "component_settings_generation",
        "Generation of the settings in force in a component.",
        lambda r: [((c.name,), c.generation) for c in r.components],
        "component",
    ),
    counter("settings_changes", "Live changes put in force.", one(lambda r: r.settings_changes)),
    counter("settings_refused", "Live changes refused.", one(lambda r: r.settings_refused)),
    # Learner and weights
    counter("learner_updates", "Updates settled.", one(lambda r: r.ledger.updates)),
    counter(
        "learner_updates_skipped",
        "Updates whose step was skipped as not finite.",
        one(lambda r: r.ledger.skipped_updates),
    ),
    histogram(
        "learner_update_seconds",
        "Time of one update.",
        of_components("distributions", "update_seconds"),
        "component",
    ),
    gauge(
        "learner_last_update_timestamp_seconds",
        "Unix time of the last settled update.",
        one(lambda r: r.last_update_timestamp),
    ),
    counter(
        "samples_trained",
        "Steps trained on, as the learner counts them.",
        of_components("counters", "samples"),
        "component",
    ),
    gauge(
        "off_policy_kl_nats",
        "KL of the acting from the learning policy on a batch.",
        of_components("gauges", "kl"),
        "component",
    ),
    gauge(
        "effective_sample_ratio",
        "Effective sample size of the importance weights over the batch size.",
        of_components("gauges", "ess_ratio"),
        "component",
    ),
    counter("weights_published", "Versions published.", one(lambda r: r.ledger.publishes)),
    counter(
        "weights_skipped",
        "Updates settled without being published.",
        one(lambda r: r.ledger.unpublished_updates),
    ),
    counter(
        "weights_bytes",
        "Bytes of weights published.",
        of_components("counters", "weights_bytes"),
        "component",
    ),
    histogram(
        "weights_publish_seconds",
        "Time to publish a version.",
        of_components("distributions", "publish_seconds"),
        "component",
    ),
    *REPLAY_FAMILIES,
    # Components and the coordinator
    counter(
        "component_time_seconds",
        "Where a component's time goes, the state now running included.",
        _times,
        "component",
        "state",
    ),
    counter(
        "component_starts",
        "Starts of a host process, by its place.",
        each(lambda r: r.starts),
        "component",
    ),
    counter(
        "component_restarts",
        "Starts of a host process that replaced one that was lost, by its place.",
        lambda r: [(key, count) for key, count in r.restarts.items()],
        "component",
        "reason",
    ),
    gauge("actors_wanted", "Actors that the settings ask for.", one(lambda r: r.actors_wanted)),
    gauge(
        "actors", "Actors that report.", one(lambda r: sum(c.role == "actor" for c in r.components))
    ),
    counter(
        "events_received", "Events that reached the coordinator.", one(lambda r: r.events_received)
    ),
    counter("events_dropped", "Events lost on the way to it.", one(lambda r: r.events_dropped)),
    counter(
        "sink_rows",
        "Rows of history that were for a sink.",
        each(lambda r: {n: s.rows for n, s in r.sinks.items()}),
        "sink",
    ),
    counter(
        "sink_rows_dropped",
        "Rows that it did not get: it was too slow for them, or it had failed.",
        each(lambda r: {n: s.dropped for n, s in r.sinks.items()}),
        "sink",
    ),
    histogram(
        "loop_lag_seconds",
        "How late the coordinator's event loop runs.",
        lambda r: [((), r.loop_lag)],
    ),
    counter("checkpoint_attempts", "Checkpoints begun.", one(lambda r: r.checkpoint.attempts)),
    counter(
        "checkpoint_failures",
        "Checkpoints that could not be written.",
        one(lambda r: r.checkpoint.failures),
    ),
    histogram(
        "checkpoint_seconds", "Time to write a checkpoint.", lambda r: [((), r.checkpoint.seconds)]
    ),
    gauge(
        "checkpoint_last_success_timestamp_seconds",
        "Unix time of the newest checkpoint, 0 before the first.",
        one(lambda r: r.checkpoint.last_success),
    ),
)
