"""``history.jsonl``: bounded, whole after a crash, continued by a resumed run, and never in the way
of a run.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tianflow.api  # at once: a lazy import inside a coroutine would block its loop
from tests.support.fakes_run import FakeRun
from tests.support.settings import cartpole
from tianflow.core.jsonable import json_ready
from tianflow.core.statistics import RunStatistics, SinkStatistics
from tianflow.observability import recorder as recording
from tianflow.observability.recorder import Recorder, recorded, staleness_between
from tianflow.report.page import page
from tianflow.report.records import read
from tianflow.rundir.history import MARKS, NAME, HistoryFile, merged, read_rows, thinned

IMPORTED = tianflow.api


def row(t: float, **fields: Any) -> dict[str, Any]:
    return {"t": t, "span_s": 1.0, "env_steps": int(100 * t), "steps_per_s": 100.0, **fields}


def staleness(
    count: int, low: int, mean: float, high: int, bound: int | None, **counts: int
) -> dict[str, Any]:
    """``counts``: a1=2 for two of age 1."""
    ages = {age.removeprefix("a"): number for age, number in counts.items()}
    return {
        "count": count,
        "min": low,
        "mean": mean,
        "p99": high,
        "max": high,
        "bound": bound,
        "counts": ages,
    }


# The file
# --------------------------------------------------------------------------------------------------


def test_there_are_never_more_lines_than_the_limit_and_they_are_evenly_spaced(
    tmp_path: Path,
) -> None:
    file = HistoryFile(tmp_path / NAME, limit=16)
    written, t = -100.0, 0
    for t in range(500):
        if t - written >= file.period_s:
            file.append(row(float(t), span_s=file.period_s))
            written = t
        assert len(read_rows(tmp_path / NAME)) <= 16
    times = [line["t"] for line in read_rows(tmp_path / NAME)]
    assert 32.0 == file.period_s
    assert 8 <= len(times) <= 16
    assert {32.0} == {later - earlier for earlier, later in itertools.pairwise(times)}
    assert t - times[-1] < 32.0


def test_merged_lines_keep_extremes_and_means_and_marks() -> None:
    older = row(
        1.0,
        staleness=staleness(2, 0, 0.5, 1, 3, a0=1, a1=1),
        shares={"learner": {"busy": 1.0}},
        marks=[{"kind": "change"}],
    )
    older |= {"queue": 9}
    newer = row(
        4.0,
        span_s=3.0,
        staleness=staleness(3, 1, 2.0, 3, 2, a1=1, a2=1, a3=1),
        shares={"learner": {"paused": 1.0}},
    )
    newer |= {"marks": [{"kind": "evaluation"}]}
    newer |= {"steps_per_s": 200.0, "queue": 2}
    line = merged(older, newer)
    assert (4.0, 4.0, 400, 175.0, 2) == tuple(
        line[key] for key in ("t", "span_s", "env_steps", "steps_per_s", "queue")
    )
    assert staleness(5, 0, 1.4, 3, 3, a0=1, a1=2, a2=1, a3=1) == line["staleness"]
    assert {"learner": {"busy": 0.25, "paused": 0.75}} == line["shares"]
    assert ["change", "evaluation"] == [mark["kind"] for mark in line["marks"]]


def test_durations_of_merged_lines_are_those_of_all_in_both() -> None:
    older = row(
        1.0,
        durations={"actor": {"count": 2, "mean": 1.0, "spread": 0.0, "skew": 0.0, "apart": 0.5}},
    )
    newer = row(
        2.0,
        durations={
            "actor": {"count": 2, "mean": 3.0, "spread": 0.0, "skew": 0.0, "apart": 0.25},
            "learner": {"count": 1},
        },
    )
    actor = merged(older, newer)["durations"]["actor"]
    assert {"count": 4, "mean": 2.0, "spread": 0.5, "skew": 0.0, "apart": 0.25} == pytest.approx(
        actor
    )
    assert older["durations"]["actor"] == pytest.approx(
        merged(older, row(2.0))["durations"]["actor"]
    )
    assert {} == merged(row(1.0), row(2.0))["durations"]


def learned(**values: tuple[int, float]) -> dict[str, Any]:
    return {
        f"train/{name}": {"count": count, "mean": mean} for name, (count, mean) in values.items()
    }


def test_learning_of_merged_lines_is_the_mean_of_all_their_values() -> None:
    older = row(1.0, mean_length=5.0, learning=learned(loss=(3, 1.0), entropy=(3, 0.5)))
    newer = row(2.0, mean_length=7.0, learning=learned(loss=(1, 5.0), kl=(1, 0.25)))
    line = merged(older, newer)
    assert 7.0 == line["mean_length"]
    assert learned(loss=(4, 2.0), entropy=(3, 0.5), kl=(1, 0.25)) == line["learning"]
    assert older["learning"] == merged(older, row(2.0))["learning"], "lines of older versions"
    assert {} == merged(row(1.0), row(2.0))["learning"]


def test_an_unbounded_time_makes_a_merged_line_unbounded() -> None:
    line = merged(
        row(1.0, staleness=staleness(1, 0, 0.0, 0, None)),
        row(2.0, staleness=staleness(1, 0, 0.0, 0, 4)),
    )
    assert line["staleness"]["bound"] is None


def test_marks_of_a_line_are_bounded_and_the_newest_stay() -> None:
    line = row(0.0)
    for t in range(1, 100):
        line = merged(line, row(float(t), marks=[{"t": t}]))
    assert [{"t": t} for t in range(100 - MARKS, 100)] == line["marks"]
    assert 99 - MARKS == line["marks_left_out"]


def test_changes_do_not_crowd_out_evaluations() -> None:
    line = row(0.0, marks=[{"t": 0, "kind": "evaluation"}], marks_left_out=3)
    for t in range(1, 100):
        line = merged(line, row(float(t), marks=[{"t": t, "kind": "change"}], marks_left_out=1))
    assert [0, *range(100 - MARKS, 100)] == [mark["t"] for mark in line["marks"]]
    assert 3 + 99 + 99 - MARKS == line["marks_left_out"]


def test_lines_without_what_they_should_hold_merge_all_the_same() -> None:
    line = merged({"t": 1.0}, {"t": 2.0})
    assert (2.0, 0.0, None) == (line["t"], line["span_s"], line["steps_per_s"])


def test_a_torn_line_is_passed_over_and_what_follows_is_whole(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text('{"t":1.0}\n[1]\n{"t":"x"}\n{"t":NaN}\n{"t":2.0,"env_st', encoding="utf-8")
    assert [1.0] == [line["t"] for line in read_rows(path)]
    file = HistoryFile(path)
    assert 1.0 == file.open()
    file.append(row(3.0))
    assert [1.0, 3.0] == [line["t"] for line in read_rows(path)]


SPOILED: list[dict[str, Any]] = [
    {"staleness": 5},
    {"staleness": {"count": "2"}},
    {"staleness": {"counts": {"0": None}}},
    {"shares": [1]},
    {"shares": {"actor": 3}},
    {"shares": {"actor": {"busy": "all"}}},
    {"durations": [1]},
    {"durations": {"actor": 3}},
    {"durations": {"actor": {"count": "2"}}},
    {"learning": 3},
    {"learning": {"train/loss": 0.5}},
    {"learning": {"train/loss": {"count": 1, "mean": "x"}}},
    {"learning": {"train/loss": {"count": -1, "mean": 1.0}}},
    {"mean_length": "long"},
    {"marks": 3},
    {"marks": [3]},
    {"marks_left_out": "some"},
    {"span_s": "u"},
    {"steps_per_s": 10**400},
    {"learning": {"train/loss": {"count": 10**400, "mean": 1.0}}},
    {"staleness": {"count": 10**400}},
    {"staleness": {"max": -(10**400)}},
    {"env_steps": 2**53 + 1},
]


@pytest.mark.parametrize("fields", SPOILED)
def test_what_has_another_shape_is_passed_over_and_its_line_is_merged_and_drawn(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    path = tmp_path / NAME
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in (row(1.0), row(2.0) | fields, row(3.0))),
        encoding="utf-8",
    )
    lines = read_rows(path)
    assert [1.0, 2.0, 3.0] == [line["t"] for line in lines]
    assert not set(fields) & set(lines[1])
    assert [3.0] == [line["t"] for line in thinned(lines, 1)]
    assert 'id="charts"' in page(read(tmp_path), now=dt.datetime(2026, 1, 1, tzinfo=dt.UTC))


def test_a_time_that_no_float_can_hold_is_none(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text('{"t":1.0}\n{"t":1' + "0" * 400 + "}\n", encoding="utf-8")
    assert 1.0 == HistoryFile(path).open()
    assert [1.0] == [line["t"] for line in read_rows(path)]


def test_a_file_that_goes_on_keeps_its_limit_and_its_period(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text(
        "".join(json.dumps(row(float(t))) + "\n" for t in range(0, 60, 4)), encoding="utf-8"
    )
    file = HistoryFile(path, limit=16)
    assert 56.0 == file.open()
    assert 4.0 == file.period_s
    for t in range(60, 200, 4):
        file.append(row(float(t)))
        assert len(read_rows(path)) <= 16


def test_what_json_has_no_number_for_becomes_null(tmp_path: Path) -> None:
    HistoryFile(tmp_path / NAME).append(row(1.0, mean_return=float("nan")))
    assert None is read_rows(tmp_path / NAME)[0]["mean_return"]


def test_a_limit_that_cannot_be_kept_by_merging_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two lines"):
        HistoryFile(tmp_path / NAME, limit=1)


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert [] == read_rows(tmp_path / NAME)
    assert None is HistoryFile(tmp_path / NAME).open()


# Samples
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    """Made before there is a loop: it reads the installed entry points."""
    return FakeRun(directory=tmp_path)


@pytest.fixture
def fake_with_replay(tmp_path: Path) -> FakeRun:
    return FakeRun(directory=tmp_path, replay=True)


def recorder(fake: FakeRun, path: Path, **options: Any) -> Recorder:
    return Recorder(run=fake, file=HistoryFile(path), **options)


async def recorded_line(fake: FakeRun, path: Path, *steps: Any) -> dict[str, Any]:
    """The line that covers ``steps``, with a sample between them."""
    them = recorder(fake, path)
    for step in steps:
        them.sample()
        step()
    await them.close()
    return read_off_the_loop(path)[-1]


def read_off_the_loop(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(read_rows(path)))
    thread.start()
    thread.join()
    return found


async def test_a_line_tells_speeds_staleness_shares_and_credits(
    fake: FakeRun, tmp_path: Path
) -> None:
    line = await recorded_line(fake, tmp_path / NAME, lambda: fake.train(4))
    assert 4 * 64 / 4.0 == line["steps_per_s"]
    assert 1.0 == line["updates_per_s"]
    assert staleness(8, 0, 0.0, 0, 1, a0=8) == line["staleness"]
    assert {"limit": 4, "in_use": 0} == line["credits"]
    assert {"busy": 1.0} == line["shares"]["learner"]
    assert {"learner": {"count": 4, "mean": 1.0, "spread": 0.0, "skew": 0.0}} == line["durations"]
    assert (4.0, "learning-bound", 4.0) == (line["span_s"], line["bottleneck"], line["episodes"])


async def test_a_line_has_the_means_of_the_updates_since_the_line_before(
    fake: FakeRun, tmp_path: Path
) -> None:
    fake.train(2)
    line = await recorded_line(fake, tmp_path / NAME, lambda: fake.train(1), lambda: fake.train(3))
    assert {"count": 6, "mean": pytest.approx(sum(1 / n for n in range(1, 7)) / 6)} == line[
        "learning"
    ]["train/loss"]
    assert {"count": 6, "mean": 1.0} == line["learning"]["rollout/success"]
    assert (3.5, 3.5) == (line["mean_return"], line["mean_length"])


async def test_lines_of_a_long_interval_share_the_updates_exactly(
    fake: FakeRun, tmp_path: Path
) -> None:
    """Every update is in one line, however many samples a line covers."""
    them = recorder(fake, tmp_path / NAME)
    for number in range(1, 31):
        fake.train(1)
        them.sample()
        if number % 7 == 0:
            await them._write()
    await them.close()
    found = [line["learning"]["train/loss"] for line in read_off_the_loop(tmp_path / NAME)]
    assert [7, 7, 7, 7, 2] == [values["count"] for values in found]
    assert sum(1 / n for n in range(1, 31)) == pytest.approx(
        sum(values["count"] * values["mean"] for values in found)
    )


async def test_a_span_without_an_update_has_no_learning(fake: FakeRun, tmp_path: Path) -> None:
    them = recorder(fake, tmp_path / NAME)
    fake.train(1)
    them.sample()
    await them._write()
    fake.now += 1.0
    await them.close()
    assert {} == read_off_the_loop(tmp_path / NAME)[-1]["learning"]


async def test_statistics_that_are_not_finite_leave_a_line_that_is_json(
    fake: FakeRun, tmp_path: Path
) -> None:
    path = tmp_path / NAME
    for value in (float("nan"), float("inf"), 1e300, 1e300):
        fake.learning.add(fake.learning.accept({"odd": value}))
    await recorded_line(fake, path, lambda: fake.train(1))
    text = await asyncio.to_thread(path.read_text)
    assert [] == [word for word in ("NaN", "Infinity") if word in text]
    assert 1e300 == json.loads(text.splitlines()[-1])["learning"]["train/odd"]["mean"]


async def test_replay_whose_shards_are_gone_holds_an_unknown_number(
    fake_with_replay: FakeRun, tmp_path: Path
) -> None:
    assert fake_with_replay.replay is not None
    fake_with_replay.replay.shards.clear()
    line = await recorded_line(fake_with_replay, tmp_path / NAME, lambda: None)
    assert None is line["replay"]["items"]


def test_shares_of_time_are_of_the_last_five_seconds(fake: FakeRun, tmp_path: Path) -> None:
    them = recorder(fake, tmp_path / NAME)
    for _ in range(20):
        them.sample()
        fake.now += 1.0
        fake.waiting += 1.0
    for _ in range(3):
        them.sample()
        them._pending = None
        fake.now += 1.0
    assert {"waiting:batch": 2 / 5, "busy": 3 / 5} == pytest.approx(
        them.sample()["shares"]["learner"]
    )


async def test_a_moment_is_too_short_to_tell_a_speed(fake: FakeRun, tmp_path: Path) -> None:
    line = await recorded_line(fake, tmp_path / NAME, lambda: fake.train(1, seconds=0.4))
    assert (0.4, None, None, 2) == (
        line["span_s"],
        line["steps_per_s"],
        line["updates_per_s"],
        line["staleness"]["count"],
    )


def test_further_evaluations_leave_room_for_the_main_one() -> None:
    main = {"t": 0.0, "kind": "evaluation", "mean_return": 1.0}
    line = row(0.0, marks=[main])
    for t in range(1, 100):
        line = merged(line, row(float(t), marks=[{**main, "t": t, "name": "large"}]))
    assert [None, *["large"] * MARKS] == [mark.get("name") for mark in line["marks"]]


async def test_a_further_evaluation_is_a_mark_with_its_name(fake: FakeRun, tmp_path: Path) -> None:
    found = {"version": 4.0, "mean_return": 12.5, "episodes": 10.0}

    def evaluate() -> None:
        fake.further_evaluations = {"large": found}

    line = await recorded_line(fake, tmp_path / NAME, evaluate, lambda: None)
    (mark,) = line["marks"]
    assert {**found, "kind": "evaluation", "name": "large", "t": mark["t"]} == mark


async def test_evaluations_and_changes_are_marks_once(fake: FakeRun, tmp_path: Path) -> None:

    def evaluate() -> None:
        fake.evaluation = {"version": 4.0, "mean_return": 12.5, "episodes": 10.0}

    def change() -> None:
        fake.change({"balance": {"max_staleness": 3}}, source="test")

    line = await recorded_line(fake, tmp_path / NAME, evaluate, change, lambda: None)
    assert ["evaluation", "change"] == [mark["kind"] for mark in line["marks"]]
    assert 12.5 == line["marks"][0]["mean_return"]
    assert (2, 3) == (line["marks"][1]["generation"], line["staleness"]["bound"])


async def test_changes_are_marks_however_many_there_were_before(
    fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fakes_run.RECORDS_IN_MEMORY", 200)

    def change(times: int) -> None:
        for _ in range(times):
            fake.change({"balance": {"max_staleness": 3}}, source="test")

    much = 210
    line = await recorded_line(
        fake, tmp_path / NAME, lambda: change(much), lambda: change(2), lambda: None
    )
    assert [much] * (MARKS - 2) + [much + 2] * 2 == [
        mark["generation"] - 1 for mark in line["marks"]
    ]
    assert much + 2 - MARKS == line["marks_left_out"]


async def test_replay_is_told_where_there_is_one(fake_with_replay: FakeRun, tmp_path: Path) -> None:
    fake = fake_with_replay
    line = await recorded_line(fake, tmp_path / NAME, lambda: fake.train(4))
    assert (128, 256, {"expired": 128}) == tuple(
        line["replay"][key] for key in ("inserted", "drawn", "discarded")
    )


def look(counts: dict[int, int], bound: int | None) -> RunStatistics:
    statistics = FakeRun().statistics()
    return replace(
        statistics, ledger=replace(statistics.ledger, staleness=counts, max_staleness=bound)
    )


def test_staleness_is_that_of_what_was_trained_on_in_between_under_the_wider_bound() -> None:
    before = look({0: 5, 9: 3}, 9)
    now = look({0: 200, 9: 3, 1: 4, 4: 1}, 4)
    assert staleness(200, 0, 8 / 200, 4, 9, a0=195, a1=4, a4=1) | {"p99": 1} == json_ready(
        staleness_between(before, now)
    )
    assert {
        "count": 0,
        "min": None,
        "mean": None,
        "p99": None,
        "max": None,
        "bound": 9,
        "counts": {},
    } == json_ready(staleness_between(before, before))
    old = staleness_between(None, look({15: 1, 16: 2, 17: 4, 1000: 1, 1023: 1}, None)).counts
    assert {"15": 1, "16": 6, "960": 2} == old
    assert None is staleness_between(look({}, None), look({}, 2)).bound


async def test_a_resumed_run_goes_on_in_time(fake: FakeRun, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text(json.dumps(row(500.0)) + "\n", encoding="utf-8")
    # The run says that 100 s have passed: it goes on from a checkpoint that is older than the last
    # line
    async with recorded(fake):
        while len(read_off_the_loop(path)) < 2:  # noqa: ASYNC110 - a file has no notification
            await asyncio.sleep(0.01)
        fake.now += 7.0
    rows = read_off_the_loop(path)
    assert [500.0, 500.0, 507.0] == [line["t"] for line in rows]
    assert ["resumed"] == [mark["kind"] for mark in rows[1]["marks"]]


async def test_a_failing_disk_costs_lines_and_nothing_else(
    fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    them = recorder(fake, tmp_path / NAME)
    broken = True

    def append(file: HistoryFile, line: dict[str, Any], whole: Any = HistoryFile.append) -> None:
        if broken:
            raise OSError(28, "No space left on device")
        whole(file, line)

    monkeypatch.setattr(HistoryFile, "append", append)
    them.sample()
    fake.train(4)
    them.sample()
    await them._write()
    broken = False
    await them.close()
    line = read_off_the_loop(tmp_path / NAME)[-1]
    assert (4.0, 8) == (line["span_s"], line["staleness"]["count"])


async def test_a_line_that_is_being_written_when_the_run_ends_reaches_file_and_sinks(
    fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, freed = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def append(file: HistoryFile, line: dict[str, Any], whole: Any = HistoryFile.append) -> None:
        loop.call_soon_threadsafe(begun.set)
        freed.wait(10.0)
        whole(file, line)

    monkeypatch.setattr(HistoryFile, "append", append)
    offered: list[float] = []
    outlet = SimpleNamespace(
        name="sink", offer=lambda line: offered.append(line["t"]), statistics=SinkStatistics
    )
    them = Recorder(run=fake, file=HistoryFile(tmp_path / NAME), outlets=[outlet])  # type: ignore[list-item]  # that much of one
    task = asyncio.create_task(them.run())
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    fake.now += 7.0
    freed.set()
    await them.close()
    lines = read_off_the_loop(tmp_path / NAME)
    assert [line["t"] for line in lines] == offered
    assert 7.0 == lines[-1]["t"] - lines[0]["t"]


async def test_a_disk_that_hangs_does_not_keep_a_run_from_ending(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()
    monkeypatch.setattr(HistoryFile, "append", lambda *_: freed.wait(30.0))
    monkeypatch.setattr(recording, "CLOSE_S", 0.05)
    try:
        async with asyncio.timeout(10.0):
            async with recorded(fake):
                await asyncio.sleep(0.02)
    finally:
        freed.set()
    assert "not written in time" in caplog.text


async def test_a_sample_that_fails_costs_itself_and_is_logged_once(
    fake: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, good, broken = tmp_path / NAME, fake.statistics, [True]

    def statistics() -> RunStatistics:
        if broken:
            raise OverflowError("cannot convert float infinity to integer")
        return good()

    fake.statistics = statistics  # type: ignore[method-assign]
    them = recorder(fake, path, spacing_s=0.001)
    task = asyncio.create_task(them.run())
    while "a sample for the history of the run failed" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)
    broken.clear()
    while not path.exists() or not read_off_the_loop(path):  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.005)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await them.close()
    assert 1 == caplog.text.count("a sample for the history of the run failed")


async def test_a_bug_in_recording_does_not_reach_the_run_and_is_logged_when_it_happens(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def append(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HistoryFile, "append", append)
    async with recorded(fake):
        while "the history of the run is no longer recorded" not in caplog.text:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.005)
        assert "not whole" not in caplog.text
    assert "not whole" in caplog.text


# A real run
# --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_a_run_without_http_has_a_history_that_a_resumed_run_goes_on_with(tmp_path: Path) -> None:
    first = tianflow.train(cartpole(run={"name": "one"}), runs_dir=tmp_path)
    rows = read_rows(first.directory / NAME)
    assert (4, first.summary["env_steps"], "done") == (
        rows[-1]["updates"],
        rows[-1]["env_steps"],
        rows[-1]["state"],
    )
    assert ["evaluation"] == [mark["kind"] for line in rows for mark in line["marks"]]
    second = tianflow.train(cartpole(run={"max_updates": 6}), runs_dir=tmp_path, resume="one")
    more = read_rows(second.directory / NAME)
    assert rows == more[: len(rows)]
    times = [line["t"] for line in more]
    assert sorted(times) == times
    assert (6, second.summary["env_steps"]) == (more[-1]["updates"], more[-1]["env_steps"])
    assert ["resumed", "evaluation"] == [
        mark["kind"] for line in more[len(rows) :] for mark in line["marks"]
    ]
