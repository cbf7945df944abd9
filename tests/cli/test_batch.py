"""A job is followed: its output, its states, its signals."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tianflow.cli import batch
from tianflow.cli.batch import Follower, Tail
from tianflow.core.program import JobState

RUNNING, DONE = JobState("running"), JobState("completed", ended=True)


class FakeJob:
    """A job whose states are a list; each may have an action, called when it is asked for."""

    script = ""

    def __init__(self, folder: Path, *states: JobState | Callable[[], JobState]) -> None:
        self._states = iter(states)
        self.directory = folder / "demo"
        self.outputs = folder / "1.out", folder / "1.err"
        self.cancelled: list[bool] = []

    def __str__(self) -> str:
        return "job 1 of run demo"

    def submit(self) -> str:
        return "1"

    def state(self) -> JobState:
        found = next(self._states)
        return found if isinstance(found, JobState) else found()

    def cancel(self, *, now: bool) -> None:
        self.cancelled.append(now)


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ASK_S", 0.0)
    monkeypatch.setattr("tianflow.cli.batch.time.sleep", lambda _: None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert before == [signal.getsignal(number) for number in numbers]


def sends(*numbers: int, then: JobState = RUNNING) -> Callable[[], JobState]:
    def act() -> JobState:
        for number in numbers:
            os.kill(os.getpid(), number)
        return then

    return act


def test_output_appears_with_its_streams_and_changes_of_the_state_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def writes() -> JobState:
        (tmp_path / "1.out").write_text("first\nsec")
        (tmp_path / "1.err").write_text("note\n")
        return RUNNING

    def ends() -> JobState:
        with (tmp_path / "1.out").open("a") as file:
            file.write("ond\nlast\n")
        return DONE

    waits = JobState("pending (Resources)")
    assert 0 == Follower(FakeJob(tmp_path, waits, waits, writes, RUNNING, ends)).run()
    out, err = capsys.readouterr()
    assert "first\nsecond\nlast\n" == out
    states = [f"job 1 of run demo: {text}" for text in (waits.text, "running", "note", "completed")]
    assert [line.replace("job 1 of run demo: note", "note") for line in states] == err.splitlines()


def test_the_exit_code_is_that_of_the_job(tmp_path: Path) -> None:
    assert 3 == Follower(FakeJob(tmp_path, JobState("failed", ended=True, code=3))).run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_job_which_is_followed_to_its_end(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    job = FakeJob(tmp_path, sends(number), RUNNING, JobState("cancelled", ended=True, code=143))
    assert 128 + number == Follower(job).run()
    assert [False] == job.cancelled
    assert f"{number.name}: cancelling job 1 of run demo" in capsys.readouterr().err


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, sends(signal.SIGINT), sends(signal.SIGTERM), RUNNING, DONE)
    assert 130 == Follower(job).run()
    assert [False, True] == job.cancelled


@pytest.mark.parametrize(
    ("numbers", "kept", "code"),
    [((signal.SIGINT,), 4, 1), ((signal.SIGINT,), 7, 130), ((signal.SIGTERM,) * 2, None, 143)],
)
def test_lost_updates_of_a_cancelled_job_outrank_one_signal_and_a_second_one_gives_them_up(
    tmp_path: Path, numbers: tuple[int, ...], kept: int | None, code: int
) -> None:
    (tmp_path / "demo").mkdir()
    summary = json.dumps({"updates": 7, "checkpoint": kept})
    (tmp_path / "demo" / "summary.json").write_text(summary)
    cancelled = JobState("cancelled", ended=True, code=143)
    states = [sends(number) for number in numbers]
    assert code == Follower(FakeJob(tmp_path, *states, cancelled)).run()


def test_a_job_outlives_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(tmp_path, sends(signal.SIGHUP), RUNNING)
    before = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # nohup, in which tests may run, ignores it
    try:
        assert 129 == Follower(job).run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [] == job.cancelled
    assert "job 1 of run demo continues" in capsys.readouterr().err


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert 0 == Follower(FakeJob(tmp_path, sends(signal.SIGHUP), DONE)).run()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_line_that_controls_a_terminal_is_escaped(tmp_path: Path) -> None:
    stream = io.StringIO()
    (tmp_path / "out").write_bytes(b"a\x1b[2J\xff\n")
    Tail(tmp_path / "out", stream).read()
    assert "a\\u001b[2J\ufffd\n" == stream.getvalue()


def test_a_file_that_comes_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    stream = io.StringIO()
    tail = Tail(tmp_path / "out", stream)
    tail.read()
    (tmp_path / "out").write_text("line\n")
    tail.read()
    tail.read()
    assert "line\n" == stream.getvalue()
