"""Every page works for who follows it from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import PAGES, Reader

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    if page.stem == "search":
        pytest.importorskip("optuna")
    Reader(tmp_path).follow(page.read_text())
