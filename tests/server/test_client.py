from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tianflow.cli.main import app
from tianflow.config.model import LIVE
from tianflow.errors import ConfigError, RequestError, RunNotFoundError
from tianflow.rundir.control_file import SERVICE, ControlFile, process_start_time
from tianflow.server.common import client


@dataclass
class Control:
    """A control server that gives every request the same answer, and records the requests."""

    address: str = ""
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, object]] = field(default_factory=list)
    sent: list[dict[str, str]] = field(default_factory=list)

    def answer(self, status: int, document: object, **headers: str) -> None:
        self.status, self.body, self.headers = status, json.dumps(document).encode(), headers


@pytest.fixture
def control() -> Iterator[Control]:
    state = Control()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            state.requests.append((self.command, self.path, json.loads(body) if body else None))
            state.sent.append(dict(self.headers))
            self.send_response(state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            self.wfile.write(state.body)

        do_GET = do_POST = do_PATCH = handle_any  # noqa: N815 - the base class looks for these names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Write no log to the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.address = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield state
        finally:
            server.shutdown()
            serving.join()


def announce(
    runs: Path, name: str, address: str = "http://127.0.0.1:9", **changes: Any
) -> ControlFile:
    """Write the control file of a run whose process is this one."""
    start_time = process_start_time(os.getpid())
    file = replace(
        ControlFile(
            run=name,
            pid=os.getpid(),
            start_time=start_time,
            address=address,
            token="secret",
            read_token="look",
        ),
        **changes,
    )
    (runs / name).mkdir(parents=True)
    file.write(runs / name)
    return file


# Finding a run
# --------------------------------------------------------------------------------------------------


def test_the_only_run_need_not_be_named(tmp_path: Path) -> None:
    assert announce(tmp_path, "one") == client.find(tmp_path, None)


def test_one_of_several_runs_must_be_named(tmp_path: Path) -> None:
    announce(tmp_path, "one")
    two = announce(tmp_path, "two")
    assert two == client.find(tmp_path, "two")
    with pytest.raises(RunNotFoundError, match=r"2 runs are active in .* \(one, two\): name one"):
        client.find(tmp_path, None)


def test_a_run_without_its_process_is_not_active(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    announce(tmp_path, "gone", pid=gone.pid)
    with pytest.raises(RunNotFoundError, match="run 'gone' crashed"):
        client.find(tmp_path, "gone")


def test_a_killed_run_is_distinguished_from_one_that_ended(tmp_path: Path) -> None:
    announce(tmp_path, "killed", start_time=1)
    (tmp_path / "ended").mkdir()
    announce(tmp_path, "active")
    assert ["killed"] == client.crashed(tmp_path)
    with pytest.raises(
        RunNotFoundError,
        match=r"'killed' crashed \(continue with `tianflow train --resume killed`\).*: active$",
    ):
        client.find(tmp_path, "killed")
    for name, state in (
        ("killed", "crashed"),
        ("ended", "has ended"),
    ):  # neither counts as a section
        with pytest.raises(RunNotFoundError, match=state):
            client.get(tmp_path, [name])


def test_a_run_whose_process_id_was_used_again_has_ended(tmp_path: Path) -> None:
    announce(tmp_path, "old", start_time=1)
    assert {} == client.running(tmp_path)


def test_a_killed_process_has_ended_before_its_parent_waits_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert process_start_time(child.pid) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_time(child.pid) is None
    child.wait()


def test_a_torn_control_file_is_ignored(tmp_path: Path) -> None:
    announce(tmp_path, "one")
    (tmp_path / "one" / "control.json").write_text("{")
    assert {} == client.running(tmp_path)


def test_an_unknown_run_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    announce(tmp_path, "cartpole-1")
    with pytest.raises(
        RunNotFoundError, match="'cartpol-1' does not exist; .*did you mean 'cartpole-1'"
    ):
        client.find(tmp_path, "cartpol-1")


@pytest.mark.parametrize("name", ["", "..", "."])
def test_a_run_is_a_name_not_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunNotFoundError, match="does not exist"):
        client.find(tmp_path, name)


def test_without_a_directory_of_runs_none_is_active(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="0 runs are active"):
        client.find(tmp_path / "nowhere", None)


def test_only_its_owner_may_read_a_control_file(tmp_path: Path) -> None:
    announce(tmp_path, "one")
    assert 0o600 == (tmp_path / "one" / "control.json").stat().st_mode & 0o777


# Requests
# --------------------------------------------------------------------------------------------------


def test_a_change_is_a_merge_patch_with_the_token(tmp_path: Path, control: Control) -> None:
    control.answer(200, {"max_staleness": 4}, ETag='"7"')
    contact = announce(tmp_path, "one", control.address)
    assert {"max_staleness": 4, "generation": "7"} == client.change(
        contact, "balance", {"max_staleness": 4}
    )
    assert [("PATCH", "/api/v1/runs/one/balance", {"max_staleness": 4})] == control.requests
    assert "application/merge-patch+json" == control.sent[0]["Content-Type"]
    assert "Bearer secret" == control.sent[0]["Authorization"]


def test_a_proxy_of_the_environment_is_not_used(
    tmp_path: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert {} == client.request(announce(tmp_path, "one", control.address), "GET")


def test_settings_of_the_algorithm_and_the_learner_are_in_one_place() -> None:
    assert "learner" == client.resource("algorithm") == client.resource("learner")


def test_every_section_with_live_settings_has_a_resource() -> None:
    assert LIVE.keys() == client.RESOURCES.keys()


def test_a_section_without_live_settings_is_refused_without_a_request() -> None:
    with pytest.raises(
        ConfigError,
        match="blance: does not name a section with live settings; .* did you mean 'balance'",
    ):
        client.resource("blance")


def refusal(contact: ControlFile) -> RequestError:
    with pytest.raises(RequestError) as caught:
        client.request(contact, "GET")
    return caught.value


def test_a_problem_document_becomes_a_message(tmp_path: Path, control: Control) -> None:
    wrong = {
        "path": "balance.max_staleness",
        "value": -1,
        "message": "is out of range",
        "accepted": "a number >= 0",
        "nearest": "",
    }
    control.answer(
        422,
        {"title": "Invalid settings", "detail": "Nothing of it was accepted.", "errors": [wrong]},
    )
    error = refusal(announce(tmp_path, "one", control.address))
    lines = [
        "Invalid settings: Nothing of it was accepted.",
        "balance.max_staleness = -1: is out of range; accepted: a number >= 0",
    ]
    assert (lines, True) == (str(error).splitlines(), error.bad)
    assert lines[1:] == [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("status", "bad"),
    [(400, True), (422, True), (401, False), (404, False), (409, False), (503, False)],
)
def test_only_an_invalid_request_is_bad(
    tmp_path: Path, control: Control, status: int, bad: bool
) -> None:
    control.answer(status, {"title": "No", "detail": "because"})
    error = refusal(announce(tmp_path, "one", control.address))
    assert ("No: because", bad) == (str(error), error.bad)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"errors": 3}', b"\xff"])
def test_a_refusal_without_a_problem_document_shows_its_status(
    tmp_path: Path, control: Control, body: bytes
) -> None:
    control.status, control.body = 502, body
    assert "refused with status 502" == str(refusal(announce(tmp_path, "one", control.address)))


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff"])
def test_an_answer_that_is_not_an_object_is_an_error(
    tmp_path: Path, control: Control, body: bytes
) -> None:
    control.body = body
    assert "is not a JSON object" in str(refusal(announce(tmp_path, "one", control.address)))


def test_a_run_that_does_not_answer_is_named(tmp_path: Path) -> None:
    assert "run 'one' at http://127.0.0.1:9 does not answer" in str(
        refusal(announce(tmp_path, "one"))
    )


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[ControlFile]:
    """A run that accepts connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield announce(tmp_path, "one", f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(("method", "expected"), [("POST", True), ("GET", False)])
def test_a_request_that_is_not_answered_in_time_may_have_been_carried_out(
    silent: ControlFile, monkeypatch: pytest.MonkeyPatch, method: str, expected: bool
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    with pytest.raises(RequestError) as error:
        client.request(silent, method, "/api/v1/pause")
    assert expected == ("it may do what was asked: see `tianflow status`" in str(error.value))


def test_a_request_may_wait_longer_than_others(
    silent: ControlFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 0.01)
    with pytest.raises(RequestError, match=r"after 0\.05 s"):
        client.send(silent, "POST", "/api/v1/runs", timeout_s=0.05)


# A service
# --------------------------------------------------------------------------------------------------


def announce_service(runs: Path, address: str) -> ControlFile:
    """Write the file of a service whose process is this one."""
    start_time = process_start_time(os.getpid())
    file = ControlFile(
        run="",
        pid=os.getpid(),
        start_time=start_time,
        address=address,
        token="secret",
        read_token="look",
    )
    file.write(runs, SERVICE)
    return file


def test_a_pending_or_finished_run_is_found_through_its_service(
    tmp_path: Path, control: Control
) -> None:
    announce_service(tmp_path, control.address)
    control.answer(200, {"id": "two words", "state": "pending"})
    found = client.find(tmp_path, "two words")
    assert ("two words", control.address, "secret") == (found.run, found.address, found.token)
    assert [("GET", "/api/v1/runs/two%20words", None)] == control.requests
    assert client.find(tmp_path, "two words") == found


def test_a_run_that_the_service_does_not_know_does_not_exist(
    tmp_path: Path, control: Control
) -> None:
    announce_service(tmp_path, control.address)
    control.answer(404, {"title": "Not Found"})
    with pytest.raises(RunNotFoundError, match="run 'zzz' does not exist"):
        client.find(tmp_path, "zzz")


def test_an_active_run_answers_itself(tmp_path: Path, control: Control) -> None:
    announce_service(tmp_path, control.address)
    own = announce(tmp_path, "one")
    assert own == client.find(tmp_path, "one")
    assert [] == control.requests


def test_a_service_without_its_process_is_ignored(tmp_path: Path) -> None:
    file = announce_service(tmp_path, "http://127.0.0.1:9")
    assert file == client.service(tmp_path)
    replace(file, start_time=1).write(tmp_path, SERVICE)
    assert client.service(tmp_path) is None


def test_all_runs_are_read_page_by_page(
    tmp_path: Path, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {
        "/api/v1/runs": {
            "runs": [{"id": "b"}],
            "next": "/api/v1/runs?before=2",
            "on_disk": [{"id": "by-hand"}],
        },
        "/api/v1/runs?before=2": {"runs": [{"id": "a"}], "next": None},
    }
    monkeypatch.setattr(client, "send", lambda _contact, _method, path: pages[path])
    runs = list(client.all_runs(announce_service(tmp_path, control.address)))
    assert [{"id": "b"}, {"id": "a"}, {"id": "by-hand", "on_disk": True}] == runs


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2**63, [None], date(2026, 1, 31)])
def test_a_value_that_json_lacks_is_refused_by_its_path_and_not_sent(
    control: Control, value: object
) -> None:
    contact = ControlFile(
        run="a", pid=1, start_time=0, address=control.address, token="t", read_token="r"
    )
    with pytest.raises(ConfigError, match=r"parameters\.x"):
        client.send(contact, "PATCH", "/api/v1/runs/a/balance", {"parameters": {"x": value}})
    assert [] == control.requests


@pytest.mark.parametrize("command", ["resume", "console"])
def test_commands_on_a_run_that_has_ended_name_what_continues_and_what_shows_it(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "ended").mkdir()
    done = CliRunner().invoke(app, [command, "ended", "--runs-dir", str(tmp_path)])
    assert 1 == done.exit_code
    assert (
        "run 'ended' has ended (`tianflow train --resume ended` continues it, `tianflow report "
        "ended` shows it)" in done.stderr
    )


def test_the_console_of_a_service_shows_a_run_on_disk_that_no_command_steers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control: Control
) -> None:
    (tmp_path / "by-hand").mkdir()
    announce_service(tmp_path, control.address)
    documents = {"/api/v1/runs/by-hand": {"id": "by-hand", "on_disk": True}}

    def send(_contact: ControlFile, _method: str, path: str) -> dict[str, Any]:
        if path not in documents:
            raise RequestError("does not exist")
        return documents[path]

    monkeypatch.setattr(client, "send", send)
    options = ["--runs-dir", str(tmp_path)]
    done = CliRunner().invoke(app, ["console", "by-hand", *options])
    assert (0, True) == (done.exit_code, "&run=by-hand\n" in done.stdout)
    assert done.stdout.startswith(f"{control.address}/#token=")
    for command in ("stop", "get"):
        done = CliRunner().invoke(app, [command, "by-hand", *options])
        assert 1 == done.exit_code
        assert "run 'by-hand' has ended (`tianflow train --resume by-hand`" in done.stderr
    assert 1 == CliRunner().invoke(app, ["console", "nothing", *options]).exit_code
