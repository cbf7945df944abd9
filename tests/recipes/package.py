"""A user's package outside the repository: one module and its entry points."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from types import ModuleType

from tianflow import plugins


class UserPackage:
    """An installed package of one module: ``NAME.py`` and the metadata of its distribution.

    Args:
        folder: the package's folder, which is on the import path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def write(self, name: str, text: str) -> Path:
        """Write the module ``name``."""
        self.modules.append(name)
        path = self.folder / f"{name}.py"
        path.write_text(textwrap.dedent(text).lstrip(), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def entry_point(self, group: str, name: str, target: str) -> None:
        """Add an entry point to the metadata that ``pip install`` makes."""
        metadata = self.folder / "user_package-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: user-package\nVersion: 1.0\n", encoding="utf-8"
        )
        with (metadata / "entry_points.txt").open("a", encoding="utf-8") as file:
            file.write(f"[{group}]\n{name} = {target}\n")
        forget_entry_points()

    def load(self, name: str) -> ModuleType:
        """Import the module ``name``."""
        return importlib.import_module(name)


def forget_entry_points() -> None:
    """Forget the entry points that this process has read. A user's process starts after the
    installation.
    """
    plugins._installed.cache_clear()
