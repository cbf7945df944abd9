from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blockbuster import BlockingError

from tianflow.rundir.control_file import process_start_time

ROOT = Path(__file__).parent.parent
SKIPS = """
import pytest

def test_skipped():
    pytest.skip("no such part")

@pytest.mark.gpu
def test_gpu():
    pytest.skip("as without a GPU")

@pytest.mark.extra("no_such_package_at_all")
def test_extra():
    assert False

@pytest.mark.extra("pytest")
def test_extra_that_is_there():
    pass

@pytest.mark.xfail
def test_known():
    assert False
"""


MODULE = """
import pytest

pytest.importorskip("no_such_module")
"""


BESIDE = """
import threading

import pytest

meeting = threading.Barrier(3, timeout=20.0)

@pytest.fixture(scope="module")
def thread():
    return threading.current_thread()

def test_before(thread):
    meeting.wait()

@pytest.mark.beside(lanes=2)
@pytest.mark.parametrize("number", [1, 2])
def test_beside(number, thread, tmp_path):
    assert [] == list(tmp_path.iterdir())
    meeting.wait()
    assert threading.current_thread() is not thread

@pytest.mark.beside
def test_fails():
    assert False

@pytest.mark.beside
def test_skips():
    pytest.skip("no such part")

def test_after(thread):
    assert threading.current_thread() is thread
"""


def outcomes(tmp_path: Path, **environment: str) -> str:
    """The last line of a run over a file of skips and a file that is skipped as a whole."""
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    return last_line(tmp_path, **environment)


def last_line(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """The last line of a run over the files in ``tmp_path``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
    ]
    command += ["--continue-on-collection-errors", *arguments, str(tmp_path)]
    known = {name: value for name, value in os.environ.items() if name != "TIANFLOW_REQUIRE_ALL"}
    done = subprocess.run(
        command, cwd=ROOT, env=known | environment, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.e2e
def test_a_skip_is_only_a_skip_on_a_laptop(tmp_path: Path) -> None:
    assert "1 passed, 4 skipped, 1 xfailed" in outcomes(tmp_path)


@pytest.mark.e2e
def test_a_skip_is_a_failure_where_all_is_required(tmp_path: Path) -> None:
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 1 error" in outcomes(
        tmp_path, TIANFLOW_REQUIRE_ALL="1"
    )


@pytest.mark.e2e
def test_marked_tests_run_beside_the_others_of_their_module_and_report_their_own_outcome(
    tmp_path: Path,
) -> None:
    """Three of them wait for each other."""
    (tmp_path / "test_beside.py").write_text(BESIDE)
    plug_in = ("-p", "tests.e2e.conftest")
    assert "1 failed, 4 passed, 1 skipped" in last_line(tmp_path, *plug_in)
    assert "1 passed, 5 deselected" in last_line(tmp_path, *plug_in, "-k", "test_after")
    assert "1 failed, 5 deselected" in last_line(tmp_path, *plug_in, "-k", "test_fails")


async def test_code_that_blocks_the_loop_fails_its_test() -> None:
    with pytest.raises(BlockingError):
        process_start_time(os.getpid())
