"""`AuditLog`: changes and actions of a run in ``audit.jsonl``. The file is read one page at a time,
newest page first, because it may have grown for weeks.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tianflow.config.loading import write_config
from tianflow.core.files import open_regular
from tianflow.logs import logger

if TYPE_CHECKING:
    from tianflow.config.model import Config

log = logger("audit")

NAME = "audit.jsonl"
MOST = 1000
"""Maximum number of records of a page."""
BLOCK = 64 * 1024
LONGEST = 4 * 2**20
"""Maximum number of bytes read for a page."""

RETRY_S = 1.0
"""Seconds between two attempts to write what is pending."""
MOST_PENDING = 10_000
"""Largest number of records that wait for the disk. The oldest of more are dropped and counted."""

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


def read_page(
    path: Path, *, before: int | None = None, limit: int = MOST, follow: bool = True
) -> AuditPage:
    """Read the newest ``limit`` records, or those before ``before``, the `AuditPage.next` of
    another page. Waits for the disk. A link is refused unless ``follow``.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with open_regular(path, follow=follow) as file:
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
    """The audit log of a run and its settings on disk, which always agree.

    ``executor`` appends every change and action to a file. A change is written together with the
    settings that it makes: neither counts without the other. What the disk refuses stays pending,
    and each later write tries it again. The newest records are in memory, too.

    Args:
        path: of the file.
        executor: does all writing, one call at a time.
    """

    def __init__(self, *, path: Path, executor: Executor) -> None:
        self._path, self._executor = path, executor
        self.records: deque[Mapping[str, object]] = deque(maxlen=RECORDS_IN_MEMORY)
        self.count = 0
        """Number of records of this process, with those that are only in the file."""
        self._newest: Future[None] | None = None
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._settings: tuple[Config, int] | None = None
        self._dropped = 0
        self._refused = False

    @property
    def pending(self) -> int:
        """Records and settings that are not on disk yet."""
        with self._lock:
            return len(self._lines) + self._dropped + (self._settings is not None)

    def add(
        self,
        source: str,
        action: str,
        *,
        settings: tuple[Config, int] | None = None,
        **details: object,
    ) -> None:
        """Record that ``source`` did ``action``, now.

        Args:
            source: of the action.
            action: its name.
            settings: settings in force from now on, and their revision.
            details: more fields of the record.
        """
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "source": source, "action": action, **details}
        self.records.append(record)
        self.count += 1
        with self._lock:
            self._lines.append(json.dumps(record) + "\n")
            if len(self._lines) > MOST_PENDING:  # a disk that stays full must not fill the memory
                del self._lines[0]
                self._dropped += 1
        self.store(settings)

    def store(self, settings: tuple[Config, int] | None = None) -> None:
        """Write what is pending, and ``settings`` with their revision."""
        with self._lock:
            self._settings = settings or self._settings
        self._newest = self._executor.submit(self._write)

    async def retry(self) -> None:
        """Write what is pending again and again, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self.pending and (self._newest is None or self._newest.done()):
                self.store()

    async def flush(self) -> None:
        """Try once more to write what is pending."""
        if self.pending:
            self.store()
        if self._newest is not None:
            await asyncio.shield(asyncio.wrap_future(self._newest))

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

    def _write(self) -> None:
        with self._lock:
            lines, settings, dropped = list(self._lines), self._settings, self._dropped
        if not lines and settings is None and not dropped:
            return
        try:
            self._write_together(lines, settings, dropped)
        except OSError as error:
            if not self._refused:
                log.warning(
                    "settings and audit cannot be written; they are pending and tried again",
                    pending=self.pending,
                    error=str(error),
                )
            self._refused = True
            return
        with self._lock:
            # Lines may have been dropped from the front meanwhile, and are written all the same.
            gone = self._dropped - dropped
            del self._lines[: max(0, len(lines) - gone)]
            self._dropped = max(0, gone - len(lines))
            if self._settings is settings:
                self._settings = None
        if self._refused:
            log.warning("settings and audit are written again")
        self._refused = False

    def _write_together(
        self, lines: Sequence[str], settings: tuple[Config, int] | None, dropped: int
    ) -> None:
        if dropped:
            left_out = {"source": "audit", "action": "dropped", "records": dropped}
            lines = [json.dumps(left_out) + "\n", *lines]
        if settings is None:
            self._append(lines)
            return
        config, revision = settings
        end: int | None = None

        def append() -> None:
            nonlocal end
            end = self._append(lines)

        try:
            write_config(self._path.parent, config, revision=revision, before_it_counts=append)
        except OSError:
            if end is not None:  # the settings did not get their name, so the record is untrue
                os.truncate(self._path, end)
            raise

    def _append(self, lines: Sequence[str]) -> int:
        """Append ``lines``: all of them, or none. The length of the file before. Raises OSError."""
        with self._path.open("ab") as file:
            end = file.tell()
        torn = False
        if end:
            with self._path.open("rb") as file:
                file.seek(end - 1)
                torn = file.read(1) != b"\n"
        data = (("\n" if torn else "") + "".join(lines)).encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        finally:
            os.close(descriptor)
        return end
