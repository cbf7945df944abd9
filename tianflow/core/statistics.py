"""Numbers that components give when asked: frozen dataclasses, and the small accumulators behind
them.

Exporters, screens and controllers read these; no component knows who reads.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tianflow.core.limits import RateLimits
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


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram: ``counts[i]`` values were <= ``edges[i]`` and above the edge before; the last
    count is the rest.

    ``total``, ``squares`` and ``cubes`` are sums of the values and of their powers.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    squares: float = 0.0
    cubes: float = 0.0

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)


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
        """What was counted so far."""
        return Histogram(self._edges, tuple(self._counts), self._total, self._squares, self._cubes)


def quantile(counts: Mapping[int, int], part: float) -> int | None:
    """The least value that ``part`` of all do not exceed (nearest rank); ``counts`` say how often
    each came. None of nothing.
    """
    seen, total = 0, sum(counts.values())
    for value in sorted(counts):
        seen += counts[value]
        if seen >= part * total:
            return value
    return None


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Seconds spent in each state. ``current`` has been going on since ``since`` (monotonic), not
    yet in ``seconds``.
    """

    seconds: Mapping[str, float]
    current: str
    since: float

    def at(self, now: float) -> dict[str, float]:
        """Seconds in each state, the running one counted up to ``now``; they sum to the time since
        the clock began.
        """
        shares = dict(self.seconds)
        shares[self.current] = shares.get(self.current, 0.0) + max(0.0, now - self.since)
        return shares


class StateClock:
    """Where a component's time goes: always in exactly one state ("busy", "waiting:grant",
    "paused", …).
    """

    def __init__(
        self, state: str = "starting", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._state, self._since = state, clock()

    def enter(self, state: str) -> None:
        """From now on the time belongs to ``state``."""
        now = self._clock()
        self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._state, self._since = state, now

    @property
    def state(self) -> str:
        """The state now running."""
        return self._state

    def read(self) -> TimeShares:
        """Shares so far. `TimeShares.at` adds the state now running."""
        return TimeShares(dict(self._seconds), self._state, self._since)


@dataclass(frozen=True, slots=True)
class ComponentStatistics:
    """What one component says of itself. ``name`` is its place ("actor-3"), so restarts add no
    series.
    """

    name: str
    role: str
    host: str
    time: TimeShares
    generation: int = 0
    """Settings generation in force."""
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    distributions: Mapping[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplayStatistics:
    """Replay at one moment. Counts are of items; ``drawn = trained + discarded + held`` at every
    look, since this process began.
    """

    shards: Mapping[int, Holdings]
    """Of every shard that is up."""
    inserts: int
    deletes: int
    """Of all there were since the run began; ``inserts - deletes`` are there."""
    drawn: int
    trained: int
    discarded: Mapping[str, int]
    """By reason."""
    held: int
    """Drawn, neither trained on nor discarded yet."""
    diff: float
    """The limiter's accumulator, in draws."""
    limits: RateLimits
    """That the limiter obeys now."""
    samples_per_insert: float
    """Since the run began, so also before anything could be drawn."""
    blocked_s: Mapping[str, float]
    """Seconds for which ``insert`` and ``draw`` were wanted and held back, pauses left out: by the
    limiter, or for want of a shard.
    """

    @property
    def items(self) -> int:
        """Items that the shards now up hold."""
        return sum(holdings.items for holdings in self.shards.values())

    @property
    def samples_per_insert_target(self) -> float | None:
        """The ratio that the limiter keeps; None: neither side waits for the other."""
        return self.limits.samples_per_insert if math.isfinite(self.limits.max_diff) else None


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """What one controller asked for last, and how many directives it has given."""

    name: str
    directives: int
    credits: int | None
    winning: bool


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Attempts, failures and times of checkpoints. ``last_success`` is a Unix time, 0 before the
    first.
    """

    attempts: int = 0
    failures: int = 0
    last_success: float = 0.0
    seconds: Histogram = field(default_factory=lambda: HistogramBuilder().read())


@dataclass(frozen=True, slots=True)
class SinkStatistics:
    """Rows of history that were for a sink, and how many of them it did not get: it was too slow
    for them, or it had failed.
    """

    rows: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What holds a run back. `tianflow.observability.diagnosis` makes it."""

    verdict: str
    """sampling-bound, learning-bound, transport-bound, balance-bound, stalled, balanced or
    starting; or the state of a run that does not train."""
    advice: str
    """Why, by how much, and what would help, in a sentence."""
    component: str | None = None
    """Who stands still in a stalled run."""
    for_s: float = 0.0
    """Seconds for which it has been so."""
    window_s: float = 0.0
    """Seconds that the shares are of."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Shares of the time for which the ``learner`` waited for a batch, and ``actors`` on average
    for a credit.
    """
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mean share of each state by role; pauses and starts left out."""
    suggested: Mapping[str, float] = field(default_factory=dict)
    """Values of settings that would help, by path."""
    steps_per_s: float | None = None
    forecast_steps_per_s: float | None = None
    """What they would bring, where that can be said."""
    forecast_range: tuple[float, float] | None = None
    """Between which it will lie, where times vary: of two standard errors of what was seen, and of
    what the model may be off by.
    """


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Everything about a run at one moment; what metrics, screen and API read.

    ``state`` is one of starting, running, paused, draining, stopping, done, failed, stopped.
    ``now`` is monotonic. ``restarts`` counts by (host, reason), ``starts`` by host. ``generation``
    is that of the newest settings.
    """

    run: str
    state: str
    ready: bool
    reasons: tuple[str, ...]
    now: float
    elapsed_s: float
    ledger: LedgerSnapshot
    components: tuple[ComponentStatistics, ...]
    controllers: tuple[ControllerStatistics, ...]
    env_steps: int
    env_frames: int
    episodes: int
    recent_returns: tuple[float, ...]
    """Of the last 100 episodes of training, oldest first."""
    recent_lengths: tuple[int, ...]
    evaluation: Mapping[str, float]
    """``version``, ``mean_return``, ``episodes`` of the newest evaluation; empty before the first.
    """
    evaluation_failures: int
    """Evaluations that came to nothing."""
    restarts: Mapping[tuple[str, str], int]
    starts: Mapping[str, int]
    events_dropped: int
    events_received: int
    generation: int
    settings_changes: int
    settings_refused: int
    checkpoint: CheckpointStatistics
    loop_lag: Histogram
    last_update_timestamp: float
    """Unix time of the last settled update, 0 before the first."""
    actors_wanted: int
    diagnosis: Diagnosis
    replay: ReplayStatistics | None
    """None for an algorithm that uses each trajectory once."""
    target_return: float | None
    time_to_target_s: float | None
    """Seconds of training until the mean of the last 100 training episodes first reached the
    target.
    """
    sinks: Mapping[str, SinkStatistics] = field(default_factory=dict)
    """By name."""
    trained_s: float = 0.0
    """Seconds that count towards ``run.max_seconds``."""
    evaluating: bool = False
    """True while an evaluation goes on."""
    evaluation_left_s: float | None = None
    """Seconds after which the last evaluation of a run that is stopping is given up; None while
    there is none.
    """


@dataclass(slots=True)
class Share:
    """What became of the environment steps of one holder (an actor)."""

    committed_steps: int = 0
    trained_steps: int = 0
    dropped_steps: int = 0
    trajectories: int = 0

    def copy(self) -> Share:
        """As it is now. Every look copies that of every actor, and `dataclasses.replace` takes
        eight times as long.
        """
        return Share(
            self.committed_steps, self.trained_steps, self.dropped_steps, self.trajectories
        )


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """One consistent look. Counters count since the run began; ``open`` tickets have begun and are
    neither trained nor dropped.
    """

    version: Version
    published: Version
    granted: int
    begun: int
    committed: int
    trained: int
    inserted: int
    dropped: dict[str, int]
    open: int
    returned: int
    late_commits: int
    cuts: int
    in_use: int
    credits_limit: int
    credits_ceiling: int
    slots: int
    free_slots: int
    quarantined_slots: int
    queue: int
    oldest_committed_at: float | None
    steps_committed: int
    steps_trained: int
    updates: int
    skipped_updates: int
    publishes: int
    publish_lag: int
    unpublished_updates: int
    max_staleness: int | None
    staleness: dict[int, int]
    in_flight: dict[int, int]
    in_queue: dict[int, int]
    violations: int
    recent_staleness: tuple[int, ...]
    shares: dict[str, Share]


def coarse(age: int) -> int:
    """``age`` to three binary digits, so that a histogram of ages in replay stays small: 0..15
    exactly, then 16, 18, 20, …, 32, 36, …
    """
    shift = max(0, age.bit_length() - 4)
    return age >> shift << shift
