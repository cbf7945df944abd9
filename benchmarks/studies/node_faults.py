"""Study: runs on several machines, while links, nodes, replay shards, gateway and coordinator fail.

Machines are network namespaces. Every kind of fault happens several times under load, one after the
other. The account of trajectories, the staleness bound and ``/livez`` are judged all the time. Of
two runs, one after the other, the second one has replay shards on its nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from benchmarks.lib import child, namespaces
from benchmarks.lib.harness import Benchmark, BenchmarkError, Plan, Ratio, Together, Values
from benchmarks.lib.node_faults import cluster, recovery
from benchmarks.lib.node_faults.faults import RUNS, STORED_RUN
from benchmarks.lib.node_faults.striker import CALM_S

MINUTES = 30.0
"""No fault begins later."""
OVERTIME_S = 900.0
"""The last fault, the start and the end of each run come on top."""


def make(size: Plan) -> Benchmark:
    """Make the benchmark in the size of ``size``."""
    notes: list[str] = []
    seconds = 60.0 * (size.minutes or MINUTES)

    def measure(number: int) -> Mapping[str, Values]:
        if reason := namespaces.missing():
            raise BenchmarkError(f"there are no machines: {reason}")
        with tempfile.TemporaryDirectory(dir=size.scratch) as scratch:
            done = child.run(
                "benchmarks.workers.node_faults",
                *("short" if size.quick else "long", seconds, 1 + number, scratch),
                timeout_s=seconds + OVERTIME_S,
                echo_errors=True,
            )
        notes.extend(done.answer["missing"])
        notes.extend(f"finding at {text}" for text in done.answer["findings"])
        return {name: done.answer["sides"].get(name, {}) for name in names}

    names = tuple(name for run, faults in RUNS.items() for name in (run, *(f.name for f in faults)))
    return Benchmark(
        name="node_faults",
        title="recovery of a run on several machines, by failure",
        sides=(Together(names, measure),),
        ratios=(
            Ratio(
                "promises held: 1 over 1 + kinds of findings",
                lambda v: 1.0 / (1.0 + sum(v[run]["kinds of findings"] or 0.0 for run in RUNS)),
                aim=1.0,
                sides=tuple(RUNS),
            ),
        ),
        units=units(),
        settings={"minutes": seconds / 60, **settings()},
        seeds=tuple(range(1, 1 + size.rounds)),
        notes=notes,
    )


def units() -> dict[str, str]:
    """Return the unit of each value, in the order of the table."""
    pace = f"s, to {recovery.SHARE:g} of the steps/s before, for {recovery.WINDOW_S:g} s"
    whole = "s, from the end of the fault to all nodes with all hosts"
    return {
        "minutes": "min",
        "kinds of findings": "kinds",
        "coordinators": "processes",
        "updates": "updates judged",
        "frames": "frames trained on",
        "frames twice": "frames",
        "/metrics": "scrapes judged",
        "run document": "documents judged",
        "/livez": "answers judged",
        "worst /livez": "s",
        "worst /livez without waits for a core": "s, without those of prober and coordinator",
        "times": "faults",
        "median time to pace": pace,
        "longest time to pace": pace,
        "median time to whole": whole,
        "longest time to whole": whole,
        "dropped": "trajectories",
        "dropped as node_lost": "trajectories",
        "hosts started again": "hosts",
    }


def settings() -> dict[str, object]:
    """Return what a reader needs to repeat the benchmark."""
    return {
        "machines": f"a head and {len(cluster.NAMES)} nodes, network namespaces of one machine, "
        "CURVE on",
        "run": f"{cluster.HOSTS} hosts of one actor with 2 environments, "
        f"max_staleness = {cluster.MAX_STALENESS}, the oracle's algorithm",
        STORED_RUN: f"{cluster.SHARDS} shards besides, max_staleness = "
        f"{cluster.MAX_STALENESS_OF_ITEMS}",
        "cluster.lease_s": cluster.LEASE_S,
        "time to pace": f"from the begin of the fault; the rate before is that of {CALM_S:g} s, "
        "and looks are 0.2 s apart",
    }
