"""Every page works for who follows it from top to bottom."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, PageError, Reader
from tests.support.prepared import PreparedProcess
from tests.support.ray_cluster import require_ray
from tests.support.slurm import require_slurm, slurm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
CLUSTER = next(page for page in PAGES if page.stem == "cluster")


@pytest.fixture(scope="module")
def prepared() -> Iterator[PreparedProcess]:
    process = PreparedProcess(Reader.environment())
    yield process
    process.close()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != CLUSTER], ids=lambda page: page.stem
)
def test_a_page_works_from_top_to_bottom(
    page: Path, tmp_path: Path, prepared: PreparedProcess
) -> None:
    if page.stem == "search":
        pytest.importorskip("optuna")
    if page.stem == "http-api" and shutil.which("curl") is None:
        pytest.skip("needs curl")
    Reader(tmp_path, prepared).follow(page.read_text())


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("```console\n$ tianflow config explain nothing\n```", "exit code 2: tianflow config"),
        ("```console\n$ tianflow --version\nasked\n```", "not seen: asked"),
        ("```python\nraise SystemExit(3)\n```", "exit code 3"),
        ("```python\n1 / 0\n```", "exit code 1(.|\n)*ZeroDivisionError"),
    ],
)
def test_a_page_that_fails_names_the_command(
    page: str, sentence: str, tmp_path: Path, prepared: PreparedProcess
) -> None:
    with pytest.raises(PageError, match=sentence):
        Reader(tmp_path, prepared).follow(page)


def test_a_fork_leaves_nothing_to_the_next_command(
    tmp_path: Path, prepared: PreparedProcess
) -> None:
    page = (
        "```python\nimport os, sys\nsys.modules['left'] = sys\nos.chdir('/')\n"
        "os.environ['LEFT'] = '1'\n```\n\n"
        "```python\nimport os, sys\nassert 'left' not in sys.modules\n"
        "assert 'LEFT' not in os.environ\nprint(os.getcwd())\n```\n\n"
        "```console\n$ tianflow config explain nothing 2>&1 || true\n...nothing...\n```\n"
    )
    Reader(tmp_path, prepared).follow(page)


@pytest.mark.beside
def test_the_page_on_several_machines_works_where_there_is_a_slurm_and_a_ray(
    tmp_path: Path,
) -> None:
    require_ray()
    require_slurm()
    (tmp_path / "page").mkdir()
    with slurm(tmp_path / "slurm") as cluster:
        conf = cluster.environment["SLURM_CONF"]
        Reader(tmp_path / "page", SLURM_CONF=conf).follow(CLUSTER.read_text())
