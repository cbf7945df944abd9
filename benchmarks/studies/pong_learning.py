"""Study of learning on a GPU: ``python -m benchmarks.studies.pong_learning --jobs 4`` trains Pong
at 42 x 42 for at most `SECONDS` a run.

IMPALA (``configs/pong_gpu.toml``) trains in fp32, tf32 and bf16, and Ape-X
(``configs/pong_apex.toml``) beside it. Each run has four cores, and all share the GPU. The
record of a run contains its curve: the mean return of the last 100 training episodes over time and
steps. ``--only none`` runs nothing, and formats and plots the recorded runs. Plots need the extra
``plots``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.matrix import Case, Matrix, Record, at, main, plot_curves
from benchmarks.lib.results import RESULTS

CORES, SECONDS, SOLVED = 4, 510.0, 15.0
AT_SECONDS = (120.0, 240.0, 360.0, SECONDS)
COMMON: Mapping[str, object] = {"run.max_seconds": SECONDS, "run.target_return": None}
IMPALA: Mapping[str, object] = {
    **COMMON,
    "env.kwargs.img_height": 42,
    "env.kwargs.img_width": 42,
    "env.num_envs": 8,
    "algorithm.learning_rate": {
        "schedule": "linear",
        "start": 6e-4,
        "end": 1e-4,
        "unit": "seconds",
        "over": SECONDS,
    },
    "actors.count": 2 * CORES,
    "actors.hosts": CORES,
    "algorithm.batch_trajectories": CORES // 2,
}
"""Batches of 320 samples make many updates of few steps; the bound of the config still holds with
every actor at work.
"""
TF32: Mapping[str, object] = {"learner.precision": "tf32", "inference.precision": "tf32"}
BF16: Mapping[str, object] = {"learner.precision": "bf16", "inference.precision": "bf16"}
APEX: Mapping[str, object] = {
    **COMMON,
    "actors.inference": "central",
    "actors.count": "auto",
    "inference.max_wait_s": 0.002,
}
CASES = (
    Case("IMPALA, fp32", "pong_gpu", IMPALA, seeds=1, needed=None, curve=True),
    Case("IMPALA, tf32", "pong_gpu", {**IMPALA, **TF32}, seeds=1, needed=None, curve=True),
    Case("IMPALA, bf16", "pong_gpu", {**IMPALA, **BF16}, seeds=1, needed=None, curve=True),
    Case("Ape-X", "pong_apex", APEX, seeds=1, needed=None, curve=True),
)
COLUMNS = (
    *("run", "seed", "steps", "steps/s", "updates"),
    *(f"return at {seconds:.0f} s" for seconds in AT_SECONDS),
    *(f"seconds to {SOLVED:.0f}", "staleness mean", "max", "violations"),
)
HEAD = f"""# Learning Pong with a learner on a GPU

ALE Pong at 42 x 42 from nothing, {SECONDS:.0f} s of training. Four runs ran at the same time, on
{CORES} cores each, and shared one GPU. IMPALA: `configs/pong_gpu.toml` with batches of
{CORES // 2} trajectories of 8 environments, and a learning rate that falls to a sixth. Ape-X:
`configs/pong_apex.toml` with central inference. Returns are means of the last 100 training
episodes, from -21 (every point lost) to 21 (every point won).

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


def table(records: Sequence[Record], _known: Sequence[Case]) -> str:
    """Format one line for each run."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for record in records:
        summary, curve = record.summary, record.summary["curve"]
        staleness: Mapping[str, Any] = summary["staleness"]
        yield (
            record.case,
            str(record.seed),
            f"{summary['env_steps']:,}",
            f"{summary['steps_per_s']:,.0f}",
            f"{summary['updates']:,}",
            *(_number(at(curve, 0, seconds), ".1f") for seconds in AT_SECONDS),
            _number(first_at(curve, SOLVED), ".0f"),
            _number(staleness["mean"], ".2f"),
            str(staleness["max"]),
            str(staleness["violations"]),
        )


def first_at(curve: Sequence[Sequence[float | None]], wanted: float) -> float | None:
    """Return the seconds to the first point with a return of at least ``wanted``."""
    return next((point[0] for point in curve if point[2] is not None and point[2] >= wanted), None)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot returns into ``path`` (SVG), with a colour for each run."""
    plot_curves(records, path, lambda record: f"{record.case}, seed {record.seed}")


MATRIX = Matrix(
    doc=__doc__,
    cases=CASES,
    table=table,
    out=RESULTS / "pong_learning.json",
    plot=plot,
    cores=CORES,
)

if __name__ == "__main__":
    sys.exit(main(MATRIX))
