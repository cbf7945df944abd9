"""Records of a run: the files of its directory. The run may be active or interrupted, and files may
be missing.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow import plugins
from tianflow.core.files import read_regular
from tianflow.errors import TianflowError
from tianflow.observability.run_document import ENDED
from tianflow.rundir.history import LIMIT, NAME, Row, is_number, read_rows, thinned

FILES = (NAME, "summary.json", "audit.jsonl", "config.toml")


class ReportError(TianflowError):
    """The run does not exist, or its report cannot be written."""


@dataclass(frozen=True, slots=True)
class Records:
    """A run on disk.

    Attributes:
        name: of its directory.
        rows: its history.
        summary: its summary; empty while it is active, or if it was interrupted.
        audit: every change and action, oldest first.
        config_text: last settings in force, as TOML.
        config: the same, parsed; empty if that fails.
    """

    name: str
    rows: tuple[Row, ...]
    summary: Mapping[str, Any]
    audit: tuple[Mapping[str, Any], ...]
    config_text: str
    config: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """True if its files say that the run ended."""
        return bool(self.summary)

    def series(self, *path: str) -> list[float | None]:
        """The number at ``path`` in every row; None where it is missing."""
        return [number_at(row, *path) for row in self.rows]

    def marks(self) -> list[Mapping[str, Any]]:
        """The marks of all rows that have a time."""
        lists = [row["marks"] for row in self.rows if isinstance(row.get("marks"), list)]
        return [
            mark
            for marks in lists
            for mark in marks
            if isinstance(mark, Mapping) and number_at(mark, "t") is not None
        ]


def number_at(row: object, *path: str) -> float | None:
    """The number at ``path`` in ``row``; None if it is missing or not a number."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return float(row) if isinstance(row, int | float) and is_number(row) else None


def table_at(row: object, *path: str) -> Mapping[str, Any]:
    """The table at ``path`` in ``row``; empty if it is missing or not a table."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row if isinstance(row, Mapping) else {}


def find(run: str, runs_dir: Path) -> Path:
    """The directory of ``run``, given by name or directory.

    Raises:
        ReportError: it does not exist; the message names some that do.
    """
    for directory in (Path(run), runs_dir / run):
        if run and any((directory / name).is_file() for name in FILES):
            return directory
    known = {path.parent.name for name in FILES for path in runs_dir.glob(f"*/{name}")}
    end = plugins.missing(run, known, heading=f"runs in {str(runs_dir)!r}")
    raise ReportError(f"run {run!r} {end}")


def read(directory: Path) -> Records:
    """The records in ``directory``.

    Raises:
        ReportError: the history exists and cannot be read.
    """
    try:
        # A run never writes more lines than this, but a program that joins histories may.
        rows = tuple(
            thinned(sorted(read_rows(directory / NAME), key=lambda row: float(row["t"])), LIMIT)
        )
    except OSError as error:
        raise ReportError(f"the history of {directory.name!r} cannot be read: {error}") from None
    summary = _json(_text(directory / "summary.json"))
    if rows and rows[-1].get("state") not in ENDED:
        summary = {}  # the run was resumed, so its summary is out of date
    audit = [_json(line) for line in _text(directory / "audit.jsonl").splitlines()]
    config_text = _text(directory / "config.toml")
    name = directory.resolve().name
    return Records(
        name,
        rows,
        summary,
        tuple(record for record in audit if record),
        config_text,
        _toml(config_text),
    )


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
