"""`RunHandle` on runs that run, have ended, failed, crashed or were moved."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tianflow
from tests.cli.test_events import Script, script, sse  # noqa: F401 - a fixture
from tests.server.test_client import Control, announce, control  # noqa: F401 - a fixture
from tianflow import handle
from tianflow.config.model import Config
from tianflow.core import events
from tianflow.errors import (
    ConfigError,
    RequestError,
    RunError,
    RunNotFoundError,
    RunTimeoutError,
    StateConflictError,
    TianflowError,
)
from tianflow.handle import RunHandle, as_arrays, flat_rows, kind_named, live_tables
from tianflow.rundir.control_file import SERVICE, ControlFile
from tianflow.server.common import client
from tianflow.server.common.event_feed import kind_of

SUMMARY: dict[str, Any] = {
    "state": "done",
    "reason": "max_updates",
    "env_steps": 640,
    "updates": 5,
    "mean_return": 9.5,
    "staleness": {"mean": 0.5, "bound": 1},
    "error": None,
}
ROW: dict[str, Any] = {
    "t": 2.0,
    "time": 1002.0,
    "state": "running",
    "env_steps": 64,
    "updates": 4,
    "mean_return": 8.0,
    "staleness": {"mean": 1.0, "counts": {"1": 4}},
    "learning": {"train/loss": {"count": 4, "mean": 0.25}},
    "bottleneck": "balanced",
    "marks": [{"t": 1.5, "kind": "evaluation", "version": 3, "mean_return": 7.5, "episodes": 4}],
}


def ended(runs: Path, name: str = "one", **changes: Any) -> RunHandle:
    directory = runs / name
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text("")
    (directory / "summary.json").write_text(json.dumps(SUMMARY | changes))
    (directory / "history.jsonl").write_text(json.dumps(ROW) + "\n")
    return tianflow.attach(name, runs_dir=runs)


def active(control: Control, runs: Path) -> RunHandle:  # noqa: F811 - the fixture
    announce(runs, "one", control.address)
    (runs / "one" / "config.toml").write_text("")
    return tianflow.attach("one", runs_dir=runs)


# A run that has ended
# --------------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_has_its_last_state_and_no_events(tmp_path: Path) -> None:
    run = ended(tmp_path)
    assert ("done", 5, ["max_updates"]) == (
        run.status()["state"],
        run.status()["progress"]["updates"],
        run.status()["reasons"],
    )
    assert SUMMARY == run.wait()
    assert [] == list(run.events())


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.pause(),
        lambda run: run.resume(),
        lambda run: run.drain(),
        lambda run: run.stop(),
        lambda run: run.checkpoint(),
        lambda run: run.set(balance={"max_staleness": 1}),
    ],
)
def test_control_of_a_run_that_has_ended_is_refused_with_the_way_to_continue(
    tmp_path: Path, call: Any
) -> None:
    run = ended(tmp_path)
    with pytest.raises(
        StateConflictError, match=r"^run 'one' has ended \(done\); resume='one' continues it$"
    ):
        call(run)


def test_a_wait_for_a_failed_run_raises_its_first_error(tmp_path: Path) -> None:
    run = ended(tmp_path, state="failed", error="actor-0: ValueError: broken")
    assert "failed" == run.status()["state"]
    with pytest.raises(RunError, match=r"^actor-0: ValueError: broken$") as caught:
        run.wait()
    assert ("actor-0", "ValueError: broken") == (caught.value.component, caught.value.summary)


def test_a_killed_run_is_crashed_whatever_summary_an_earlier_process_left(tmp_path: Path) -> None:
    run = ended(tmp_path)
    announce(tmp_path / "elsewhere", "one", start_time=1).write(tmp_path / "one")
    assert "crashed" == run.status()["state"]
    with pytest.raises(RunError, match="its process ended without a summary.*resume='one'"):
        run.wait()
    with pytest.raises(StateConflictError, match="crashed"):
        run.pause()


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.status(),
        lambda run: run.metrics(),
        lambda run: run.policy(),
        lambda run: run.wait(),
        lambda run: run.pause(),
    ],
)
def test_a_run_whose_directory_was_moved_is_attached_at_its_new_path(
    tmp_path: Path, call: Any
) -> None:
    run = ended(tmp_path)
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(RunNotFoundError, match=r"one.* does not exist any more; .* attach"):
        call(run)
    assert "done" == tianflow.attach(tmp_path / "two").status()["state"]


def test_what_is_not_a_run_is_not_attached(tmp_path: Path) -> None:
    ended(tmp_path, "demo")
    said = r"run 'dem' does not exist \(did you mean 'demo'\?\); runs in .*, ended ones too: demo$"
    with pytest.raises(RunNotFoundError, match=said):
        tianflow.attach("dem", runs_dir=tmp_path)
    with pytest.raises(RunNotFoundError, match="0 runs are active"):
        tianflow.attach(runs_dir=tmp_path)
    with pytest.raises(ConfigError, match="is not an HTTP address"):
        tianflow.attach("demo", address="localhost:8080")


@pytest.mark.parametrize(
    ("options", "started", "trust"),
    [({}, True, True), ({}, False, False), ({"trust": True}, False, True),
     ({"trust": ["mine"]}, True, ["mine"])],
)  # fmt: skip
def test_only_a_run_of_this_program_is_trusted_without_consent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    started: bool,
    trust: object,
) -> None:
    given: list[object] = []
    monkeypatch.setattr("tianflow.policy.load", lambda *_, **others: given.append(others["trust"]))
    directory = tmp_path / "one"
    directory.mkdir()
    process: Any = object() if started else None
    RunHandle("one", directory=directory, process=process).policy(**options)
    assert [trust] == given


# History
# --------------------------------------------------------------------------------------------------


def test_metrics_are_flat_rows_by_the_names_of_sinks(tmp_path: Path) -> None:
    (row,) = ended(tmp_path).metrics()
    expected = {
        "t": 2.0,
        "time": 1002.0,
        "state": "running",
        "time/total_timesteps": 64.0,
        "train/loss": 0.25,
        "rollout/ep_rew_mean": 8.0,
        "eval/mean_reward": 7.5,
        "balance/staleness/mean": 1.0,
    }
    assert expected == {name: row[name] for name in expected}
    assert all(isinstance(value, int | float | str) for value in row.values())


def test_columns_of_metrics_have_nan_where_a_row_lacks_a_number(tmp_path: Path) -> None:
    found = as_arrays(flat_rows([ROW, {**ROW, "t": 3.0, "learning": {}, "marks": []}]))
    assert "state" not in found
    assert [2.0, 3.0] == found["t"].tolist()
    assert found["train/loss"].dtype == np.float64
    assert 0.25 == found["train/loss"][0]
    assert np.isnan(found["train/loss"][1])
    assert ["t"] == list(as_arrays([{"t": 1.0, "state": "done"}]))
    assert ended(tmp_path).metrics(arrays=True)["t"].shape == (1,)


# An active run
# --------------------------------------------------------------------------------------------------


def test_a_change_is_one_request_and_returns_the_generation(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = active(control, tmp_path)
    control.answer(200, {"max_staleness": 4}, ETag='"7"')
    assert 7 == run.set({"balance.max_staleness": 4})
    assert 7 == run.set(balance={"max_staleness": 4})
    assert 7 == run.set({"balance": {"max_staleness": 4}})
    assert 3 * [("PATCH", "/api/v1/runs/one/balance", {"max_staleness": 4})] == control.requests


def test_algorithm_and_learner_change_together(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = active(control, tmp_path)
    control.answer(200, {}, ETag='"1"')
    run.set({"algorithm.learning_rate": 1e-4, "learner.slowdown": 0.5})
    assert {"learning_rate": 1e-4, "slowdown": 0.5} == control.requests[0][2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "names no setting"),
        ({"max_staleness": 4}, "is not the path of a setting"),
        ({"balance": 4}, "is not the path of a setting"),
        ({"balanse.max_staleness": 4}, "does not name a section with live settings.*balance"),
        ({"balance.max_staleness": 4, "actors.count": 2}, "atomic only within one section"),
    ],
)
def test_a_change_that_names_no_live_setting_sends_nothing(
    control: Control,  # noqa: F811
    tmp_path: Path,
    values: dict[str, object],
    message: str,
) -> None:
    run = active(control, tmp_path)
    with pytest.raises(ConfigError, match=message):
        run.set(values)
    assert [] == control.requests


def test_refusals_of_the_run_are_the_errors_of_the_library(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = active(control, tmp_path)
    problem = {"path": "balance.max_staleness", "value": -1, "message": "is negative"}
    control.answer(422, {"title": "Invalid settings", "errors": [problem]})
    with pytest.raises(ConfigError, match="balance.max_staleness = -1: is negative"):
        run.set({"balance.max_staleness": -1})
    control.answer(409, {"title": "State conflict", "detail": "the run is ending"})
    with pytest.raises(StateConflictError, match="the run is ending"):
        run.pause()
    control.answer(401, {"title": "Unauthorized"})
    with pytest.raises(RequestError, match="Unauthorized"):
        run.status()


def test_a_run_whose_directory_is_moved_while_it_runs_still_answers(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = active(control, tmp_path)
    control.answer(200, {"id": "one", "state": "running"})
    assert "running" == run.status()["state"]
    (tmp_path / "one").rename(tmp_path / "two")
    assert "running" == run.status()["state"]


def test_a_run_at_an_address_is_asked_there_with_the_token_of_the_environment(
    control: Control,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIANFLOW_TOKEN", "secret")
    control.answer(200, {"id": "far", "state": "done", "ended": 5.0, "runs": [{"id": "far"}]})
    run = tianflow.attach(address=control.address)
    assert ("far", None) == (run.id, run.directory)
    assert "done" == run.wait()["state"]
    assert {"Bearer secret"} == {headers["Authorization"] for headers in control.sent}
    with pytest.raises(RunNotFoundError, match="by its address only"):
        run.policy()
    control.answer(200, {"history": [ROW]})
    assert 0.25 == run.metrics()[0]["train/loss"]
    control.answer(200, {"id": "far", "state": "failed", "ended": 5.0, "reasons": ["no memory"]})
    with pytest.raises(RunError, match="run: no memory"):
        run.wait()


def test_a_wait_times_out_and_leaves_the_run(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = active(control, tmp_path)
    control.answer(200, {"id": "one", "state": "running"})
    with pytest.raises(RunTimeoutError, match=r"^run 'one' has not ended after 0.05 s$") as caught:
        run.wait(timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert all(method == "GET" for method, _, _ in control.requests)


def test_a_wait_for_a_paused_run_warns_once(
    control: Control,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle, "POLL_S", 0.01)
    monkeypatch.setattr(handle, "PAUSED_S", 0.01)
    run = active(control, tmp_path)
    control.answer(200, {"id": "one", "state": "paused"})
    (tmp_path / "one" / "summary.json").write_text(json.dumps(SUMMARY))
    timer = threading.Timer(0.3, (tmp_path / "one" / "control.json").unlink)
    timer.start()
    with pytest.warns(RuntimeWarning, match=r"paused.*resume\(\) or stop\(\)") as caught:
        assert "done" == run.wait()["state"]
    timer.join()
    assert 1 == len(caught)


def test_two_handles_of_one_run_agree(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    one, two = active(control, tmp_path), tianflow.attach("one", runs_dir=tmp_path)
    control.answer(202, {"state": "stopping"})
    assert "stopping" == one.stop()
    (tmp_path / "one" / "summary.json").write_text(json.dumps(SUMMARY | {"state": "stopped"}))
    (tmp_path / "one" / "control.json").unlink()
    assert one.wait() == two.wait()
    assert "stopped" == two.status()["state"]


# Events
# --------------------------------------------------------------------------------------------------


def test_callbacks_get_the_events_of_their_kind_in_order_and_an_error_ends_neither(
    script: Script,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[tuple[type[BaseException], str]] = []
    monkeypatch.setattr(
        threading,
        "excepthook",
        lambda found: failures.append((found.exc_type, found.thread.name)),
    )
    monkeypatch.setattr(client, "PAUSE_S", 0.0)
    name = "evaluation-finished"
    script.answers = [(200, sse(1, name, x=1) + sse(2) + sse(3, name, x=3)), (200, b"")]
    (tmp_path / "one" / "config.toml").write_text("")
    (tmp_path / "one" / "summary.json").write_text(json.dumps(SUMMARY))
    run = tianflow.attach("one", runs_dir=tmp_path)
    seen: list[tuple[object, str]] = []

    def callback(event: tianflow.StreamedEvent) -> None:
        seen.append((event.data["x"], threading.current_thread().name))
        raise ValueError(event.number)

    run.on("evaluation", callback)
    assert "done" == run.wait(timeout=30.0)["state"]
    assert [(1, "events of one"), (3, "events of one")] == seen
    assert 2 * [(ValueError, "events of one")] == failures


def test_every_event_has_a_kind_for_callbacks() -> None:
    kinds = {
        kind_of(kind)
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, events.Event)
    } - {"event", "observed"}
    assert kinds == set(handle.KINDS.values())
    assert "evaluation-finished" == kind_named("evaluation") == kind_named("evaluation-finished")
    assert "lost" == kind_named("lost")
    with pytest.raises(ConfigError, match="evaluations.*accepted: .*evaluation"):
        kind_named("evaluations")


def test_live_settings_are_named_in_three_forms() -> None:
    for values, sections in (
        ({"balance.max_staleness": 4}, {}),
        ({"balance": {"max_staleness": 4}}, {}),
        (None, {"balance": {"max_staleness": 4}}),
    ):
        assert {"balance": {"max_staleness": 4}} == live_tables(values, sections)


# The start of a process
# --------------------------------------------------------------------------------------------------

ORDER = {"config": {}, "resume": None, "runs_dir": "runs"}
READS = "import sys; sys.stdin.readline(); "


@pytest.mark.parametrize(
    ("program", "details"),
    [(f"{READS}print('no memory', file=sys.stderr); sys.exit(3)", "no memory"),
     ("import sys; sys.exit(3)", "")],
)  # fmt: skip
def test_a_process_that_dies_before_the_start_leaves_its_last_words(
    monkeypatch: pytest.MonkeyPatch, program: str, details: str
) -> None:
    monkeypatch.setattr(handle, "_BOOT", program)
    with pytest.raises(RunError, match="ended with code 3 before the run started") as caught:
        handle.BackgroundProcess(ORDER).started()
    assert details == caught.value.details


def test_ctrl_c_during_a_start_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def get(self) -> None:
            raise KeyboardInterrupt

        def put(self, _answer: object) -> None:
            """The process ended."""

    monkeypatch.setattr(handle, "_BOOT", f"{READS}import time; time.sleep(600.0)")
    process = handle.BackgroundProcess(ORDER)
    monkeypatch.setattr(process, "_first", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        process.started()
    assert process.ended.wait(30.0)


# The package
# --------------------------------------------------------------------------------------------------


def test_dir_shows_the_public_names_and_each_exists() -> None:
    assert sorted(tianflow.__all__) == dir(tianflow)
    assert {"attach", "open_run", "start", "train"} <= set(dir(tianflow))
    for name in dir(tianflow):
        assert getattr(tianflow, name) is not None
    assert tianflow.Config is Config
    assert tianflow.TianflowError is TianflowError


def test_a_service_that_is_busy_is_asked_again(
    control: Control,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle, "POLL_S", 0.01)
    control.answer(200, {"id": "far", "state": "pending", "ended": None})
    run = tianflow.attach("far", address=control.address, token="t")
    control.answer(503, {"title": "Service Unavailable"})
    timer = threading.Timer(
        0.2, lambda: control.answer(200, {"id": "far", "state": "done", "ended": 1.0})
    )
    timer.start()
    assert "done" == run.status()["state"]
    timer.join()
    control.answer(503, {"title": "Service Unavailable"})
    monkeypatch.setattr(handle, "BUSY_S", 0.05)
    with pytest.raises(RequestError, match="Service Unavailable"):
        run.status()


def queued(control: Control, runs: Path) -> RunHandle:  # noqa: F811 - the fixture
    """A run in the queue of a service."""
    file = announce(runs, "other", control.address)
    replace(file, run="").write(runs, SERVICE)
    control.answer(200, {"id": "queued", "state": "pending", "ended": None})
    return tianflow.attach("queued", runs_dir=runs)


def test_a_service_that_does_not_answer_once_has_not_ended_its_run(
    control: Control,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = queued(control, tmp_path)
    assert "pending" == run.status()["state"]
    control.answer(500, {"title": "Internal Server Error"})
    for call in (run.status, run.wait, run.stop):
        with pytest.raises(RequestError, match="Internal Server Error"):
            call()
    control.answer(404, {"title": "Not Found"})
    with pytest.raises(RunNotFoundError, match="does not exist any more"):
        run.wait()


def test_the_note_on_a_paused_run_cannot_end_a_wait(
    control: Control,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handle, "POLL_S", 0.01)
    monkeypatch.setattr(handle, "PAUSED_S", 0.01)
    run = active(control, tmp_path)
    control.answer(500, {"title": "Internal Server Error"})
    (tmp_path / "one" / "summary.json").write_text(json.dumps(SUMMARY))
    timer = threading.Timer(0.3, (tmp_path / "one" / "control.json").unlink)
    timer.start()
    assert "done" == run.wait()["state"]
    timer.join()
    assert control.requests


def test_events_of_a_queued_run_begin_with_its_start(
    control: Control,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    run = queued(control, tmp_path)
    states: list[str] = []

    def listen(contact: ControlFile, **_options: Any) -> Iterator[tianflow.StreamedEvent]:
        states.append(client.request(contact, "GET")["state"])
        yield tianflow.StreamedEvent(1, "host-exited", {})

    monkeypatch.setattr(client, "listen", listen)
    timer = threading.Timer(
        0.2, lambda: control.answer(200, {"id": "queued", "state": "running", "ended": None})
    )
    timer.start()
    assert [1] == [event.number for event in run.events()]
    timer.join()
    assert ["running"] == states
