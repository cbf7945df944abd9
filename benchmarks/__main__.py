"""``python -m benchmarks [NAME ...]``: run benchmarks, print their tables, write their results.

``python -m benchmarks presets`` trains the shipped presets, see `benchmarks.studies.presets`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.lib import machine, results
from benchmarks.lib.harness import BenchmarkError, Plan, alternate, part

NAMES = (
    "time_to_target",
    "impala_cartpole",
    "cost_of_balance",
    "freshness",
    "many_actors",
    "channels",
    "transports",
    "network",
    "weights",
    "actors",
    "learner",
    "idle",
    "readers",
    "replay",
    "off_policy",
    "forecast",
    "inference",
)
LONG = (
    "stalled",
    "storm",
    "node_faults",
    "nodes",
    "pong_gpu",
    "learner_gpu",
    "scaling_gpu",
    "inference_gpu",
    "apex_gpu",
    "peers_cartpole",
    "peers_pong",
    "peers_served",
)
"""Benchmarks that run only when they are named. They take half an hour, or need root, a GPU, or the
peers that `make bench-peers` installs.
"""
STUDIES = ("stalled", "storm", "node_faults")
"""Benchmarks that lie in ``studies`` because of their length. The others lie in ``suites``."""


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"benchmarks to run: {', '.join(NAMES)} (default: all of these), {', '.join(LONG)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short run that proves that a benchmark works; its numbers mean nothing, and its "
        "results go to NAME-quick",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="measure only the sides whose name contains TEXT; results go to NAME-part",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="samples of each side (default: 5; 1 with --quick and for studies)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=None,
        help="longest wait in seconds before each sample for other processes to be idle "
        "(default: 60, with --quick 0)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="seconds of training in each run of the benchmarks with peers and of forecast "
        "(default: chosen by the benchmark)",
    )
    parser.add_argument(
        "--minutes", type=float, help="minutes of storm, node_faults and stalled (default: 30)"
    )
    parser.add_argument("--cores", type=_cores, help="cores to use, such as 0,1 (default: all)")
    parser.add_argument(
        "--results",
        type=Path,
        default=results.RESULTS,
        help="directory for JSON documents and tables",
    )
    chosen = parser.parse_args(given)
    known = (*NAMES, *LONG)
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a benchmark (expected {', '.join(known)})")
    chosen.names = chosen.names or list(NAMES)
    once = chosen.quick or set(chosen.names) <= set(STUDIES)
    chosen.rounds = chosen.rounds or (1 if once else 5)
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    chosen.patience = (
        (0.0 if chosen.quick else 60.0) if chosen.patience is None else chosen.patience
    )
    return chosen


def _cores(text: str) -> set[int]:
    """Parse core numbers separated by commas. This process must be allowed to use each of them."""
    wanted, there = {int(number) for number in text.split(",")}, os.sched_getaffinity(0)
    if not wanted <= there:
        raise argparse.ArgumentTypeError(
            f"{text} contains cores that this process may not use "
            f"(expected {', '.join(map(str, sorted(there)))})"
        )
    return wanted


def module_of(name: str) -> str:
    """Return the name of the module that makes benchmark ``name``."""
    return f"benchmarks.{'studies' if name in STUDIES else 'suites'}.{name}"


def run(name: str, chosen: argparse.Namespace, scratch: Path) -> None:
    """Run one benchmark, print its table, and write its results.

    Raises:
        KeyboardInterrupt: it was interrupted. The results of its samples so far are written.
    """
    plan = Plan(
        quick=chosen.quick,
        rounds=chosen.rounds,
        scratch=scratch,
        seconds=chosen.seconds,
        minutes=chosen.minutes,
    )
    benchmark = importlib.import_module(module_of(name)).make(plan)
    if chosen.only is not None:
        benchmark = part(benchmark, chosen.only)
    began = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    outcome = alternate(
        benchmark,
        plan.rounds,
        patience_s=chosen.patience,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    found = results.document(outcome, machine=machine.describe(), began=began, quick=plan.quick)
    results.write(found, chosen.results)
    print(results.table(found), flush=True)
    if outcome.interrupted:
        raise KeyboardInterrupt


def main() -> int:
    """Run the benchmarks that the command line names. Return 1 if one could not run."""
    if sys.argv[1:2] == ["presets"]:  # a matrix of runs with options of its own
        from benchmarks.studies import presets

        return presets.main(sys.argv[2:])
    chosen = arguments(sys.argv[1:])
    # exiting ends the children on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if chosen.cores:
        # children inherit the affinity, and the foreign load is measured on these cores
        os.sched_setaffinity(0, chosen.cores)
    failed = False
    with tempfile.TemporaryDirectory(prefix="tianflow-bench-") as scratch:
        for name in chosen.names:
            try:
                run(name, chosen, Path(scratch))
            except BenchmarkError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = True
            except KeyboardInterrupt:
                return 130
    return int(failed)


if __name__ == "__main__":
    if any(
        name in os.environ for name in machine.UNSET
    ):  # numerical libraries read them when they load
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks", *sys.argv[1:]],
            machine.clean_environment(os.environ),
        )
    sys.exit(main())
