"""Does bfloat16 learn alike? ``python -m benchmarks.studies.precision --jobs N`` trains Pong at 42 x 42 in
both precisions, over many seeds.

The same config (``configs/pong_impala.toml``), for each seed one run with ``learner.precision``
fp32, one with bf16, and one with ``actors.precision`` bf16, too; two cores and at most `SECONDS` a
run. Kept with each run is its curve: the mean return of the last 100 training episodes over time
and over steps. With ``--only none`` nothing is run, and what was measured earlier is shown and
drawn; that needs the extra ``plots``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.matrix import Case, Matrix, Record, main
from benchmarks.lib.results import RESULTS

SECONDS = 420.0
AT_SECONDS = (140.0, 280.0, 420.0)
PRECISIONS: Mapping[str, Mapping[str, object]] = {
    "fp32": {"learner.precision": "fp32"},
    "bf16": {"learner.precision": "bf16"},
    "bf16, actors, too": {"learner.precision": "bf16", "actors.precision": "bf16"},
}
COMMON: Mapping[str, object] = {"run.max_seconds": SECONDS, "run.target_return": None}
MOMENTS = " | ".join(f"return at {t:.0f} s" for t in AT_SECONDS)
HEAD = f"""# Does bfloat16 learn alike?

IMPALA on ALE Pong at 42 x 42 (`configs/pong_impala.toml`), {SECONDS:.0f} s of training on two cores
a run; medians over seeds, with the range. Returns are means of the last 100 training episodes: -21
is a player who loses every point, 21 one who wins every point. *At the same steps*: where the
slowest of all runs ended.

| precision | runs | steps/s | {MOMENTS} | at the same steps | staleness mean | max | violations |
|---|---|---|{"---|" * len(AT_SECONDS)}---|---|---|---|
"""


def cases() -> tuple[Case, ...]:
    """One for each precision."""
    return tuple(
        Case(name, "pong_impala", {**COMMON, **settings}, needed=None, curve=True)
        for name, settings in PRECISIONS.items()
    )


def at(curve: Sequence[Sequence[float | None]], axis: int, place: float) -> float | None:
    """The return at ``place`` of a curve of (seconds, steps, return), on its ``axis`` 0 or 1: that
    of the last point up to there.
    """
    known = [point for point in curve if point[2] is not None and (point[axis] or 0.0) <= place]
    return known[-1][2] if known else None


def table(records: Sequence[Record], _known: Sequence[Case]) -> str:
    """For people: one line a precision."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    slowest = min((record.summary["env_steps"] for record in records), default=0)
    for precision in PRECISIONS:
        found = [record.summary for record in records if record.case == precision]
        if found:
            ages = [summary["staleness"] for summary in found]
            yield (
                precision,
                str(len(found)),
                _spread([summary["steps_per_s"] for summary in found], ",.0f"),
                *(
                    _spread([at(summary["curve"], 0, t) for summary in found], ".1f")
                    for t in AT_SECONDS
                ),
                _spread([at(summary["curve"], 1, slowest) for summary in found], ".1f"),
                f"{statistics.median(age['mean'] for age in ages):.2f}",
                str(max(age["max"] for age in ages)),
                str(sum(age["violations"] for age in ages)),
            )


def _spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{statistics.median(known):{form}} ({min(known):{form}} – {max(known):{form}})"


def plot(records: Sequence[Record], path: Path) -> None:
    """Returns over time and over steps, into ``path`` (SVG): a thin line a run, a colour a
    precision.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: it needs the extra 'plots'", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for panel, axis, label in zip(
        panels, (0, 1), ("seconds of training", "environment steps"), strict=True
    ):
        for index, precision in enumerate(PRECISIONS):
            named = precision
            for record in records:
                if record.case == precision:
                    points = [point for point in record.summary["curve"] if point[2] is not None]
                    panel.plot(
                        [p[axis] for p in points],
                        [p[2] for p in points],
                        color=f"C{index}",
                        linewidth=0.8,
                        label=named,
                    )
                    named = "_"
        panel.set(xlabel=label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean return of 100 episodes")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "precision.json", plot=plot)

if __name__ == "__main__":
    sys.exit(main(MATRIX))
