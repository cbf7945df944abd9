"""Tests of the folders of the benchmarks, and of the prose of their modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from benchmarks.lib.machine import ROOT
from tests.documents.test_prose import dialect, long_sentences

BENCHMARKS = ROOT / "benchmarks"


def modules(folder: str) -> list[Path]:
    return sorted(path for path in (BENCHMARKS / folder).glob("*.py") if path.stem != "__init__")


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def imported(path: Path) -> set[str]:
    """Names of the benchmark folders that a module imports from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    return {name.split(".")[1] for name in names if name.startswith("benchmarks.")}


def test_the_readme_has_a_row_for_every_suite_and_every_study() -> None:
    lines = (BENCHMARKS / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `") and "`/`" not in line]
    named = [row[1].strip().strip("`") for row in rows if not row[1].strip().endswith("/`")]
    there = [path.stem for folder in ("suites", "studies") for path in modules(folder)]
    assert sorted(there) == sorted(named)
    assert all(row[4].strip() for row in rows if len(row) > 5)


def test_every_suite_makes_a_benchmark_that_the_command_line_names() -> None:
    names = {*command_line.NAMES, *command_line.LONG} - set(command_line.STUDIES)
    assert names == {path.stem for path in modules("suites")}
    assert [] == [path.stem for path in modules("suites") if "make" not in functions(path)]


def test_every_worker_can_be_started() -> None:
    assert [] == [path.stem for path in modules("workers") if "main" not in functions(path)]


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("lib", {"lib"}),
        ("workers", {"lib", "workers"}),
        ("suites", {"lib", "workers", "peers", "suites"}),
    ],
)
def test_a_folder_imports_only_from_the_folders_below_it(folder: str, allowed: set[str]) -> None:
    assert {} == {
        path.stem: extra for path in modules(folder) if (extra := imported(path) - allowed)
    }


def test_the_top_level_of_the_benchmarks_holds_no_benchmark() -> None:
    assert ["__init__.py", "__main__.py"] == sorted(path.name for path in BENCHMARKS.glob("*.py"))


def docstrings(path: Path) -> list[str]:
    """Strings that stand alone: docstrings of modules, classes, functions and constants."""
    return [
        node.value.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize(
    "path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: str(path.relative_to(BENCHMARKS))
)
def test_docstrings_use_plain_words_and_short_sentences(path: Path) -> None:
    found = [dialect(text) + long_sentences(text) for text in docstrings(path)]
    assert [] == [problems for problems in found if problems]
