"""``tianflow status``, ``top`` and ``console``, and the text of ``tianflow diagnose``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tianflow.cli.common import RUNS, AsJson, RunArgument, RunsDir, echo, exit_codes
from tianflow.core.formatting import sparkline, steady_speed
from tianflow.errors import RequestError, RunNotFoundError, printable
from tianflow.rundir.summary import SUMMARY, ended_document
from tianflow.server.common import client

if TYPE_CHECKING:
    from rich.table import Table


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "run": ("id",),
    "state": ("state",),
    "env steps": ("progress", "env_steps"),
    "updates": ("progress", "updates"),
    "steps/s": ("throughput",),
    "train return": ("returns", "mean"),
    "best": ("checkpoint", "best", "mean_return"),
    "loss": ("learning", "values", "train/loss"),
    "staleness": ("staleness", "mean"),
    "bound": ("staleness", "bound"),
    "actors": ("actors", "reporting"),
    "bottleneck": ("bottleneck",),
}
CURVES = {"train return": "return", "loss": "loss"}
"""Columns that `top` shows with a curve of the last minutes, and the names of the curves."""
CURVE = 12
"""Characters of a curve: half of those in the document."""
ENDED_SHOWN = 10
"""Number of ended runs of a service that are shown besides the others."""


NODE_COLUMNS = ("node", "state", "cores", "hosts", "round trip", "weights lag", "in", "out")
SHARD_COLUMNS = ("shards", "direct in", "direct out")
"""Shown if a node has replay shards, or trajectories go from node to node."""


def nodes(run: RunArgument = None, *, runs_dir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show the nodes of RUN: machines that run its actors.

    They may also run its replay shards. Bytes are those that the head has received from a node and
    sent to it. Direct ones are trajectories that the node has received from other nodes and sent
    to them.
    """
    from rich.filesize import decimal
    from rich.table import Table

    with exit_codes():
        contact = client.find(runs_dir, run)
        found = client.request(contact, "GET", "/nodes")["nodes"]
    if as_json:
        echo(json.dumps(found))
    elif not found:
        echo(f"{contact.run} has no nodes")
    else:
        also = any(node["shards"] or node["direct_sent_bytes"] for node in found)
        columns = (*NODE_COLUMNS, *(SHARD_COLUMNS if also else ()))
        shown = Table(*columns, box=None, pad_edge=False)
        for node in found:
            state = "not connected" if not node["up"] else "ready" if node["ready"] else "joining"
            cells = (
                node["name"],
                state,
                str(node["cores"]),
                str(node["hosts"]),
                f"{1000 * node['round_trip_s']:.1f} ms",
                str(node["weights_lag"]),
                decimal(sum(node["received_bytes"].values())),
                decimal(sum(node["sent_bytes"].values())),
                str(len(node["shards"])),
                decimal(node["direct_received_bytes"]),
                decimal(node["direct_sent_bytes"]),
            )
            shown.add_row(*cells[: len(columns)])
        _print(shown)


def status(
    run: RunArgument = None,
    *,
    runs_dir: RunsDir = RUNS,
    every_run: Annotated[
        bool, typer.Option("--all", help="All ended runs, not only the newest ten.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the status of RUN, or of every active run.

    If a service holds the runs, pending and recently ended runs are shown, too.
    """
    with exit_codes():
        limit = None if every_run else ENDED_SHOWN
        documents, more = _gathered(runs_dir, limit) if run is None else ([_one(runs_dir, run)], 0)
    if as_json:
        echo(json.dumps(documents if run is None else documents[0]))
    elif documents:
        _print(table(documents))
        on_disk = [document for document in documents if document.get("on_disk")]
        for document in documents:
            told = document["state"] == "failed" or (len(on_disk) == 1 and document in on_disk)
            if told and document.get("reasons"):
                echo(f"{document['id']}: {'; '.join(document['reasons'])}")
        if len(on_disk) > 1:
            echo(
                f"{len(on_disk)} of these are on disk and not in the store of the service; "
                "`tianflow train --resume RUN` continues one"
            )
        if more:
            echo(f"{more} more that do not run (tianflow status --all shows them)")
    else:
        echo(f"no active run in {str(runs_dir)!r}{_inactive(runs_dir, limit)}")


def _inactive(runs_dir: Path, limit: int | None) -> str:
    """Runs that ended, and those that were interrupted (a summary may be older than the
    interruption), in words.
    """
    from tianflow.server.common import client

    broken = client.crashed(runs_dir)
    ended = sorted(runs_dir.glob(f"*/{SUMMARY}"), key=lambda path: -path.stat().st_mtime)
    names = [path.parent.name for path in ended if path.parent.name not in broken]
    broken.sort(key=lambda name: -(runs_dir / name).stat().st_mtime)
    shown = f"; ended: {_listed(names, limit)} (tianflow status RUN shows one)" if names else ""
    return shown + (
        f"; interrupted: {_listed(broken, limit)} (tianflow train --resume RUN continues)"
        if broken
        else ""
    )


def _listed(names: list[str], limit: int | None) -> str:
    """The first ``limit`` names, and the number of the others."""
    shown = names if limit is None else names[:limit]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more (--all)" if more else "")


def _one(runs_dir: Path, run: str) -> dict[str, Any]:
    """The document of ``run``, or its summary in that form."""
    from tianflow.server.common import client

    try:
        contact = client.find(runs_dir, run)
    except RunNotFoundError:
        if run in client.crashed(runs_dir) or (left := ended_document(runs_dir / run)) is None:
            raise
        return left
    return _with_summary(runs_dir, client.request(contact, "GET"))


def _with_summary(runs_dir: Path, document: dict[str, Any]) -> dict[str, Any]:
    """``document`` with the summary of a run that has ended, which a service does not know."""
    return (
        document
        if document.get("ended") is None
        else (ended_document(runs_dir / document["id"]) or {}) | document
    )


def top(
    *,
    runs_dir: RunsDir = RUNS,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two refreshes.")
    ] = 1.0,
) -> None:
    """Show every run and refresh until Ctrl-C.

    Without a terminal, the runs are printed once.
    """
    import time

    from rich.console import Console
    from rich.live import Live

    with exit_codes():
        if not sys.stdout.isatty():
            _print(table(gather(runs_dir)))
            return
        with Live(
            table(gather(runs_dir), curves=True),
            console=Console(highlight=False, markup=False),
            screen=True,
            auto_refresh=False,
        ) as live:
            while True:
                time.sleep(every)
                live.update(table(gather(runs_dir), curves=True), refresh=True)


def console(run: RunArgument = None, *, runs_dir: RunsDir = RUNS) -> None:
    """Print the address of RUN's console for a browser.

    Without RUN, it is the console of the service that holds the runs. That of a service also shows
    runs that have ended. The address contains the token.
    """
    from urllib.parse import quote

    from tianflow.server.common import client

    with exit_codes():
        holder = client.service(runs_dir)
        try:
            contact = (holder if run is None else None) or client.find(runs_dir, run)
        except RunNotFoundError:
            if holder is None or run is None or not client.shows(holder, run):
                raise
            contact = replace(holder, run=run)
    echo(
        f"{contact.address}/#token={contact.token}"
        + (f"&run={quote(contact.run)}" if contact.run else "")
    )


def gather(runs_dir: Path) -> list[dict[str, Any]]:
    """The document of every active run, and the other runs of a service that holds them.

    A run that ends during its request is skipped.

    Raises:
        RequestError: the service does not answer.
    """
    return _gathered(runs_dir, ENDED_SHOWN)[0]


def _gathered(runs_dir: Path, limit: int | None) -> tuple[list[dict[str, Any]], int]:
    """As `gather`, with at most ``limit`` runs that do not run, and the number of the others."""
    from tianflow.server.common import client

    contacts = client.running(runs_dir)
    documents = []
    for contact in contacts.values():
        try:
            documents.append(client.request(contact, "GET"))
        except RequestError:
            if contact.alive:
                raise
    holder, more = client.service(runs_dir), 0
    if holder is not None:
        known = {document["id"] for document in documents}
        others, more = _others(client.all_runs(holder), known, limit)
        documents += others
    return [_with_summary(runs_dir, document) for document in documents], more


def _others(
    runs: Iterable[dict[str, Any]], known: set[str], limit: int | None
) -> tuple[list[dict[str, Any]], int]:
    """Active and pending runs, and the newest ``limit`` of those that ended or were interrupted;
    the number of the others.
    """
    shown, still = [], 0
    for run in runs:
        if run["id"] in known:
            continue
        is_still = run["ended"] is not None or run["state"] == "interrupted"
        still += is_still
        if limit is None or not is_still or still <= limit:
            shown.append(run)
    return shown, 0 if limit is None else max(0, still - limit)


def table(documents: Iterable[Mapping[str, Any]], *, curves: bool = False) -> Table:
    """One row per run. ``curves``: with curves of return and loss."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        made.add_column(name, no_wrap=True)
    for document in documents:
        made.add_row(
            *(
                printable(_curve(document, name) * curves + _cell(document, path))
                for name, path in COLUMNS.items()
            )
        )
    return made


def _curve(document: Mapping[str, Any], name: str) -> str:
    """The curve of the column ``name`` and a space; "" without one."""
    learning = document.get("learning")
    curves = learning.get("curves") if isinstance(learning, Mapping) else None
    values = curves.get(CURVES.get(name)) if isinstance(curves, Mapping) else None
    return f"{sparkline(values[-CURVE:])} " if values else ""


def _print(made: Table) -> None:
    from rich.console import Console

    # A pipe has no width, and nothing may be cut there.
    Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False, markup=False
    ).print(made)


def _cell(document: object, path: tuple[str, ...]) -> str:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    if path == COLUMNS["steps/s"] and isinstance(document, Mapping):
        document = steady_speed(
            *(_numbers(document.get(name)) for name in ("env_steps_per_s", "updates_per_s"))
        )
    if document is None:
        return "-"
    if isinstance(document, float):
        return f"{document:.0f}" if abs(document) >= 1000.0 else f"{document:.4g}"
    return str(document)


def _numbers(found: object) -> dict[str, float]:
    """The numbers in an object of a document, by name."""
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(key): value for key, value in items if isinstance(value, int | float)}


def ask(runs_dir: Path, run: str | None, *, as_json: bool = False) -> str:
    """The diagnosis of ``run``, or of the only one in ``runs_dir``.

    Raises:
        TianflowError: the run does not exist or does not answer.
    """
    document = client.request(client.find(runs_dir, run), "GET", "/diagnosis")
    return json.dumps(document) if as_json else "\n".join(lines(document))


def _commands(run: str, suggested: Mapping[str, float]) -> list[str]:
    """The suggested settings as commands to type: one per section, and those for a new run."""
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
    """Verdict, advice, commands, and the shares of time behind them."""
    stuck = f" ({document['component']})" if document["component"] else ""
    said = [
        f"{document['id']}: {document['verdict']}{stuck} for {document['for_s']:.0f} s",
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
