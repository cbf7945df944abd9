"""Worker: one storm over one run. It prints what it counted, and its findings."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.lib import child
from benchmarks.lib.storm import disk, plan
from benchmarks.lib.storm.clock import UnavailableError, WallClock
from benchmarks.lib.storm.deterministic import Resumes
from benchmarks.lib.storm.judges import Findings
from benchmarks.lib.storm.lives import Stage, Storm, values

DISK_MIB = 48
KINDS = ("use-once", "replay", "deterministic")
SIZES = {"long": plan.LONG, "short": plan.SHORT}


def set_up(scratch: Path) -> tuple[Stage, list[str]]:
    """Prepare clock and disk in ``scratch``. Return also what this machine cannot provide."""
    missing = []
    clock, small = None, None
    runs = scratch / "runs"
    try:
        disk.enter_private_mounts()
        disk.mount_memory(runs, mib=DISK_MIB)
        small = disk.SmallDisk(runs)
    except UnavailableError as error:
        missing.append(f"no disk fills: {error}")
    try:
        clock = WallClock(scratch)
    except UnavailableError as error:
        missing.append(f"no clock jumps: {error}")
    runs.mkdir(parents=True, exist_ok=True)
    return Stage(runs=runs, scratch=scratch, clock=clock, disk=small), missing


def main() -> None:
    """Arguments: ``KIND SIZE SECONDS SEED SCRATCH``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("size", choices=tuple(SIZES))
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("scratch", type=Path)
    given = parser.parse_args()
    if given.kind == "deterministic":
        child.report(resumes(given.seconds, given.seed, given.scratch))
    else:
        child.report(storm(given))


def storm(given: argparse.Namespace) -> dict[str, object]:
    """Strike a run of the oracle."""
    began = time.monotonic()
    stage, missing = set_up(given.scratch)
    struck = Storm(
        replay=given.kind == "replay",
        seconds=given.seconds,
        seed=given.seed,
        size=SIZES[given.size],
        stage=stage,
        log=_log,
    )
    struck.run()
    return {
        "values": values(struck, time.monotonic() - began),
        "findings": [str(record) for record in struck.findings.records],
        "missing": missing,
    }


def resumes(seconds: float, seed: int, scratch: Path) -> dict[str, object]:
    """Kill and resume a deterministic run."""
    began = time.monotonic()
    findings = Findings(
        now=lambda: time.monotonic() - began,
        context=lambda: "deterministic run",
        log=lambda text: _log(f"! {text}"),
    )
    run = Resumes(seconds=seconds, seed=seed, scratch=scratch, findings=findings, log=_log)
    run.run()
    counted = {
        "minutes": (time.monotonic() - began) / 60,
        "kill coordinator": float(run.kills),
        "updates": float(run.updates),
        "kinds of findings": float(len(findings.records)),
    }
    return {
        "values": counted,
        "findings": [str(record) for record in findings.records],
        "missing": [],
    }


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
