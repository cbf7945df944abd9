"""Fixtures of the recipes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.package import UserPackage, forget_entry_points


@pytest.fixture
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserPackage]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    package = UserPackage(folder)
    yield package
    for name in package.modules:
        sys.modules.pop(name, None)
    forget_entry_points()
