"""``audit.jsonl``, a page at a time, newest page first: it may have grown for weeks, and is never
read as a whole.
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
"""Records of one page."""
BLOCK = 64 * 1024
LONGEST = 4 * 2**20
"""Bytes of one page, whatever its records are like."""

KEPT_RECORDS = 1000
"""Number of audit records kept in memory. The file has all of them."""


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Some of the records, oldest first.

    Attributes:
        records: changes and actions; a line that a crash tore is left out.
        next: where the page of those before them ends, or None if there are none.
    """

    records: Sequence[Mapping[str, Any]]
    next: int | None


def read_page(path: Path, *, before: int | None = None, limit: int = MOST) -> AuditPage:
    """The newest ``limit`` records of the file, or, with ``before``, those that a page named by its
    `AuditPage.next`. Waits for the disk.

    Raises:
        OSError: the file is there and cannot be read.
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
    if start and len(lines) == 1:  # no record is so long
        return AuditPage((), start)
    if start:  # the first one began further up
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
    """The audit: every change and action, appended to a file by ``executor``; the newest are kept
    in memory, too.
    """

    def __init__(self, *, path: Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self.records: deque[Mapping[str, object]] = deque(maxlen=KEPT_RECORDS)
        self.count = 0
        """Records of this process, those that are no longer kept included."""
        self._newest: Future[None] | None = None

    def add(self, source: str, action: str, **details: object) -> None:
        """Record that ``source`` did ``action``, now."""
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "source": source, "action": action, **details}
        self.records.append(record)
        self.count += 1
        self._newest = self._executor.submit(self._append, json.dumps(record) + "\n")

    async def read(self, *, before: int | None, limit: int) -> AuditPage:
        """A page of the file, with everything that was recorded before this was asked. Where it
        cannot be read, what is in memory.
        """
        if self._newest is not None:
            await asyncio.shield(
                asyncio.wrap_future(self._newest)
            )  # a reader that gives up would take what waits to be written with it
        try:
            return await asyncio.to_thread(read_page, self._path, before=before, limit=limit)
        except OSError as error:
            log.warning("the audit cannot be read", error=str(error))
            return AuditPage(tuple(self.records)[-limit:], None)

    def _append(self, line: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log.warning(
                "a line of the audit cannot be written", error=str(error), line=line.rstrip()
            )
