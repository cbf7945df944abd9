"""Matrices of training runs: cases, seeds, the records of finished runs, and a study's command
line.

Each run is ``tianflow train``, as a user starts it. `main` writes the results after each run. It
does not repeat a run whose settings are recorded already, so a matrix can be completed in parts.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from tianflow.config.loading import load_config, to_toml, toml_value
from tianflow.rundir import history

SLOWED_SHARE = 0.8
"""Smallest mean staleness of a slowed run that counts, as a share of the bound."""
POINTS = 120


@dataclass(frozen=True, slots=True)
class Case:
    """One config with one set of overrides, over ``seeds``.

    Attributes:
        needed: number of seeds that are expected to succeed. 0: learning must fail. None: no
            expectation.
        rises_to: mean of the last 100 training episodes that counts as solved, instead of the
            target in evaluation.
        curve: add the learning curve to the summary, as at most `POINTS` of (seconds, steps, mean
            return of 100 episodes).
    """

    name: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    seeds: int = 5
    needed: int | None = 4
    rises_to: float | None = None
    curve: bool = False

    def over(self, seeds: int) -> Case:
        """Return the same case over ``seeds`` seeds, with the same expected share."""
        return replace(
            self,
            seeds=seeds,
            needed=None if self.needed is None else self.needed * seeds // self.seeds,
        )

    def settings(self, seed: int) -> dict[str, object]:
        """Return the overrides of one run."""
        return {**self.overrides, "run.seed": seed}

    def solved(self, summary: Mapping[str, Any]) -> bool:
        """True if a run reached its goal."""
        if self.rises_to is not None:
            return summary["mean_return"] is not None and summary["mean_return"] >= self.rises_to
        return bool(summary["target_reached"])

    def old_enough(self, summary: Mapping[str, Any]) -> bool:
        """True if the data were as stale as the case wants them."""
        return (
            "learner.slowdown" not in self.overrides
            or summary["staleness"]["mean"] >= SLOWED_SHARE * summary["staleness"]["bound"]
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One finished run."""

    case: str
    seed: int
    settings: str
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cases that are run and shown together.

    Attributes:
        table: formats records and cases as Markdown.
        out: file of the records. The table and the plot lie beside it.
        plot: draws the records into a file. None: there is no plot.
        cores: number of cores of each run.
    """

    doc: str | None
    cases: Sequence[Case]
    table: Callable[[Sequence[Record], Sequence[Case]], str]
    out: Path
    plot: Callable[[Sequence[Record], Path], None] | None = None
    cores: int = 2


def settings_of(case: Case, seed: int) -> str:
    """Return the whole config of a run, which identifies its record."""
    return to_toml(load_config(case.config, case.settings(seed)), only_changed=True)


def train(case: Case, seed: int) -> Record:
    """Train once in separate processes. Raises CalledProcessError if the run failed."""
    settings = settings_of(
        case, seed
    )  # before the run, because the config file can change meanwhile
    with tempfile.TemporaryDirectory() as runs:
        overrides = [
            f"{path}={'null' if value is None else toml_value(value)}"
            for path, value in case.settings(seed).items()
        ]
        options = ["--plain", "--json", "--no-http", "--runs-dir", runs, "placement.affinity=none"]
        command = [sys.executable, "-m", "tianflow", "train", case.config, *options, *overrides]
        environment = machine.clean_environment(os.environ)
        done = subprocess.run(
            command, cwd=machine.ROOT, env=environment, capture_output=True, text=True, check=False
        )
        rows = (
            [
                row
                for path in Path(runs).glob(f"*/{history.NAME}")
                for row in history.read_rows(path)
            ]
            if case.curve
            else []
        )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    summary = json.loads(done.stdout.splitlines()[-1])
    if case.curve:
        summary["curve"] = [
            (round(row["t"], 1), row["env_steps"], row["mean_return"])
            for row in history.thinned(rows, POINTS)
        ]
    return Record(case.name, seed, settings, summary)


def at(curve: Sequence[Sequence[float | None]], axis: int, place: float) -> float | None:
    """Return the return at ``place`` on ``axis`` 0 or 1 of a curve of (seconds, steps, return):
    that of the last point up to there.
    """
    known = [point for point in curve if point[2] is not None and (point[axis] or 0.0) <= place]
    return known[-1][2] if known else None


def plot_curves(records: Sequence[Record], path: Path, label_of: Callable[[Record], str]) -> None:
    """Plot the curves of runs over time and over steps into ``path`` (SVG): a thin line for each
    run, a colour for each label.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: install the extra 'plots'", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    colours = {
        label: f"C{index}" for index, label in enumerate(dict.fromkeys(map(label_of, records)))
    }
    for panel, axis, name in zip(
        panels, (0, 1), ("seconds of training", "environment steps"), strict=True
    ):
        shown: set[str] = set()
        for record in records:
            points = [point for point in record.summary["curve"] if point[2] is not None]
            label = label_of(record)
            panel.plot(
                [point[axis] for point in points],
                [point[2] for point in points],
                color=colours[label],
                linewidth=0.8,
                label="_" if label in shown else label,
            )
            shown.add(label)
        panel.set(xlabel=name)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean return of 100 episodes")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})


def read(path: Path) -> list[Record]:
    """Read the records of earlier calls."""
    if not path.exists():
        return []
    return [Record(**record) for record in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def write(
    path: Path,
    records: Iterable[Record],
    known: Sequence[Case],
    shown: Callable[[Sequence[Record], Sequence[Case]], str],
) -> None:
    """Write the ``records`` of ``known`` cases with the machine, and the table beside them."""
    order = {case.name: index for index, case in enumerate(known)}
    kept = sorted(
        (record for record in records if record.case in order),
        key=lambda record: (order[record.case], record.seed),
    )
    runs = [
        {"case": r.case, "seed": r.seed, "settings": r.settings, "summary": dict(r.summary)}
        for r in kept
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine.describe(), "runs": runs}, indent=1) + "\n", encoding="utf-8"
    )
    path.with_suffix(".md").write_text(shown(kept, known), encoding="utf-8")


def main(matrix: Matrix) -> int:
    """Run what is missing. Return 1 if a case has fewer solved runs than expected."""
    parser = argparse.ArgumentParser(description=matrix.doc)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="names of cases to run, as shell patterns",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds of each case (default: chosen by the case)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help=f"number of runs at once, each on {matrix.cores} cores of its own",
    )
    parser.add_argument("--out", type=Path, default=matrix.out)
    given = parser.parse_args()
    every_case = [case if given.seeds is None else case.over(given.seeds) for case in matrix.cases]
    chosen = [
        case
        for case in every_case
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in given.only)
    ]
    wanted = {
        (case.name, seed): (case, settings_of(case, seed))
        for case in every_case
        for seed in range(1, case.seeds + 1)
    }
    records = [
        r for r in read(given.out) if wanted.get((r.case, r.seed), (None, ""))[1] == r.settings
    ]
    recorded = {(record.case, record.seed) for record in records}
    asked = sorted(
        ((case, seed) for case in chosen for seed in range(1, case.seeds + 1)),
        key=lambda run: run[1],
    )
    missing = [(case, seed) for case, seed in asked if (case.name, seed) not in recorded]
    parts = _parts(given.jobs, matrix.cores)
    with ThreadPoolExecutor(
        given.jobs, initializer=lambda: os.sched_setaffinity(0, parts.get_nowait())
    ) as pool:
        for future in as_completed([pool.submit(train, case, seed) for case, seed in missing]):
            try:
                record = future.result()
            except (
                subprocess.CalledProcessError
            ) as error:  # one failure must not lose the other runs
                print(f"failed: {error}", file=sys.stderr, flush=True)
                continue
            records.append(record)
            write(given.out, records, every_case, matrix.table)
            print(_line(record), flush=True)
    print(matrix.table(records, every_case))
    if matrix.plot is not None:
        matrix.plot(records, given.out.with_suffix(".svg"))
    return 0 if all(_as_expected(case, records) for case in chosen) else 1


def _parts(count: int, size: int) -> queue.SimpleQueue[set[int]]:
    """Return ``size`` cores for each of ``count`` workers, which their children inherit. Raises
    SystemExit if there are too few cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if count > 1 and len(cores) < size * count:
        raise SystemExit(f"--jobs {count} needs {size * count} cores; there are {len(cores)}")
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for index in range(count):
        found.put(set(cores[size * index : size * (index + 1)]))
    return found


def _line(record: Record) -> str:
    summary = record.summary
    mean, staleness = summary["evaluation"].get("mean_return"), summary["staleness"]
    reached = "reached" if summary["target_reached"] else "not reached"
    steps = (
        f"{summary['env_steps']:,} steps, {summary['updates']:,} updates in "
        f"{summary['training_s']:.0f} s"
    )
    return (
        f"{record.case}, seed {record.seed}: target {reached}, evaluation {mean}, {steps}, "
        f"staleness {staleness['mean']:.2f} max {staleness['max']}"
    )


def _as_expected(case: Case, records: Sequence[Record]) -> bool:
    found = [record.summary for record in records if record.case == case.name]
    if len(found) != case.seeds or any(summary["staleness"]["violations"] for summary in found):
        return False
    if case.needed is None:
        return True
    solved = sum(case.solved(summary) and case.old_enough(summary) for summary in found)
    return solved >= case.needed if case.needed else solved == 0
