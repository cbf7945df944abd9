"""Statistics of a run and of its parts: frozen dataclasses, and the accumulators that fill them.

Exporters, screens and controllers read them; a component does not know its readers. A field with
`tianflow.core.metrics.metric` as metadata is a metric on ``/metrics``.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from tianflow.core.jsonable import JsonDocument
from tianflow.core.learning import StatisticSum, together
from tianflow.core.limits import RateLimits
from tianflow.core.metrics import metric, parts
from tianflow.core.payloads import Holdings, Version

SECONDS_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
LATENCY_BUCKETS = tuple(
    round(step * 10.0**power, 7)
    for power in (-4, -3, -2, -1, 0)
    for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
)
"""For short times of which quantiles are compared, 100 us to 7 s."""
ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""For numbers of requests in a batch."""
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384, 65536)
"""Up to 256 for trajectories that are used once, beyond it for items of replay."""
STATES = ("starting", "running", "paused", "draining", "stopping", "done", "failed", "stopped")
VERDICTS = (
    "sampling-bound",
    "learning-bound",
    "inference-bound",
    "transport-bound",
    "balance-bound",
    "balanced",
    "starting",
    "paused",
    "stalled",
    "unknown",
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
    "node_lost",
    "node_left",
    "moved",
    "stopped",
)
DISCARD_REASONS = ("expired", "learner_lost", "shard_lost", "unwanted", "stopped")


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of values: ``counts[i]`` of them are at most ``edges[i]`` and above the edge before
    it. The last count is the rest.

    ``total``, ``squares`` and ``cubes`` are sums of the values and of their powers.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    squares: float = 0.0
    cubes: float = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def after(self, earlier: Histogram) -> Histogram:
        """This histogram with the values of an ``earlier`` one, which has the same edges."""
        return Histogram(
            self.edges,
            tuple(own + before for own, before in zip(self.counts, earlier.counts, strict=True)),
            self.total + earlier.total,
            self.squares + earlier.squares,
            self.cubes + earlier.cubes,
        )


class HistogramBuilder:
    """Accumulates a `Histogram`."""

    def __init__(self, edges: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._total = self._squares = self._cubes = 0.0

    def add(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value
        self._squares += value * value
        self._cubes += value * value * value

    def read(self) -> Histogram:
        """The values so far."""
        return Histogram(self._edges, tuple(self._counts), self._total, self._squares, self._cubes)


def quantile(counts: Mapping[int, int], part: float) -> int | None:
    """Quantile by nearest rank: the smallest value that at least ``part`` of all values do not
    exceed. ``counts`` holds the number of each value; None where it is empty.
    """
    seen, total = 0, sum(counts.values())
    for value in sorted(counts):
        seen += counts[value]
        if seen >= part * total:
            return value
    return None


def mean_or_none(values: Sequence[float]) -> float | None:
    """Mean of ``values``; None without any."""
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Seconds spent in each state. ``current`` is the state since ``since`` (monotonic seconds);
    ``seconds`` does not hold that time yet.
    """

    seconds: Mapping[str, float]
    current: str
    since: float

    def at(self, now: float) -> dict[str, float]:
        """Seconds in each state, the current one up to ``now``. They add up to the time since the
        clock began.
        """
        shares = dict(self.seconds)
        shares[self.current] = shares.get(self.current, 0.0) + max(0.0, now - self.since)
        return shares

    def after(self, earlier: TimeShares) -> TimeShares:
        """These shares with the seconds of an ``earlier`` clock, which has stopped."""
        return TimeShares(_sum(earlier.seconds, self.seconds), self.current, self.since)


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}


class StateClock:
    """Measures where a component's time goes. A component is in exactly one state at any time:
    "busy", "waiting:grant", "paused", …

    The loop and the compute thread of a host may both enter states.
    """

    def __init__(
        self, state: str = "starting", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._state, self._since = state, clock()
        self._lock = threading.Lock()

    def enter(self, state: str) -> None:
        """Count the time from now on for ``state``."""
        with self._lock:
            now = self._clock()
            self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
            self._state, self._since = state, now

    @property
    def state(self) -> str:
        """The current state."""
        return self._state

    def read(self) -> TimeShares:
        """Seconds so far. `TimeShares.at` adds the current state."""
        with self._lock:
            return TimeShares(dict(self._seconds), self._state, self._since)


# Measures of components: what each role counts and times
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMeasures:
    """Counts and times of an actor."""

    trajectories: float = field(
        metadata=metric(
            "Trajectories committed by the actor.", kind="counter", name="actor_trajectories"
        )
    )
    env_failures: float = field(
        metadata=metric(
            "Failures of the actor's environments.", kind="counter", name="actor_env_failures"
        )
    )
    poisoned: float = field(
        metadata=metric(
            "Failures of the actor's environments by a value that is not finite.",
            kind="counter",
            name="actor_poisoned",
        )
    )
    refused_metrics: float = field(
        metadata=metric(
            "Values in the environments' info that are not valid metrics.",
            kind="counter",
            name="actor_metrics_refused",
        )
    )
    # A histogram has 19 series: with 128 actors these two would be three quarters of a scrape.
    rollout_seconds: Histogram = field(
        metadata=metric(
            "Time of a trajectory, with the wait for its turn.", kind="histogram", exposed=False
        )
    )
    trajectory_seconds: Histogram = field(
        metadata=metric(
            "Time of a trajectory of full length, from its first step.",
            kind="histogram",
            exposed=False,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMeasures:
    """Counts and times of a learner, and the statistics of its last update that every algorithm
    names alike; None where the algorithm has no such statistic.
    """

    samples: float = field(
        metadata=metric(
            "Steps trained on, as the learner counts them.", kind="counter", name="samples_trained"
        )
    )
    given_back: float = field(
        metadata=metric(
            "Batches that the learner returned unused.",
            kind="counter",
            name="learner_batches_given_back",
        )
    )
    refused_statistics: float = field(
        metadata=metric(
            "Values of the algorithm that are not valid statistics.",
            kind="counter",
            name="learner_statistics_refused",
        )
    )
    update_seconds: Histogram = field(
        metadata=metric("Time of one update.", kind="histogram", name="learner_update_seconds")
    )
    copy_seconds: Histogram = field(
        metadata=metric(
            "Time to copy one batch out of its slots.",
            kind="histogram",
            name="learner_copy_seconds",
        )
    )
    learning_rate: float | None = field(
        default=None,
        metadata=metric("Learning rate of the last update.", name="learning_rate"),
    )
    kl: float | None = field(
        default=None,
        metadata=metric(
            "KL divergence of the acting policy from the learning policy on a batch.",
            name="off_policy_kl_nats",
        ),
    )
    ess_ratio: float | None = field(
        default=None,
        metadata=metric(
            "Effective sample size of the importance weights over the batch size.",
            name="effective_sample_ratio",
        ),
    )
    fresh_log_ratio: float | None = field(
        default=None,
        metadata=metric(
            "Largest absolute log ratio of the learning to the acting policy on the newest batch "
            "with staleness 0; 0 up to rounding.",
            name="fresh_log_ratio_nats",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMeasures:
    """Counts and times of a learner's publisher of weights."""

    # The ledger counts these two since the run began: weights_published, weights_skipped.
    published: float = field(
        metadata=metric("Versions published by this process.", kind="counter", exposed=False)
    )
    skipped: float = field(
        metadata=metric("Versions skipped by this process.", kind="counter", exposed=False)
    )
    weights_bytes: float = field(metadata=metric("Bytes of weights published.", kind="counter"))
    divergence: float | None = field(
        default=None,
        metadata=metric(
            "Mean KL divergence per state of the published policy from the newest one, after the "
            "last update that measured it.",
            name="weights_divergence_nats",
        ),
    )
    publish_seconds: Histogram = field(
        metadata=metric(
            "Time to publish a version.", kind="histogram", name="weights_publish_seconds"
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorMeasures:
    """Counts of an evaluator."""

    evaluations: float = field(
        metadata=metric("Finished evaluations.", kind="counter", name="evaluator_evaluations")
    )
    episodes: float = field(
        metadata=metric(
            "Episodes of finished evaluations.", kind="counter", name="evaluator_episodes"
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasures:
    """Counts and times of a replay shard."""

    inserted_items: float = field(
        metadata=metric(
            "Items inserted into the shard.", kind="counter", name="replay_shard_items_inserted"
        )
    )
    drawn_items: float = field(
        metadata=metric(
            "Items drawn from the shard.", kind="counter", name="replay_shard_items_drawn"
        )
    )
    refused_priorities: float = field(
        metadata=metric(
            "Priorities that were negative or not finite.",
            kind="counter",
            name="replay_shard_priorities_refused",
        )
    )
    # The coordinator shows these three of every shard that it draws from: replay_items, ….
    items: float = field(metadata=metric("Items in the shard.", exposed=False))
    steps: float = field(metadata=metric("Environment steps in the shard.", exposed=False))
    memory_bytes: float = field(metadata=metric("Memory of the shard.", exposed=False))
    insert_seconds: Histogram = field(
        metadata=metric(
            "Time to store a trajectory.", kind="histogram", name="replay_insert_seconds"
        )
    )
    draw_seconds: Histogram = field(
        metadata=metric(
            "Time to write one part of a draw.", kind="histogram", name="replay_draw_seconds"
        )
    )
    prioritise_seconds: Histogram = field(
        metadata=metric(
            "Time to update the priorities of a part of a draw.",
            kind="histogram",
            name="replay_prioritise_seconds",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceMeasures:
    """Counts and times of an inference server. A request is one row: the observations of all
    environments of one actor.
    """

    requests: float = field(
        metadata=metric("Requests answered.", kind="counter", name="inference_requests")
    )
    padding: float = field(
        metadata=metric(
            "Rows added to fill batches to a size that the device has prepared.",
            kind="counter",
            name="inference_padding_rows",
        )
    )
    weight_loads: float = field(
        metadata=metric(
            "Versions loaded by the server.", kind="counter", name="inference_weight_loads"
        )
    )
    failures: float = field(
        metadata=metric(
            "Batches that failed and were computed again.",
            kind="counter",
            name="inference_failures",
        )
    )
    batch_rows: Histogram = field(
        metadata=metric("Requests in one batch.", kind="histogram", name="inference_batch_requests")
    )
    wait_seconds: Histogram = field(
        metadata=metric(
            "Time from a request to its answer.", kind="histogram", name="inference_wait_seconds"
        )
    )
    compute_seconds: Histogram = field(
        metadata=metric("Time of one batch.", kind="histogram", name="inference_seconds")
    )


Measures = (
    ActorMeasures
    | LearnerMeasures
    | WeightsMeasures
    | EvaluatorMeasures
    | ShardMeasures
    | InferenceMeasures
)
MEASURES: Mapping[str, tuple[type[Measures], ...]] = {
    "actor": (ActorMeasures,),
    "learner": (LearnerMeasures, WeightsMeasures),
    "rank": (),
    "evaluator": (EvaluatorMeasures,),
    "replay": (ShardMeasures,),
    "inference": (InferenceMeasures,),
}
"""By role."""


# Statistics of a run
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComponentStatistics:
    """Statistics of one component. ``name`` is its place ("actor-3"), so a restart adds no series.

    ``counters``, ``gauges`` and ``distributions`` hold its measures (`MEASURES`) by their fields'
    names.
    """

    name: str
    role: str
    host: str
    time: TimeShares
    generation: int = field(
        default=0,
        metadata=metric(
            "Generation of the settings in force in a component.",
            name="component_settings_generation",
        ),
    )
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    distributions: Mapping[str, Histogram] = field(default_factory=dict)
    learning: Mapping[str, StatisticSum] = field(default_factory=dict)
    """Statistics of updates (of a learner) or of episodes (of an actor), by full name."""

    def with_measures(self, measures: Measures) -> ComponentStatistics:
        """The same with ``measures`` by their kinds; those that are None are omitted."""
        found: dict[str, dict[str, float]] = {"counter": {}, "gauge": {}}
        distributions: dict[str, Histogram] = {}
        for each in fields(measures):
            value, kind = getattr(measures, each.name), each.metadata["metric"].kind
            if value is not None:
                (distributions if kind == "histogram" else found[kind])[each.name] = value
        return ComponentStatistics(
            self.name,
            self.role,
            self.host,
            self.time,
            self.generation,
            {**self.counters, **found["counter"]},
            {**self.gauges, **found["gauge"]},
            {**self.distributions, **distributions},
            self.learning,
        )

    def after(self, earlier: ComponentStatistics) -> ComponentStatistics:
        """The same with the sums of an ``earlier`` incarnation, which has ended. Gauges are not
        sums.
        """
        found = earlier.distributions
        return replace(
            self,
            time=self.time.after(earlier.time),
            counters=_sum(earlier.counters, self.counters),
            distributions={
                **found,
                **{
                    name: own.after(found[name]) if name in found else own
                    for name, own in self.distributions.items()
                },
            },
            learning=together((earlier.learning, self.learning)),
        )


@dataclass(frozen=True, slots=True)
class ReplayStatistics:
    """Replay at one moment. Counts are of items since this process began; at any time
    ``drawn = trained + discarded + held``.
    """

    shards: Mapping[int, Holdings]
    """Contents of every shard that is up."""
    inserts: int
    deletes: int
    """Like ``inserts`` since the run began; ``inserts - deletes`` items are there."""
    drawn: int = field(
        metadata=metric(
            "Draws of items; an item counts each time.", kind="counter", name="replay_items_drawn"
        )
    )
    trained: int = field(
        metadata=metric("Drawn items trained on.", kind="counter", name="replay_items_trained")
    )
    discarded: Mapping[str, int] = field(
        metadata=metric(
            "Drawn items discarded untrained, by reason.",
            kind="counter",
            name="replay_items_discarded",
            labels=("reason",),
            known=DISCARD_REASONS,
        )
    )
    held: int = field(
        metadata=metric(
            "Drawn items, neither trained on nor discarded yet.", name="replay_items_held"
        )
    )
    diff: float = field(
        metadata=metric(
            "Lead of inserting over drawing, in draws.",
            name="replay_limiter_diff",
        )
    )
    limits: RateLimits
    """Limits in force."""
    samples_per_insert: float = field(
        metadata=metric("Draws per insert since the run began.", name="replay_samples_per_insert")
    )
    """Includes the time before anything could be drawn."""
    blocked_s: Mapping[str, float] = field(
        metadata=metric(
            "Time for which the limiter or a missing shard blocked inserts, or draws.",
            kind="counter",
            name="replay_limiter_blocked_seconds",
            labels=("side",),
        )
    )
    """Of ``insert`` and ``draw``; pauses do not count."""
    earlier_deletes: int = 0
    """``deletes`` of earlier processes of the run. Counters are without them, and so count the
    items that a resumed run restores as inserted.
    """
    inserted_steps: Mapping[int, int] = field(
        default_factory=dict,
        metadata=metric(
            "Environment steps stored.",
            kind="counter",
            name="replay_steps_inserted",
            labels=("shard",),
        ),
    )
    """By shard, present or lost."""

    @property
    def items(self) -> int:
        """Items in the shards that are up."""
        return sum(holdings.items for holdings in self.shards.values())

    @property
    def samples_per_insert_target(self) -> float | None:
        """Ratio that the limiter maintains; None where neither side waits for the other."""
        return self.limits.samples_per_insert if math.isfinite(self.limits.max_diff) else None


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """Last request of a balance controller, and the number of its directives."""

    name: str
    directives: int = field(
        metadata=metric(
            "Directives given by a controller.", kind="counter", name="balance_directives"
        )
    )
    credits: int | None
    """Credits that it requested; None before its first request."""
    winning: bool = field(
        metadata=metric(
            "1 for the controller whose request is in force.", name="balance_controller_winning"
        )
    )


@dataclass(frozen=True, slots=True)
class BestVersion(JsonDocument):
    """The version with the best evaluation whose checkpoint is on disk."""

    version: int = field(
        metadata=metric("Version of the best checkpoint.", name="checkpoint_best_version")
    )
    mean_return: float = field(
        metadata=metric(
            "Mean return of the evaluation of the best checkpoint.", name="checkpoint_best_return"
        )
    )
    episodes: int


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Attempts, failures and times of checkpoints."""

    attempts: int = field(
        default=0, metadata=metric("Checkpoints begun.", kind="counter", name="checkpoint_attempts")
    )
    failures: int = field(
        default=0,
        metadata=metric(
            "Checkpoints that could not be written.", kind="counter", name="checkpoint_failures"
        ),
    )
    last_success: float = field(
        default=0.0,
        metadata=metric(
            "Unix time of the newest checkpoint, 0 before the first.",
            name="checkpoint_last_success_timestamp_seconds",
        ),
    )
    seconds: Histogram = field(
        default_factory=lambda: HistogramBuilder().read(),
        metadata=metric("Time to write a checkpoint.", kind="histogram", name="checkpoint_seconds"),
    )
    best: BestVersion | None = field(default=None, metadata=parts())
    """None before an evaluation whose version is saved."""


@dataclass(frozen=True, slots=True)
class SinkStatistics:
    """Rows of history offered to a sink, and those that a slow or failed sink did not receive."""

    rows: int = field(
        default=0,
        metadata=metric("Rows of history offered to a sink.", kind="counter", name="sink_rows"),
    )
    dropped: int = field(
        default=0,
        metadata=metric(
            "Rows of history that a sink did not receive, because it was slow or had failed.",
            kind="counter",
            name="sink_rows_dropped",
        ),
    )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The bottleneck of a run; `tianflow.observability.diagnosis` finds it."""

    verdict: str = field(
        metadata=metric(
            "1 for the current bottleneck.", name="diagnosis", labels=("verdict",), known=VERDICTS
        )
    )
    """sampling-bound, learning-bound, transport-bound, balance-bound, stalled, balanced or
    starting; unknown if the diagnosis failed; otherwise the state of a run that does not train."""
    advice: str
    """Cause, size and remedy in one sentence."""
    component: str | None = None
    """Component that is stuck, of a stalled run."""
    for_s: float = 0.0
    """Seconds since the verdict last changed."""
    window_s: float = 0.0
    """Seconds that the shares cover."""
    waits: Mapping[str, float] = field(
        default_factory=dict,
        metadata=metric(
            "Share of the last seconds in which the learner waited for a batch, and actors on "
            "average for a credit.",
            name="waiting_ratio",
            labels=("role",),
        ),
    )
    """Shares of time in which the ``learner`` waited for a batch, and ``actors`` on average for a
    credit."""
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mean share of each state by role, without pauses and starts."""
    suggested: Mapping[str, float] = field(default_factory=dict)
    """Settings that would help: value by path."""
    steps_per_s: float | None = None
    """Environment steps per second over the window."""
    forecast_steps_per_s: float | None = None
    """Environment steps per second with the suggested settings; None where no model applies."""
    forecast_range: tuple[float, float] | None = None
    """Range of the forecast: two standard errors of the measured times, and the error of the model.
    None where times do not vary."""


@dataclass(slots=True)
class Share:
    """Environment steps of one holder (an actor) by their outcome."""

    committed_steps: int = field(
        default=0,
        metadata=metric(
            "Environment steps in committed trajectories.", kind="counter", name="steps_committed"
        ),
    )
    trained_steps: int = field(
        default=0,
        metadata=metric("Environment steps trained on.", kind="counter", name="steps_trained"),
    )
    dropped_steps: int = field(
        default=0,
        metadata=metric(
            "Environment steps committed and then dropped.", kind="counter", name="steps_dropped"
        ),
    )
    trajectories: int = 0

    def copy(self) -> Share:
        """A copy. A snapshot copies that of every actor, and `dataclasses.replace` takes eight
        times as long.
        """
        return Share(
            self.committed_steps, self.trained_steps, self.dropped_steps, self.trajectories
        )


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger at one moment. Counters count since the run began; at any time
    ``begun = trained + inserted + dropped + open``.
    """

    version: Version
    published: Version
    granted: int = field(
        metadata=metric("Tickets granted.", kind="counter", name="trajectories_granted")
    )
    begun: int = field(
        metadata=metric("Trajectories begun.", kind="counter", name="trajectories_begun")
    )
    committed: int = field(
        metadata=metric("Trajectories committed.", kind="counter", name="trajectories_committed")
    )
    trained: int = field(
        metadata=metric("Trajectories trained on.", kind="counter", name="trajectories_trained")
    )
    inserted: int = field(
        metadata=metric(
            "Trajectories inserted into replay; 0 without replay.",
            kind="counter",
            name="trajectories_inserted",
        )
    )
    dropped: dict[str, int] = field(
        metadata=metric(
            "Trajectories begun and then dropped, by reason.",
            kind="counter",
            name="trajectories_dropped",
            labels=("reason",),
            known=DROP_REASONS,
        )
    )
    open: int = field(
        metadata=metric(
            "Trajectories begun, neither trained on, inserted nor dropped yet.",
            name="trajectories_open",
        )
    )
    returned: int = field(
        metadata=metric(
            "Tickets returned before their trajectory began.",
            kind="counter",
            name="trajectories_returned",
        )
    )
    late_commits: int = field(
        metadata=metric(
            "Commits refused because the ticket had been dropped.",
            kind="counter",
            name="trajectories_late_commits",
        )
    )
    cuts: int = field(
        metadata=metric(
            "Requests to commit a trajectory early.", kind="counter", name="trajectories_cut"
        )
    )
    in_use: int = field(metadata=metric("Credits held by tickets.", name="credits_in_use"))
    credits_limit: int = field(metadata=metric("Credits in force."))
    credits_ceiling: int = field(metadata=metric("Largest number of credits under the bound."))
    slots: int = field(metadata=metric("Slots of trajectories."))
    free_slots: int = field(metadata=metric("Free slots.", name="slots_free"))
    quarantined_slots: int = field(
        metadata=metric(
            "Slots of dropped tickets that an actor may still write to.", name="slots_quarantined"
        )
    )
    queue: int = field(
        metadata=metric(
            "Committed trajectories that wait for the learner.", name="queue_trajectories"
        )
    )
    oldest_committed_at: float | None
    """Monotonic time of the oldest commit in the queue."""
    steps_committed: int
    steps_trained: int
    updates: int = field(
        metadata=metric("Updates settled.", kind="counter", name="learner_updates")
    )
    skipped_updates: int = field(
        metadata=metric(
            "Updates whose step was skipped because it was not finite.",
            kind="counter",
            name="learner_updates_skipped",
        )
    )
    publishes: int = field(
        metadata=metric("Versions published.", kind="counter", name="weights_published")
    )
    publish_lag: int = field(
        metadata=metric("Updates since the last published version.", name="publish_lag_updates")
    )
    unpublished_updates: int = field(
        metadata=metric(
            "Updates settled without being published.", kind="counter", name="weights_skipped"
        )
    )
    max_staleness: int | None = field(
        metadata=metric(
            "Maximum staleness in force (+Inf: unbounded).",
            name="staleness_bound_updates",
            missing=math.inf,
        )
    )
    staleness: dict[int, int] = field(
        metadata=metric(
            "Staleness at use of everything trained on: trajectories, with replay items.",
            kind="histogram",
            name="staleness_updates",
            buckets=STALENESS_BUCKETS,
        )
    )
    in_flight: dict[int, int] = field(
        metadata=metric(
            "Part of staleness until commit.",
            kind="histogram",
            name="staleness_in_flight_updates",
            buckets=STALENESS_BUCKETS,
        )
    )
    in_queue: dict[int, int] = field(
        metadata=metric(
            "Part of staleness from commit to use.",
            kind="histogram",
            name="staleness_in_queue_updates",
            buckets=STALENESS_BUCKETS,
        )
    )
    violations: int = field(
        metadata=metric(
            "Trajectories trained on beyond the bound: always 0.",
            kind="counter",
            name="staleness_violations",
        )
    )
    recent_staleness: tuple[int, ...]
    """Staleness of the last 1,000 trained trajectories."""
    shares: dict[str, Share] = field(metadata=parts("component"))


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """Use of one process of a run, under the name of its host."""

    cpu_s: float = field(
        metadata=metric(
            "CPU time of the process and of those that it replaced.",
            kind="counter",
            name="process_cpu_seconds",
        )
    )
    memory_bytes: int | None = field(
        metadata=metric(
            "Resident memory of the process, with memory that it shares with others.",
            name="process_resident_memory_bytes",
        )
    )
    """None once the process has ended."""


CONNECTION_REFUSALS = ("stranger", "undecodable", "not_allowed", "broken_rule", "lost")
"""Why connections to the gateway end. stranger: without a word that could be read, because of
another protocol, no valid key, or silence; undecodable: after bytes that are not a message;
not_allowed: after a message that is not valid there; broken_rule: the coordinator has refused a
message, and the node is lost; lost: without a farewell, such as after a frame above the limit.
"""


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """One node of a run, under its name. Counters continue when the node joins again."""

    up: bool = field(metadata=metric("1 while the connection to the node stands.", name="node_up"))
    ready: bool = field(metadata=metric("1 while the node takes hosts.", name="node_ready"))
    cores: int = field(metadata=metric("Cores that the node offers.", name="node_cores"))
    roles: tuple[str, ...]
    """Roles that the node offers: ``actors``, ``replay``."""
    hosts: int = field(metadata=metric("Host processes on the node.", name="node_hosts"))
    shards: tuple[str, ...]
    """Names of the replay shards on the node."""
    actors: tuple[str, ...]
    """Names of the actors on the node that have had a grant there."""
    late: tuple[str, ...]
    """Of them, those that rest because the learner has waited for their trajectories."""
    silent_s: float = field(
        metadata=metric("Time since the node was last heard.", name="node_silent_seconds")
    )
    round_trip_s: float = field(
        metadata=metric(
            "Last round trip to the node, with up to a quarter of a second at the node.",
            name="node_round_trip_seconds",
        )
    )
    weights_lag: int = field(
        metadata=metric(
            "Published versions that the node does not have yet.", name="node_weights_lag"
        )
    )
    unacknowledged: int = field(
        metadata=metric(
            "Messages to the node that it has not acknowledged.", name="node_unacknowledged"
        )
    )
    sent_bytes: Mapping[str, int] = field(
        metadata=metric(
            "Bytes sent to the node, by kind.",
            kind="counter",
            name="node_sent_bytes",
            labels=("kind",),
        )
    )
    received_bytes: Mapping[str, int] = field(
        metadata=metric(
            "Bytes received from the node, by kind.",
            kind="counter",
            name="node_received_bytes",
            labels=("kind",),
        )
    )
    direct_sent_bytes: int = field(
        metadata=metric(
            "Bytes of trajectories that the node has sent to other nodes.",
            kind="counter",
            name="node_direct_sent_bytes",
        )
    )
    direct_received_bytes: int = field(
        metadata=metric(
            "Bytes of trajectories that the node has received from other nodes.",
            kind="counter",
            name="node_direct_received_bytes",
        )
    )


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A run at one moment; metrics, screens and the API read it.

    ``now`` is in monotonic seconds.
    """

    run: str
    state: str = field(
        metadata=metric(
            "1 for the state of the run.", name="run_state", labels=("state",), known=STATES
        )
    )
    ready: bool = field(metadata=metric("1 while training can proceed.", name="run_ready"))
    reasons: tuple[str, ...]
    """Reasons why training cannot proceed."""
    now: float
    elapsed_s: float = field(
        metadata=metric("Time since the run began.", name="run_elapsed_seconds")
    )
    ledger: LedgerSnapshot = field(metadata=parts())
    components: tuple[ComponentStatistics, ...] = field(metadata=parts("component", key="name"))
    controllers: tuple[ControllerStatistics, ...] = field(metadata=parts("controller", key="name"))
    env_steps: int = field(
        metadata=metric(
            "Environment steps of the run, with those of earlier processes.", name="run_env_steps"
        )
    )
    env_frames: int = field(
        metadata=metric(
            "Frames of the environments behind the steps of the run.", name="run_env_frames"
        )
    )
    episodes: int = field(
        metadata=metric(
            "Finished episodes of training, with those of earlier processes.", name="run_episodes"
        )
    )
    recent_returns: tuple[float, ...]
    """Returns of the last 100 episodes of training, oldest first."""
    recent_lengths: tuple[int, ...]
    evaluation: Mapping[str, float]
    """``version``, ``mean_return`` and ``episodes`` of the newest main evaluation, and the mean of
    each metric of its environment; empty before the first.
    """
    evaluation_failures: int = field(
        metadata=metric("Failed evaluations.", kind="counter", name="evaluations_failed")
    )
    restarts: Mapping[tuple[str, str], int] = field(
        metadata=metric(
            "Starts of a host process that replaced a lost one, by its place.",
            kind="counter",
            name="component_restarts",
            labels=("component", "reason"),
        )
    )
    starts: Mapping[str, int] = field(
        metadata=metric(
            "Starts of a host process, by its place.",
            kind="counter",
            name="component_starts",
            labels=("component",),
        )
    )
    events_dropped: int = field(
        metadata=metric("Events lost on the way to the coordinator.", kind="counter")
    )
    events_received: int = field(
        metadata=metric("Events that reached the coordinator.", kind="counter")
    )
    generation: int = field(
        metadata=metric(
            "Newest generation of the live settings.", name="balance_settings_generation"
        )
    )
    settings_changes: int = field(metadata=metric("Live changes put in force.", kind="counter"))
    settings_refused: int = field(metadata=metric("Live changes refused.", kind="counter"))
    settings_pending: int = field(
        metadata=metric("Settings and audit records that wait for the disk.")
    )
    checkpoint: CheckpointStatistics = field(metadata=parts())
    loop_lag: Histogram = field(
        metadata=metric(
            "Delay of the coordinator's event loop.", kind="histogram", name="loop_lag_seconds"
        )
    )
    last_update_timestamp: float = field(
        metadata=metric(
            "Unix time of the last settled update, 0 before the first.",
            name="learner_last_update_timestamp_seconds",
        )
    )
    actors_wanted: int = field(metadata=metric("Number of actors in the settings."))
    diagnosis: Diagnosis = field(metadata=parts())
    replay: ReplayStatistics | None = field(metadata=parts())
    """None for an algorithm that uses each trajectory once."""
    target_return: float | None = field(metadata=metric("Target return of the run."))
    time_to_target_s: float | None = field(
        metadata=metric(
            "Training time until the mean return of the last 100 episodes first reached the "
            "target.",
            name="time_to_target_seconds",
        )
    )
    sinks: Mapping[str, SinkStatistics] = field(default_factory=dict, metadata=parts("sink"))
    further_evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """As ``evaluation``, the newest of each further evaluation, by its name."""
    processes: Mapping[str, ProcessStatistics] = field(
        default_factory=dict, metadata=parts("process")
    )
    """By name: the coordinator, and each host that is a process of this machine."""
    nodes: Mapping[str, NodeStatistics] = field(default_factory=dict, metadata=parts("node"))
    """By name; empty without nodes."""
    nodes_arrived: int = field(
        default=0,
        metadata=metric("Processes that asked to be nodes, or to continue as one.", kind="counter"),
    )
    nodes_refused: int = field(
        default=0,
        metadata=metric("Processes that were not admitted as nodes.", kind="counter"),
    )
    nodes_connections: int = field(
        default=0,
        metadata=metric(
            "Connections to the gateway and to nodes, of nodes and of others.", kind="counter"
        ),
    )
    nodes_connections_refused: Mapping[str, int] = field(
        default_factory=dict,
        metadata=metric(
            "Connections to the gateway that were refused, closed or lost, by reason.",
            kind="counter",
            labels=("reason",),
            known=CONNECTION_REFUSALS,
        ),
    )
    trained_s: float = 0.0
    """Seconds that count towards ``run.max_seconds``."""
    evaluating: bool = False
    """True during an evaluation."""
    evaluation_left_s: float | None = None
    """Seconds until the last evaluation of a stopping run times out; None without one."""
    earlier_episodes: int = 0
    """Episodes of earlier processes of the run."""
    earlier: Mapping[str, ComponentStatistics] = field(default_factory=dict)
    """Sums over the earlier incarnations of components, by name. Counters include them."""
    gone: tuple[ComponentStatistics, ...] = ()
    """Components that have ended, with their last numbers."""


def coarse(staleness: int) -> int:
    """``staleness`` to three binary digits: 0..15 exactly, then 16, 18, 20, …, 32, 36, …. A
    histogram of staleness with replay stays small.
    """
    shift = max(0, staleness.bit_length() - 4)
    return staleness >> shift << shift
