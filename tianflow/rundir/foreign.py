"""`ForeignRun`: the directory of a run that another program made, read with limits.

Its files may hold anything. Links are not followed, so nothing outside of the directory is read.
Sizes are bounded, settings import nothing, and values that are not those of the models are omitted.
Texts stay texts of others: a page or a terminal escapes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tianflow.config.loading import CONFIG_FILE
from tianflow.config.model import Config
from tianflow.core.files import open_regular, opened_directory, read_regular
from tianflow.rundir import audit_log, history
from tianflow.rundir.audit_log import AuditPage
from tianflow.rundir.control_file import MACHINE, ControlFile, ProcessIdentity
from tianflow.rundir.history import HistoryRow, Row, is_number, parse_rows
from tianflow.rundir.manifest import LARGEST
from tianflow.rundir.summary import SUMMARY, RunSummary

LARGEST_HISTORY = 32 * 2**20
"""Bytes of a history: 2,000 lines with 64 statistics and all marks have fewer."""
LARGEST_SUMMARY = 2**20
LARGEST_SETTINGS = 256 * 2**10
END = 64 * 2**10
"""Bytes at each end of a history that a list of runs reads."""
LONGEST_TEXT = 4096
LONGEST_NAME = 128
MOST_ENTRIES = 1024
"""Entries of a table or list, at most."""
DEEPEST = 8
"""Levels of tables and lists, at most."""
RECORD = ("time", "source", "action", "old", "new")
"""Fields of a record of the audit log."""
NAMES = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Names of runs, as in ``run.name``."""
ENDED = ("done", "failed", "stopped")
RECENT_S = 30.0
"""A run of another machine is active if its last line is not older than this and three spans."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


NUMBERS = ("t", "version", "mean_return", "episodes", "generation", "updates")
MARK: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(NUMBERS, is_number),
    **dict.fromkeys(("kind", "name", "action"), _is_text),
    "paths": _are_texts,
}
"""Fields of a mark that are shown, and what they may be."""


@dataclass(frozen=True, slots=True)
class Extent:
    """First and last line of a history; {} without one."""

    first: Row
    last: Row


class ForeignRun:
    """A run in the directory ``path``. Every method waits for the disk.

    Methods return nothing (None, or an empty value) where a file is missing, refused or damaged.

    Args:
        path: of the directory. It may not be a link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Changes when a file that a list of runs shows has changed."""
        found: list[Any] = []
        for name in (CONFIG_FILE, SUMMARY, history.NAME, "control.json"):
            try:
                state = (self.path / name).lstat()
            except OSError:
                found.append(None)
            else:
                found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        return tuple(found)

    def settings(self) -> dict[str, dict[str, Any]] | None:
        """The settings in force, by section; None if they cannot be read. Nothing is imported or
        checked.
        """
        data = self._read(CONFIG_FILE, LARGEST_SETTINGS)
        try:
            tables = tomllib.loads((data or b"").decode("utf-8"))
        except (ValueError, RecursionError):
            return None
        if data is None:
            return None
        return {
            section: bounded(values)
            for section, values in tables.items()
            if section in Config.model_fields and isinstance(values, dict)
        }

    def summary(self) -> dict[str, Any] | None:
        """The summary, without fields that are not those of `RunSummary`; None if there is none."""
        data = self._read(SUMMARY, LARGEST_SUMMARY)
        if data is None:
            return None
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        wrong: set[object] = set()
        try:
            _summaries().validate_json(data, strict=True)
        except ValidationError as error:
            problems = [problem for problem in error.errors() if problem["type"] != "missing"]
            if not all(problem["loc"] for problem in problems):
                return None
            wrong = {problem["loc"][0] for problem in problems}
        names = {field.name for field in fields(RunSummary)} - wrong
        return {name: bounded(value) for name, value in found.items() if name in names}

    def ended(self) -> float | None:
        """Unix time of the summary; None without one."""
        with suppress(OSError):
            return (self.path / SUMMARY).lstat().st_mtime
        return None

    def rows(self) -> list[Row]:
        """The history, oldest first."""
        data = self._read(history.NAME, LARGEST_HISTORY)
        return [] if data is None else [_row(row) for row in parse_rows(data)]

    def extent(self) -> Extent:
        """The ends of the history, without reading the rest."""
        try:
            with (
                opened_directory(self.path) as here,
                open_regular(here / history.NAME, follow=False) as file,
            ):
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                first = file.read(END)
                file.seek(max(0, size - END))
                last = file.read(END)
        except OSError:
            return Extent({}, {})
        # the last line of the beginning, and the first one of the end, may be cut
        before, after = first.splitlines()[:1], last.splitlines()[-2:]
        begun, now = parse_rows(b"\n".join(before)), parse_rows(b"\n".join(after))
        return Extent(_row(begun[0]) if begun else {}, _row(now[-1]) if now else {})

    def audit(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of the audit log (`tianflow.rundir.audit_log.read_page`)."""
        try:
            with opened_directory(self.path) as here:
                page = audit_log.read_page(
                    here / audit_log.NAME, before=before, limit=limit, follow=False
                )
        except OSError:
            return AuditPage((), None)
        records = [record for record in map(_record, page.records) if record is not None]
        return AuditPage(records, page.next)

    def contact(self) -> ControlFile | None:
        """Its control file, of which only address and process may be used: not the tokens."""
        try:
            with opened_directory(self.path) as here:
                return ControlFile.read(here)
        except OSError:
            return None

    def is_active(self, contact: ControlFile, last: Row, now: float) -> bool:
        """Whether the run of ``contact`` is active: by its process on this machine, else by the age
        of its last line at the Unix time ``now``. No address of the file is called.
        """
        if contact.machine == MACHINE:
            return ProcessIdentity(contact.pid, contact.start_time).alive
        time, span = last.get("time"), last.get("span_s")
        if not is_number(time):
            return False
        return now - float(time) <= RECENT_S + 3.0 * float(span or 0.0)  # type: ignore[arg-type]  # a number

    def _read(self, name: str, most: int) -> bytes | None:
        try:
            with opened_directory(self.path) as here:
                return read_regular(here / name, follow=False, most=most)
        except OSError:
            return None


def bounded(value: object, deepest: int = DEEPEST) -> Any:
    """``value`` as JSON, with short texts, few entries, few levels, and numbers that every reader
    holds. Other entries are omitted; another value itself is None.
    """
    found = list(_bounded(value, deepest))
    return found[0] if found else None


def _bounded(value: object, deepest: int) -> Iterable[Any]:
    """The bounded value, or nothing."""
    if value is None or isinstance(value, bool):
        yield value
    elif isinstance(value, str):
        yield value[:LONGEST_TEXT]
    elif isinstance(value, int):
        if abs(value) <= LARGEST:
            yield value
    elif isinstance(value, float):
        if math.isfinite(value):
            yield value
    elif isinstance(value, Mapping):
        if deepest:
            yield {
                key: inner
                for key, item in list(value.items())[:MOST_ENTRIES]
                if isinstance(key, str) and len(key) <= LONGEST_NAME
                for inner in _bounded(item, deepest - 1)
            }
    elif isinstance(value, list | tuple):
        if deepest:
            yield [inner for item in value[:MOST_ENTRIES] for inner in _bounded(item, deepest - 1)]
    else:  # a date of TOML
        yield str(value)[:LONGEST_TEXT]


def _row(row: Row) -> Row:
    """A line of a history with the fields of `HistoryRow`, within bounds."""
    names = {field.name for field in fields(HistoryRow)}
    found: Row = bounded({name: value for name, value in row.items() if name in names})
    if "marks" in found:
        found["marks"] = [mark for mark in map(_mark, found["marks"]) if mark is not None]
    return found


def _mark(mark: Mapping[str, Any]) -> dict[str, Any] | None:
    """A mark with a time and a kind, and those of its other fields that have their type."""
    found = {name: value for name, value in mark.items() if name in MARK and MARK[name](value)}
    return found if {"t", "kind"} <= set(found) else None


def _record(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """A record of an audit log with the fields that every record has."""
    if not all(isinstance(record.get(name), str) for name in ("time", "source", "action")):
        return None
    found: dict[str, Any] = bounded({name: record[name] for name in RECORD if name in record})
    return found


@cache
def _summaries() -> TypeAdapter[RunSummary]:
    return TypeAdapter(RunSummary)


def names_of_runs(runs: Path) -> Sequence[str]:
    """Names of the runs in the directory ``runs``, the newest first."""
    found = []
    with suppress(OSError), os.scandir(runs) as entries:
        for entry in entries:
            began = _began(runs, entry.name)
            if began is not None:
                found.append((-began, entry.name))
    return [name for _, name in sorted(found)]


def is_run(runs: Path, name: str) -> bool:
    """True if ``name`` is that of a run in the directory ``runs``: a directory, not a link, with
    settings and a valid name.
    """
    return _began(runs, name) is not None


def _began(runs: Path, name: str) -> float | None:
    """Unix time of the settings of a run; None if ``name`` is not that of one."""
    if not NAMES.fullmatch(name):
        return None
    try:
        if not stat.S_ISDIR((runs / name).lstat().st_mode):
            return None
        return (runs / name / CONFIG_FILE).lstat().st_mtime
    except OSError:
        return None
