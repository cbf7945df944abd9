"""The benchmarks run, from real processes to a result document. What they measure is no test's
business.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import results
from benchmarks.lib.machine import ROOT, clean_environment
from tests.support.machines import require_machines

pytestmark = [pytest.mark.e2e, pytest.mark.beside(lanes=2), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("name", "sides"),
    [("channels", 6), ("impala_cartpole", 5), ("many_actors", 2), ("nodes", 4)],
)
def test_a_quick_run_writes_a_document_and_a_table(name: str, sides: int, tmp_path: Path) -> None:
    if name == "nodes":
        require_machines()
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--results", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(os.environ),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found = json.loads((tmp_path / f"{name}-quick.json").read_text(encoding="utf-8"))
    results.check(found)
    assert sides == len({sample["side"] for sample in found["samples"]})
    assert (tmp_path / f"{name}-quick.md").read_text(encoding="utf-8") == results.table(found)
