"""A public class name has one owner in tianflow and its controllers."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

SOURCES = (ROOT / "tianflow", ROOT / "controllers")


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below ``node``. No expression holds a class."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from statements(child)


@cache
def public_classes(source: str) -> tuple[str, ...]:
    return tuple(
        node.name
        for node in statements(ast.parse(source))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def owners(modules: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """{public class: modules that define it} for (name, source) of each module."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, source in modules:
        for owned in public_classes(source):
            found[owned].append(name)
    return found


def shared(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    return {name: found for name, found in owners(modules).items() if len(found) > 1}


def read() -> list[tuple[str, str]]:
    files: list[Path] = [path for folder in SOURCES for path in sorted(folder.rglob("*.py"))]
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in files]


def test_no_public_class_name_has_two_owners() -> None:
    assert {} == shared(read())


def test_the_check_reads_every_package() -> None:
    found = owners(read())
    assert ["tianflow/ledger/ledger.py"] == found["Ledger"]
    assert ["controllers/tianflow_controllers/freshest.py"] == found["Freshest"]


def test_the_check_finds_a_second_owner() -> None:
    second = ("tianflow/other.py", "if True:\n    class Ledger:\n        pass\nclass _Private: ...")
    assert {"Ledger": ["tianflow/ledger/ledger.py", "tianflow/other.py"]} == shared(
        [*read(), second]
    )
