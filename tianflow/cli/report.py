"""``tianflow report``: finds a run, reads what it left, and writes its page."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import RUNS, RunsDir, complete_kept, exit_codes

if TYPE_CHECKING:
    import datetime as dt

NAME = "report.html"


def write_report(directory: Path, output: Path, *, now: dt.datetime) -> None:
    """Write the page of the run in ``directory``, whole or not at all.

    Raises:
        ReportError: its history cannot be read, or ``output`` not be written.
    """
    from tianflow.report.page import page
    from tianflow.report.records import ReportError, read

    text = page(read(directory), now=now)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ReportError(f"the report cannot be written: {error}") from None


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run, by name or directory; it may be going on.",
            autocompletion=complete_kept,
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to; report.html in the run's directory."),
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write one page about RUN: curves, changes, settings.

    It needs no network.
    """
    import datetime as dt

    from tianflow.report.records import find

    with exit_codes():
        directory = find(run, runs_dir)
        path = directory / NAME if output is None else output
        write_report(directory, path, now=dt.datetime.now(dt.UTC))
    typer.echo(str(path))
