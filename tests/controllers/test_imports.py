"""A balance controller imports only events, directives and pure helpers.

A controller without clock, files, network or randomness is a pure state machine: the same events
give the same directives.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "controllers" / "tianflow_controllers"
MODULES = sorted(FOLDER.glob("*.py"))
ALLOWED = frozenset(
    {
        "__future__",
        "collections.abc",
        "dataclasses",
        "math",
        "typing",
        "tianflow.core.directives",
        "tianflow.core.events",
        "tianflow.core.payloads",
        "tianflow.errors",
        "tianflow.interfaces",
        "tianflow_controllers._limits",
    }
)


def forbidden(source: str) -> list[str]:
    """Imports of ``source`` that are not allowed, in functions and conditions, too."""
    return [name for name in _imports(ast.parse(source)) if name not in ALLOWED]


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from package import module` imports the module, so its own name must be allowed
            yield from (
                module if module in ALLOWED else f"{module}.{alias.name}" for alias in node.names
            )
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield node.id


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_controller_imports_only_what_is_allowed(path: Path) -> None:
    assert [] == forbidden(path.read_text())


def test_every_controller_is_checked() -> None:
    names = {path.stem for path in MODULES}
    assert {"consume_only", "freshest", "lockstep", "open_loop", "sample_ratio"} < names
    assert {"staleness", "_limits"} < names


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import time", "time"),
        ("import math, random", "random"),
        ("from time import monotonic", "time.monotonic"),
        ("import tianflow.ledger.ledger", "tianflow.ledger.ledger"),
        ("from tianflow.core import statistics", "tianflow.core.statistics"),
        ("from tianflow_controllers import freshest", "tianflow_controllers.freshest"),
        ("from . import freshest", "..freshest"),
        ("def handle(event):\n    import os", "os"),
        ("if TYPE_CHECKING:\n    from numpy import ndarray", "numpy.ndarray"),
        ("clock = __import__('time').monotonic", "__import__"),
    ],
)
def test_the_check_finds_a_forbidden_import(line: str, found: str) -> None:
    source = (FOLDER / "staleness.py").read_text()
    assert [found] == forbidden(f"{source}\n{line}\n")


@pytest.mark.parametrize(
    "line", ["from tianflow.core import events", "import dataclasses", "from math import ceil"]
)
def test_the_check_accepts_allowed_imports_in_any_form(line: str) -> None:
    assert [] == forbidden(line)
