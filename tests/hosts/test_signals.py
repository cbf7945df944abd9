"""A host outlives SIGTERM, and what its environments start does not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
from tianflow.hosts.signals import outlive_sigterm

outlive_sigterm()
match sys.argv[1]:
    case "host":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        print("works", flush=True)
    case "fork":
        if (pid := os.fork()) == 0:
            print("ready", flush=True)
            time.sleep(60)
        sys.stdin.readline()
        os.kill(pid, signal.SIGTERM)
        print(os.waitpid(pid, 0)[1], flush=True)
    case "program":
        with subprocess.Popen(["sleep", "60"]) as child:
            child.terminate()
        print(-child.returncode, flush=True)
"""


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("host", ["works"]),
        ("fork", ["ready", str(int(signal.SIGTERM))]),
        ("program", [str(int(signal.SIGTERM))]),
    ],
)
def test_sigterm_ends_only_what_a_host_has_started(case: str, lines: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, case],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        first = child.stdout.readline()
        if case == "fork":  # its child sleeps now
            child.stdin.write("\n")
            child.stdin.flush()
        assert lines == [line.strip() for line in [first, *child.stdout]]
        assert 0 == child.wait(10)
