"""`RunStore`: records of all runs in one SQLite file with a write-ahead log."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.errors import TianflowError

NAME = "runs.sqlite"
STATES = ("pending", "running", "done", "failed", "stopped")
ENDED = ("done", "failed", "stopped")
FORMAT = 1
"""``user_version`` of the database that is written, and the only one that is read."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    config TEXT NOT NULL,
    source TEXT NOT NULL,
    key TEXT UNIQUE,
    body TEXT,
    submitted REAL NOT NULL,
    started REAL,
    ended REAL,
    reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS by_state ON runs (state);
CREATE TABLE IF NOT EXISTS deletions (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    time REAL NOT NULL
);
"""
REFUSALS = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors of SQLite; a damaged file also gives invalid texts."""
BUSY_S = 1.0
"""Seconds to wait for another process that has locked the database."""
COLUMNS = "number, id, state, config, source, submitted, started, ended, reason"


class StoreError(TianflowError):
    """The store cannot be read or written."""


class TakenError(TianflowError):
    """A run of this name exists."""


class ReusedKeyError(TianflowError):
    """The idempotency key was used for another request."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run in the store.

    Attributes:
        number: rises with each submission.
        state: pending, running, done, failed or stopped. Running: the run is to continue, whether
            or not its process exists at the moment.
        config: every setting, as JSON.
        source: of the submission.
        submitted, started, ended: seconds since 1970.
        reason: why it ended, or ``""``.
    """

    number: int
    id: str
    state: str
    config: str
    source: str
    submitted: float
    started: float | None
    ended: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class DeletionRecord:
    """The newest deletion of a run.

    Attributes:
        id: of the run.
        source: of the request.
        time: seconds since 1970.
    """

    id: str
    source: str
    time: float


class RunStore:
    """Records of all runs. Every method waits for the disk; call them from one thread that may
    block.

    Args:
        path: of the database; created if it is missing.

    Raises:
        StoreError: the database cannot be opened, or another version of tianflow wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            try:
                self._prepare()
                self._file = path.stat()
            except BaseException:
                self._connection.close()
                raise
        except OSError as error:
            raise StoreError(f"{str(path)!r} cannot be used: {error.strerror}") from error
        except REFUSALS as error:
            raise StoreError(f"{str(path)!r} cannot be used: {error}") from error

    def _prepare(self) -> None:
        """Check the file, which a refusal leaves as it was, and then make it ready."""
        path = str(self._path)
        # a damaged text affects its own run only; the others stay readable
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StoreError(f"{path!r} is damaged: {found}")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise StoreError(
                f"{path!r} has format {version}; accepted: {FORMAT}; use the version of tianflow "
                "that wrote it"
            )
        self._connection.execute("PRAGMA journal_mode = WAL")
        # an accepted run survives a power cut
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(SCHEMA)
        self._connection.execute(f"PRAGMA user_version = {FORMAT}")

    def add(
        self,
        name: str,
        *,
        config: dict[str, Any],
        source: str,
        now: float,
        key: str | None = None,
        body: str | None = None,
    ) -> tuple[RunRecord, bool]:
        """Add a pending run, and return its record and True. If ``key`` was used before with the
        same ``body``, return that run and False.

        Raises:
            TakenError: a run of this name exists.
            ReusedKeyError: the key was used with another body.
        """
        if key is not None and (known := self.by_key(key)) is not None:
            if self._execute("SELECT body FROM runs WHERE key = ?", key) != [(body,)]:
                raise ReusedKeyError(
                    f"the idempotency key {key!r} was used for another request; use a new key"
                )
            return known, False
        if self.get(name) is not None:
            raise TakenError(f"run {name!r} exists already; choose another run.name")
        self._execute(
            "INSERT INTO runs (id, state, config, source, key, body, submitted) VALUES (?, "
            "'pending', ?, ?, ?, ?, ?)",
            *(name, json.dumps(config), source, key, body, now),
        )
        record = self.get(name)
        assert record is not None
        return record, True

    def get(self, name: str) -> RunRecord | None:
        """The run called ``name``; None if it does not exist."""
        return self._one("id = ?", name)

    def by_key(self, key: str) -> RunRecord | None:
        """The run that was submitted with an idempotency key; None if the key is new."""
        return self._one("key = ?", key)

    def names(self) -> frozenset[str]:
        """Names of all runs."""
        return frozenset(name for (name,) in self._execute("SELECT id FROM runs"))

    def startable(self, most: int) -> Sequence[RunRecord]:
        """The first ``most`` runs to start: running ones, then pending ones, each in order of
        submission.
        """
        found = (
            self._records(f"state = '{state}' ORDER BY number LIMIT ?", most)
            for state in ("running", "pending")
        )
        return [record for records in found for record in records][:most]

    def page(self, *, before: int | None, limit: int) -> Sequence[RunRecord]:
        """At most ``limit`` runs, newest first, with numbers below ``before``."""
        return self._records(
            "number < ? ORDER BY number DESC LIMIT ?", 2**62 if before is None else before, limit
        )

    def counts(self) -> dict[str, int]:
        """Number of runs by state."""
        return dict(self._execute("SELECT state, COUNT(*) FROM runs GROUP BY state"))

    def begin(self, name: str, *, now: float) -> bool:
        """Mark a run as running, with ``now`` as its first start. False, without a change, if it
        has ended meanwhile.
        """
        changed = self._execute(
            "UPDATE runs SET state = 'running', started = COALESCE(started, ?)"
            " WHERE id = ? AND state IN ('pending', 'running') RETURNING id",
            *(now, name),
        )
        return bool(changed)

    def queue(self, name: str) -> None:
        """Mark an ended run as pending."""
        self._execute(
            "UPDATE runs SET state = 'pending', ended = NULL, reason = '' WHERE id = ?", name
        )

    def end(self, name: str, *, state: str, reason: str, now: float) -> None:
        """Mark a run as ended."""
        self._execute(
            "UPDATE runs SET state = ?, reason = ?, ended = ? WHERE id = ?",
            state,
            reason,
            now,
            name,
        )

    def delete(self, name: str, *, source: str, now: float) -> bool:
        """Delete an ended run, and record its deletion. False, without a change, if the run does
        not exist or has not ended.
        """
        self._execute("BEGIN IMMEDIATE")
        try:
            deleted = self._execute(
                f"DELETE FROM runs WHERE id = ? AND state IN {ENDED} RETURNING id",  # noqa: S608 - our own texts
                name,
            )
            if deleted:
                self._execute(
                    "INSERT OR REPLACE INTO deletions (id, source, time) VALUES (?, ?, ?)",
                    *(name, source, now),
                )
            self._execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        return bool(deleted)

    def deletion(self, name: str) -> DeletionRecord | None:
        """The newest deletion of a run of this name; None if none was deleted."""
        found = self._execute("SELECT id, source, time FROM deletions WHERE id = ?", name)
        return DeletionRecord(*found[0]) if found else None

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _one(self, condition: str, *values: object) -> RunRecord | None:
        return next(iter(self._records(condition, *values)), None)

    def _records(self, condition: str, *values: object) -> list[RunRecord]:
        rows = self._execute(f"SELECT {COLUMNS} FROM runs WHERE {condition}", *values)  # noqa: S608 - our own texts
        return [RunRecord(*row) for row in rows]

    def _require_file(self) -> None:
        """Raise StoreError if the file was deleted or replaced: SQLite would go on in a file that
        the next service does not find.
        """
        try:
            same = os.path.samestat(self._path.stat(), self._file)
        except OSError:
            same = False
        if not same:
            raise StoreError(
                f"{str(self._path)!r} was deleted or replaced; restore it, then restart the service"
            )

    def _execute(self, statement: str, *values: object) -> list[Any]:
        self._require_file()
        try:
            return self._connection.execute(statement, values).fetchall()
        except REFUSALS as error:
            raise StoreError(f"the store of runs cannot be read or written: {error}") from error
