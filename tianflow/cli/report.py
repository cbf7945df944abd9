"""``tianflow report``: writes the report page of a run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tianflow.cli.common import RUNS, RunsDir, complete_any_run, echo, exit_codes

if TYPE_CHECKING:
    import datetime as dt

NAME = "report.html"


def write_report(directory: Path, output: Path, *, now: dt.datetime) -> None:
    """Write the report of the run in ``directory``, whole or not at all.

    Raises:
        ReportError: the history cannot be read, or ``output`` cannot be written.
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
            help="Run: name or directory, active or finished.",
            autocompletion=complete_any_run,
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output file; default: report.html of the run."),
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write a report of RUN: curves, changes and settings.

    The report is one HTML file and needs no network.
    """
    import datetime as dt

    from tianflow.report.records import find

    with exit_codes():
        directory = find(run, runs_dir)
        path = directory / NAME if output is None else output
        write_report(directory, path, now=dt.datetime.now(dt.UTC))
    echo(str(path))
