"""Does it learn, at every age of data? ``python -m benchmarks.learning`` trains the shipped configs
and a memory task over many seeds.

Every run is ``tianflow train`` as a user starts it, and ends when 100 episodes of evaluation
average the target, or when its steps are used up. Results are kept after each run, and a run with
the same settings is not repeated, so that the whole may be made in parts. What counts here is
returns, steps and staleness; time is measured elsewhere.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.results import RESULTS
from tianflow.config.loading import load_config, to_toml, toml_value
from tianflow.rundir import history

BOUNDS = (0, 1, 4, 16)
SLOWED: Mapping[str, object] = {"learner.slowdown": 3.0, "actors.count": 2}
"""The learner takes four times as long, and two actors keep its queue full: batches are then as old
as the bound allows.
"""
OLD = 0.8
"""A slowed run counts if the mean staleness is at least this share of the bound."""
MEMORY: Mapping[str, object] = {
    "env.id": "tianflow.envs.recall:Recall",
    "env.kwargs": {"gap": 10},
    "env.normalisation.returns": False,
    "network.hidden": [32],
    "network.activation": "tanh",
    "actors.rollout_steps": 8,
    "algorithm.discount": 0.95,
    "algorithm.entropy_cost": 0.005,
    "run.target_return": 0.95,
}
"""What was shown in one fragment must be said in another."""
MEMORY_BY: Mapping[str, Mapping[str, object]] = {
    "ppo": {
        "algorithm.learning_rate": 3e-3,
        "algorithm.batch_trajectories": 2,
        "algorithm.gae_lambda": 0.95,
        "algorithm.epochs": 4,
    },
    "impala": {"algorithm.learning_rate": 2e-3, "algorithm.normalise_advantages": False},
}
POINTS = 120
PONG_RISES = -20.0
"""A player that does nothing loses every point, which is -21."""


@dataclass(frozen=True, slots=True)
class Case:
    """One config under one set of overrides, over ``seeds``.

    Attributes:
        needed: of so many seeds the target is expected; 0 where learning must fail, None where
            nothing is expected.
        rises_to: the mean of the last 100 training episodes that counts as solved, instead of the
            target in evaluation.
        curve: whether its curve is kept in the summary: at most `POINTS` of (seconds, steps, mean
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
        """The same over so many seeds, of which the same share is expected."""
        return replace(
            self,
            seeds=seeds,
            needed=None if self.needed is None else self.needed * seeds // self.seeds,
        )

    def settings(self, seed: int) -> dict[str, object]:
        """Overrides of one run."""
        return {**self.overrides, "run.seed": seed}

    def solved(self, summary: Mapping[str, Any]) -> bool:
        """Whether a run did what was asked."""
        if self.rises_to is not None:
            return summary["mean_return"] is not None and summary["mean_return"] >= self.rises_to
        return bool(summary["target_reached"])

    def old_enough(self, summary: Mapping[str, Any]) -> bool:
        """Whether data were as old as the case wants them."""
        return (
            "learner.slowdown" not in self.overrides
            or summary["staleness"]["mean"] >= OLD * summary["staleness"]["bound"]
        )


def cases() -> tuple[Case, ...]:
    """The whole matrix, in the order in which it is shown."""
    found = []
    for config in ("cartpole_ppo", "cartpole_impala"):
        for bound in BOUNDS:
            found.append(Case(f"{config} bound {bound}", config, {"balance.max_staleness": bound}))
            if bound:
                found.append(
                    Case(
                        f"{config} bound {bound} slowed",
                        config,
                        {"balance.max_staleness": bound, **SLOWED},
                    )
                )
    found.append(Case("cartpole_a2c", "cartpole_a2c", seeds=3, needed=3))
    found.append(Case("pendulum_ppo", "pendulum_ppo"))
    for name, settings in MEMORY_BY.items():
        memory = {**MEMORY, **settings}
        remembering, forgetting = (
            {"network.lstm": 32, "run.max_env_steps": 600_000},
            {"network.lstm": 0, "run.max_env_steps": 300_000},
        )
        found.append(
            Case(
                f"memory {name} lstm",
                f"cartpole_{name}",
                {**memory, **remembering},
                seeds=3,
                needed=3,
            )
        )
        found.append(
            Case(
                f"memory {name} without",
                f"cartpole_{name}",
                {**memory, **forgetting},
                seeds=3,
                needed=0,
            )
        )
    found += [
        Case(f"cartpole_apex {name}", "cartpole_apex", {"replay.shards": count})
        for count, name in ((1, "1 shard"), (4, "4 shards"))
    ]
    found.append(Case("pendulum_sac", "pendulum_sac"))
    found.append(Case("memory_r2d2", "memory_r2d2"))
    without: Mapping[str, object] = {
        "algorithm.burn_in": None,
        "algorithm.unroll": None,
        "algorithm.name": "dqn",
        "network.lstm": 0,
        "run.max_env_steps": 200_000,
    }
    found.append(
        Case("memory_r2d2 without memory (dqn)", "memory_r2d2", without, seeds=3, needed=0)
    )
    found.append(
        Case(
            "pong_impala",
            "pong_impala",
            {"run.max_seconds": 600.0},
            seeds=1,
            needed=1,
            rises_to=PONG_RISES,
        )
    )
    return tuple(found)


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
        table: records and cases -> Markdown.
        out: where records are kept; the table and the plot lie beside it.
        plot: draws the records into a file; None: there is no plot.
    """

    doc: str | None
    cases: Sequence[Case]
    table: Callable[[Sequence[Record], Sequence[Case]], str]
    out: Path
    plot: Callable[[Sequence[Record], Path], None] | None = None


def settings_of(case: Case, seed: int) -> str:
    """The whole config of a run, by which a record of it is known again."""
    return to_toml(load_config(case.config, case.settings(seed)), only_changed=True)


def train(case: Case, seed: int) -> Record:
    """One run in processes of its own; CalledProcessError if it failed."""
    settings = settings_of(case, seed)  # before the run: somebody may edit the config meanwhile
    with tempfile.TemporaryDirectory() as runs:
        overrides = [
            f"{path}={'null' if value is None else toml_value(value)}"
            for path, value in case.settings(seed).items()
        ]
        options = ["--plain", "--json", "--no-http", "--runs-dir", runs, "placement.affinity=none"]
        command = [sys.executable, "-m", "tianflow.cli", "train", case.config, *options, *overrides]
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


def read(path: Path) -> list[Record]:
    """Records kept by an earlier call; none if there was none."""
    if not path.exists():
        return []
    return [Record(**record) for record in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def write(
    path: Path,
    records: Iterable[Record],
    known: Sequence[Case],
    shown: Callable[[Sequence[Record], Sequence[Case]], str],
) -> None:
    """Keep ``records`` of ``known`` cases, with the machine, and the table that ``shown`` makes of
    them beside them.
    """
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


HEAD = """# Learning

Each line: runs of `tianflow train` with other seeds, to the target of the config (100 episodes of
evaluation) or to the end of its steps. *slowed*: the learner sleeps three times as long as it
computes, so that data become as old as the bound allows. Staleness is counted in updates, per
trajectory trained on; its mean is the median over runs, its maximum that of all.

| case | solved | wanted | median env steps | median updates | staleness mean | max | violations |
|---|---|---|---|---|---|---|---|
"""


def table(records: Sequence[Record], known: Sequence[Case]) -> str:
    """For people: one line a case."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records, known))


def _lines(records: Sequence[Record], known: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    for case in known:
        found = [record.summary for record in records if record.case == case.name]
        if found:
            solved = [
                summary for summary in found if case.solved(summary) and case.old_enough(summary)
            ]
            ages = [summary["staleness"] for summary in found]
            yield (
                case.name,
                f"{len(solved)} of {len(found)}",
                f"{case.needed} of {case.seeds}" if case.needed else "none",
                f"{statistics.median(summary['env_steps'] for summary in solved or found):,.0f}",
                f"{statistics.median(summary['updates'] for summary in solved or found):,.0f}",
                f"{statistics.median(age['mean'] for age in ages):.2f}",
                str(max(age["max"] for age in ages)),
                str(sum(age["violations"] for age in ages)),
            )


def main(matrix: Matrix) -> int:
    """Run what is missing; exit code 1 when a case has fewer solved runs than expected."""
    parser = argparse.ArgumentParser(description=matrix.doc)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="cases whose name matches one of these",
    )
    parser.add_argument(
        "--seeds", type=int, help="so many seeds of each case, instead of its own number"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at once, each on two cores of its own"
    )
    parser.add_argument("--out", type=Path, default=matrix.out)
    given = parser.parse_args()
    everything = [case if given.seeds is None else case.over(given.seeds) for case in matrix.cases]
    chosen = [
        case
        for case in everything
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in given.only)
    ]
    wanted = {
        (case.name, seed): (case, settings_of(case, seed))
        for case in everything
        for seed in range(1, case.seeds + 1)
    }
    records = [
        r for r in read(given.out) if wanted.get((r.case, r.seed), (None, ""))[1] == r.settings
    ]
    there = {(record.case, record.seed) for record in records}
    asked = sorted(
        ((case, seed) for case in chosen for seed in range(1, case.seeds + 1)),
        key=lambda run: run[1],
    )
    missing = [(case, seed) for case, seed in asked if (case.name, seed) not in there]
    pairs = _pairs(given.jobs)
    with ThreadPoolExecutor(
        given.jobs, initializer=lambda: os.sched_setaffinity(0, pairs.get_nowait())
    ) as pool:
        for future in as_completed([pool.submit(train, case, seed) for case, seed in missing]):
            try:
                record = future.result()
            except subprocess.CalledProcessError as error:  # the others' hours are not lost for it
                print(f"failed: {error}", file=sys.stderr, flush=True)
                continue
            records.append(record)
            write(given.out, records, everything, matrix.table)
            print(_brief(record), flush=True)
    print(matrix.table(records, everything))
    if matrix.plot is not None:
        matrix.plot(records, given.out.with_suffix(".svg"))
    return 0 if all(_as_expected(case, records) for case in chosen) else 1


def _pairs(count: int) -> queue.SimpleQueue[set[int]]:
    """Two cores for each of ``count`` workers, which what they start inherits; SystemExit when
    there are too few.
    """
    cores = sorted(os.sched_getaffinity(0))
    if count > 1 and len(cores) < 2 * count:
        raise SystemExit(f"--jobs {count} needs {2 * count} cores; there are {len(cores)}")
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for index in range(count):
        found.put(set(cores[2 * index : 2 * index + 2]))
    return found


def _brief(record: Record) -> str:
    summary = record.summary
    mean, age = summary["evaluation"].get("mean_return"), summary["staleness"]
    reached = "reached" if summary["target_reached"] else "not reached"
    steps = (
        f"{summary['env_steps']:,} steps, {summary['updates']:,} updates in "
        f"{summary['training_s']:.0f} s"
    )
    return (
        f"{record.case}, seed {record.seed}: target {reached}, evaluation {mean}, {steps}, "
        f"staleness {age['mean']:.2f} max {age['max']}"
    )


def _as_expected(case: Case, records: Sequence[Record]) -> bool:
    found = [record.summary for record in records if record.case == case.name]
    if len(found) != case.seeds or any(summary["staleness"]["violations"] for summary in found):
        return False
    if case.needed is None:
        return True
    solved = sum(case.solved(summary) and case.old_enough(summary) for summary in found)
    return solved >= case.needed if case.needed else solved == 0


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "learning.json")

if __name__ == "__main__":
    sys.exit(main(MATRIX))
