"""`AuditLog`: changes and actions of a run in ``audit.jsonl``. The file is read one page at a time,
newest page first, because it may have grown for weeks.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tianflow.logs import logger

log = logger("audit")

NAME = "audit.jsonl"
MOST = 1000
"""Maximum number of records of a page."""
BLOCK = 64 * 1024
LONGEST = 4 * 2**20
"""Maximum number of bytes read for a page."""

RECORDS_IN_MEMORY = 1000
"""Number of audit records in memory; the file has all of them."""


@dataclass(frozen=True, slots=True)
class AuditPage:
    """A page of records, oldest first.

    Attributes:
        records: changes and actions, without lines torn by a crash.
        next: end of the previous page; None on the first page of the file.
    """

    records: Sequence[Mapping[str, Any]]
    next: int | None


def read_page(path: Path, *, before: int | None = None, limit: int = MOST) -> AuditPage:
    """Read the newest ``limit`` records, or those before ``before``, the `AuditPage.next` of
    another page. Waits for the disk.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            end = end if before is None else min(before, end)
            start, data = end, b""
            while start and data.count(b"\n") <= limit and len(data) < LONGEST:
                size = min(BLOCK, start)
                start -= size
                file.seek(start)
                data = file.read(size) + data
    except FileNotFoundError:
        return AuditPage((), None)
    lines = data.split(b"\n")
    if start and len(lines) == 1:  # records are shorter than this
        return AuditPage((), start)
    if start:  # the first line is incomplete
        start += len(lines[0]) + 1
        lines = lines[1:]
    whole = lines[:-1] if lines and not lines[-1] else lines
    for line in whole[: max(0, len(whole) - limit)]:
        start += len(line) + 1
    found = [record for line in whole[-limit:] if (record := _record(line)) is not None]
    return AuditPage(found, start or None)


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class AuditLog:
    """The audit log of a run. ``executor`` appends each record to the file; the newest stay in
    memory.
    """

    def __init__(self, *, path: Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self.records: deque[Mapping[str, object]] = deque(maxlen=RECORDS_IN_MEMORY)
        self.count = 0
        """Number of records of this process, with those that are only in the file."""
        self._newest: Future[None] | None = None

    def add(self, source: str, action: str, **details: object) -> None:
        """Record that ``source`` did ``action`` now."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "source": source, "action": action, **details}
        self.records.append(record)
        self.count += 1
        self._newest = self._executor.submit(self._append, json.dumps(record) + "\n")

    async def read(self, *, before: int | None, limit: int) -> AuditPage:
        """Read a page of the file with all records so far; if that fails, the records in memory."""
        if self._newest is not None:
            await asyncio.shield(
                asyncio.wrap_future(self._newest)
            )  # a cancelled reader must not cancel the write
        try:
            return await asyncio.to_thread(read_page, self._path, before=before, limit=limit)
        except OSError as error:
            log.warning("the audit log cannot be read", error=str(error))
            return AuditPage(tuple(self.records)[-limit:], None)

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log.warning(
                "a record of the audit log cannot be written", error=str(error), line=line.rstrip()
            )
