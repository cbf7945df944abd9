"""The recipe for a launcher: one file and one entry point. The file is that of its page, which runs
the shipped suite on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tests.support.pages import DOCS, blocks

PAGE = (DOCS / "own-launcher.md").read_text(encoding="utf-8")
(LAUNCHER,) = (block.text for block in blocks(PAGE) if block.name == "subprocesses.py")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def installed(user_package: UserPackage) -> UserPackage:
    user_package.write("subprocesses", LAUNCHER)
    user_package.entry_point(
        "tianflow.launchers", "subprocesses", "subprocesses:SubprocessLauncher"
    )
    return user_package


def test_an_installed_launcher_starts_every_host_of_a_run(
    installed: UserPackage, tmp_path: Path
) -> None:
    finished = train(
        tmp_path,
        actors={"hosts": 2, "count": 2},
        placement={"launcher": "subprocesses", "affinity": "none"},
    )
    assert UPDATES == finished.summary["updates"]
    assert finished.summary["evaluation"]["episodes"] > 0
