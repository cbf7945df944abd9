"""``tianflow events``: the events of a run as lines. A broken connection is resumed after the last
event.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import RUNS, RunArgument, RunsDir, echo, exit_codes

if TYPE_CHECKING:
    from tianflow.server.common.client import StreamedEvent

FREQUENT = frozenset({"update-finished", "episodes-finished"})
"""Kinds of events that occur all the time while a run trains."""


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
    runs_dir: Path, run: str | None, *, follow: bool, pause: float | None = None
) -> Iterator[StreamedEvent]:
    """Events that the run retains; with ``follow`` also later ones, until it ends.

    Waits ``pause`` seconds before each retry.

    Raises:
        TianflowError: the run does not exist, or does not answer.
    """
    from tianflow.server.common import client

    return client.listen(
        client.find(runs_dir, run),
        again=lambda server, error: client.reconnected(runs_dir, server, error),
        follow=follow,
        pause=client.PAUSE_S if pause is None else pause,
    )


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
