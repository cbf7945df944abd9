"""What a run's directory holds, read as it is: a run may go on, may have broken off, or may have
lost a file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow import plugins
from tianflow.errors import TianflowError
from tianflow.observability.run_document import ENDED
from tianflow.rundir.history import LIMIT, NAME, Row, is_number, read_rows, thinned

FILES = (NAME, "summary.json", "audit.jsonl", "config.toml")


class ReportError(TianflowError):
    """There is no such run, or its report cannot be written."""


@dataclass(frozen=True, slots=True)
class Records:
    """A run on disk.

    ``rows``: its history. ``summary``: what it came to; empty while it goes on, or where it never
    ended properly. ``audit``: every change and action. ``config_text``: the settings in force last,
    as TOML; ``config`` is the same read, empty if it cannot be.
    """

    name: str
    rows: tuple[Row, ...]
    summary: Mapping[str, Any]
    audit: tuple[Mapping[str, Any], ...]
    config_text: str
    config: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """True if the run ended, as far as its files say."""
        return bool(self.summary)

    def series(self, *path: str) -> list[float | None]:
        """The number at ``path`` in every row; None where there is none."""
        return [number_at(row, *path) for row in self.rows]

    def marks(self) -> list[Mapping[str, Any]]:
        """What happened, of every row, each with a time."""
        lists = [row["marks"] for row in self.rows if isinstance(row.get("marks"), list)]
        return [
            mark
            for marks in lists
            for mark in marks
            if isinstance(mark, Mapping) and number_at(mark, "t") is not None
        ]


def number_at(row: object, *path: str) -> float | None:
    """The number that lies there."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return float(row) if isinstance(row, int | float) and is_number(row) else None


def find(run: str, runs_dir: Path) -> Path:
    """The directory of ``run``, given by name or directory.

    Raises:
        ReportError: there is none; names what there is.
    """
    for directory in (Path(run), runs_dir / run):
        if run and any((directory / name).is_file() for name in FILES):
            return directory
    known = tuple(
        sorted({path.parent.name for name in FILES for path in runs_dir.glob(f"*/{name}")})
    )
    nearest = plugins.nearest(run, known)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    raise ReportError(
        f"no run {run!r}; runs in {str(runs_dir)!r}: {', '.join(known) or 'none'}{hint}"
    )


def read(directory: Path) -> Records:
    """Everything that can be read there.

    Raises:
        ReportError: the history is there and cannot be read.
    """
    try:
        # A run never writes more lines than these; whoever put runs together may have, and a page
        # is for reading.
        rows = tuple(
            thinned(sorted(read_rows(directory / NAME), key=lambda row: float(row["t"])), LIMIT)
        )
    except OSError as error:
        raise ReportError(f"the history of {directory.name!r} cannot be read: {error}") from None
    summary = _json(_text(directory / "summary.json"))
    if rows and rows[-1].get("state") not in ENDED:
        summary = {}  # it was resumed, and what it came to before is not what it comes to
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
        return path.read_text(encoding="utf-8", errors="replace")
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
