"""What a scraper reads: names, identities, exact histograms, both formats."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from dataclasses import dataclass, field, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.fakes_run import FakeRun
from tianflow.core.learning import MOST_NAMES
from tianflow.core.metrics import metric, metric_of, parts
from tianflow.core.payloads import Settlement, Version
from tianflow.core.statistics import (
    DROP_REASONS,
    MEASURES,
    STALENESS_BUCKETS,
    STATES,
    ActorMeasures,
    BestVersion,
    CheckpointStatistics,
    ComponentStatistics,
    Histogram,
    HistogramBuilder,
    RunStatistics,
    SinkStatistics,
    TimeShares,
)
from tianflow.observability.prometheus.families import FAMILIES, families
from tianflow.observability.prometheus.family import Family, Rows
from tianflow.observability.prometheus.fields import histogram_of
from tianflow.observability.prometheus.prometheus import Exporter
from tianflow.observability.prometheus.steady import steady

OPENMETRICS = "application/openmetrics-text;version=1.0.0"

LISTED = set(
    """
env_steps_total env_frames_total episodes_total episode_return_mean episode_return_min episode_return_max trajectories_begun_total
trajectories_committed_total trajectories_trained_total trajectories_dropped_total trajectories_open staleness_updates_bucket
staleness_in_flight_updates_bucket staleness_in_queue_updates_bucket staleness_bound_updates staleness_max_updates
staleness_violations_total publish_lag_updates learner_updates_total learner_update_seconds_bucket samples_trained_total
queue_trajectories queue_oldest_age_seconds credits_limit credits_in_use component_time_seconds_total weights_published_total
weights_skipped_total weights_bytes_total weights_publish_seconds_bucket off_policy_kl_nats effective_sample_ratio weights_divergence_nats
component_restarts_total events_dropped_total http_requests_total balance_directives_total balance_settings_generation credits_target
run_state run_ready learner_last_update_timestamp_seconds checkpoint_last_success_timestamp_seconds loop_lag_seconds_bucket
checkpoint_seconds_bucket build_info sink_rows_total sink_rows_dropped_total learner_batches_given_back_total
actor_trajectories_total actor_env_failures_total actor_poisoned_total
""".split()  # noqa: SIM905 - a list of words reads better
)


def exporter(*runs: FakeRun, requests: dict[int, int] | None = None) -> Exporter:
    return Exporter(
        runs=lambda: [run.statistics() for run in runs],
        requests={200: 3} if requests is None else requests,
    )


def samples(
    made: Exporter, accept: str = ""
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text, _ = made.exposition(accept)
    parse = parse_openmetrics if accept else parse_text
    found = [sample for family in parse(text.decode()) for sample in family.samples]
    read = {
        (s.name.removeprefix("tianflow_"), tuple(sorted(s.labels.items()))): s.value for s in found
    }
    assert len(found) == len(read), "a series was given twice"
    return read


def test_every_evaluation_has_its_series_and_so_has_the_best_version() -> None:
    run = FakeRun()
    found = {name for name, _ in samples(exporter(run))}
    names = {"evaluation_return_mean", "evaluation_metric", "checkpoint_best_return"}
    assert set() == names & found
    run.evaluation = {"version": 4.0, "mean_return": 12.5, "episodes": 10.0}
    large = {"version": 3.0, "mean_return": 2.5, "episodes": 5.0, "success": 0.75}
    run.further_evaluations = {"large": large}
    best = BestVersion(version=2, mean_return=20.0, episodes=10)
    run.checkpoint = CheckpointStatistics(attempts=1, last_success=1.0, best=best)
    series = samples(exporter(run))

    def of(series_name: str, **labels: str) -> float:
        return series[series_name, tuple(sorted({"run": "fake", **labels}.items()))]

    assert (12.5, 4.0) == tuple(
        of(name, evaluation="main") for name in ("evaluation_return_mean", "evaluation_version")
    )
    assert (2.5, 3.0) == tuple(
        of(name, evaluation="large") for name in ("evaluation_return_mean", "evaluation_version")
    )
    assert 0.75 == of("evaluation_metric", evaluation="large", name="success")
    assert 1 == sum(name == "evaluation_metric" for name, _ in series)
    assert (20.0, 2.0) == (of("checkpoint_best_return"), of("checkpoint_best_version"))


def value(made: Exporter, name: str, **labels: str) -> float:
    return samples(made)[
        name,
        tuple(
            sorted(
                (
                    {}
                    if name in {"http_requests_total", "build_info"}
                    else {"run": "fake"} | labels
                ).items()
            )
        ),
    ]


@pytest.fixture
def run() -> FakeRun:
    run = FakeRun()
    run.restarts = {("actors-0", "exited"): 1}
    run.train(5)
    run.commit(1)
    run.sinks = {"tensorboard": SinkStatistics(9, 2)}
    return run


def test_every_listed_series_is_emitted(run: FakeRun) -> None:
    names = {name for name, _ in samples(exporter(run))}
    assert set() == LISTED - names


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_both_formats_parse_and_agree(run: FakeRun, accept: str) -> None:
    assert samples(exporter(run)) == samples(exporter(run), accept)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text; version=1.0.0",
        ),
        ("application/openmetrics-text; version=new", "text/plain; version=0.0.4"),
        ("text/plain; version=1.x", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_follows_the_accept_header(run: FakeRun, accept: str, expected: str) -> None:
    _, content_type = exporter(run).exposition(accept)
    assert content_type.startswith(expected)


def test_no_created_series(run: FakeRun) -> None:
    for accept in ("", OPENMETRICS):
        text, _ = exporter(run).exposition(accept)
        assert b"_created" not in text


def test_begun_is_trained_plus_inserted_plus_dropped_plus_open(run: FakeRun) -> None:
    run.ledger.drop_open("expired")
    run.commit(1)
    read = samples(exporter(run))
    label = ("run", "fake")
    dropped = sum(v for (name, _), v in read.items() if name == "trajectories_dropped_total")
    trained, inserted = (
        read[f"trajectories_{name}_total", (label,)] for name in ("trained", "inserted")
    )
    parts = [trained, inserted, dropped, read["trajectories_open", (label,)]]
    assert [10.0, 0.0, 1.0, 1.0] == parts
    assert sum(parts) == read["trajectories_begun_total", (label,)]


def test_a_scrape_takes_one_snapshot_of_a_run(run: FakeRun) -> None:
    looks = itertools.count()

    def look() -> list[object]:
        next(looks)
        run.commit(1)
        return [run.statistics()]

    Exporter(runs=look, requests={}).exposition("")  # type: ignore[arg-type]
    assert next(looks) == 1


def test_a_family_that_cannot_be_read_costs_itself_and_is_logged_once(
    run: FakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: RunStatistics) -> Rows:
        raise OverflowError("cannot convert float infinity to integer")

    broken = Family("gauge", "broken", "Cannot be read.", (), fail)
    families = (*FAMILIES[:3], broken, *FAMILIES[3:])
    exporter = Exporter(runs=lambda: [run.statistics()], requests={}, families=families)
    whole = Exporter(runs=lambda: [run.statistics()], requests={})
    for _ in range(2):
        assert exporter.exposition("") == whole.exposition("")
    assert 1 == caplog.text.count("a metric cannot be read")


def test_making_an_exporter_reads_no_run() -> None:
    def read() -> list[object]:
        raise AssertionError

    Exporter(runs=read, requests={})  # type: ignore[arg-type]


def test_staleness_buckets_hold_the_exact_counts() -> None:
    distribution = histogram_of({0: 3, 1: 2, 3: 1, 4: 1, 70_000: 1}, STALENESS_BUCKETS)
    assert (0.0, 1.0, 2.0, 4.0) == distribution.edges[:4]
    assert (3, 2, 0, 2) == distribution.counts[:4]
    assert distribution.counts[-1] == 1
    assert distribution.count == 8
    assert 0 * 3 + 1 * 2 + 3 + 4 + 70_000 == distribution.total


def test_the_staleness_histogram_counts_every_trained_trajectory(run: FakeRun) -> None:
    assert value(exporter(run), "staleness_updates_bucket", le="+Inf") == value(
        exporter(run), "trajectories_trained_total"
    )
    assert value(exporter(run), "staleness_updates_count") == 10.0
    assert value(exporter(run), "staleness_updates_bucket", le="0.0") == 10.0


def test_histogram_buckets_are_cumulative(run: FakeRun) -> None:
    run.update_seconds.add(0.003)
    made = exporter(run)
    assert value(made, "learner_update_seconds_bucket", le="0.005", component="learner") == 1.0
    assert value(made, "learner_update_seconds_bucket", le="1.0", component="learner") == 6.0
    assert value(made, "learner_update_seconds_sum", component="learner") == pytest.approx(5.003)


def test_an_unbounded_run_shows_infinity(run: FakeRun) -> None:
    assert value(exporter(run), "staleness_bound_updates") == 1.0
    run.change(
        {"balance": {"max_staleness": "unbounded", "controller": "open_loop"}}, source="test"
    )
    assert value(exporter(run), "staleness_bound_updates") == math.inf


def test_component_time_counts_the_running_state_up_to_now(run: FakeRun) -> None:
    for now in (run.now, run.now + 7.0):
        run.now = now
        read = samples(exporter(run))
        total = sum(
            v
            for (name, labels), v in read.items()
            if name == "component_time_seconds_total" and ("component", "actor-0") in labels
        )
        assert total == pytest.approx(now - run.began)


def times(made: Exporter, component: str) -> dict[str, float]:
    read = {
        labels: v
        for (name, labels), v in samples(made).items()
        if name == "component_time_seconds_total"
    }
    return {
        dict(labels)["state"]: v for labels, v in read.items() if ("component", component) in labels
    }


def test_component_time_never_goes_down_when_a_late_report_tells_otherwise(run: FakeRun) -> None:
    def report(**seconds: float) -> None:
        current = "waiting" if seconds["busy"] < 10.0 else "busy"
        time = TimeShares(seconds, current, run.began + sum(seconds.values()))
        run._components = lambda: (ComponentStatistics("learner", "learner", "learner", time),)  # type: ignore[method-assign]

    made = exporter(run)
    report(busy=5.0, waiting=1.0)
    run.now = 10.0
    shown = times(made, "learner")
    assert {"busy": 5.0, "waiting": 5.0} == shown
    for now, busy, waiting in ((11.0, 9.5, 1.5), (20.0, 15.0, 2.0), (40.0, 30.0, 8.0)):
        report(busy=busy, waiting=waiting)
        run.now = now
        before, shown = shown, times(made, "learner")
        assert all(shown[state] >= before[state] for state in shown)
        assert sum(shown.values()) == pytest.approx(now)
    assert shown == pytest.approx({"busy": 32.0, "waiting": 8.0})


def test_counters_of_a_restarted_component_include_its_earlier_incarnations(run: FakeRun) -> None:
    made = Exporter(runs=lambda: [replace(run.statistics(), earlier=earlier)], requests={})
    earlier: dict[str, ComponentStatistics] = {}
    before = samples(made)
    ended = {component.name: component for component in run._components()}
    earlier = {
        name: replace(c, time=TimeShares(c.time.at(run.now), "busy", run.now))
        for name, c in ended.items()
    }
    after = samples(made)
    for name, component in (
        ("samples_trained_total", "learner"),
        ("actor_trajectories_total", "actor-0"),
    ):
        key = next(k for k in before if k[0] == name and ("component", component) in k[1])
        assert 2 * before[key] == after[key]
    counted = [
        key
        for key in before
        if key[0].endswith(("_total", "_bucket", "_count", "_sum")) and after[key] < before[key]
    ]
    assert [] == counted


def test_component_time_of_a_component_that_came_back_does_not_decrease(run: FakeRun) -> None:
    def report(**seconds: float) -> None:
        time = TimeShares(seconds, "busy", run.began + sum(seconds.values()))
        run._components = lambda: (ComponentStatistics("learner", "learner", "learner", time),)  # type: ignore[method-assign]

    made = exporter(run)
    report(busy=4.0, waiting=1.0)
    run.now = 10.0
    assert {"busy": 9.0, "waiting": 1.0} == times(made, "learner")
    run._components = tuple  # type: ignore[method-assign]
    assert {} == times(made, "learner")
    report(busy=4.0, waiting=6.5)
    run.now = 10.5
    shown = times(made, "learner")
    assert shown["busy"] >= 9.0
    assert shown["waiting"] >= 1.0
    assert sum(shown.values()) == pytest.approx(10.5)


def test_a_resumed_run_counts_from_its_own_process_and_shows_the_totals_of_the_run(
    run: FakeRun,
) -> None:
    found = run.statistics()
    earlier = 1000
    resumed = replace(
        found,
        env_steps=found.env_steps + earlier,
        env_frames=4 * (found.env_steps + earlier),
        episodes=found.episodes + 7,
        earlier_episodes=7,
    )
    made = Exporter(runs=lambda: [resumed], requests={})
    steps = float(found.ledger.steps_committed)
    assert [steps, 4 * steps, float(found.episodes)] == [
        value(made, f"{name}_total") for name in ("env_steps", "env_frames", "episodes")
    ]
    assert [steps + 1000, 4 * (steps + 1000), found.episodes + 7.0] == [
        value(made, f"run_{name}") for name in ("env_steps", "env_frames", "episodes")
    ]


def test_items_that_a_resumed_run_restores_count_as_inserted() -> None:
    run = FakeRun(replay=True)
    run.train(3)
    found = run.statistics()
    assert found.replay is not None
    replay = replace(
        found.replay,
        inserts=found.replay.inserts + 500,
        deletes=found.replay.deletes + 500,
        earlier_deletes=500,
    )
    made = Exporter(runs=lambda: [replace(found, replay=replay)], requests={})
    assert float(found.replay.inserts) == value(made, "replay_items_inserted_total")
    assert float(found.replay.deletes) == value(made, "replay_items_removed_total")


def test_component_time_of_a_new_process_begins_again() -> None:
    assert {"busy": 1.0, "starting": 2.0} == steady(
        {"busy": 50.0, "waiting": 3.0}, {"busy": 1.0, "starting": 2.0}
    )


def test_a_sum_in_another_order_is_no_new_clock() -> None:
    assert {"busy": 5.0, "waiting": 1.0} == steady(
        {"busy": 5.0, "waiting": 1.0}, {"busy": 4.0, "waiting": 2.0 - 1e-12}
    )


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(0.0, 10.0)), max_size=20))
def test_steady_times_sum_to_what_is_told_and_never_fall(reports: list[dict[str, float]]) -> None:
    shown: dict[str, float] = {}
    told: dict[str, float] = {}
    for report in reports:
        told = {
            state: told.get(state, 0.0) * 0.9 + report.get(state, 0.0)
            for state in {**told, **report}
        }
        before, shown = shown, steady(shown, told)
        assert sum(shown.values()) == pytest.approx(
            sum(told.values()), abs=1e-6
        )  # less than a microsecond is rounding
        if sum(told.values()) >= sum(before.values()) - 1e-9:
            assert all(shown[state] >= before[state] for state in before)


def test_exactly_one_state_is_on(run: FakeRun) -> None:
    for state in STATES:
        run.state = state
        read = {
            dict(labels)["state"]: v
            for (name, labels), v in samples(exporter(run)).items()
            if name == "run_state"
        }
        assert {name: float(name == state) for name in STATES} == read


def test_dropped_reasons_are_there_before_the_first_drop(run: FakeRun) -> None:
    for reason in DROP_REASONS:
        assert value(exporter(run), "trajectories_dropped_total", reason=reason) == 0.0


def test_a_new_drop_reason_becomes_a_series(run: FakeRun) -> None:
    run.ledger.drop_open("unforeseen")
    assert value(exporter(run), "trajectories_dropped_total", reason="unforeseen") == 1.0


def test_series_of_a_component_go_with_it(run: FakeRun) -> None:
    everyone = run._components()
    made = exporter(run)
    assert any(
        ("component", "actor-1") in labels
        for name, labels in samples(made)
        if name == "component_time_seconds_total"
    )
    run._components = lambda: everyone[:2]  # type: ignore[method-assign]
    assert not any(
        ("component", "actor-1") in labels
        for name, labels in samples(made)
        if name == "component_time_seconds_total"
    )


def test_two_runs_share_one_family_each() -> None:
    first, second = FakeRun(name="a"), FakeRun(name="b")
    first.train(1)
    text = exporter(first, second).exposition(OPENMETRICS)[0].decode()
    read = {
        s.labels["run"]: s.value
        for f in parse_openmetrics(text)
        for s in f.samples
        if s.name == "tianflow_learner_updates_total"
    }
    assert {"a": 1.0, "b": 0.0} == read


def test_labels_are_small_sets_only(run: FakeRun) -> None:
    allowed = {
        "run",
        "component",
        "reason",
        "controller",
        "state",
        "host",
        "shard",
        "side",
        "sink",
        "process",
        "node",
        "kind",
        "role",
        "verdict",
        "name",
        "le",
        "code",
        "version",
        "python",
    }
    for shown in (run, FakeRun(replay=True)):
        assert {key for _, labels in samples(exporter(shown)) for key, _ in labels} <= allowed


def test_statistics_of_updates_and_episodes_are_series_by_name(run: FakeRun) -> None:
    updates = len(run.returns)
    made = exporter(run)
    found = samples(made)
    run_ = ("run", "fake")
    assert 1 / updates == found["learner_statistic", (("name", "train/loss"), run_)]
    assert 1.0 == found["episode_metric", (("name", "rollout/success"), run_)]
    assert sum(run.returns) / updates == value(made, "episode_length_mean")


def test_names_of_statistics_are_bounded_and_the_others_are_counted(run: FakeRun) -> None:
    run.learning.accept({f"layer{number}": 1.0 for number in range(1000)})
    for number in range(1000):
        run.learning.add(run.learning.accept({f"layer{number}": 1.0}))
    found = samples(exporter(run))
    shown = [labels for name, labels in found if name == "learner_statistic"]
    assert MOST_NAMES == len(shown)
    assert found[
        "learner_statistics_refused_total", (("component", "learner"), ("run", "fake"))
    ] == 2 * (1000 - MOST_NAMES + 8)


def test_every_failure_counter_has_its_attempts_beside_it() -> None:
    names = {family.name for family in FAMILIES}
    pairs = {
        "actor_env_failures": "actor_trajectories",
        "actor_metrics_refused": "actor_trajectories",
        "checkpoint_failures": "checkpoint_attempts",
        "component_restarts": "component_starts",
        "events_dropped": "events_received",
        "inference_failures": "inference_requests",
        "learner_statistics_refused": "learner_updates",
        "learner_updates_skipped": "learner_updates",
        "nodes_connections_refused": "nodes_connections",
        "nodes_refused": "nodes_arrived",
        "replay_items_discarded": "replay_items_drawn",
        "replay_shard_priorities_refused": "replay_shard_items_drawn",
        "sink_rows_dropped": "sink_rows",
        "settings_refused": "settings_changes",
        "staleness_violations": "trajectories_trained",
        "trajectories_dropped": "trajectories_begun",
        "trajectories_late_commits": "trajectories_committed",
        "trajectories_returned": "trajectories_granted",
        "weights_skipped": "learner_updates",
    }
    words = (
        "failures",
        "discarded",
        "dropped",
        "skipped",
        "refused",
        "violations",
        "restarts",
        "late",
        "returned",
    )
    failures = {
        f.name
        for f in FAMILIES
        if f.kind == "counter" and any(word in f.name.split("_") for word in words)
    }
    assert failures - {"steps_dropped"} == set(pairs)
    assert set(pairs.values()) <= names


def test_family_names_are_unique_and_explained() -> None:
    assert len(FAMILIES) == len({family.name for family in FAMILIES})
    assert all(family.help.endswith(".") for family in FAMILIES)


# A new metric is one field
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreCheckpoints(CheckpointStatistics):
    retries: int = field(default=7, metadata=metric("Retries.", kind="counter", name="retries"))
    unfinished: float | None = field(default=None, metadata=metric("Size of nothing."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    name: str
    boxes: int = field(metadata=metric("Boxes on a shelf."))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreStatistics(RunStatistics):
    checkpoint: MoreCheckpoints = field(default=MoreCheckpoints(), metadata=parts())
    naps: int = field(default=3, metadata=metric("Naps.", kind="counter"))
    mood: str = field(
        default="calm", metadata=metric("1 for the mood.", labels=("mood",), known=("calm", "low"))
    )
    visits: dict[tuple[str, str], int] = field(
        default_factory=lambda: {("a", "b"): 2},
        metadata=metric("Visits.", kind="counter", labels=("place", "guest")),
    )
    lengths: Histogram = field(
        default=Histogram((1.0,), (2, 1), 4.0), metadata=metric("Lengths.", kind="histogram")
    )
    shelves: tuple[Shelf, ...] = field(
        default=(Shelf(name="left", boxes=5), Shelf(name="right", boxes=0)),
        metadata=parts("shelf", key="name"),
    )
    hidden: int = field(default=1, metadata=metric("Hidden.", exposed=False))
    plain: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMeasures(ActorMeasures):
    jumps: float = field(metadata=metric("Jumps.", kind="counter", name="actor_jumps"))


def extended(run: FakeRun) -> MoreStatistics:
    found = run.statistics()
    values = {each.name: getattr(found, each.name) for each in fields(found)}
    return MoreStatistics(**values | {"checkpoint": MoreCheckpoints()})


def test_a_new_metric_is_one_field_of_a_statistics_dataclass(run: FakeRun) -> None:
    them = families(MoreStatistics)
    made = Exporter(runs=lambda: [extended(run)], requests={}, families=them)
    assert (7.0, 3.0) == (value(made, "retries_total"), value(made, "naps_total"))
    assert [1.0, 0.0] == [value(made, "mood", mood=mood) for mood in ("calm", "low")]
    assert 2.0 == value(made, "visits_total", place="a", guest="b")
    assert (2.0, 3.0) == (
        value(made, "lengths_bucket", le="1.0"),
        value(made, "lengths_bucket", le="+Inf"),
    )
    assert [5.0, 0.0] == [value(made, "boxes", shelf=shelf) for shelf in ("left", "right")]
    read = {name for name, _ in samples(made)}
    assert {name for name, _ in samples(exporter(run))} <= read | {"http_requests_total"}
    assert not {"hidden", "plain", "unfinished"} & read
    assert {"hidden", "plain"}.isdisjoint(family.name for family in them)


def test_a_new_metric_of_a_component_is_one_field_of_its_measures(run: FakeRun) -> None:
    measures = MoreMeasures(
        trajectories=4.0,
        env_failures=0.0,
        poisoned=0.0,
        refused_metrics=0.0,
        rollout_seconds=HistogramBuilder().read(),
        trajectory_seconds=HistogramBuilder().read(),
        jumps=9.0,
    )
    actor = ComponentStatistics("actor-0", "actor", "here", TimeShares({}, "busy", 0.0))
    run._components = lambda: (actor.with_measures(measures),)  # type: ignore[method-assign]
    them = families(measures={"actor": (MoreMeasures,)})
    made = Exporter(runs=lambda: [run.statistics()], requests={}, families=them)
    assert 9.0 == value(made, "actor_jumps_total", component="actor-0")
    assert 4.0 == value(made, "actor_trajectories_total", component="actor-0")


def test_parts_without_a_dataclass_are_refused() -> None:
    @dataclass
    class Wrong:
        number: int = field(default=0, metadata=parts())

    with pytest.raises(TypeError, match=r"Wrong\.number holds parts, but no dataclass"):
        families(Wrong)


def test_every_measure_of_a_component_is_on_the_page_or_kept_off_it_on_purpose() -> None:
    exposed = {family.name for family in FAMILIES}
    for classes in MEASURES.values():
        for each in (each for cls in classes for each in fields(cls)):
            found = metric_of(each)
            assert found is not None, each.name
            assert found.exposed == (found.name in exposed), each.name


def test_the_oldest_waiting_trajectory_gives_the_queue_its_age(run: FakeRun) -> None:
    run.now += 3.0
    assert value(exporter(run), "queue_oldest_age_seconds") == 3.0
    assert value(exporter(FakeRun()), "queue_oldest_age_seconds") == 0.0


def test_time_shares_of_a_clock_running_backwards_do_not_shrink() -> None:
    assert TimeShares({"busy": 2.0}, "busy", 10.0).at(9.0) == {"busy": 2.0}


def test_unpublished_updates_are_counted_as_skipped_weights(run: FakeRun) -> None:
    assert value(exporter(run), "weights_skipped_total") == 0.0
    run.ledger.settle(Settlement(Version(1, 6), (), 1, published=False))
    assert value(exporter(run), "weights_skipped_total") == 1.0
    assert value(exporter(run), "weights_published_total") == 6.0


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)
def test_promtool_finds_nothing_to_criticise(run: FakeRun) -> None:
    text, _ = exporter(run, FakeRun(name="with replay", replay=True)).exposition("")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=30
    )
    assert (0, b"") == (checked.returncode, checked.stdout + checked.stderr)
