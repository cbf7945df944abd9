"""``tianflow events``: the events of a run as lines. A broken connection is resumed after the last
event.
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import RUNS, RunArgument, RunsDir, echo, exit_codes

if TYPE_CHECKING:
    from tianflow.cli.client import RequestError, StreamedEvent
    from tianflow.rundir.control_file import ControlFile

PAUSE_S = 1.0
TRIES = 30
"""Consecutive connections without an event, after which the command fails."""
FREQUENT = frozenset({"update-finished", "episodes-finished"})
"""Kinds of events that occur all the time while a run trains."""
_BUSY = {429, 503}


def events(
    run: RunArgument = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Further events until the run ends.")
    ] = False,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="Events without updates and episodes, which occur several times a second.",
        ),
    ] = False,
    runs_dir: RunsDir = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="JSON output, one event a line.")] = False,
) -> None:
    """Print recent events of RUN.

    Events are evaluations, changes, failures, updates and episodes.
    """
    with exit_codes():
        for event in listen(runs_dir, run, follow=follow):
            if brief and event.kind in FREQUENT:
                continue
            echo(json_line(event) if as_json else line(event))


def listen(
    runs_dir: Path, run: str | None, *, follow: bool, pause: float = PAUSE_S
) -> Iterator[StreamedEvent]:
    """Events that the run retains; with ``follow`` also later ones, until it ends.

    Waits ``pause`` seconds before each retry.

    Raises:
        TianflowError: the run does not exist, or does not answer.
    """
    from tianflow.cli import client

    contact: ControlFile | None = client.find(runs_dir, run)
    number = failures = 0
    while contact is not None:
        server, error = contact, None
        try:
            for event in client.stream(server, number, follow=follow):
                number, failures = event.number, 0
                yield event
        except client.RequestError as caught:
            if caught.status and caught.status not in _BUSY:
                raise
            error = caught
        if not follow and error is None:
            return
        failures += 1
        if not follow or failures >= TRIES:
            raise error or client.RequestError(
                f"run {server.run!r} at {server.address} closes its event stream"
            )
        time.sleep(pause)
        contact = _contact(runs_dir, server, error)
        if number and contact is not None and not _same_process(contact, server):
            number = 0
            yield client.StreamedEvent(
                0, "lost", {"count": None, "reason": "the run continues in another process"}
            )


def _contact(runs_dir: Path, server: ControlFile, error: RequestError | None) -> ControlFile | None:
    """Where to connect next; None if the run has ended.

    A service that starts the run is busy (503) until the run answers for itself.
    """
    from tianflow.cli import client

    busy = error is not None and error.status in _BUSY
    return client.running(runs_dir).get(server.run) or (server if busy and server.alive else None)


def _same_process(one: ControlFile, other: ControlFile) -> bool:
    return (one.pid, one.start_time) == (other.pid, other.start_time)


def line(event: StreamedEvent) -> str:
    """The event as text."""
    at = event.data.get("at")
    when = (
        f"{dt.datetime.fromtimestamp(at).astimezone():%H:%M:%S}"
        if isinstance(at, int | float)
        else "--:--:--"
    )
    values = (f"{key}={_short(value)}" for key, value in event.data.items() if key != "at")
    return " ".join([when, event.kind, *values])


def json_line(event: StreamedEvent) -> str:
    """The event as JSON."""
    return json.dumps({"id": event.number, "event": event.kind, "data": event.data})


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
        # The text may come from a failing environment: it must stay on one line and must not
        # contain terminal control sequences.
        return (
            json.dumps(value)
            if not value.isprintable()
            else json.dumps(value, ensure_ascii=False)
            if " " in value
            else value
        )
    return "-" if value is None else str(value)
