"""DESIGN against the code: its floors are those of the import contract, its walks go down, its files
exist. The page of measurements has every result.
"""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise

import pytest

from tests.support.pages import DOCS, ROOT

DESIGN = (ROOT / "DESIGN.md").read_text()
SHORT = re.compile(r"`([a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py)`")
"""A path relative to the package."""
HEADING = re.compile(r"^\*\*(.+)\*\*$")
PROCESS = re.compile(r"^\*(?!\*)(.+)\*$")
STEP = re.compile(r"^\d+\. ")
LONGEST_WALK = 15
"""Lines of steps."""


def contract() -> list[str]:
    """Floors of the import contract, highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    floors: list[str] = next(found["layers"] for found in contracts if found["id"] == "floors")
    return floors


def floor_of(path: str) -> int:
    """Number of the floor of a file, the highest is 0."""
    package = path.partition("/")[0].removesuffix(".py")
    return next(number for number, floor in enumerate(contract()) if package in floor.split(" | "))


def walks(text: str) -> dict[str, dict[str, list[str]]]:
    """Files of the steps, by walk and by process: the first file that each step names."""
    found: dict[str, dict[str, list[str]]] = {}
    steps: list[str] = []
    for line in text.partition("## Flow")[2].partition("\n## ")[0].splitlines():
        if heading := HEADING.match(line):
            processes = found[heading[1]] = {}
        elif process := PROCESS.match(line):
            steps = processes[process[1]] = []
        elif STEP.match(line):
            steps.extend(SHORT.findall(line)[:1])
    return found


def rises(files: list[str]) -> list[tuple[str, str]]:
    """Pairs of steps of which the second is on a higher floor."""
    return [
        (before, after) for before, after in pairwise(files) if floor_of(after) < floor_of(before)
    ]


def test_the_floors_are_those_of_the_import_contract() -> None:
    section = DESIGN.partition("## Floors")[2].partition("\n## ")[0]
    assert contract() == [line.strip() for line in section.splitlines() if line.startswith("    ")]


def test_there_are_four_walks_of_several_processes() -> None:
    found = walks(DESIGN)
    assert 4 == len(found)
    for processes in found.values():
        assert len(processes) >= 3
        assert all(processes.values())
        assert sum(len(steps) for steps in processes.values()) <= LONGEST_WALK


def test_every_step_of_a_walk_names_its_file() -> None:
    section = DESIGN.partition("## Flow")[2].partition("\n## ")[0]
    steps = sum(STEP.match(line) is not None for line in section.splitlines())
    assert steps == sum(
        len(files) for processes in walks(DESIGN).values() for files in processes.values()
    )


def test_no_step_of_a_walk_goes_up_a_floor() -> None:
    for processes in walks(DESIGN).values():
        assert [] == [pair for files in processes.values() for pair in rises(files)]


@pytest.mark.parametrize("name", ["DESIGN.md", "docs/decisions.md"])
def test_every_file_named_relative_to_the_package_exists(name: str) -> None:
    named = set(SHORT.findall((ROOT / name).read_text()))
    assert named
    assert [] == [
        path
        for path in named
        if not (ROOT / path).exists() and not (ROOT / "tianflow" / path).exists()
    ]


def test_every_result_is_on_the_page_of_measurements() -> None:
    page = (DOCS / "performance.md").read_text()
    linked = set(re.findall(r"\]\(\.\./benchmarks/results/(\w+\.json)\)", page))
    assert {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")} == linked


def test_a_rise_is_noticed() -> None:
    text = "## Flow\n**A**\n*host*\n1. `ops/returns.py` `cli/main.py`\n2. `cli/main.py`\n## B\n"
    assert {"A": {"host": ["ops/returns.py", "cli/main.py"]}} == walks(text)
    assert [("ops/returns.py", "cli/main.py")] == rises(walks(text)["A"]["host"])
    assert [] == rises(["cli/main.py", "server/run/app.py", "report/page.py", "ops/returns.py"])
