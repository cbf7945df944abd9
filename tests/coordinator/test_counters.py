"""The coordinator's small accounts."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

from tianflow.coordinator.counters import ActiveClock, EpisodeTally, waiting_seconds
from tianflow.coordinator.registry import ComponentRegistry
from tianflow.core.payloads import Episode
from tianflow.core.statistics import ComponentStatistics, HistogramBuilder, TimeShares
from tianflow.rundir import audit_log
from tianflow.rundir.audit_log import AuditLog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def component(name, role, **seconds):
    return ComponentStatistics(name, role, "host", TimeShares(seconds, "busy", 0.0))


def test_paused_time_does_not_count():
    clock = Clock()
    active = ActiveClock(clock)
    before = active()
    clock.now += 3
    active.pause()
    active.pause()
    clock.now += 50
    assert active() - before == 3
    active.resume()
    active.resume()
    clock.now += 2
    assert active() - before == 5


def test_the_mean_exists_once_a_hundred_episodes_have_ended():
    tally = EpisodeTally(count=7)
    tally.add([Episode(1.0, 3)] * 99)
    assert (tally.mean, tally.count) == (None, 106)
    tally.add([Episode(101.0, 3)])
    assert tally.mean == 2.0
    tally.add([Episode(2.0, 3)] * 100)
    assert tally.mean == 2.0


def test_a_million_episodes_take_the_room_of_a_hundred():
    tally = EpisodeTally()
    batch = [Episode(1.0, 10)] * 1000
    for _ in range(1000):
        tally.add(batch)
    assert (1_000_000, 100, 100) == (tally.count, len(tally.returns), len(tally.lengths))


def test_the_audit_is_kept_in_memory_and_appended_to_the_file(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        journal = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        journal.add("cli", "pause")
        journal.add("http:::1", "change", old={"a": 1}, new={"a": 2})
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert lines == list(journal.records)
    assert [(line["source"], line["action"]) for line in lines] == [
        ("cli", "pause"),
        ("http:::1", "change"),
    ]


def test_memory_holds_the_newest_records_only_and_the_file_all(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_log, "RECORDS_IN_MEMORY", 3)
    with ThreadPoolExecutor(1) as executor:
        journal = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        for number in range(5):
            journal.add("cli", "change", new=number)
    assert [2, 3, 4] == [record["new"] for record in journal.records]
    assert 5 == len((tmp_path / "audit.jsonl").read_text().splitlines())


async def test_a_reader_that_gives_up_takes_no_line_of_the_audit_with_it(tmp_path):
    """Its connection may end while the disk is slow."""
    slow = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(slow.wait)
        journal = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        journal.add("cli", "pause")
        reading = asyncio.create_task(journal.read(before=None, limit=10))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        slow.set()
        assert ["pause"] == [
            record["action"] for record in (await journal.read(before=None, limit=10)).records
        ]


def test_waiting_is_summed_over_actors_and_kept_apart_from_the_learner():
    components = [
        component("learner", "learner", **{"waiting:batch": 5.0, "waiting:grant": 100.0}),
        component("actor-0", "actor", **{"waiting:grant": 2.0}),
        component("actor-1", "actor", **{"waiting:grant": 3.0, "waiting:turn": 100.0}),
    ]
    assert waiting_seconds(components, 0.0) == (5.0, 5.0)


def incarnation(began, count, *, name="learner", role="learner", **seconds):
    """Numbers of a process that began at ``began``: ``count`` trajectories and timed updates."""
    times = HistogramBuilder()
    for _ in range(count):
        times.add(0.01)
    shares = TimeShares(seconds, "busy", began + sum(seconds.values()))
    return ComponentStatistics(
        name,
        role,
        "host",
        shares,
        counters={"trajectories": float(count)},
        distributions={"update_seconds": times.read()},
    )


def shown(registry):
    """(count, histogram's count, seconds busy and waiting) as counters show them, at the last time
    of each clock.
    """
    (newest,) = registry.reports
    if (earlier := registry.earlier.get(newest.name)) is not None:
        newest = newest.after(earlier)
    return (
        newest.counters["trajectories"],
        newest.distributions["update_seconds"].count,
        newest.time.seconds["busy"],
    )


def test_numbers_of_a_restarted_component_follow_those_of_its_earlier_incarnations(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tianflow.coordinator.registry.time.monotonic", clock)
    registry = ComponentRegistry()
    registry.report(incarnation(100.0, 10, busy=5.0))
    clock.now = 110.0
    registry.forget("learner")
    assert [] == list(registry.reports)
    for count in (1, 2):  # the earlier numbers count once, whatever the number of reports
        registry.report(incarnation(200.0, count, busy=1.0))
        # busy until the loss at 110
        assert (10 + count, 10 + count, 11.0) == shown(registry)
    registry.report(incarnation(300.0, 4, busy=1.0))  # lost without a word
    assert (16, 16) == shown(registry)[:2]


def test_a_component_that_has_ended_is_gone_with_its_last_numbers_until_it_is_back():
    registry = ComponentRegistry()
    assert () == registry.gone
    registry.report(incarnation(100.0, 10, busy=5.0))
    assert () == registry.gone
    registry.forget("learner")
    registry.report(incarnation(100.0, 12, busy=5.0))  # the report of its end
    registry.forget("learner")
    (gone,) = registry.gone
    assert {12.0} == set(gone.counters.values())
    registry.report(incarnation(200.0, 1, busy=1.0))
    assert () == registry.gone


def test_a_report_that_arrives_after_the_loss_counts_once():
    registry = ComponentRegistry()
    for _ in range(2):
        registry.report(incarnation(100.0, 10, busy=5.0))
        registry.forget("learner")
    registry.report(incarnation(200.0, 1, busy=1.0))
    assert (11, 11) == shown(registry)[:2]


def test_waiting_of_gone_and_earlier_incarnations_counts_once(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tianflow.coordinator.registry.time.monotonic", clock)
    registry = ComponentRegistry()
    for began in (100.0, 200.0, 300.0):
        waited = {"waiting:grant": 7.0}
        registry.report(incarnation(began, 1, name="actor-0", role="actor", **waited))
        clock.now = began + 7.0
        registry.forget("actor-0")
    assert (0.0, 21.0) == registry.waiting_seconds()
