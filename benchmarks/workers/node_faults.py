"""Worker: faults of nodes, links, replay shards, gateway and coordinator, one after the other."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.lib import child, namespaces
from benchmarks.lib.node_faults.cluster import SHARDS, BrokenRunError, opened
from benchmarks.lib.node_faults.faults import RUN, RUNS
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
    """Strike one run after the other, and return what was seen."""
    began = time.monotonic()
    missing, clock = [], None
    try:
        clock = WallClock(given.scratch)
    except UnavailableError as error:
        missing.append(f"no clock is an hour off: {error}")
    sides: dict[str, Mapping[str, float | None]] = {}
    found: list[str] = []
    kinds = sum(map(len, RUNS.values()))
    for run, faults in RUNS.items():
        if any(given.only in fault.name for fault in faults):
            share = given.seconds * len(faults) / kinds
            found += _strike(given, run, share, clock=clock, began=began, sides=sides)
    return {"sides": sides, "findings": found, "missing": missing}


def _strike(
    given: argparse.Namespace,
    run: str,
    seconds: float,
    *,
    clock: WallClock | None,
    began: float,
    sides: dict[str, Mapping[str, float | None]],
) -> list[str]:
    """Start ``run``, strike it, and end it. Add what was seen to ``sides``, and return findings."""
    since, tally = time.monotonic(), Tally()
    striker: Striker | None = None
    findings = Findings(
        now=lambda: time.monotonic() - began,
        context=lambda: "start" if striker is None else striker.doing,
        log=lambda text: _log(f"! {text}"),
    )
    scratch = given.scratch / run.replace(" ", "-")
    scratch.mkdir()
    with opened(
        scratch=scratch,
        shards=0 if run == RUN else SHARDS,
        clock=clock,
        findings=findings,
        tally=tally,
        log=_log,
    ) as cluster:
        with suppress(BrokenRunError):
            cluster.begin(seed=given.seed)
            _log(f"{time.monotonic() - began:.0f} s: the {run} trains on its nodes")
            striker = Striker(
                cluster=cluster,
                faults=RUNS[run],
                quick=given.size == "short",
                seconds=seconds,
                log=lambda text: _log(f"{time.monotonic() - began:.0f} s: {text}"),
                only=given.only,
            )
            striker.run()
            cluster.finish()
        trained, twice = cluster.frames()
    for path in namespaces.NAMESPACES.glob(f"{namespaces.PREFIX}-{os.getpid()}-*"):
        findings.report("left", "at the end", f"the network namespace {path.name}")
    frames = {"frames": float(trained), "frames twice": float(twice)} if run == RUN else {}
    sides[run] = {
        "minutes": (time.monotonic() - since) / 60,
        "kinds of findings": float(len(findings.records)),
        "coordinators": float(cluster.life),
        "updates": float(cluster.oracle.updates),
        **frames,
        **{name: float(count) for name, count in sorted(tally.counts.items())},
        **{f"worst {name}": value for name, value in sorted(tally.worst.items())},
    }
    sides |= {name: of.values() for name, of in (striker.found if striker else {}).items()}
    return [f"{record} ({run})" for record in findings.records]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
