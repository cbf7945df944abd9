"""A process that retains its memory does not pay for the same pages again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tianflow.core.allocator import RETAINED_MEMORY

BLOCKS, MIB, ROUNDS, PAGE = 8, 4, 20, 4096
FREES_AGAIN_AND_AGAIN = f"""
import resource
import sys
import numpy as np
if sys.argv[1] == "call":
    from tianflow.core.allocator import retain_memory
    retain_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    for block in [np.empty({MIB} << 20, np.uint8) for _ in range({BLOCKS})]:
        block[::{PAGE}] = 1
use()
before = faults()
for _ in range({ROUNDS}):
    use()
print(faults() - before)
"""


@pytest.mark.parametrize("how", ["call", "environment", "neither"])
def test_freed_blocks_cost_no_page_faults_again(how: str) -> None:
    environment = {name: os.environ[name] for name in os.environ if "MALLOC" not in name}
    environment |= RETAINED_MEMORY if how == "environment" else {}
    # huge pages would hide the faults of small ones
    environment["NUMPY_MADVISE_HUGEPAGE"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", FREES_AGAIN_AND_AGAIN, how],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    faults, pages = int(done.stdout), (BLOCKS * MIB << 20) // PAGE
    assert (how == "neither") == (faults > pages)
