"""``tianflow events`` prints every event once, in order, until the run ends, also over connections
that break.
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

from tests.server.test_client import announce
from tianflow.cli.events import line, listen
from tianflow.cli.main import app
from tianflow.core.events import EpisodesFinished, UpdateFinished
from tianflow.errors import RequestError
from tianflow.rundir.control_file import SERVICE, ControlFile, process_start_time
from tianflow.server.common import client
from tianflow.server.common.client import StreamedEvent, parse
from tianflow.server.common.event_feed import kind_of


@dataclass
class Script:
    """A server of events that answers each connection with the next of ``answers``; the run ends with
    the last one.
    """

    directory: Path
    address: str = ""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    on_answer: list[ControlFile | None] = field(default_factory=list)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path / "one")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = self.headers
            script.requests.append(
                (self.path, headers.get("Last-Event-ID"), headers.get("Authorization"))
            )
            status, body = script.answers.pop(0)
            if not script.answers:
                (script.directory / "control.json").unlink()
            elif script.on_answer and (file := script.on_answer.pop(0)) is not None:
                file.write(script.directory)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Write no log to the tests' output."""

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
    return [event.number for event in listen(runs, None, follow=follow, pause=0.0)]


def test_a_broken_connection_is_resumed_after_its_last_event(
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
    ] == script.requests


def test_without_following_one_connection_is_enough(script: Script, tmp_path: Path) -> None:
    script.answers = [(200, sse(1) + sse(2)), (200, sse(3))]
    assert [1, 2] == numbers(tmp_path, follow=False)
    assert ["/api/v1/runs/one/events?follow=false"] == [path for path, _, _ in script.requests]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_retried_when_following(
    script: Script, tmp_path: Path, status: int
) -> None:
    script.answers = [(status, b'{"title": "Busy", "detail": "later"}'), (200, sse(1)), (200, b"")]
    assert [1] == numbers(tmp_path)


def test_a_refusal_is_shown_in_the_words_of_the_server(script: Script, tmp_path: Path) -> None:
    script.answers = [
        (401, b'{"title": "Unauthorized", "detail": "A token is needed."}'),
        (200, b""),
    ]
    with pytest.raises(RequestError, match="Unauthorized: A token is needed."):
        numbers(tmp_path)


def test_the_command_fails_after_some_connections_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRIES", 3)
    announce(tmp_path, "one", "http://127.0.0.1:9")
    with pytest.raises(RequestError, match="run 'one' at .* does not answer: .*refused"):
        numbers(tmp_path)


def test_another_process_of_the_run_numbers_its_events_from_1(
    script: Script, tmp_path: Path
) -> None:
    ours = ControlFile.read(script.directory)
    assert ours is not None
    parent = os.getppid()
    script.on_answer = [replace(ours, pid=parent, start_time=process_start_time(parent))]
    script.answers = [(200, sse(7)), (200, sse(1)), (200, b"")]
    seen = list(listen(tmp_path, None, follow=True, pause=0.0))
    assert [(7, "host-exited"), (0, "lost"), (1, "host-exited")] == [
        (event.number, event.kind) for event in seen
    ]
    assert ["0", "0", "1"] == [number for _, number, _ in script.requests]


def test_events_of_a_run_that_a_service_is_starting_are_not_lost(
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
    assert [(1, "host-exited")] == [(event.number, event.kind) for event in seen]


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
def test_an_invalid_event_is_an_error(script: Script, tmp_path: Path, body: bytes) -> None:
    script.answers = [(200, body), (200, b"")]
    with pytest.raises(RequestError, match="sent an invalid event"):
        numbers(tmp_path, follow=False)


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        list(parse(io.BytesIO(b"data: " + b"x" * 2**21)))  # type: ignore[arg-type] # it reads lines


def test_comments_are_not_events() -> None:
    stream = io.BytesIO(b":\n\n: hello\n\nid: 1\n:\ndata: {}\n\n")
    assert [StreamedEvent(1, "message", {})] == list(parse(stream))  # type: ignore[arg-type] # it reads lines


def test_an_event_is_a_line() -> None:
    event = StreamedEvent(
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
        'message="two words"' == line(event).split(" ", 1)[1]
    )


def test_a_text_of_an_environment_is_one_line_without_control_sequences() -> None:
    data = {"error": "a\nb\x1b[2J\u202ec", "where": "ünder"}
    text = line(StreamedEvent(3, "host-failed", data))
    assert text.isprintable()
    assert text.endswith('error="a\\nb\\u001b[2J\\u202ec" where=ünder')


def test_the_command_prints_lines_or_json(script: Script, tmp_path: Path) -> None:
    script.answers = [(200, sse(1, reason="killed")), (200, sse(1, reason="killed")), (200, b"")]
    arguments = ["events", "--runs-dir", str(tmp_path)]
    shown = CliRunner().invoke(app, arguments)
    assert (0, "--:--:-- host-exited reason=killed\n") == (shown.exit_code, shown.output)
    shown = CliRunner().invoke(app, [*arguments, "--json", "one"])
    assert {"id": 1, "event": "host-exited", "data": {"reason": "killed"}} == json.loads(
        shown.output
    )


def test_a_brief_list_has_no_updates_and_episodes(script: Script, tmp_path: Path) -> None:
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
    assert "'nowhere' does not exist" in shown.output
