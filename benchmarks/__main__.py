"""``python -m benchmarks [NAME ...]``: run benchmarks, print their tables, write their results."""

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
    "weights",
    "actors",
    "learner",
    "idle",
    "readers",
    "replay",
    "forecast",
)
LONG = ("stalled", "pong_gpu", "peers_cartpole", "peers_pong")
"""Benchmarks that run only when they are named. They take half an hour, or need a GPU, or need the
peers that `make bench-peers` installs.
"""
STUDIES = ("stalled",)
"""Benchmarks that lie in ``studies`` because of their length. The others lie in ``suites``."""


def arguments(given: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which: {', '.join(NAMES)}, all of them when none is named; or {', '.join(LONG)}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="prove that they run; the numbers mean nothing and go to names of their own",
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="only sides whose name holds it, with results under a name of their own",
    )
    parser.add_argument("--rounds", type=int, help="samples of each side; 5, or 1 with --quick")
    parser.add_argument(
        "--patience",
        type=float,
        default=None,
        help="seconds to wait before each sample for others to be quiet; 60, or 0 with --quick",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="of training in each run beside peers, or forecast; as many as each benchmark takes "
        "by itself",
    )
    parser.add_argument(
        "--cores", type=_cores, help="those to use, such as 0,1; all that may be used"
    )
    parser.add_argument(
        "--results", type=Path, default=results.RESULTS, help="where JSON and tables go"
    )
    chosen = parser.parse_args(given)
    known = (*NAMES, *LONG)
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"there is no {unknown[0]!r}; known are {', '.join(known)}")
    chosen.names = chosen.names or list(NAMES)
    chosen.rounds = chosen.rounds or (1 if chosen.quick else 5)
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    chosen.patience = (
        (0.0 if chosen.quick else 60.0) if chosen.patience is None else chosen.patience
    )
    return chosen


def _cores(text: str) -> set[int]:
    """Numbers with commas between them, of cores that this process may use."""
    wanted, there = {int(number) for number in text.split(",")}, os.sched_getaffinity(0)
    if not wanted <= there:
        raise argparse.ArgumentTypeError(
            f"{text} is not all among the cores that may be used: "
            f"{', '.join(map(str, sorted(there)))}"
        )
    return wanted


def module_of(name: str) -> str:
    """Return the name of the module that makes benchmark ``name``."""
    return f"benchmarks.{'studies' if name in STUDIES else 'suites'}.{name}"


def run(name: str, chosen: argparse.Namespace, scratch: Path) -> None:
    """Run one benchmark, print its table, write its results."""
    plan = Plan(quick=chosen.quick, rounds=chosen.rounds, scratch=scratch, seconds=chosen.seconds)
    benchmark = importlib.import_module(module_of(name)).make(plan)
    if chosen.only is not None:
        benchmark = part(benchmark, chosen.only)
    began = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    outcome = alternate(
        benchmark,
        plan.rounds,
        patience_s=chosen.patience,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    found = results.document(outcome, machine=machine.describe(), began=began, quick=plan.quick)
    results.write(found, chosen.results)
    print(results.table(found), flush=True)


def main() -> int:
    """Run what the command line asks for; 1 if a benchmark could not be run."""
    chosen = arguments(sys.argv[1:])
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that children are ended on the way out
    if chosen.cores:
        os.sched_setaffinity(
            0, chosen.cores
        )  # children inherit it, and the load of others is that on these
    failed = False
    with tempfile.TemporaryDirectory(prefix="tianflow-bench-") as scratch:
        for name in chosen.names:
            try:
                run(name, chosen, Path(scratch))
            except BenchmarkError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    if any(name in os.environ for name in machine.UNSET):  # libraries read them when they load
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks", *sys.argv[1:]],
            machine.clean_environment(os.environ),
        )
    sys.exit(main())
