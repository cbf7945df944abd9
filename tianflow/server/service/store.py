"""What a service remembers of its runs: one SQLite file in the directory of the runs, written ahead
(WAL), whole at every moment.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.errors import TianflowError

NAME = "runs.sqlite"
STATES = ("pending", "running", "done", "failed", "stopped")
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
"""
REFUSALS = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""What comes out of SQLite: of a file whose bits have changed, texts that are none."""
COLUMNS = "number, id, state, config, source, submitted, started, ended, reason"


class StoreError(TianflowError):
    """The store cannot be read or written."""


class TakenError(TianflowError):
    """There is a run of that name already."""


class ReusedKeyError(TianflowError):
    """The idempotency key was used before, for something else."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as the service remembers it.

    Attributes:
        number: rises with each submission.
        state: pending, running, done, failed or stopped. Running: the service wants it to go on,
            whether or not it does at the moment.
        config: every setting, as JSON.
        source: who submitted it.
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


class RunStore:
    """The records of all runs. Every method waits for the disk: call it from one thread that may.

    Args:
        path: the database; it is made when it is not there.

    Raises:
        StoreError: it cannot be opened, or another version of tianflow wrote it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            # what is no text any more concerns its own run, and keeps no other from being read
            self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
            self._connection.execute("PRAGMA journal_mode = WAL")
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise StoreError(f"{str(path)!r} is damaged: {found}")
            self._connection.execute(
                "PRAGMA synchronous = FULL"
            )  # a run that was accepted is there after a power cut
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise StoreError(
                    f"{str(path)!r} has format {version}, and this version of tianflow reads "
                    f"format {FORMAT} only"
                )
            self._connection.executescript(SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")
        except REFUSALS as error:
            raise StoreError(f"{str(path)!r} cannot be used: {error}") from error

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
        """A new pending run, and True; or, where ``key`` was used before for the same ``body``, the
        run of that time, and False.

        Raises:
            TakenError: another run has this name.
            ReusedKeyError: the key came with another body.
        """
        if key is not None and (known := self._one("key = ?", key)) is not None:
            if self._execute("SELECT body FROM runs WHERE key = ?", key) != [(body,)]:
                raise ReusedKeyError(
                    f"the idempotency key {key!r} was used before, to submit something else"
                )
            return known, False
        if self.get(name) is not None:
            raise TakenError(f"there is a run {name!r} already; choose another run.name")
        self._execute(
            "INSERT INTO runs (id, state, config, source, key, body, submitted) VALUES (?, "
            "'pending', ?, ?, ?, ?, ?)",
            *(name, json.dumps(config), source, key, body, now),
        )
        record = self.get(name)
        assert record is not None
        return record, True

    def get(self, name: str) -> RunRecord | None:
        """The run called ``name``; None if there is none."""
        return self._one("id = ?", name)

    def startable(self, most: int) -> Sequence[RunRecord]:
        """The first ``most`` of those that go on or wait: first what was running, then what waits,
        each in the order of their coming.
        """
        found = (
            self._records(f"state = '{state}' ORDER BY number LIMIT ?", most)
            for state in ("running", "pending")
        )
        return [record for records in found for record in records][:most]

    def page(self, *, before: int | None, limit: int) -> Sequence[RunRecord]:
        """At most ``limit`` runs, newest first, from those that came before number ``before``."""
        return self._records(
            "number < ? ORDER BY number DESC LIMIT ?", 2**62 if before is None else before, limit
        )

    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        return dict(self._execute("SELECT state, COUNT(*) FROM runs GROUP BY state"))

    def begin(self, name: str, *, now: float) -> bool:
        """It is running, from ``now`` on if it never was before; False, and nothing changes, if it
        has ended meanwhile.
        """
        changed = self._execute(
            "UPDATE runs SET state = 'running', started = COALESCE(started, ?)"
            " WHERE id = ? AND state IN ('pending', 'running') RETURNING id",
            *(now, name),
        )
        return bool(changed)

    def queue(self, name: str) -> None:
        """It waits for its turn, as one that has not ended."""
        self._execute(
            "UPDATE runs SET state = 'pending', ended = NULL, reason = '' WHERE id = ?", name
        )

    def end(self, name: str, *, state: str, reason: str, now: float) -> None:
        """It has ended."""
        self._execute(
            "UPDATE runs SET state = ?, reason = ?, ended = ? WHERE id = ?",
            state,
            reason,
            now,
            name,
        )

    def close(self) -> None:
        """Nothing can be asked afterwards."""
        self._connection.close()

    def _one(self, condition: str, *values: object) -> RunRecord | None:
        return next(iter(self._records(condition, *values)), None)

    def _records(self, condition: str, *values: object) -> list[RunRecord]:
        rows = self._execute(f"SELECT {COLUMNS} FROM runs WHERE {condition}", *values)  # noqa: S608 - our own texts
        return [RunRecord(*row) for row in rows]

    def _execute(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except REFUSALS as error:
            raise StoreError(
                f"what is remembered of the runs cannot be read or written: {error}"
            ) from error
