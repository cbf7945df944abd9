"""Study of presets and defaults: ``python -m benchmarks presets`` trains each for its steps and
writes the tables of ``docs/presets.md``.

A run is ``tianflow train``, as a user starts it. The score is the mean return of the evaluation at
its end, with the most probable actions. With ``--peer sb3``, Stable-Baselines3 trains beside it for
the same steps: with the settings of RL Zoo beside a preset, with its own defaults beside ours.
Results are written after each run, and a recorded run is not repeated.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks.lib import child, machine
from benchmarks.lib.harness import BenchmarkError
from benchmarks.lib.results import RESULTS
from tianflow.config.loading import load_config, shipped, to_toml
from tianflow.planning.starting import start_config

PAGE = machine.ROOT / "docs" / "presets.md"
OUT = RESULTS / "presets.json"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
SEEDS = (1, 2, 3, 4, 5)
ON_CPU = ("learner.device=cpu", "inference.device=cpu")
"""The scores are those of two cores. Networks this small are slower on a GPU."""
MARGIN = 1.25
"""Time that a run may take longer than the longest recorded run of its kind."""
START_S = 15.0
"""Seconds for a start and a last evaluation, where only training was estimated."""

PRESETS: Mapping[str, float] = {
    "cartpole_ppo": 30,
    "cartpole_a2c": 60,
    "cartpole_impala": 60,
    "cartpole_dqn": 60,
    "cartpole_apex": 60,
    "acrobot_ppo": 60,
    "acrobot_dqn": 60,
    "mountaincar_ppo": 150,
    "mountaincar_dqn": 100,
    "lunarlander_ppo": 240,
    "lunarlander_dqn": 150,
    "lunarlandercontinuous_ppo": 240,
    "pendulum_ppo": 200,
    "pendulum_sac": 120,
    "pendulum_td3": 120,
    "frozenlake_ppo": 30,
    "taxi_ppo": 90,
    "halfcheetah_ppo": 300,
    "hopper_ppo": 300,
    "memory_r2d2": 200,
}
"""Presets that are measured, with the seconds that a run takes on two cores at most."""
LONG: Mapping[str, float] = {"hopper_sac": 700, "halfcheetah_sac": 1200}
"""The same for presets that are measured only when ``--only`` names them."""
DEFAULTS: Sequence[tuple[str, str, int, float]] = (
    ("ppo", "CartPole-v1", 50_000, 60),
    ("ppo", "Acrobot-v1", 90_000, 60),
    ("ppo", "LunarLander-v3", 200_000, 150),
    ("ppo", "Pendulum-v1", 200_000, 120),
    ("ppo", "FrozenLake-v1", 50_000, 60),
    ("a2c", "CartPole-v1", 50_000, 30),
    ("a2c", "Acrobot-v1", 90_000, 60),
    ("a2c", "LunarLander-v3", 200_000, 100),
    ("a2c", "Pendulum-v1", 200_000, 100),
    ("a2c", "FrozenLake-v1", 50_000, 30),
    ("dqn", "CartPole-v1", 50_000, 60),
    ("dqn", "Acrobot-v1", 90_000, 100),
    ("dqn", "LunarLander-v3", 100_000, 100),
    ("dqn", "FrozenLake-v1", 50_000, 60),
    ("sac", "Pendulum-v1", 15_000, 200),
    ("td3", "Pendulum-v1", 15_000, 200),
)
"""Defaults that are measured: algorithm, environment, steps, and seconds on two cores at most."""
PEERS = frozenset({"a2c", "dqn", "ppo", "sac", "td3"})
"""Algorithms that the peer has."""
PEER_SLOWER = 2.5
"""How many times as long the peer takes at most, until a run of it is recorded."""
NEEDED = (
    ("LunarLander", "Box2D", "gymnasium[box2d]"),
    ("HalfCheetah", "mujoco", "gymnasium[mujoco]"),
    ("Hopper", "mujoco", "gymnasium[mujoco]"),
)
"""Beginnings of environments, the module that each needs, and the package to install."""
ELSEWHERE = {
    "pong_apex": "takes longer than ten minutes",
    "pong_gpu": "needs a GPU",
    "pong_impala": "takes longer than ten minutes",
    "cartpole_seed": "that of `cartpole_impala`",
}
"""Presets that this study does not measure, and the text in place of their score."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one seed trains.

    Attributes:
        side: preset, defaults, zoo (of the peer, beside a preset) or peer (its own defaults).
        name: of the preset, or algorithm and environment.
        steps: end of the training, in environment steps.
        seconds: longest time on two cores.
    """

    side: str
    name: str
    algorithm: str
    env: str
    steps: int
    seconds: float

    @property
    def ours(self) -> bool:
        """True if tianflow trains."""
        return self.side in {"preset", "defaults"}


@dataclass(frozen=True, slots=True)
class Record:
    """One finished run. ``settings`` identifies what was run."""

    side: str
    name: str
    seed: int
    settings: str
    score: float
    training: float | None
    env_steps: int
    training_s: float
    wall_s: float


def trials(peer: bool) -> list[Trial]:
    """All trials, in the order of the table."""
    found = []
    for name, seconds in {**PRESETS, **LONG}.items():
        config = load_config(shipped()[name])
        steps = config.run.max_env_steps
        assert steps is not None, f"{name} has no run.max_env_steps"
        place = config.algorithm.name, config.env.id, steps
        found.append(Trial("preset", name, *place, seconds))
        if peer and config.algorithm.name in PEERS:
            found.append(Trial("zoo", name, *place, seconds * PEER_SLOWER))
    for algorithm, env, steps, seconds in DEFAULTS:
        name = f"{algorithm} {env}"
        found.append(Trial("defaults", name, algorithm, env, steps, seconds))
        if peer:
            found.append(Trial("peer", name, algorithm, env, steps, seconds * PEER_SLOWER))
    return found


@cache
def settings_of(trial: Trial) -> str:
    """All settings of a trial but the seed, which identify its records."""
    if trial.side == "preset":
        return to_toml(load_config(trial.name), only_changed=True)
    if trial.side == "defaults":
        overrides = {"run.max_env_steps": trial.steps}
        config = start_config(trial.algorithm, trial.env, overrides, presets=False)
        return to_toml(config, only_changed=True)
    from benchmarks.peers.sb3_presets import ZOO

    settings = ZOO.get((trial.algorithm, trial.env), {}) if trial.side == "zoo" else {}
    return json.dumps({"steps": trial.steps, **settings}, sort_keys=True)


def train(trial: Trial, seed: int, limit_s: float) -> Record:
    """Train once in separate processes.

    Raises:
        BenchmarkError: the run failed, or was still active after ``limit_s``.
    """
    settings = settings_of(trial)
    if not trial.ours:
        which = "zoo" if trial.side == "zoo" else "defaults"
        place = (which, trial.algorithm, trial.env, trial.steps, seed)
        done = child.run("benchmarks.peers.sb3_presets", *place, timeout_s=limit_s)
        answer = done.answer
    else:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.toml"
            config.write_text(settings, encoding="utf-8")
            what = ("train", config, f"run.seed={seed}", "placement.affinity=none", *ON_CPU)
            options = ("--plain", "--json", "--no-http", "--runs-dir", folder)
            done = child.run("tianflow", *what, *options, timeout_s=limit_s)
        answer = {
            "score": done.answer["evaluation"]["mean_return"],
            "training": done.answer["mean_return"],
            "env_steps": done.answer["env_steps"],
            "training_s": done.answer["training_s"],
        }
    return Record(trial.side, trial.name, seed, settings, **answer, wall_s=done.wall_s)


def missing_package(trial: Trial) -> str | None:
    """The package to install for a trial; None if all are there."""
    needed = [each for each in NEEDED if trial.env.startswith(each[0])]
    if not trial.ours:
        needed.append(("", "stable_baselines3", "stable-baselines3"))
    return next((package for _, module, package in needed if not _can_import(module)), None)


@cache
def _can_import(module: str) -> bool:
    """True if the module works. One that is found may lack its libraries."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


@cache
def _machine() -> dict[str, object]:
    """The machine, which starts processes to describe itself."""
    return machine.describe()


def expected_s(trial: Trial, records: Iterable[Record]) -> float:
    """Longest time of a run, from recorded runs of the same trial if there are any."""
    known = [r.wall_s for r in records if (r.side, r.name) == (trial.side, trial.name)]
    return max(known) * MARGIN if known else trial.seconds + START_S


class Queue:
    """Runs that are missing, in their order. A worker takes the next one that can end in time.

    Args:
        runs: (trial, seed), in their order.
        ends: moment of the limit, by ``now``.
        records: finished runs, which show how long others take. It grows meanwhile.
        now: the clock.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Trial, int]],
        *,
        ends: float,
        records: Sequence[Record],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs, self._ends, self._records, self._now = list(runs), ends, records, now
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Number of runs that no worker took."""
        return len(self._runs)

    def take(self) -> tuple[Trial, int, float] | None:
        """The next run, and the seconds until the limit; None if no run can end in time."""
        with self._lock:
            time_left = self._ends - self._now()
            for index, (trial, seed) in enumerate(self._runs):
                if expected_s(trial, self._records) <= time_left:
                    del self._runs[index]
                    return trial, seed, time_left
        return None


def read(path: Path) -> list[Record]:
    """The records of earlier calls."""
    if not path.exists():
        return []
    return [Record(**each) for each in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write the records and the machine. A reader never sees half a file."""
    order = {(trial.side, trial.name): index for index, trial in enumerate(trials(peer=True))}
    kept = sorted(
        (record for record in records if (record.side, record.name) in order),
        key=lambda record: (order[record.side, record.name], record.seed),
    )
    text = json.dumps(
        {"machine": _machine(), "runs": [asdict(record) for record in kept]}, indent=1
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


# The table
# --------------------------------------------------------------------------------------------------


def _middle(found: Sequence[Record]) -> str:
    """Median and range of the scores; "" without records."""
    scores = [record.score for record in found]
    if not scores:
        return ""
    low, middle, high = (_number(f(scores)) for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def table(records: Sequence[Record]) -> str:
    """The tables of ``docs/presets.md``: presets, then defaults.

    A record of other settings than the present ones is not shown. Defaults are not compared,
    because that makes their environments.
    """
    present = {
        (trial.side, trial.name): settings_of(trial)
        for trial in trials(peer=True)
        if trial.side != "defaults"
    }
    by: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        side = record.side, record.name
        if present.get(side, record.settings) == record.settings:
            by.setdefault(side, []).append(record)
    lines = [
        _line(("preset", "environment", "steps", "seeds", "score", "Stable-Baselines3", "seconds")),
        _line(["---"] * 7),
    ]
    for name in sorted(shipped()):
        config = load_config(shipped()[name])
        ours, theirs = by.get(("preset", name), []), by.get(("zoo", name), [])
        limit = f"{config.run.max_env_steps:,}" if config.run.max_env_steps else "none"
        if config.run.target_return is not None:
            limit = f"to {config.run.target_return:g}, at most {limit}"
            if ours:
                limit += f"; {statistics.median(record.env_steps for record in ours):,.0f}"
        score = _middle(ours) or ELSEWHERE.get(name, "not measured yet")
        seconds = f"{statistics.median(r.training_s for r in ours):,.0f}" if ours else ""
        first = (f"`{name}`", config.env.id, limit, len(ours) or "")
        lines.append(_line((*first, score, _middle(theirs), seconds)))
    lines += [
        "\nDefaults, without a preset:\n\n",
        _line(("algorithm", "environment", "steps", "seeds", "score", "Stable-Baselines3")),
        _line(["---"] * 6),
    ]
    for algorithm, env, steps, _ in DEFAULTS:
        ours, theirs = (by.get((side, f"{algorithm} {env}"), []) for side in ("defaults", "peer"))
        score = _middle(ours) or "not measured yet"
        first = (f"`{algorithm}`", env, f"{steps:,}", len(ours) or "")
        lines.append(_line((*first, score, _middle(theirs))))
    return "".join(lines)


def render(records: Sequence[Record], page: Path = PAGE) -> None:
    """Replace the tables of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n" + table(records) + "\n" + END + after, encoding="utf-8")


# The command line
# --------------------------------------------------------------------------------------------------


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks presets", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="presets, or 'ALGORITHM ENV' of defaults, as shell patterns (default: all short ones)",
    )
    parser.add_argument(
        "--what",
        choices=("presets", "defaults", "all"),
        default="all",
        help="presets, defaults, or both (default: all)",
    )
    parser.add_argument("--seeds", type=_numbers, default=SEEDS, help="default: 1,2,3,4,5")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--cores", type=int, default=2, help="cores of each run (default: 2)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="seconds in which all runs end; a run that would last longer is not started",
    )
    parser.add_argument("--peer", choices=("sb3",), help="train Stable-Baselines3, too")
    parser.add_argument("--out", type=Path, default=OUT, help="file of the results")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="page whose tables are written (docs/presets.md)"
    )
    parser.add_argument("--render", action="store_true", help="write the tables, and train nothing")
    return parser.parse_args(given)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def chosen(given: argparse.Namespace) -> list[Trial]:
    """The trials that the command line asks for."""
    sides = {
        "presets": {"preset", "zoo"},
        "defaults": {"defaults", "peer"},
        "all": {"preset", "zoo", "defaults", "peer"},
    }[given.what]
    patterns = given.only or ["*"]
    return [
        trial
        for trial in trials(peer=given.peer is not None)
        if trial.side in sides
        and any(fnmatch.fnmatch(trial.name, pattern) for pattern in patterns)
        and (given.only or trial.name not in LONG)
    ]


def main(words: Sequence[str]) -> int:
    """Run what is missing. Return 1 if a run failed."""
    given = arguments(words)
    ends = time.monotonic() + given.limit_s
    records, lock, failed = read(given.out), threading.Lock(), 0
    if given.render:
        render(records, given.page)
        return 0
    wanted = []
    for trial in chosen(given):
        package = missing_package(trial)
        if package is not None:
            print(f"skipped: {trial.side} {trial.name} needs {package}", flush=True)
            continue
        wanted.append(trial)
    current = {(trial.side, trial.name): settings_of(trial) for trial in wanted}
    records = [r for r in records if current.get((r.side, r.name), r.settings) == r.settings]
    there = {(record.side, record.name, record.seed) for record in records}
    runs = sorted(  # one seed of everything first, and long runs early, so that cores end together
        (
            (trial, seed)
            for seed in given.seeds
            for trial in wanted
            if (trial.side, trial.name, seed) not in there
        ),
        key=lambda run: (not run[0].ours, given.seeds.index(run[1]), -run[0].seconds),
    )
    todo = Queue(runs, ends=ends, records=records)

    def work(cores: set[int]) -> int:
        os.sched_setaffinity(0, cores)  # of this thread and its children
        failures = 0
        while (taken := todo.take()) is not None:
            trial, seed, limit_s = taken
            try:
                record = train(trial, seed, min(limit_s, 86_400.0))
            except BenchmarkError as error:  # one failure must not lose the other runs
                print(f"failed: {trial.side} {trial.name}, seed {seed}: {error}", flush=True)
                failures += 1
                continue
            with lock:
                records.append(record)
                write(given.out, records)
                render(records, given.page)
                print(_said(record), flush=True)
        return failures

    sets = core_sets(given.jobs, given.cores)
    with ThreadPoolExecutor(given.jobs) as pool:
        failed = sum(pool.map(work, [sets.get_nowait() for _ in range(given.jobs)]))
    if todo.left:
        print(f"{todo.left} runs are left: they need more than the limit; call again", flush=True)
    return int(failed > 0)


def core_sets(jobs: int, width: int) -> queue.SimpleQueue[set[int]]:
    """``width`` cores for each of ``jobs`` workers. One worker may have fewer.

    Raises:
        SystemExit: there are too few cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if jobs > 1 and len(cores) < width * jobs:
        raise SystemExit(
            f"--jobs {jobs} with --cores {width} needs {width * jobs} cores; there are {len(cores)}"
        )
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for index in range(jobs):
        found.put(set(cores[width * index : width * (index + 1)]))
    return found


def _said(record: Record) -> str:
    return (
        f"{record.side} {record.name}, seed {record.seed}: score {_number(record.score)}, "
        f"{record.env_steps:,} steps in {record.training_s:.0f} s, {record.wall_s:.0f} s in all"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
