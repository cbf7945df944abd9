"""``tianflow events``: what happened in a run, and what happens in it, as lines. A connection that
breaks is taken up where it broke.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli.common import RUNS, RunArgument, RunsDir, exit_codes

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from tianflow.rundir.control_file import ControlFile

SILENCE_S = 45.0
"""Three heartbeats of the server that did not come: the connection is dead."""
PAUSE_S = 1.0
TRIES = 30
"""Connections in a row that bring nothing, before it is given up."""
LONGEST_LINE = 2**20
FREQUENT = frozenset({"update-finished", "episodes-finished"})
"""Kinds of events that come as long as a run trains."""
_LATER = {429, 503}


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """An event of a run. ``number`` is 0 for a loss that no event stands for."""

    number: int
    kind: str
    data: Mapping[str, Any]

    def line(self) -> str:
        """For a person."""
        at = self.data.get("at")
        when = (
            f"{dt.datetime.fromtimestamp(at).astimezone():%H:%M:%S}"
            if isinstance(at, int | float)
            else "--:--:--"
        )
        return " ".join(
            [
                when,
                self.kind,
                *(f"{key}={_short(value)}" for key, value in self.data.items() if key != "at"),
            ]
        )

    def document(self) -> dict[str, Any]:
        """For a program."""
        return {"id": self.number, "event": self.kind, "data": self.data}


def events(
    run: RunArgument = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")
    ] = False,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief", help="Leave out updates and episodes, of which there are several a second."
        ),
    ] = False,
    runs_dir: RunsDir = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one event a line.")] = False,
) -> None:
    """Print what happened in RUN lately.

    Evaluations, changes, failures, updates and episodes.
    """
    with exit_codes():
        for told in listen(runs_dir, run, follow=follow):
            if brief and told.kind in FREQUENT:
                continue
            typer.echo(json.dumps(told.document()) if as_json else told.line())


def listen(
    runs_dir: Path, run: str | None, *, follow: bool, pause: float = PAUSE_S
) -> Iterator[StreamedEvent]:
    """Events that the run still keeps; with ``follow`` also those to come, until it has ended.
    Waits ``pause`` seconds before each retry.

    Raises:
        TianflowError: there is no such run, or it does not answer.
    """
    from tianflow.cli import client

    contact: ControlFile | None = client.find(runs_dir, run)
    number = failures = 0
    while contact is not None:
        asked, problem, later = contact, "", False
        try:
            for told in _connection(asked, number, follow=follow):
                number, failures = told.number, 0
                yield told
        except (OSError, ValueError, _NotNowError) as error:
            problem, later = str(error) or type(error).__name__, isinstance(error, _NotNowError)
        if not follow and not problem:
            return
        failures += 1
        if not follow or failures >= TRIES:
            raise client.RequestError(
                f"run {asked.run!r} at {asked.address} does not tell its events: "
                f"{problem or 'the stream ends'}"
            )
        time.sleep(pause)
        # a service that starts the run says so: it does not answer for itself yet
        contact = client.running(runs_dir).get(asked.run) or (
            asked if later and asked.alive else None
        )
        if (
            number
            and contact is not None
            and (contact.pid, contact.start_time) != (asked.pid, asked.start_time)
        ):
            number = 0
            yield StreamedEvent(
                0, "lost", {"count": None, "reason": "the run goes on in another process"}
            )


class _NotNowError(Exception):
    """There may be an answer later."""


def _connection(contact: ControlFile, number: int, *, follow: bool) -> Iterator[StreamedEvent]:
    """One connection's events after ``number``.

    Raises:
        OSError: it broke.
        ValueError: it told what is no event.
        RequestError: it is refused for good.
    """
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    address = urlsplit(contact.address)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=SILENCE_S)
    headers = {
        "Authorization": f"Bearer {contact.token}",
        "Accept": "text/event-stream",
        "Last-Event-ID": str(number),
    }
    try:
        connection.request(
            "GET",
            f"/api/v1/runs/{contact.run}/events?follow={str(follow).lower()}",
            headers=headers,
        )
        response = connection.getresponse()
        if response.status != 200:
            _refused(response)
        yield from parse(response)
    except HTTPException as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    finally:
        connection.close()


def _refused(response: HTTPResponse) -> None:
    from tianflow.cli import client

    try:
        document = json.loads(response.read(LONGEST_LINE))
        said = f"{document['title']}: {document['detail']}"
    except (ValueError, LookupError, TypeError):
        said = f"refused with status {response.status}"
    if response.status in _LATER:
        raise _NotNowError(said)
    raise client.RequestError(said)


def parse(response: HTTPResponse) -> Iterator[StreamedEvent]:
    """Server-sent events (HTML standard, section 9.2); one that the end cuts off is none.

    Raises:
        ValueError: an event without number or JSON object, or a line longer than `LONGEST_LINE`.
    """
    fields: dict[str, str] = {}
    while line := response.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ValueError("a line of the stream is too long")
        text = line.decode("utf-8").rstrip("\r\n")
        if text:  # a comment is a field without a name
            name, _, value = text.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            data = json.loads(fields["data"])
            if not isinstance(data, dict):
                raise ValueError("an event of the stream is no JSON object")
            yield StreamedEvent(int(fields.get("id", "")), fields.get("event", "message"), data)
            fields = {}


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return (
            "["
            + ", ".join(map(_short, value[:5]))
            + (f", … {len(value)}]" if len(value) > 5 else "]")
        )
    if isinstance(value, str):
        # An environment may say anything when it fails: it stays one line, and commands nothing to
        # a terminal.
        return (
            json.dumps(value)
            if not value.isprintable()
            else json.dumps(value, ensure_ascii=False)
            if " " in value
            else value
        )
    return "-" if value is None else str(value)
