"""Tests of the storm: its plan, its judges, its clock and its disk."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib import live_run
from benchmarks.lib.harness import Plan
from benchmarks.lib.live_run import FORK_SERVER, Answer, LiveRun, Process, Scrape, parse_metrics
from benchmarks.lib.oracle import Use
from benchmarks.lib.storm import clock, disk, environment, plan
from benchmarks.lib.storm.clock import UnavailableError, WallClock
from benchmarks.lib.storm.deterministic import Resumes
from benchmarks.lib.storm.faults import Injector
from benchmarks.lib.storm.judges import (
    BoundSpan,
    Finding,
    Findings,
    MetricsJudge,
    OracleJudge,
    Patch,
    ReadinessJudge,
    RoleWatch,
    bound_spans,
    compare_with_ledger,
    judge_pair,
    judge_resume,
)
from benchmarks.lib.storm.lives import hang_limit
from benchmarks.lib.storm.observers import Conditions, Observers, Tally, changes
from benchmarks.lib.storm.plan import Fault
from benchmarks.studies import storm
from tests.support.fakes_run import FakeRun
from tianflow.observability.prometheus.prometheus import Exporter

# The plan
# --------------------------------------------------------------------------------------------------


def first_rounds(seed: int, count: int, *, replay: bool = True) -> list[tuple[Fault, ...]]:
    return list(itertools.islice(plan.rounds(seed, plan.LONG, replay=replay), count))


def test_a_seed_gives_the_same_storm_and_another_seed_another() -> None:
    assert first_rounds(3, 20) == first_rounds(3, 20)
    assert first_rounds(3, 20) != first_rounds(4, 20)


@pytest.mark.parametrize("replay", [False, True])
def test_every_role_is_killed_and_stopped_and_whatever_can_hang_hangs(replay: bool) -> None:
    deck = len(plan.cards(replay=replay))
    struck = Counter(
        fault.name
        for faults in first_rounds(1, -(-deck // plan.LONG.together), replay=replay)
        for fault in faults
    )
    roles = {"learner", "actors", "evaluator", FORK_SERVER} | ({"replay"} if replay else set())
    wanted = {f"{kind} {role}" for kind in ("kill", "stop") for role in roles}
    wanted.add(f"stop {plan.COORDINATOR}")
    wanted |= {f"hang actors {moment}" for moment in ("step", "reset", "constructor")}
    wanted |= {"hang evaluator step", "hang evaluator reset", "hang learner update"}
    assert wanted | {"disk", "clock", "pause"} == set(struck)


def test_the_fork_server_is_struck_by_main_faults_only() -> None:
    """Three deaths in a row, before it has forked, end a run on purpose."""
    cards = len(plan.cards(replay=True))
    faults = [fault for faults in first_rounds(1, cards) for fault in faults]
    assert plan.LONG.together == sum(fault.name == f"kill {FORK_SERVER}" for fault in faults)
    assert len(faults) > plan.LONG.together * cards


def test_faults_of_a_round_come_in_order_and_stops_last_as_long_as_the_size_says() -> None:
    for faults in first_rounds(2, 30):
        assert sorted(fault.at for fault in faults) == [fault.at for fault in faults]
        assert max(fault.at for fault in faults) <= plan.LONG.spread_s
        assert {30.0} >= {fault.seconds for fault in faults if fault.kind == "stop"}
        assert {0.0} >= {fault.seconds for fault in faults if fault.kind == "kill"}


# Metrics
# --------------------------------------------------------------------------------------------------


def scraped(run: FakeRun, **changed: float) -> Scrape:
    """A real exposition of ``run``, with some series changed by hand."""
    text, _ = Exporter(runs=lambda: [run.statistics()], requests={}).exposition("")
    found = parse_metrics(text.decode(), 0.0)
    assert set(changed) <= set(found.series)
    return Scrape(0.0, {**found.series, **changed}, found.counters)


def test_series_are_read_as_the_exporter_writes_them() -> None:
    found = scraped(FakeRun(replay=True))
    assert 0.0 == found.value("trajectories_dropped_total", reason="expired")
    assert {"env_steps_total", "staleness_updates", "component_time_seconds_total"} <= set(
        found.counters
    )
    assert "credits_in_use" not in found.counters
    assert found.total("trajectories_dropped_total") == sum(
        value
        for key, value in found.series.items()
        if key.startswith("trajectories_dropped_total{")
    )


@pytest.mark.parametrize("replay", [False, True])
def test_a_sound_scrape_has_no_finding(replay: bool) -> None:
    judge = MetricsJudge(replay=replay)
    assert [] == judge.judge(scraped(FakeRun(replay=replay)))
    assert [] == judge.judge(scraped(FakeRun(replay=replay), env_steps_total=1e6))


@pytest.mark.parametrize(
    ("series", "broken"),
    [
        ("trajectories_open", "begun = trained + inserted + dropped + open"),
        ("staleness_violations_total", "no violation"),
        ("staleness_updates_count", "staleness counted for each trained"),
        ("replay_items_held", "drawn = trained + discarded + held"),
        ("replay_items_removed_total", "inserted - removed = items"),
        ("trajectories_returned_total", "begun + returned <= granted"),
        ("credits_in_use", "credits in use <= slots"),
        ("slots_quarantined", "free + quarantined <= slots"),
    ],
)
def test_an_account_that_does_not_close_is_a_finding(series: str, broken: str) -> None:
    found = MetricsJudge(replay=True).judge(scraped(FakeRun(replay=True), **{series: 1_000_000.0}))
    assert [("account", broken)] == [(finding.rule, finding.subject) for finding in found]


def test_a_counter_that_decreases_is_a_finding_also_after_its_series_was_gone() -> None:
    judge, key = MetricsJudge(replay=False), "component_time_seconds_total{component=x,state=busy}"

    def look(**series: float) -> list[Finding]:
        base = scraped(FakeRun())
        return judge.judge(Scrape(0.0, {**base.series, **series}, base.counters))

    assert [] == look(**{key: 3.0})
    assert [] == look()
    assert [] == look(**{key: 3.5})
    found = look(**{key: 3.25})
    assert ["component_time_seconds_total"] == [finding.subject for finding in found]
    assert f"{key} from 3.5 to 3.25" in found[0].detail


@pytest.mark.parametrize("part", ["_sum", "_count", "_bucket{le=+Inf}"])
def test_every_part_of_a_histogram_counts_as_a_counter(part: str) -> None:
    judge, key = MetricsJudge(replay=False), f"loop_lag_seconds{part}"
    run = FakeRun()
    assert [] == judge.judge(scraped(run, **{key: 9.0}))
    assert ["counter decreased"] == [
        finding.rule for finding in judge.judge(scraped(run, **{key: 8.0}))
    ]


def test_a_gauge_may_decrease() -> None:
    judge = MetricsJudge(replay=False)
    assert [] == judge.judge(scraped(FakeRun(), run_elapsed_seconds=9.0))
    assert [] == judge.judge(scraped(FakeRun(), run_elapsed_seconds=8.0))


# Readiness
# --------------------------------------------------------------------------------------------------

WHOLE = (
    Process(1, FORK_SERVER, "S"),
    Process(2, "learner", "S"),
    Process(3, "evaluator", "S"),
    Process(4, "actors-0", "R"),
)


def without(role: str) -> list[Process]:
    return [process for process in WHOLE if process.role != role]


def stopped(role: str) -> list[Process]:
    return [*without(role), *(p._replace(state="T") for p in WHOLE if p.role == role)]


def test_a_role_is_broken_once_it_was_stopped_or_missing_long_enough() -> None:
    for look, reason in (
        (stopped("learner"), "learner (2) is stopped"),
        (without("learner"), "there is no learner"),
        (stopped("actors-0"), "actors-0 (4) is stopped"),
        (without("actors-0"), "there is no actors"),
    ):
        watch = RoleWatch(replay_shards=0)
        watch.look(WHOLE, 0.0)
        assert 0.0 == watch.whole
        watch.look(look, 1.0)
        watch.look(look, 6.0)
        assert None is watch.whole
        assert [] == watch.broken(1.0)
        assert [reason] == watch.broken(1.5)
        watch.look(WHOLE, 7.0)
        assert ([], 7.0) == (watch.broken(7.0), watch.whole)


def test_neither_evaluator_nor_fork_server_is_needed_for_training_but_both_are_part_of_the_whole() -> (
    None
):
    for role in ("evaluator", FORK_SERVER):
        watch = RoleWatch(replay_shards=0)
        watch.look(without(role), 0.0)
        assert ([], None) == (watch.broken(9.0), watch.whole)


def test_one_of_two_shards_is_enough_for_training_and_not_for_the_whole() -> None:
    watch = RoleWatch(replay_shards=2)
    one, other = Process(5, "replay-0", "S"), Process(6, "replay-1", "S")
    watch.look([*WHOLE, one], 0.0)
    assert ([], None) == (watch.broken(9.0), watch.whole)
    watch.look(WHOLE, 1.0)
    assert ["there is no replay"] == watch.broken(9.0)
    watch.look([*WHOLE, one, other], 2.0)
    assert 2.0 == watch.whole


def test_a_restarted_process_is_not_blamed_for_the_stop_of_its_predecessor() -> None:
    watch = RoleWatch(replay_shards=0)
    watch.look(stopped("learner"), 0.0)
    watch.look([*without("learner"), Process(9, "learner", "T")], 5.0)
    assert [] == watch.broken(5.0)


def readiness(**changed: Any) -> tuple[list[str], dict[str, int]]:
    judge = ReadinessJudge(unready_after_s=8.0, ready_after_s=3.0)
    given: dict[str, Any] = {
        "asked": 100.0,
        "answered": 100.1,
        "status": 200,
        "reasons": "",
        "broken": [],
        "whole_since": 90.0,
        "quiet_since": 95.0,
        "updated": 99.9,
        "paused": False,
    }
    found = judge.judge(**{**given, **changed})
    return [finding.rule for finding in found], dict(judge.judged)


def test_readiness_is_right_when_it_says_what_is_known_from_outside() -> None:
    assert ([], {"ready": 1}) == readiness()
    assert ([], {"unready": 1}) == readiness(status=503, broken=["there is no learner"])
    assert ([], {"ready": 1}) == readiness(paused=True, updated=0.0, quiet_since=80.0)


def test_readiness_is_wrong_when_it_contradicts_what_is_known_from_outside() -> None:
    assert (["ready although broken"], {"unready": 1}) == readiness(broken=["there is no learner"])
    assert (["unready although whole"], {"ready": 1}) == readiness(status=503)


@pytest.mark.parametrize(
    "unknown",
    [
        {"quiet_since": None},
        {"whole_since": None},
        {"quiet_since": 98.0},
        {"whole_since": 98.0},
        {"updated": 97.0},
        {"paused": True},
    ],
)
def test_readiness_is_not_judged_while_the_truth_is_not_known(unknown: dict[str, Any]) -> None:
    assert ([], {}) == readiness(status=503, **unknown)


# Two clients
# --------------------------------------------------------------------------------------------------


def patch(
    sent: float, *, value: int = 0, status: int = 200, generation: int = 1, took: float = 0.1
) -> Patch:
    return Patch(sent, sent + took, "balance", value, status, generation)


@pytest.mark.parametrize(
    ("statuses", "sound"),
    [
        ((200, 412), True),
        ((412, 200), True),
        ((412, 412), True),
        ((200, 200), False),
        ((200, 500), False),
        ((0, 412), False),
    ],
)
def test_of_two_changes_of_one_generation_one_at_most_is_accepted(
    statuses: tuple[int, int], sound: bool
) -> None:
    one, other = (patch(1.0, status=status) for status in statuses)
    assert sound == (not judge_pair(one, other))


# The oracle
# --------------------------------------------------------------------------------------------------


def test_a_span_begins_with_the_learners_generation_and_ends_with_the_next_request() -> None:
    patches = [
        patch(1.0, value=0, generation=5),
        patch(1.0, value=16, status=412, generation=5),
        patch(4.0, value=16, generation=6),
    ]
    generations = [(0.5, 4), (1.5, 4), (2.0, 5), (3.0, 5), (4.5, 6)]
    assert [BoundSpan(2.0, 4.0, 0), BoundSpan(4.5, 9.0, 16)] == bound_spans(
        patches, generations, 9.0
    )


def test_there_is_no_span_when_the_learner_never_reported_the_change() -> None:
    assert [] == bound_spans([patch(1.0, generation=5)], [(2.0, 4)], 9.0)
    assert [] == bound_spans([patch(1.0, generation=5), patch(2.0, generation=6)], [(2.5, 5)], 2.6)


def line(number: int, at: float, *ages: int | str, pid: int = 7) -> str:
    return f"{pid} {number} {at} {','.join(map(str, ages))}\n"


SPANS = [BoundSpan(10.0, 20.0, 0), BoundSpan(30.0, 40.0, 16)]


def test_the_oracle_finds_what_is_beyond_the_bound_that_was_surely_in_force() -> None:
    judge = OracleJudge(highest_bound=16)
    lines = [line(0, 9.0, 16), line(1, 10.5, 3), line(2, 11.0, 0), line(3, 12.0, 1)]
    found = judge.judge([*lines, line(4, 21.0, 16), line(5, 31.0, 16)], SPANS)
    assert ["staleness 1 to 1 in update 3 of learner 7 at 12.000"] == [f.detail for f in found]
    assert {0: 2} == dict(judge.judged)
    assert 6 == judge.updates


def test_each_learners_first_update_in_a_span_may_have_been_admitted_before_it() -> None:
    judge = OracleJudge(highest_bound=16)
    lines = [line(0, 11.0, 16), line(0, 12.0, 16, pid=8), line(1, 13.0, 16, pid=8)]
    assert 1 == len(judge.judge(lines, SPANS))


@pytest.mark.parametrize("ages", [(17,), (-1,), (0, 17, 0)])
def test_the_oracle_finds_what_no_bound_ever_allowed(ages: tuple[int, ...]) -> None:
    found = OracleJudge(highest_bound=16).judge([line(0, 1.0, *ages)], [])
    assert ["bound 16"] == [finding.subject for finding in found]


def test_the_oracle_finds_data_of_another_learner_and_updates_out_of_order() -> None:
    found = OracleJudge(highest_bound=16).judge(
        [line(0, 1.0, 0, "of 6"), line(1, 2.0, 0), line(3, 3.0, 0)], []
    )
    assert ["another learner's data", "order of updates"] == [f.subject for f in found]


def ledger(ages: list[int], updates: int) -> Scrape:
    buckets = {
        f"staleness_updates_bucket{{le={float(edge)}}}": float(sum(age <= edge for age in ages))
        for edge in (0, 1, 16)
    }
    return Scrape(0.0, {"learner_updates_total": float(updates), **buckets}, frozenset())


def compared(recorded: list[int], counted: list[int], lost: int = 0) -> list[str]:
    uses = [Use(7, number, 0.0, (age,)) for number, age in enumerate(recorded)]
    found = compare_with_ledger(
        uses,
        ledger([0, 0], 2),
        ledger([0, 0, *counted], 2 + len(counted)),
        lost_learners=lost,
        labels=(0, 1, 16),
    )
    return sorted({finding.subject for finding in found})


def test_record_and_ledger_agree_up_to_one_update_of_each_lost_learner() -> None:
    assert [] == compared([0, 1, 5], [0, 1, 5])
    assert [] == compared([0, 1, 5], [0, 1], lost=1)
    assert ["updates settled"] == compared([0, 1, 5], [0, 1])
    assert ["updates settled"] == compared([0, 1], [0, 1, 5], lost=3)
    assert ["histogram of staleness"] == compared([0, 1, 5], [0, 1, 1])
    assert ["histogram of staleness"] == compared([0, 5, 5], [0, 1], lost=1)
    assert ["histogram of staleness"] == compared([0, 0, 0], [5, 5], lost=1)


# Resuming
# --------------------------------------------------------------------------------------------------


def resumed(**changed: Any) -> list[str]:
    given: dict[str, Any] = {
        "acknowledged": {"max_staleness": 16, "count": 1},
        "in_force": {"max_staleness": 16, "count": 1, "credits": None},
        "checkpoint": (3, 100),
        "version": (4, 100),
    }
    return [finding.subject for finding in judge_resume(**{**given, **changed})]


def test_a_resumed_run_has_every_acknowledged_change_and_a_later_lineage() -> None:
    assert [] == resumed()
    assert [] == resumed(checkpoint=None, version=(1, 0))
    assert ["setting max_staleness"] == resumed(in_force={"max_staleness": 0, "count": 1})
    assert ["version"] == resumed(version=(4, 99))
    assert ["version"] == resumed(version=(3, 101))


def test_a_single_bit_makes_a_resumed_run_another(tmp_path: Path) -> None:
    findings = Findings(now=lambda: 0.0, context=str, log=str)
    run = Resumes(seconds=0.0, seed=1, scratch=tmp_path, findings=findings, log=str)
    state = {"flat": np.array([1.0, 2.0]), "steps": np.array([3])}
    run.compare(state, {name: array.copy() for name, array in state.items()})
    assert () == findings.records
    run.compare(state, {**state, "flat": np.nextafter(state["flat"], 9.0)})
    run.compare(state, {"flat": state["flat"]})
    assert [2] == [record.count for record in findings.records]
    assert "flat" in findings.records[0].finding.detail


# Findings
# --------------------------------------------------------------------------------------------------


def test_findings_of_one_kind_are_counted_and_keep_their_first_moment() -> None:
    logged: list[str] = []
    moments = iter((1.0, 2.0))
    findings = Findings(now=lambda: next(moments), context=lambda: "calm", log=logged.append)
    findings.add([Finding("slow", "/livez", "took 2 s"), Finding("slow", "/livez", "took 3 s")])
    findings.report("slow", "/readyz", "took 4 s")
    assert ["1.0 s, calm: slow, /livez: took 2 s", "2.0 s, calm: slow, /readyz: took 4 s"] == logged
    assert "1.0 s, calm: slow, /livez: took 2 s (2 times)" == str(findings.records[0])


def test_it_is_quiet_once_every_fault_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    conditions = Conditions()
    for fault in ("kill learner", "disk", "kill learner"):
        conditions.begin(fault)
    conditions.end("kill learner")
    assert "life 0, disk, kill learner" == conditions.describe()
    conditions.end("kill learner")
    assert None is conditions.quiet_since
    conditions.end("disk")
    assert 5.0 == conditions.quiet_since


# Faults on a process
# --------------------------------------------------------------------------------------------------


class FakeLive:
    """A run with one real process, under any role."""

    def __init__(self, role: str, pid: int, coordinator: Any = None) -> None:
        self.alive, self.asked, self.process = True, list[str](), coordinator
        self._process = Process(pid, role, "S")

    def table(self) -> list[Process]:
        return [self._process]

    def resource(self, name: str) -> str:
        return name

    def request(self, path: str, method: str = "GET") -> Answer:
        self.asked.append(path)
        return Answer(202, b"", "", 0.0)


@pytest.fixture
def victim() -> Any:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def injector(
    live: Any, folder: Path, tally: Tally, conditions: Conditions | None = None
) -> Injector:
    return Injector(
        live=live,
        folder=folder,
        clock=None,
        disk=None,
        conditions=conditions or Conditions(),
        tally=tally,
    )


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stopped_process_goes_on_when_its_time_is_over(tmp_path: Path, victim: Any) -> None:
    role = live_run.role_of(victim.pid)
    seen: list[str] = []
    live = FakeLive(role, victim.pid)
    faults = (
        Fault(0.0, "stop", role, seconds=0.4),
        Fault(0.2, "pause", seconds=0.05),  # asks the run, so it shows the state meanwhile
    )
    live.request = lambda path, method="GET": (
        seen.append(state_of(victim.pid)) or Answer(202, b"", "", 0.0)
    )  # type: ignore[method-assign]  # a look amid the round
    tally = Tally()
    injector(live, tmp_path, tally).strike(faults)
    assert {"T"} == set(seen)
    assert "T" != state_of(victim.pid)
    assert {f"stop {role}": 1, "pause": 1} == dict(tally.counts)


def test_a_stopped_coordinator_is_asked_nothing_and_what_is_due_waits_for_it(
    tmp_path: Path, victim: Any
) -> None:
    live, conditions, tally = FakeLive("", 0, victim), Conditions(), Tally()
    stopped: list[tuple[str, bool]] = []
    live.request = lambda path, method="GET": (  # type: ignore[method-assign]  # a look amid the round
        stopped.append((path, state_of(victim.pid) == "T")) or Answer(202, b"", "", 0.0)
    )
    faults = (
        Fault(0.0, "pause", seconds=0.2),
        Fault(0.1, "stop", plan.COORDINATOR, seconds=0.4),
        Fault(0.3, "pause", seconds=0.1),
    )
    injector(live, tmp_path, tally, conditions).strike(faults)
    assert [("pause", False), ("resume", False)] == stopped
    assert not conditions.paused
    assert {"pause": 1, "missed pause": 1, "stop coordinator": 1} == dict(tally.counts)


def test_time_in_which_the_coordinator_was_stopped_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    conditions = Conditions()
    assert not conditions.sleeps
    now = 10.0
    conditions.sleep()
    now = 15.0
    assert conditions.sleeps
    assert 5.0 == conditions.slept(3.0)
    conditions.wake()
    now = 40.0
    assert not conditions.sleeps
    assert [5.0, 3.0, 0.0] == [conditions.slept(since) for since in (0.0, 12.0, 15.0)]


def observers(live: Any, conditions: Conditions, findings: Findings) -> Observers:
    return Observers(
        live=live,
        replay_shards=0,
        findings=findings,
        tally=Tally(),
        conditions=conditions,
        readiness=ReadinessJudge(8.0, 3.0),
        seed=1,
    )


class SettingsLive(FakeLive):
    """A run with settings. ``refuses``: what it answers to changes instead."""

    def __init__(self) -> None:
        super().__init__("", 0)
        self.refuses: Answer | None = None
        self.settings: dict[str, object] = {}
        self._generation, self._lock = 1, threading.Lock()

    def request(  # type: ignore[override]  # with a body
        self,
        path: str,
        method: str = "GET",
        body: dict[str, object] | None = None,
        *,
        if_match: str = "",
    ) -> Answer:
        with self._lock:
            etag = f'"{self._generation}"'
            if body is None:
                return Answer(200, json.dumps(self.settings).encode(), etag, 0.0)
            if self.refuses is not None:
                return self.refuses
            if if_match != etag:
                return Answer(412, b"", etag, 0.0)
            self.settings |= body
            self._generation += 1
            return Answer(200, b"", f'"{self._generation}"', 0.0)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_change_without_an_answer_is_unknown_and_excused_beside_a_stopped_coordinator(
    stopped: bool,
) -> None:
    live, conditions = SettingsLive(), Conditions()
    findings = Findings(now=lambda: 0.0, context=conditions.describe, log=lambda _: None)
    watched = observers(live, conditions, findings)
    with ThreadPoolExecutor(2) as clients:
        watched._pair(clients, "balance", 0, 16)
        assert live.settings == watched.acknowledged
        if stopped:
            conditions.sleep()
            conditions.wake()
        live.refuses = Answer(0, b"timed out", "", 0.5)
        watched._pair(clients, "balance", 16, 0)
        assert {"max_staleness"} == watched.unknown
        assert {} == watched.acknowledged
        assert ([] if stopped else ["PATCH balance"]) == [
            record.finding.subject for record in findings.records
        ]
        live.refuses = None
        watched._pair(clients, "balance", 16, 0)
    assert live.settings == watched.acknowledged
    assert set() == watched.unknown
    assert 6 == len(watched.patches)


@pytest.mark.parametrize("status", [200, 500])
def test_a_change_by_one_client_is_noted_like_those_of_two(status: int) -> None:
    live, conditions = SettingsLive(), Conditions()
    findings = Findings(now=lambda: 0.0, context=conditions.describe, log=lambda _: None)
    watched = observers(live, conditions, findings)
    if status != 200:
        live.refuses = Answer(status, b"", "", 0.0)
    patch = watched.change("balance", 0)
    assert (status == 200) == (patch is not None)
    assert ({"max_staleness": 0} if status == 200 else {}) == watched.acknowledged
    assert (set() if status == 200 else {"max_staleness"}) == watched.unknown
    assert [(0, status)] == [(patch.value, patch.status) for patch in watched.patches]
    assert (status != 200) == bool(findings.records)


def test_an_answer_is_not_slow_for_the_time_in_which_the_coordinator_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    conditions = Conditions()
    findings = Findings(now=lambda: 0.0, context=conditions.describe, log=lambda _: None)
    watched = observers(FakeLive("", 0), conditions, findings)
    now = 1.0
    conditions.sleep()
    now = 31.0
    conditions.wake()
    now = 31.5
    assert 0.75 == watched._took(Answer(200, b"", "", 30.75))
    assert 0.25 == watched._took(Answer(200, b"", "", 0.25))


def test_a_kill_strikes_only_a_process_that_still_has_its_role(tmp_path: Path, victim: Any) -> None:
    tally = Tally()
    injector(FakeLive("learner", victim.pid), tmp_path, tally).strike(
        (Fault(0.0, "kill", "learner"),)
    )
    assert None is victim.poll()
    assert {"missed kill learner": 1} == dict(tally.counts)
    role = live_run.role_of(victim.pid)
    injector(FakeLive(role, victim.pid), tmp_path, tally).strike((Fault(0.0, "kill", role),))
    assert -signal.SIGKILL == victim.wait(10.0)


def test_faults_end_also_when_the_run_ends_amid_a_round(tmp_path: Path, victim: Any) -> None:
    role, conditions = live_run.role_of(victim.pid), Conditions()
    live = FakeLive(role, victim.pid)

    def end(path: str, method: str = "GET") -> Answer:
        live.alive = False
        return Answer(202, b"", "", 0.0)

    live.request = end  # type: ignore[method-assign]  # the run ends with this request
    faults = (Fault(0.0, "stop", role, seconds=60.0), Fault(0.1, "pause", seconds=60.0))
    injector(live, tmp_path, Tally(), conditions).strike(faults)
    assert "T" != state_of(victim.pid)
    assert None is not conditions.quiet_since
    assert not conditions.paused


def test_what_this_machine_lacks_is_counted_as_missed(tmp_path: Path) -> None:
    tally = Tally()
    injector(FakeLive("learner", os.getpid()), tmp_path, tally).strike(
        (Fault(0.0, "disk", seconds=0.1), Fault(0.0, "clock", seconds=0.1, shift=60.0))
    )
    assert {"missed disk": 1, "missed clock": 1} == dict(tally.counts)


@pytest.mark.parametrize(
    ("detail", "host", "step_timeout_s", "limit"),
    [
        ("constructor", "actors-0", 5.0, 20.0),
        ("constructor", "evaluator", 5.0, 20.0),
        ("step", "actors-0", 5.0, 5.0),
        ("step", "evaluator", 45.0, 15.0),
        ("reset", "actors-0", 5.0, 20.0),
        ("reset", "actors-0", 45.0, 45.0),
        ("reset", "evaluator", 45.0, 15.0),
    ],
)
def test_a_hang_has_the_time_of_what_hangs(
    detail: str, host: str, step_timeout_s: float, limit: float
) -> None:
    fault = Fault(0.0, "hang", host, detail=detail)
    assert limit == hang_limit(fault, host, plan.LONG, step_timeout_s=step_timeout_s)


# Hanging on request
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.FOLDER, str(tmp_path))
    monkeypatch.setenv("TIANFLOW_HOST", "actors-0")
    return tmp_path


def test_a_request_makes_exactly_one_process_hang_once(host: Path) -> None:
    environment.request_hang(host, "actors-0", "step", 0.2)
    environment.hang_if_asked("reset")
    assert [] == environment.hung(host, "actors-0")
    began = time.monotonic()
    environment.hang_if_asked("step")
    assert time.monotonic() - began >= 0.2
    environment.hang_if_asked("step")
    assert [os.getpid()] == environment.forget(host, "actors-0")
    assert [] == environment.hung(host, "actors-0")


def test_a_hang_is_seen_with_its_time_or_not_at_all(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.request_hang(host, "actors-0", "step", 0.0)
    seen: list[list[int]] = []
    write = Path.write_text

    def looked_at(path: Path, *given: Any, **more: Any) -> int:
        seen.append(environment.hung(host, "actors-0"))
        return write(path, *given, **more)

    monkeypatch.setattr(Path, "write_text", looked_at)
    began = time.monotonic()
    environment.hang_if_asked("step")
    assert [[]] == seen
    assert environment.hung_since(host, "actors-0", os.getpid()) >= began


def test_a_learner_that_should_stop_hangs_no_longer(host: Path) -> None:
    environment.request_hang(host, "actors-0", "update", 60.0)
    asked = iter((False, True))
    began = time.monotonic()
    environment.hang_if_asked("update", lambda: next(asked))
    assert time.monotonic() - began < 10.0


def test_a_request_for_another_role_is_left_alone_and_can_be_withdrawn(host: Path) -> None:
    environment.request_hang(host, "actors-1", "step", 60.0)
    environment.hang_if_asked("step")
    assert environment.withdraw(host, "actors-1", "step")
    assert not environment.withdraw(host, "actors-1", "step")


def test_nothing_hangs_where_a_config_is_only_checked(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIANFLOW_HOST")
    environment.request_hang(host, "actors-0", "constructor", 60.0)
    environment.StormEnv()
    assert environment.withdraw(host, "actors-0", "constructor")


# Clock and disk
# --------------------------------------------------------------------------------------------------

CLOCKS = """
import datetime, json, os, sys, time
for _ in sys.stdin:
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic()]), flush=True)
"""


@pytest.fixture
def wall(tmp_path: Path) -> WallClock:
    try:
        return WallClock(tmp_path)
    except UnavailableError as error:
        pytest.skip(str(error))


def test_the_wall_clock_of_a_running_process_jumps_and_its_monotonic_clock_does_not(
    wall: WallClock,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLOCKS],
        env={**os.environ, **wall.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for shift in (0.0, plan.DAY, -30 * plan.YEAR, 60.0):
            wall.shift(shift)
            process.stdin.write("\n")
            process.stdin.flush()
            now, today, monotonic = json.loads(process.stdout.readline())
            assert abs(now - time.time() - shift) < 30.0
            assert abs(today - now) < 30.0
            assert abs(monotonic - time.monotonic()) < 30.0
        process.stdin.close()


def test_without_a_compiler_no_clock_jumps_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match=r"no C compiler was found \(gcc or cc\)"):
        WallClock(tmp_path)


DISK = """
import os, sys
from pathlib import Path
from benchmarks.lib.storm import disk
root = Path(sys.argv[1])
try:
    disk.enter_private_mounts()
    disk.mount_memory(root, mib=2)
except disk.UnavailableError as error:
    print("unavailable:", error)
    raise SystemExit
small = disk.SmallDisk(root)
small.fill()
try:
    (root / "more").write_bytes(b"x")
    print("not full")
except OSError as error:
    print(error.strerror)
small.empty()
print((root / "more").write_bytes(b"x"))
"""


def test_a_filled_disk_takes_nothing_and_an_emptied_one_takes_it_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISK, str(tmp_path / "disk")],
        cwd=live_run.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    if done.stdout.startswith("unavailable"):
        assert "needs root" in done.stdout
        pytest.skip(done.stdout)
    assert ["No space left on device", "1"] == done.stdout.split("\n")[:2]
    assert [] == list((tmp_path / "disk").iterdir())  # the mount was the child's own


def test_without_root_no_disk_fills_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_: -1

    monkeypatch.setattr(disk, "_libc", Refusing())
    with pytest.raises(UnavailableError, match="unshare failed: .*; a small disk needs root"):
        disk.enter_private_mounts()


# A run from outside
# --------------------------------------------------------------------------------------------------


def test_every_process_of_a_run_is_found_and_killed_stopped_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import os, time; os.fork(); os.setsid(); time.sleep(60)"
    command = tmp_path / "python"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{script}'\n")
    command.chmod(0o755)
    monkeypatch.setattr(live_run.sys, "executable", str(command))
    live = LiveRun(name="r", runs=tmp_path, logs=tmp_path, arguments=(), environment={})
    try:
        child = live_run.until("the child", live.table, within_s=30.0)[0]
        os.kill(child.pid, signal.SIGSTOP)
        live.process.kill()
        live.process.wait()
        left = live.leftovers(0.1)
        assert 1 == len(left)
        assert left[0].endswith(f"({child.pid}, state T)")
    finally:
        live.kill_all()
    assert [] == live.leftovers(0.0)


def test_a_process_that_shares_its_core_waits_for_it() -> None:
    spin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        live_run.until(
            "they wait",
            lambda: all(live_run.waited_for_cpu(process.pid) > 0.05 for process in busy),
            within_s=30.0,
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert 0.0 == live_run.waited_for_cpu(busy[0].pid)


def test_no_signal_reaches_a_process_that_has_ended() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as process,
        live_run.held(process.pid) as send,
    ):
        process.wait()
        assert not send(signal.SIGCONT)


# The study
# --------------------------------------------------------------------------------------------------


def test_the_table_has_a_unit_for_every_fault_and_every_change(tmp_path: Path) -> None:
    units = storm.make(Plan(quick=False, rounds=1, scratch=tmp_path)).units
    named = {fault.name for replay in (False, True) for fault in plan.cards(replay=replay)}
    assert named | {f"{name} = {value}" for name, value in changes()} <= set(units)


def test_a_finding_misses_the_aim_and_stands_in_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        answer = {
            "values": {"kinds of findings": 1.0, "worst /livez without waits for a core": 0.5},
            "findings": ["3.0 s, calm: slow"],
            "missing": ["no clock jumps: no C compiler"],
        }
        return storm.child.Finished(answer, 1.0, 1.0, None)

    monkeypatch.setattr(storm.child, "run", run)
    made = storm.make(Plan(quick=True, rounds=1, scratch=tmp_path))
    values = {side.name: side.measure(0) for side in made.sides}  # type: ignore[union-attr]  # sides of the storm are measured one by one
    assert [0.25, 2.0, 2.0] == [ratio.of(values) for ratio in made.ratios]
    assert "replay, seed 1: finding at 3.0 s, calm: slow" in made.notes
    assert "replay: no clock jumps: no C compiler" in made.notes
