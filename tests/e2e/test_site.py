"""``make docs`` builds the site: no warning, no address of another machine, and a search."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The command of ``make docs`` in ``root``."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndocs: ")[2].splitlines()[1]
    command = recipe.split()
    assert ["$(BIN)/python", "-m", "mkdocs", "build", "--strict"] == command[:5]
    return subprocess.run(
        [sys.executable, *command[1:], "--site-dir", str(site)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_is_built_without_a_warning_and_needs_no_other_machine(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path / "site")
    assert 0 == done.returncode, done.stderr
    pages = {path.relative_to(tmp_path / "site"): path.read_text()
             for path in (tmp_path / "site").rglob("*.html")}  # fmt: skip
    assert {Path("index.html"), Path("docs/python.html"), Path("docs/api.html")} <= pages.keys()
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
    api = pages[Path("docs/api.html")]
    for name in ("tianflow.start", "tianflow.attach", "tianflow.handle.RunHandle.wait"):
        assert f'id="{name}"' in api
    assert "RunTimeoutError" in api
    loaded = r"""<(?:script|img|iframe)[^>]*src="(https?://[^"]+)|<link[^>]*(?:stylesheet|preconnect)[^>]*href="(https?://[^"]+)|<link[^>]*href="(https?://[^"]+)"[^>]*(?:stylesheet|preconnect)"""
    assert [] == [found for text in pages.values() for found in re.findall(loaded, text)]


def test_each_broken_link_is_named_and_fails(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in ("docs", "deploy", "dashboards", "benchmarks/results"):
        shutil.copytree(ROOT / folder, root / folder)
    for name in ("mkdocs.yml", "LICENSE", "benchmarks/README.md", *map(str, ROOT.glob("*.md"))):
        shutil.copy(
            ROOT / name,
            root / Path(name).relative_to(ROOT) if Path(name).is_absolute() else root / name,
        )
    (root / "tianflow").symlink_to(ROOT / "tianflow")
    readme = root / "README.md"
    broken = "[a](docs/no-such-page.md) and [b](docs/python.md#no-such-heading)"
    readme.write_text(f"{readme.read_text()}\n{broken}\n")
    done = built(root, tmp_path / "site")
    assert 1 == done.returncode
    assert "no-such-page" in done.stderr + done.stdout
    assert "no-such-heading" in done.stderr + done.stdout
    assert "Aborted with 2 warnings" in done.stderr + done.stdout
