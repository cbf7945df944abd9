"""The run document: what the HTTP API answers about a run and the screen shows.

`describe` makes it of `RunStatistics`. Its dataclasses are the one definition of the document, of
its JSON (`tianflow.core.jsonable.json_ready`) and of its schema in OpenAPI.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from pydantic import NonNegativeInt

from tianflow.config.model import Config
from tianflow.config.schedules import STATISTICS, schedules_of
from tianflow.core.jsonable import JsonDocument
from tianflow.core.payloads import Version
from tianflow.core.statistics import (
    BestVersion,
    ComponentStatistics,
    ControllerStatistics,
    Diagnosis,
    Histogram,
    LedgerSnapshot,
    ReplayStatistics,
    RunStatistics,
    coarse,
    mean_or_none,
    quantile,
)
from tianflow.observability.rates import WINDOWS, Curves, RunRates

ENDED = ("done", "failed", "stopped")
POINTS = 24
"""Values of a curve, for a line of text."""
Speeds = Mapping[Literal["10", "60", "300"], float | None]
"""By the seconds of the window; None before there are two samples."""
_Picked = TypeVar("_Picked")


# The document
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress(JsonDocument):
    """Counts since the run began, resumed parts included."""

    env_steps: NonNegativeInt
    env_frames: NonNegativeInt
    episodes: NonNegativeInt
    updates: NonNegativeInt
    skipped_updates: NonNegativeInt
    time_left_s: Mapping[str, float]
    """Seconds until each limit at the pace of the last minute, by the limit's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput(JsonDocument):
    """Speeds by window."""

    env_steps_per_s: Speeds
    updates_per_s: Speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentReturns(JsonDocument):
    """Returns of the last 100 episodes of training; None before the first."""

    episodes: NonNegativeInt
    mean: float | None
    min: float | None
    max: float | None
    mean_length: float | None
    """Mean length of these episodes, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningState(JsonDocument):
    """Learning statistics by name: of updates (``train/...``) and of episodes (``rollout/...``)."""

    values: Mapping[str, float]
    """Mean over the last ten seconds; the newest value of a statistic that has none in them."""
    curves: Curves
    """Mean return of the last 100 episodes, and loss, over the last five minutes in at most 24
    parts; None where a part has no value. A curve without any value is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetProgress(JsonDocument):
    """The return that training is to reach."""

    return_: float | None
    """None: the run has no target."""
    reached_after_s: float | None
    """Seconds of training until it was first reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNumber(JsonDocument):
    """A version of the policy: number of updates within a lineage, -1 before the first policy."""

    lineage: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVersions(JsonDocument):
    """Versions of the policy."""

    learner: VersionNumber
    published: VersionNumber
    publish_lag: NonNegativeInt
    """Updates since the published version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSummary(JsonDocument):
    """Staleness of the last 1,000 trained trajectories; None before the first."""

    min: int | None
    mean: float | None
    p99: int | None
    max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessAgainstBound(StalenessSummary):
    """Staleness against its bound."""

    bound: NonNegativeInt | Literal["unbounded"]
    """Maximum staleness in force."""
    violations: NonNegativeInt
    """Trajectories trained on beyond the bound: always 0."""
    counts: Mapping[str, NonNegativeInt]
    """Number of trajectories trained on since the process began, by staleness; from 16 on to three
    binary digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCounts(JsonDocument):
    """Trajectories by their state, as the ledger counts them."""

    granted: NonNegativeInt
    begun: NonNegativeInt
    committed: NonNegativeInt
    trained: NonNegativeInt
    inserted: NonNegativeInt
    open: NonNegativeInt
    dropped: Mapping[str, NonNegativeInt]
    """By reason."""
    late_commits: NonNegativeInt
    cuts: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterState(JsonDocument):
    """Lead of inserting over drawing, in draws, and its limits; None: without a limit."""

    diff: float
    min_diff: float | None
    max_diff: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayState(JsonDocument):
    """Contents and use of replay."""

    shards: NonNegativeInt
    """Shards that are up."""
    items: NonNegativeInt
    steps: NonNegativeInt
    memory_bytes: NonNegativeInt
    capacity: NonNegativeInt
    fill: float
    """Items over capacity."""
    min_size: NonNegativeInt
    """Items that must be there before the first draw."""
    inserted: NonNegativeInt
    removed: NonNegativeInt
    drawn: NonNegativeInt
    trained: NonNegativeInt
    discarded: Mapping[str, NonNegativeInt]
    """Drawn items discarded untrained, by reason."""
    held: NonNegativeInt
    """Drawn items, neither trained on nor discarded yet."""
    samples_per_insert: float
    """Of the last minute; since the run began, while nothing was inserted in it."""
    samples_per_insert_target: float | None
    limiter: LimiterState
    blocked_s: Mapping[str, float]
    """Seconds for which inserts and draws were blocked."""
    held_back: Mapping[str, float]
    """Share of the last ten seconds for which they were blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState(JsonDocument):
    """Committed trajectories that wait for the learner."""

    trajectories: NonNegativeInt
    oldest_age_s: float | None
    """Seconds since the oldest commit; None while the queue is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditState(JsonDocument):
    """Permissions to begin a trajectory."""

    limit: NonNegativeInt
    in_use: NonNegativeInt
    ceiling: NonNegativeInt
    """Largest number under the bound."""
    target: NonNegativeInt
    """Credits that the winning controller requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSetting(JsonDocument):
    """A setting that changes by a schedule."""

    schedule: Mapping[str, Any]
    """The schedule, as a table of the settings."""
    value: float | None
    """Value in force in the newest update; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsState(JsonDocument):
    """Live settings: the generation in force, changes so far, and schedules."""

    generation: NonNegativeInt
    changes: NonNegativeInt
    refused: NonNegativeInt
    pending: NonNegativeInt
    """Settings and audit records that wait for the disk. Until then a crash loses them."""
    schedules: Mapping[str, ScheduledSetting]
    """Settings that follow a schedule, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCounts(JsonDocument):
    """Number of actors in the settings, and number of those that report."""

    wanted: NonNegativeInt
    reporting: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentState(JsonDocument):
    """State of one component."""

    name: str
    role: str
    host: str
    state: str
    shares: Mapping[str, float]
    """Shares of time in each state since the component began."""
    generation: NonNegativeInt
    """Generation of the settings in force in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionSummary(JsonDocument):
    """Number and mean of the values of a distribution."""

    count: NonNegativeInt
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentDetails(ComponentState):
    """One component with its measures."""

    seconds: Mapping[str, float]
    """Time in each state."""
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    distributions: Mapping[str, DistributionSummary]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState(JsonDocument):
    """One node."""

    name: str
    up: bool
    """True while the connection to it stands."""
    ready: bool
    """True while it takes hosts."""
    cores: NonNegativeInt
    roles: tuple[str, ...]
    """Roles that it offers: actors, replay."""
    hosts: NonNegativeInt
    shards: tuple[str, ...]
    """Names of its replay shards."""
    actors: tuple[str, ...]
    """Names of its actors."""
    late: tuple[str, ...]
    """Of them, those that rest because the learner has waited for their trajectories."""
    silent_s: float
    """Seconds since it was last heard."""
    round_trip_s: float
    weights_lag: NonNegativeInt
    """Published versions that it does not have yet."""
    unacknowledged: NonNegativeInt
    """Messages to it that it has not acknowledged."""
    sent_bytes: Mapping[str, NonNegativeInt]
    """By kind: messages, weights, and for replay shards trajectories, priorities."""
    received_bytes: Mapping[str, NonNegativeInt]
    """By kind: messages, trajectories, and of replay shards draws."""
    direct_sent_bytes: NonNegativeInt
    """Bytes of trajectories that it has sent to other nodes."""
    direct_received_bytes: NonNegativeInt
    """Bytes of trajectories that it has received from other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCount(JsonDocument):
    """Restarts of the host at one place, for one reason."""

    component: str
    reason: str
    count: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounts(JsonDocument):
    """Checkpoints written, and the Unix time of the newest (0 before the first)."""

    attempts: NonNegativeInt
    failures: NonNegativeInt
    last_success: float
    best: BestVersion | None
    """None before an evaluation whose version is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument(JsonDocument):
    """A run at one moment."""

    id: str
    state: str
    ready: bool
    """True while training can proceed."""
    reasons: tuple[str, ...]
    """Reasons why it cannot."""
    environment: str
    algorithm: str
    elapsed_s: float
    bottleneck: str
    """Verdict of the diagnosis."""
    evaluating: bool
    diagnosis: Diagnosis
    progress: RunProgress
    throughput: Throughput
    shares: Mapping[str, Mapping[str, float]]
    """Shares of the last minute in each state, by role."""
    returns: RecentReturns
    learning: LearningState
    target: TargetProgress
    evaluation: Mapping[str, float] | None
    """Newest evaluation: ``version``, ``mean_return``, ``episodes``, and the mean of each metric of
    its environment.
    """
    further_evaluations: Mapping[str, Mapping[str, float]]
    """The same of each further evaluation, by its name."""
    versions: RunVersions
    staleness: StalenessAgainstBound
    trajectories: TrajectoryCounts
    replay: ReplayState | None
    """None for an algorithm that uses each trajectory once."""
    queue: QueueState
    credits: CreditState
    controllers: tuple[ControllerStatistics, ...]
    settings: SettingsState
    actors: ActorCounts
    components: tuple[ComponentState, ...]
    restarts: tuple[RestartCount, ...]
    checkpoint: CheckpointCounts


# From statistics to the document
# --------------------------------------------------------------------------------------------------


def describe(run: RunStatistics, config: Config, rates: RunRates) -> RunDocument:
    """The document of ``run``."""
    ledger = run.ledger
    return RunDocument(
        id=run.run,
        state=run.state,
        ready=run.ready,
        reasons=run.reasons,
        environment=config.env.id,
        algorithm=config.algorithm.name,
        elapsed_s=run.elapsed_s,
        bottleneck=run.diagnosis.verdict,
        evaluating=run.evaluating,
        diagnosis=run.diagnosis,
        progress=RunProgress(
            env_steps=run.env_steps,
            env_frames=run.env_frames,
            episodes=run.episodes,
            updates=max(0, ledger.version.number),  # -1 before there is a learner
            skipped_updates=ledger.skipped_updates,
            time_left_s=time_left(run, config, rates),
        ),
        throughput=Throughput(
            env_steps_per_s={_key(window): rates.steps_per_s(window) for window in WINDOWS},
            updates_per_s={_key(window): rates.updates_per_s(window) for window in WINDOWS},
        ),
        shares=rates.shares(60.0),
        returns=_returns(run.recent_returns, run.recent_lengths),
        learning=LearningState(values=rates.learning(WINDOWS[0]), curves=rates.curves(POINTS)),
        target=TargetProgress(return_=run.target_return, reached_after_s=run.time_to_target_s),
        evaluation=run.evaluation or None,
        further_evaluations=run.further_evaluations,
        versions=RunVersions(
            learner=_version(ledger.version),
            published=_version(ledger.published),
            publish_lag=ledger.publish_lag,
        ),
        staleness=_staleness(ledger),
        trajectories=_picked(TrajectoryCounts, ledger),
        replay=None if run.replay is None else _replay(run.replay, rates),
        queue=QueueState(trajectories=ledger.queue, oldest_age_s=queue_age(run)),
        credits=CreditState(
            limit=ledger.credits_limit,
            in_use=ledger.in_use,
            ceiling=ledger.credits_ceiling,
            target=credits_target(run),
        ),
        controllers=run.controllers,
        settings=SettingsState(
            generation=run.generation,
            changes=run.settings_changes,
            refused=run.settings_refused,
            pending=run.settings_pending,
            schedules=_schedules(config, rates.newest()),
        ),
        actors=ActorCounts(
            wanted=run.actors_wanted,
            reporting=sum(component.role == "actor" for component in run.components),
        ),
        components=tuple(
            ComponentState(**_component(component, run.now)) for component in run.components
        ),
        restarts=tuple(
            RestartCount(component=place, reason=reason, count=count)
            for (place, reason), count in run.restarts.items()
        ),
        checkpoint=_picked(CheckpointCounts, run.checkpoint),
    )


def describe_components(run: RunStatistics) -> list[ComponentDetails]:
    """Every component in full."""
    return [
        ComponentDetails(
            **_component(component, run.now),
            seconds=component.time.at(run.now),
            counters=component.counters,
            gauges=component.gauges,
            distributions={
                name: _distribution(found) for name, found in component.distributions.items()
            },
        )
        for component in run.components
    ]


def describe_nodes(run: RunStatistics) -> list[NodeState]:
    """Every node of the run."""
    return [
        NodeState(name=name, **{key.name: getattr(node, key.name) for key in fields(node)})
        for name, node in run.nodes.items()
    ]


def staleness_summary(ledger: LedgerSnapshot) -> StalenessSummary:
    """Minimum, mean, 99th percentile (nearest rank) and maximum."""
    return StalenessSummary(**_moments(ledger.recent_staleness))


def by_staleness(counts: Mapping[int, int]) -> dict[str, int]:
    """``counts`` by staleness, from 16 on to three binary digits: few keys for any staleness."""
    found: dict[str, int] = {}
    for staleness, count in sorted(counts.items()):
        key = str(coarse(max(0, staleness)))
        found[key] = found.get(key, 0) + count
    return found


def credits_target(run: RunStatistics) -> int:
    """Credits that the winning controller requests; those in force before the first request."""
    asked = [
        controller.credits
        for controller in run.controllers
        if controller.winning and controller.credits is not None
    ]
    return min(asked, default=run.ledger.credits_limit)


def queue_age(run: RunStatistics) -> float | None:
    """Seconds since the commit of the oldest trajectory in the queue; None while it is empty."""
    oldest = run.ledger.oldest_committed_at
    return None if oldest is None else max(0.0, run.now - oldest)


def time_shares(component: ComponentStatistics, now: float) -> dict[str, float]:
    """Shares of the component's time in each state since its clock began, the current one
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

    A stopping run that evaluates has only ``evaluation.timeout_s``. ``target`` extends the slope of
    the mean return in a straight line. Learning curves are not straight, so it is an order of
    magnitude.
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


def _picked(cls: type[_Picked], source: object) -> _Picked:
    """An instance of the dataclass ``cls`` with the attributes of ``source``."""
    return cls(**{field.name: getattr(source, field.name) for field in fields(cls)})  # type: ignore[arg-type]  # a dataclass


def _schedules(config: Config, values: Mapping[str, float]) -> dict[str, ScheduledSetting]:
    return {
        path: ScheduledSetting(
            schedule=schedule.model_dump(mode="json"), value=values.get(STATISTICS[path])
        )
        for path, schedule in schedules_of(config).items()
    }


def _key(window: float) -> Any:
    return f"{window:.0f}"


def _returns(returns: tuple[float, ...], lengths: tuple[int, ...]) -> RecentReturns:
    if not returns:
        return RecentReturns(episodes=0, mean=None, min=None, max=None, mean_length=None)
    return RecentReturns(
        episodes=len(returns),
        mean=sum(returns) / len(returns),
        min=min(returns),
        max=max(returns),
        mean_length=mean_or_none(lengths),
    )


def _moments(recent: tuple[int, ...]) -> dict[str, Any]:
    if not recent:
        return dict.fromkeys(("min", "mean", "p99", "max"))
    return {
        "min": min(recent),
        "mean": sum(recent) / len(recent),
        "p99": quantile(Counter(recent), 0.99),
        "max": max(recent),
    }


def _staleness(ledger: LedgerSnapshot) -> StalenessAgainstBound:
    return StalenessAgainstBound(
        **_moments(ledger.recent_staleness),
        bound="unbounded" if ledger.max_staleness is None else ledger.max_staleness,
        violations=ledger.violations,
        counts=by_staleness(ledger.staleness),
    )


def _replay(replay: ReplayStatistics, rates: RunRates) -> ReplayState:
    lately = rates.samples_per_insert(60.0)
    return ReplayState(
        shards=len(replay.shards),
        items=replay.items,
        steps=sum(holdings.steps for holdings in replay.shards.values()),
        memory_bytes=sum(holdings.nbytes for holdings in replay.shards.values()),
        capacity=replay.limits.capacity,
        fill=replay.items / replay.limits.capacity,
        min_size=replay.limits.min_size,
        inserted=replay.inserts,
        removed=replay.deletes,
        drawn=replay.drawn,
        trained=replay.trained,
        discarded=replay.discarded,
        held=replay.held,
        samples_per_insert=replay.samples_per_insert if lately is None else lately,
        samples_per_insert_target=replay.samples_per_insert_target,
        limiter=LimiterState(
            diff=replay.diff, min_diff=replay.limits.min_diff, max_diff=replay.limits.max_diff
        ),
        blocked_s=replay.blocked_s,
        held_back=rates.held_back(10.0),
    )


def _version(version: Version) -> VersionNumber:
    return VersionNumber(lineage=version.lineage, number=version.number)


def _component(component: ComponentStatistics, now: float) -> dict[str, Any]:
    return {
        "name": component.name,
        "role": component.role,
        "host": component.host,
        "state": component.time.current,
        "shares": time_shares(component, now),
        "generation": component.generation,
    }


def _distribution(distribution: Histogram) -> DistributionSummary:
    count = distribution.count
    return DistributionSummary(count=count, mean=distribution.total / count if count else None)
