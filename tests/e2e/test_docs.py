"""Every page works for who follows it from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import PAGES, Reader
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
    Reader(tmp_path, prepared).follow(page.read_text())


def test_the_page_on_several_machines_works_where_there_is_a_slurm_and_a_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_ray()
    require_slurm()
    (tmp_path / "page").mkdir()
    with slurm(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        Reader(tmp_path / "page").follow(CLUSTER.read_text())
