"""``audit.jsonl``, a page at a time, newest page first: it may have grown for weeks, and is never
read as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "audit.jsonl"
MOST = 1000
"""Records of one page."""
BLOCK = 64 * 1024
LONGEST = 4 * 2**20
"""Bytes of one page, whatever its records are like."""


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
