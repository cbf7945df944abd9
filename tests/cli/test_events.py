"""``tianflow events``: every event once, in order, over connections that break, until the run has
ended.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.test_client import announce
from tianflow.cli import client
from tianflow.cli import events as following
from tianflow.cli.events import StreamedEvent, listen, parse
from tianflow.cli.main import app
from tianflow.core.events import EpisodesFinished, UpdateFinished
from tianflow.rundir.control_file import SERVICE, ControlFile, process_start_time
from tianflow.server.common.event_feed import kind_of


@dataclass
class Script:
    """A server of events that answers each connection with the next of ``answers``; after the last
    one the run has ended.
    """

    directory: Path
    address: str = ""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    on_answer: list[ControlFile | None] = field(default_factory=list)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path / "one")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = self.headers
            script.asked.append(
                (self.path, headers.get("Last-Event-ID"), headers.get("Authorization"))
            )
            status, body = script.answers.pop(0)
            if not script.answers:
                (script.directory / "control.json").unlink()
            elif script.on_answer and (made := script.on_answer.pop(0)) is not None:
                made.write(script.directory)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Keep the tests' output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.address = f"http://127.0.0.1:{server.server_port}"
        announce(tmp_path, "one", script.address)
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield script
        finally:
            server.shutdown()
            serving.join()


def sse(number: int, kind: str = "host-exited", **data: Any) -> bytes:
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def numbers(runs: Path, *, follow: bool = True) -> list[int]:
    return [told.number for told in listen(runs, None, follow=follow, pause=0.0)]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    script: Script, tmp_path: Path
) -> None:
    whole = sse(3)
    script.answers = [
        (200, b"retry: 1000\n\n" + sse(1) + sse(2) + whole[:-1]),
        (200, b":\n\n" + sse(3) + sse(4)),
        (200, b""),
    ]
    assert [1, 2, 3, 4] == numbers(tmp_path)
    path = "/api/v1/runs/one/events?follow=true"
    assert [
        (path, "0", "Bearer secret"),
        (path, "2", "Bearer secret"),
        (path, "4", "Bearer secret"),
    ] == script.asked


def test_without_following_one_connection_is_enough(script: Script, tmp_path: Path) -> None:
    script.answers = [(200, sse(1) + sse(2)), (200, sse(3))]
    assert [1, 2] == numbers(tmp_path, follow=False)
    assert ["/api/v1/runs/one/events?follow=false"] == [path for path, _, _ in script.asked]


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_again_when_following(
    script: Script, tmp_path: Path, status: int
) -> None:
    script.answers = [(status, b'{"title": "Busy", "detail": "later"}'), (200, sse(1)), (200, b"")]
    assert [1] == numbers(tmp_path)


def test_a_refusal_is_told_as_the_server_tells_it(script: Script, tmp_path: Path) -> None:
    script.answers = [
        (401, b'{"title": "Unauthorized", "detail": "A token is needed."}'),
        (200, b""),
    ]
    with pytest.raises(client.RequestError, match="Unauthorized: A token is needed."):
        numbers(tmp_path)


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "TRIES", 3)
    announce(tmp_path, "one", "http://127.0.0.1:9")
    with pytest.raises(client.RequestError, match="does not tell its events: .*refused"):
        numbers(tmp_path)


def test_another_process_of_the_run_counts_anew(script: Script, tmp_path: Path) -> None:
    ours = ControlFile.read(script.directory)
    assert ours is not None
    parent = os.getppid()
    script.on_answer = [replace(ours, pid=parent, start_time=process_start_time(parent))]
    script.answers = [(200, sse(7)), (200, sse(1)), (200, b"")]
    seen = list(listen(tmp_path, None, follow=True, pause=0.0))
    assert [(7, "host-exited"), (0, "lost"), (1, "host-exited")] == [
        (told.number, told.kind) for told in seen
    ]
    assert ["0", "0", "1"] == [number for _, number, _ in script.asked]


def test_a_run_that_a_service_starts_is_waited_for_and_nothing_of_it_is_lost(
    script: Script, tmp_path: Path
) -> None:
    ours = ControlFile.read(script.directory)
    assert ours is not None
    ours.remove(script.directory)
    replace(ours, run="").write(tmp_path, SERVICE)
    parent = os.getppid()
    script.on_answer = [
        None,
        None,
        replace(ours, pid=parent, start_time=process_start_time(parent)),
    ]
    script.answers = [(200, b'{"id": "one"}'), (503, b""), (503, b""), (200, sse(1)), (200, b"")]
    seen = list(listen(tmp_path, "one", follow=True, pause=0.0))
    assert [(1, "host-exited")] == [(told.number, told.kind) for told in seen]


@pytest.mark.parametrize(
    "body",
    [
        b"id: x\ndata: {}\n\n",
        b"data: {}\n\n",
        b"id: 1\ndata: []\n\n",
        b"id: 1\ndata: {\n\n",
        b"\xff\n",
    ],
)
def test_what_is_no_event_is_an_error(script: Script, tmp_path: Path, body: bytes) -> None:
    script.answers = [(200, body), (200, b"")]
    with pytest.raises(client.RequestError, match="does not tell its events"):
        numbers(tmp_path, follow=False)


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        list(parse(io.BytesIO(b"data: " + b"x" * 2**21)))  # type: ignore[arg-type] # it reads lines


def test_comments_are_no_events() -> None:
    stream = io.BytesIO(b":\n\n: hello\n\nid: 1\n:\ndata: {}\n\n")
    assert [StreamedEvent(1, "message", {})] == list(parse(stream))  # type: ignore[arg-type] # it reads lines


def test_an_event_is_a_line() -> None:
    told = StreamedEvent(
        1,
        "evaluation-finished",
        {
            "at": 0,
            "mean_return": 1.0 / 3.0,
            "returns": [1.0] * 9,
            "reason": None,
            "message": "two words",
        },
    )
    assert (
        "evaluation-finished mean_return=0.33333 returns=[1, 1, 1, 1, 1, … 9] reason=- "
        'message="two words"' == told.line().split(" ", 1)[1]
    )


def test_whatever_an_environment_says_is_one_line_and_no_command_of_a_terminal() -> None:
    line = StreamedEvent(3, "host-failed", {"error": "a\nb\x1b[2J\u202ec", "where": "ünder"}).line()
    assert line.isprintable()
    assert line.endswith('error="a\\nb\\u001b[2J\\u202ec" where=ünder')


def test_the_command_prints_lines_or_json(script: Script, tmp_path: Path) -> None:
    script.answers = [(200, sse(1, reason="killed")), (200, sse(1, reason="killed")), (200, b"")]
    arguments = ["events", "--runs-dir", str(tmp_path)]
    shown = CliRunner().invoke(app, arguments)
    assert (0, "--:--:-- host-exited reason=killed\n") == (shown.exit_code, shown.output)
    shown = CliRunner().invoke(app, [*arguments, "--json", "one"])
    assert {"id": 1, "event": "host-exited", "data": {"reason": "killed"}} == json.loads(
        shown.output
    )


def test_in_brief_what_comes_several_times_a_second_is_left_out(
    script: Script, tmp_path: Path
) -> None:
    kinds = [kind_of(UpdateFinished), "settings-changed", kind_of(EpisodesFinished)]
    script.answers = [
        (200, b"".join(sse(number, kind) for number, kind in enumerate(kinds, start=1)))
    ] * 2
    arguments = ["events", "--runs-dir", str(tmp_path)]
    assert 3 == len(CliRunner().invoke(app, arguments).output.splitlines())
    assert "--:--:-- settings-changed\n" == CliRunner().invoke(app, [*arguments, "--brief"]).output


def test_the_command_fails_readably_without_a_run(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["events", "nowhere", "--runs-dir", str(tmp_path)])
    assert 1 == shown.exit_code
    assert "'nowhere' is not known" in shown.output
