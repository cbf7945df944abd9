"""``tianflow status`` and ``tianflow top``: every run under a directory at a glance, once or again
and again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli import client
from tianflow.cli.common import RUNS, AsJson, RunArgument, RunsDir, exit_codes
from tianflow.rundir.summary import SUMMARY, partial_document, read_summary

if TYPE_CHECKING:
    from rich.table import Table


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "run": ("id",),
    "state": ("state",),
    "env steps": ("progress", "env_steps"),
    "updates": ("progress", "updates"),
    "steps/s": ("throughput", "env_steps_per_s", "10"),
    "return": ("returns", "mean"),
    "staleness": ("staleness", "mean"),
    "bound": ("staleness", "bound"),
    "actors": ("actors", "reporting"),
    "bottleneck": ("bottleneck",),
}
ENDED_SHOWN = 10
"""Ended runs of a service that are shown beside those that go on."""


def status(run: RunArgument = None, *, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show how RUN, or every run that is going on, is doing.

    Where a service holds the runs, also what waits and what ended lately.
    """
    with exit_codes():
        documents = gather(runs_dir) if run is None else [_one(runs_dir, run)]
    if as_json:
        typer.echo(json.dumps(documents if run is None else documents[0]))
    elif documents:
        _print(table(documents))
        for document in documents:
            if document["state"] == "failed" and document.get("reasons"):
                typer.echo(f"{document['id']}: {'; '.join(document['reasons'])}")
    else:
        typer.echo(f"no run is going on in {str(runs_dir)!r}{_not_going_on(runs_dir)}")


def _not_going_on(runs_dir: Path) -> str:
    """Runs that have ended, and those that were broken off: what a run left when it ended may be of
    a life before the last.
    """
    from tianflow.cli import client

    broken = client.broken_off(runs_dir)
    ended = sorted(runs_dir.glob(f"*/{SUMMARY}"), key=lambda path: -path.stat().st_mtime)
    names = [path.parent.name for path in ended if path.parent.name not in broken]
    told = (
        f"; ended: {', '.join(names[:ENDED_SHOWN])} (tianflow status RUN shows one)"
        if names
        else ""
    )
    return told + (
        f"; broken off: {', '.join(broken)} (tianflow train --resume RUN goes on)" if broken else ""
    )


def _one(runs_dir: Path, run: str) -> dict[str, Any]:
    """What ``run`` tells of itself, or what it left."""
    from tianflow.cli import client

    try:
        contact = client.find(runs_dir, run)
    except client.RunNotFoundError:
        if run in client.broken_off(runs_dir) or (left := _left(runs_dir, run)) is None:
            raise
        return left
    return _with_what_it_left(runs_dir, client.request(contact, "GET"))


def _with_what_it_left(runs_dir: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Of a run that has ended a service knows little more than that."""
    return (
        document
        if document.get("ended") is None
        else (_left(runs_dir, document["id"]) or {}) | document
    )


def _left(runs_dir: Path, run: str) -> dict[str, Any] | None:
    """A run that has ended, in the form of one that goes on, from its summary; None where it left
    none.
    """
    summary = read_summary(runs_dir / run) or {}
    told = partial_document(summary)
    if not told or "state" not in summary:
        return None
    reasons = [reason] if (reason := summary.get("error") or summary.get("reason")) else []
    return {"id": run, "state": summary["state"], "reasons": reasons, **told, "summary": summary}


def top(
    *,
    runs_dir: RunsDir = RUNS,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two looks.")
    ] = 1.0,
) -> None:
    """Show every run, again and again, until Ctrl-C.

    Where there is no terminal: once.
    """
    import time

    from rich.console import Console
    from rich.live import Live

    with exit_codes():
        if not sys.stdout.isatty():
            _print(table(gather(runs_dir)))
            return
        with Live(
            table(gather(runs_dir)),
            console=Console(highlight=False, markup=False),
            screen=True,
            auto_refresh=False,
        ) as live:
            while True:
                time.sleep(every)
                live.update(table(gather(runs_dir)), refresh=True)


def console(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Print the address of RUN's console for a browser.

    Or of that of the service that holds the runs. The token is in it.
    """
    from urllib.parse import quote

    from tianflow.cli import client

    with exit_codes():
        contact = (client.service(runs_dir) if run is None else None) or client.find(runs_dir, run)
    typer.echo(
        f"{contact.address}/#token={contact.token}"
        + (f"&run={quote(contact.run)}" if contact.run else "")
    )


def gather(runs_dir: Path) -> list[dict[str, Any]]:
    """What every run tells of itself, and what the service that holds them, if there is one, knows
    of the others.

    A run that ends while it is asked is left out.

    Raises:
        RequestError: the service does not answer.
    """
    from tianflow.cli import client

    contacts = client.running(runs_dir)
    documents = []
    for contact in contacts.values():
        try:
            documents.append(client.request(contact, "GET"))
        except client.RequestError:
            if contact.alive:
                raise
    holder = client.service(runs_dir)
    if holder is not None:
        documents += _others(client.all_runs(holder), {document["id"] for document in documents})
    return [_with_what_it_left(runs_dir, document) for document in documents]


def _others(runs: Iterable[dict[str, Any]], known: set[str]) -> list[dict[str, Any]]:
    """Those that go on or wait, and the newest of those that have ended."""
    shown, ended = [], 0
    for run in runs:
        if run["id"] in known:
            continue
        ended += run["ended"] is not None
        if run["ended"] is None or ended <= ENDED_SHOWN:
            shown.append(run)
    return shown


def table(documents: Iterable[Mapping[str, Any]]) -> Table:
    """One row a run."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        made.add_column(name, no_wrap=True)
    for document in documents:
        made.add_row(*(_cell(document, path) for path in COLUMNS.values()))
    return made


def _print(made: Table) -> None:
    from rich.console import Console

    # a pipe has no width: nothing is to be cut there
    Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False, markup=False
    ).print(made)


def _cell(document: object, path: tuple[str, ...]) -> str:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    if document is None:
        return "-"
    if isinstance(document, float):
        return f"{document:.0f}" if abs(document) >= 1000.0 else f"{document:.4g}"
    return str(document)


def ask(runs_dir: Path, run: str | None, *, as_json: bool = False) -> str:
    """The diagnosis of ``run``, or of the only one in ``runs_dir``.

    Raises:
        TianflowError: there is no such run, or it does not answer.
    """
    document = client.request(client.find(runs_dir, run), "GET", "/diagnosis")
    return json.dumps(document) if as_json else "\n".join(lines(document))


def _commands(run: str, suggested: Mapping[str, float]) -> list[str]:
    """What is suggested, ready to be typed: a command for each section, and what only a new run can
    take.
    """
    from tianflow.config.model import LIVE

    live: dict[str, list[str]] = {}
    later: list[str] = []
    for path, value in suggested.items():
        section, _, key = path.partition(".")
        (live.setdefault(section, []) if key in LIVE.get(section, ()) else later).append(
            f"{path}={value:.15g}"
        )
    said = [f"try: tianflow set {run} {' '.join(assignments)}" for assignments in live.values()]
    return said + ([f"in a new run: {' '.join(later)}"] if later else [])


def lines(document: Mapping[str, Any]) -> list[str]:
    """Verdict, advice, what to set, and the shares behind it."""
    who = f" ({document['component']})" if document["component"] else ""
    said = [
        f"{document['id']}: {document['verdict']}{who} for {document['for_s']:.0f} s",
        f"  {document['advice']}",
    ]
    said += [f"  {line}" for line in _commands(document["id"], document["suggested"])]
    for role, shares in document["shares"].items():
        largest = sorted(shares.items(), key=lambda item: -item[1])
        said.append(
            f"  {role} over {document['window_s']:.0f} s: "
            + ", ".join(f"{state} {share:.0%}" for state, share in largest)
        )
    return said
