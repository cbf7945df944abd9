"""A command whose standard streams are closed."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT

SCRIPT = """
import os, sys
report = os.dup(1)
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
from tianflow.cli.common import open_standard_streams
open_standard_streams()
print("to nowhere"), print("to nowhere", file=sys.stderr)
os.write(report, repr([(os.readlink(f"/proc/self/fd/{n}"), os.get_inheritable(n)) for n in range(3)]).encode())
"""


def test_closed_streams_are_the_null_device_for_it_and_for_its_child_processes() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (repr([("/dev/null", True)] * 3), "") == (done.stdout, done.stderr)
