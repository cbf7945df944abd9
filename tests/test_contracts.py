"""The import contracts: the import that a contract forbids breaks it, and the code breaks none.

The tests check copies of the two packages with the repository's own configuration.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {
    contract["id"]: contract["name"] for contract in SETTINGS["tool"]["importlinter"]["contracts"]
}
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@dataclass(frozen=True)
class Violation:
    """A forbidden import.

    Attributes:
        file: file that gets the import. It is a new one unless the contract names every module.
        imported: the module that it imports.
    """

    file: str
    imported: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")


VIOLATIONS = {
    "floors": Violation("tianflow/core/scratch.py", "tianflow.rundir.history"),
    "floors-of-ledger": Violation("tianflow/ledger/tickets.py", "tianflow.ledger.ledger"),
    "floors-of-server": Violation("tianflow/server/common/scratch.py", "tianflow.server.run.app"),
    "floors-of-algorithms": Violation("tianflow/algorithms/dqn.py", "tianflow.algorithms.sac"),
    "controllers-are-plug-ins": Violation(
        "tianflow/coordinator/scratch.py", "tianflow_controllers.staleness"
    ),
    "aiohttp-room": Violation("tianflow/export/scratch.py", "aiohttp"),
    "terminal-room": Violation("tianflow/report/scratch.py", "rich"),
    "prometheus-room": Violation("tianflow/simulation/scratch.py", "prometheus_client"),
    "zmq-room": Violation("tianflow/hosts/scratch.py", "zmq"),
    "torch-free": Violation("tianflow/planning/scratch.py", "torch"),
    "torch-free-terminal": Violation("tianflow/cli/scratch.py", "torch"),
}


def copied(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tianflow", folder / "tianflow", ignore=ignored)
    controllers = ROOT / "controllers" / "tianflow_controllers"
    shutil.copytree(controllers, folder / "tianflow_controllers", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def add(folder: Path, violation: Violation) -> None:
    with (folder / violation.file).open("a", encoding="utf-8") as file:
        file.write(f"\nimport {violation.imported}  # a violation\n")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def verdicts(output: str) -> dict[str, str]:
    """The verdict on each contract, by its name."""
    found = re.findall(r"^(.+?) (KEPT|BROKEN)(?: \(.*\))?$", output, re.MULTILINE)
    return dict(found)


def reasons(output: str, name: str) -> str:
    """The section that says why the contract ``name`` is broken."""
    found = re.search(
        rf"^{re.escape(name)}\n-+\n(.*?)(?=^[^\n]+\n-+\n|\Z)", output, re.MULTILINE | re.DOTALL
    )
    return "" if found is None else found[1]


@pytest.mark.e2e
def test_the_code_keeps_every_contract(tmp_path: Path) -> None:
    done = lint(copied(tmp_path))
    assert 0 == done.returncode, done.stdout + done.stderr
    assert dict.fromkeys(CONTRACTS.values(), "KEPT") == verdicts(done.stdout)


def test_every_contract_has_a_violation_here() -> None:
    assert set(CONTRACTS) == set(VIOLATIONS)


@pytest.mark.e2e
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for violation in VIOLATIONS.values():
        add(folder, violation)
    done = lint(folder)
    assert 1 == done.returncode
    assert dict.fromkeys(CONTRACTS.values(), "BROKEN") == verdicts(done.stdout)
    unexplained = [
        contract
        for contract, violation in VIOLATIONS.items()
        if f"{violation.module} -> {violation.imported}"
        not in reasons(done.stdout, CONTRACTS[contract])
    ]
    assert [] == unexplained, done.stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("file", "contract"),
    [
        ("tianflow/scratch/__init__.py", "floors"),
        ("tianflow/ledger/scratch.py", "floors-of-ledger"),
        ("tianflow/server/scratch.py", "floors-of-server"),
        ("tianflow/algorithms/scratch.py", "floors-of-algorithms"),
    ],
)
def test_a_module_on_no_floor_breaks_the_contract(file: str, contract: str, tmp_path: Path) -> None:
    path = copied(tmp_path) / file
    path.parent.mkdir(exist_ok=True)
    path.touch()
    done = lint(tmp_path)
    broken = {name for name, verdict in verdicts(done.stdout).items() if verdict == "BROKEN"}
    assert {CONTRACTS[contract]} == broken, done.stdout + done.stderr


def test_the_top_level_has_at_most_ten_modules_and_twenty_two_packages() -> None:
    top = ROOT / "tianflow"
    modules = [path.name for path in top.glob("*.py")]
    packages = [path.parent.name for path in top.glob("*/__init__.py")]
    assert len(modules) <= 10, sorted(modules)
    assert len(packages) <= 22, sorted(packages)
