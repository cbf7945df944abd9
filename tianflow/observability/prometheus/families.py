"""Every metric family of a run: those that fields of statistics dataclasses declare
(`tianflow.core.metrics.metric`), and the few whose values are computed.

A new metric is one field with its metadata. `tianflow.observability.prometheus.prometheus` writes
the families out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tianflow.config.evaluations import MAIN
from tianflow.core.payloads import NOT_METRICS
from tianflow.core.statistics import MEASURES, Measures, RunStatistics, mean_or_none
from tianflow.observability.learning import newest
from tianflow.observability.prometheus.family import Family, Reader, Rows, counter, gauge, one
from tianflow.observability.prometheus.fields import families_of, families_of_role
from tianflow.observability.prometheus.replay import REPLAY_COMPUTED, shard_of
from tianflow.observability.run_document import credits_target, queue_age, staleness_summary


def _times(run: RunStatistics) -> Rows:
    for component in run.components:
        for state, seconds in component.time.at(run.now).items():
            yield (component.name, state), seconds


def _staleness(field: str) -> Reader:
    return one(lambda run: getattr(staleness_summary(run.ledger), field))


def _returns(read: Callable[[tuple[float, ...]], float]) -> Reader:
    return one(lambda run: read(run.recent_returns) if run.recent_returns else None)


def _learning(role: str) -> Reader:
    def rows(run: RunStatistics) -> Rows:
        for name, value in newest(run, role).items():
            yield (name,), value

    return rows


def _evaluations(field: str) -> Reader:
    def rows(run: RunStatistics) -> Rows:
        for name, found in {MAIN: run.evaluation, **run.further_evaluations}.items():
            if field in found:
                yield (name,), found[field]

    return rows


def _evaluation_metrics(run: RunStatistics) -> Rows:
    for name, found in {MAIN: run.evaluation, **run.further_evaluations}.items():
        for metric, mean in found.items():
            if metric not in NOT_METRICS:
                yield (name, metric), mean


def _late_actors(run: RunStatistics) -> Rows:
    for name, node in run.nodes.items():
        yield (name,), len(node.late)


def _frames(run: RunStatistics) -> float:
    """Frames behind the steps of this process. The number of frames of a step is fixed."""
    return run.ledger.steps_committed * run.env_frames / run.env_steps if run.env_steps else 0


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


COMPUTED: tuple[Family, ...] = (
    gauge(
        "episode_return_mean", "Mean return of the last 100 episodes of training.", _returns(_mean)
    ),
    gauge(
        "episode_return_min", "Lowest return of the last 100 episodes of training.", _returns(min)
    ),
    gauge(
        "episode_return_max", "Highest return of the last 100 episodes of training.", _returns(max)
    ),
    gauge(
        "episode_length_mean",
        "Mean length of the last 100 episodes of training, in steps.",
        one(lambda run: mean_or_none(run.recent_lengths)),
    ),
    gauge(
        "learner_statistic",
        "Newest value of a statistic of updates; 64 names at most.",
        _learning("learner"),
        "name",
    ),
    gauge(
        "episode_metric",
        "Newest value of a metric in the environments' info, the mean over actors; 64 names at "
        "most.",
        _learning("actor"),
        "name",
    ),
    gauge(
        "evaluation_return_mean",
        "Mean return of the newest evaluation, by its name.",
        _evaluations("mean_return"),
        "evaluation",
    ),
    gauge(
        "evaluation_version",
        "Version of the policy in the newest evaluation, by its name.",
        _evaluations("version"),
        "evaluation",
    ),
    gauge(
        "evaluation_metric",
        "Mean of a metric in the environments' info in the newest evaluation, by the name of the "
        "evaluation; 64 metrics at most.",
        _evaluation_metrics,
        "evaluation",
        "name",
    ),
    gauge(
        "staleness_min_updates",
        "Minimum staleness of the last 1,000 trajectories.",
        _staleness("min"),
    ),
    gauge(
        "staleness_mean_updates",
        "Mean staleness of the last 1,000 trajectories.",
        _staleness("mean"),
    ),
    gauge(
        "staleness_p99_updates",
        "99th percentile of the staleness of the last 1,000 trajectories.",
        _staleness("p99"),
    ),
    gauge(
        "staleness_max_updates",
        "Maximum staleness of the last 1,000 trajectories.",
        _staleness("max"),
    ),
    gauge("credits_target", "Credits that the winning controller requests.", one(credits_target)),
    gauge(
        "queue_oldest_age_seconds",
        "Time since the commit of the oldest trajectory in the queue.",
        one(lambda run: queue_age(run) or 0.0),
    ),
    counter(
        "env_steps",
        "Environment steps, without those of resets.",
        one(lambda run: run.ledger.steps_committed),
    ),
    counter("env_frames", "Frames of the environments behind those steps.", one(_frames)),
    counter(
        "episodes",
        "Finished episodes of training.",
        one(lambda run: run.episodes - run.earlier_episodes),
    ),
    counter(
        "component_time_seconds",
        "Time of a component in each state, the current one included.",
        _times,
        "component",
        "state",
    ),
    gauge(
        "actors",
        "Actors that report.",
        one(lambda run: sum(component.role == "actor" for component in run.components)),
    ),
    gauge(
        "node_late_actors",
        "Actors on the node that rest, because the learner has waited for their trajectories.",
        _late_actors,
        "node",
    ),
    *REPLAY_COMPUTED,
)


def families(
    statistics: type = RunStatistics,
    measures: Mapping[str, tuple[type[Measures], ...]] = MEASURES,
) -> tuple[Family, ...]:
    """Every family of runs with these ``statistics``, whose components have these ``measures``."""
    return (*families_of(statistics), *_of_components(measures), *COMPUTED)


def _of_components(measures: Mapping[str, tuple[type[Measures], ...]]) -> Iterator[Family]:
    for role, classes in measures.items():
        label, named = ("shard", shard_of) if role == "replay" else ("component", str)
        for cls in classes:
            yield from families_of_role(role, cls, label=label, named=named)


FAMILIES = families()
