"""Worker: faults of nodes, links, gateway and coordinator, one after the other, on one run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.lib import child, namespaces
from benchmarks.lib.node_faults.cluster import BrokenRunError, opened
from benchmarks.lib.node_faults.striker import Striker
from benchmarks.lib.storm.clock import UnavailableError, WallClock
from benchmarks.lib.storm.judges import Findings
from benchmarks.lib.storm.observers import Tally


def main() -> None:
    """Arguments: ``SIZE SECONDS SEED SCRATCH [ONLY]``. ``ONLY`` selects faults by their names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=("long", "short"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("only", nargs="?", default="")
    child.report(strike(parser.parse_args()))


def strike(given: argparse.Namespace) -> dict[str, object]:
    """Start a run, strike it, end it, and return what was seen."""
    began = time.monotonic()
    missing, clock = [], None
    try:
        clock = WallClock(given.scratch)
    except UnavailableError as error:
        missing.append(f"no clock is an hour off: {error}")
    striker: Striker | None = None
    findings = Findings(
        now=lambda: time.monotonic() - began,
        context=lambda: "start" if striker is None else striker.doing,
        log=lambda text: _log(f"! {text}"),
    )
    tally = Tally()
    with opened(
        scratch=given.scratch, clock=clock, findings=findings, tally=tally, log=_log
    ) as cluster:
        with suppress(BrokenRunError):
            cluster.begin(seed=given.seed)
            _log(f"{time.monotonic() - began:.0f} s: the run trains on its nodes")
            striker = Striker(
                cluster=cluster,
                quick=given.size == "short",
                seconds=given.seconds,
                log=lambda text: _log(f"{time.monotonic() - began:.0f} s: {text}"),
                only=given.only,
            )
            striker.run()
            cluster.finish()
        trained, twice = cluster.frames()
        updates = float(cluster.oracle.updates)
    for path in namespaces.NAMESPACES.glob(f"{namespaces.PREFIX}-{os.getpid()}-*"):
        findings.report("left", "at the end", f"the network namespace {path.name}")
    return {
        "sides": {
            "run": {
                "minutes": (time.monotonic() - began) / 60,
                "kinds of findings": float(len(findings.records)),
                "coordinators": float(cluster.life),
                "updates": updates,
                "frames": float(trained),
                "frames twice": float(twice),
                **{name: float(count) for name, count in sorted(tally.counts.items())},
                **{f"worst {name}": value for name, value in sorted(tally.worst.items())},
            },
            **{name: found.values() for name, found in (striker.found if striker else {}).items()},
        },
        "findings": [str(record) for record in findings.records],
        "missing": missing,
    }


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
