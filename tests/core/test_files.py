"""Only regular files are read: a FIFO in the directory of a run would wait for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tianflow.config.loading import CONFIG_FILE, read_revision
from tianflow.core.files import open_regular, read_regular
from tianflow.report import records
from tianflow.report.records import ReportError
from tianflow.rundir import audit_log, history, summary
from tianflow.server.service.run_process import RunFiles


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of a run in which every file is a FIFO."""
    directory = tmp_path / "a"
    directory.mkdir()
    for name in (CONFIG_FILE, audit_log.NAME, history.NAME, summary.SUMMARY):
        os.mkfifo(directory / name)
    return directory


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (summary.read_summary, None),
        (lambda run: read_revision(run / CONFIG_FILE), 0),
        (lambda run: RunFiles(run.parent).settings("a"), None),
        (lambda run: list(RunFiles(run.parent).audit("a")), []),
        (lambda run: records._text(run / CONFIG_FILE), ""),
    ],
    ids=["summary", "revision", "settings", "audit", "report"],
)
def test_a_fifo_in_the_directory_of_a_run_counts_as_a_missing_file(
    run: Path, read: Callable[[Path], object], expected: object
) -> None:
    assert expected == read(run)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "read",
    [
        lambda run: history.read_rows(run / history.NAME),
        lambda run: history.HistoryFile(run / history.NAME).open(),
        lambda run: audit_log.read_page(run / audit_log.NAME),
        lambda run: open_regular(run / CONFIG_FILE),
        lambda run: read_regular(Path("/dev/zero")),
        read_regular,
    ],
    ids=["history", "resumed", "audit", "fifo", "device", "directory"],
)
def test_anything_but_a_regular_file_is_refused_without_waiting(
    run: Path, read: Callable[[Path], object]
) -> None:
    with pytest.raises(OSError, match="not a regular file|Is a directory"):
        read(run)


@pytest.mark.timeout(10)
def test_a_report_on_such_a_directory_is_refused(run: Path) -> None:
    with pytest.raises(ReportError, match="not a regular file"):
        records.read(run)


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert b"text" == read_regular(tmp_path / "link")
