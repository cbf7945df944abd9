"""The audit is read a page at a time from its end, whatever its lines are like, and without ever
holding much of it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.refusing import full_disk
from tests.support.settings import cartpole
from tianflow.config.loading import read_revision
from tianflow.rundir import audit_log as audit
from tianflow.rundir.audit_log import AuditLog, AuditPage, read_page


def written(path: Path, count: int, *, length: int = 0) -> list[dict[str, object]]:
    records: list[dict[str, object]] = [
        {"number": number, "text": "x" * length} for number in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def pages(path: Path, limit: int) -> list[AuditPage]:
    found = [read_page(path, limit=limit)]
    while found[-1].next is not None:
        found.append(read_page(path, before=found[-1].next, limit=limit))
    return found


@given(count=st.integers(0, 30), limit=st.integers(1, 12), block=st.integers(1, 200))
def test_all_records_are_in_exactly_one_page_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, limit: int, block: int
) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    records = written(path, count, length=count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "BLOCK", block)
        found = pages(path, limit)
    assert records == [record for page in reversed(found) for record in page.records]
    assert all(len(page.records) == limit for page in found[:-1])
    assert len(found) == max(1, -(-count // limit))


def test_a_torn_line_and_one_that_is_no_record_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": 1}\n{"torn\n[]\n\n{"a": 2}\n{"tor')
    assert AuditPage([{"a": 1}, {"a": 2}], None) == read_page(tmp_path / "a")


def test_a_place_amid_a_line_is_that_of_the_lines_before(tmp_path: Path) -> None:
    records = written(tmp_path / "a", 3)
    (page,) = pages(tmp_path / "a", 10)
    assert records == list(page.records)
    size = (tmp_path / "a").stat().st_size
    assert records[:2] == list(read_page(tmp_path / "a", before=size - 3).records)
    assert records == list(read_page(tmp_path / "a", before=2**62).records)
    assert [] == list(read_page(tmp_path / "a", before=0).records)


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert AuditPage((), None) == read_page(tmp_path / "none")


def test_a_page_of_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    records = written(tmp_path / "a", 60_000, length=200)  # 14 MB
    tracemalloc.start()
    try:
        page = read_page(tmp_path / "a", limit=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert records[-10:] == list(page.records)
    assert peak < 1_000_000


def test_a_line_without_end_is_passed_over_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LONGEST", 1000)
    monkeypatch.setattr(audit, "BLOCK", 100)
    (tmp_path / "a").write_text('{"a": 1}\n' + "x" * 5000)
    assert [{"a": 1}] == [record for page in pages(tmp_path / "a", 10) for record in page.records]


async def test_what_was_recorded_before_is_read_and_an_earlier_process_is_not_forgotten(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(1) as executor:
        earlier = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        earlier.add("cli", "pause")
        later = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        for _ in range(20):
            later.add("cli", "resume")
        page = await later.read(before=None, limit=21)
    assert ["pause", *["resume"] * 20] == [record["action"] for record in page.records]


async def test_where_the_file_cannot_be_read_what_is_in_memory_is_told(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with ThreadPoolExecutor(1) as executor:
        journal = AuditLog(path=tmp_path / "audit.jsonl", executor=executor)
        journal.add("cli", "pause")
        journal.add("cli", "stop")
        page = await journal.read(before=None, limit=1)
    assert (["stop"], None) == ([record["action"] for record in page.records], page.next)


# Settings and audit together
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AuditLog]:
    with ThreadPoolExecutor(1) as executor:
        yield AuditLog(path=tmp_path / "audit.jsonl", executor=executor)


async def on_disk(folder: Path) -> tuple[int, list[object]]:
    """The revision of the settings, and the actions of the audit."""
    page = await asyncio.to_thread(read_page, folder / "audit.jsonl")
    revision = await asyncio.to_thread(read_revision, folder / "config.toml")
    return revision, [record["action"] for record in page.records]


@pytest.mark.parametrize("refused", ["write", "replace"])
async def test_neither_settings_nor_record_count_while_the_disk_refuses_one(
    tmp_path: Path, log: AuditLog, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    config = await asyncio.to_thread(cartpole)  # it may read the installed entry points
    log.add("test", "change", settings=(config, 1))
    await log.flush()
    assert (1, ["change"]) == await on_disk(tmp_path)
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(*((os, "write") if refused == "write" else (Path, "replace")), full)
        log.add("test", "change", settings=(config, 2))
        log.add("test", "stop")
        await log.flush()
    assert ((1, ["change"]), 3) == (await on_disk(tmp_path), log.pending)
    await log.flush()
    assert ((2, ["change", "change", "stop"]), 0) == (await on_disk(tmp_path), log.pending)


async def test_a_record_that_is_half_written_is_taken_back(
    tmp_path: Path, log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:15])

    log.add("test", "pause")
    await log.flush()
    path = tmp_path / "audit.jsonl"
    before = await asyncio.to_thread(path.read_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        log.add("test", "resume")
        await log.flush()
    assert (before, 1) == (await asyncio.to_thread(path.read_bytes), log.pending)


async def test_a_line_that_a_crash_tore_does_not_spoil_the_next(
    tmp_path: Path, log: AuditLog
) -> None:
    torn = b'{"action": "first"}\n{"act'
    await asyncio.to_thread((tmp_path / "audit.jsonl").write_bytes, torn)
    log.add("test", "stop")
    await log.flush()
    assert (0, ["first", "stop"]) == await on_disk(tmp_path)


async def test_a_disk_that_stays_full_does_not_fill_the_memory(
    tmp_path: Path, log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MOST_PENDING", 3)
    with full_disk():
        for number in range(5):
            log.add("test", f"action {number}")
        await log.flush()
    assert 5 == log.pending
    await log.flush()
    assert (0, ["dropped", "action 2", "action 3", "action 4"]) == await on_disk(tmp_path)
    page = await asyncio.to_thread(read_page, tmp_path / "audit.jsonl")
    assert 2 == page.records[0]["records"]


@pytest.mark.parametrize(
    ("line", "revision"),
    [
        ("# revision 12", 12),
        ("# revision x", 0),
        ("[env]", 0),
        ("", 0),
        ("# revision " + "9" * 50, 0),
    ],
)
def test_a_revision_is_read_from_the_first_line(tmp_path: Path, line: str, revision: int) -> None:
    (tmp_path / "config.toml").write_text(f"{line}\n[run]\n")
    assert revision == read_revision(tmp_path / "config.toml")
