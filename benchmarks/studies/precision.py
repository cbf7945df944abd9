"""Study of bfloat16: ``python -m benchmarks.studies.precision --jobs N`` trains Pong at 42 x 42 in
both precisions, over many seeds.

For each seed, ``configs/pong_impala.toml`` runs with ``learner.precision`` fp32, with bf16, and
with ``actors.precision`` bf16 as well. A run has two cores and at most `SECONDS`. The record of a
run contains its curve: the mean return of the last 100 training episodes over time and steps.
``--only none`` runs nothing, and formats and plots the recorded runs. Plots need the extra
``plots``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.matrix import Case, Matrix, Record, at, main, plot_curves
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
HEAD = f"""# Learning in bfloat16

IMPALA on ALE Pong at 42 x 42 (`configs/pong_impala.toml`), {SECONDS:.0f} s of training on two cores
for each run. Values are medians over seeds, with the range. Returns are means of the last 100
training episodes, from -21 (every point lost) to 21 (every point won). *At the same steps*: at the
last step of the slowest run.

| precision | runs | steps/s | {MOMENTS} | at the same steps | staleness mean | max | violations |
|---|---|---|{"---|" * len(AT_SECONDS)}---|---|---|---|
"""


def cases() -> tuple[Case, ...]:
    """Return one case for each precision."""
    return tuple(
        Case(name, "pong_impala", {**COMMON, **settings}, needed=None, curve=True)
        for name, settings in PRECISIONS.items()
    )


def table(records: Sequence[Record], _known: Sequence[Case]) -> str:
    """Format one line for each precision."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    slowest = min((record.summary["env_steps"] for record in records), default=0)
    for precision in PRECISIONS:
        found = [record.summary for record in records if record.case == precision]
        if found:
            staleness = [summary["staleness"] for summary in found]
            yield (
                precision,
                str(len(found)),
                _spread([summary["steps_per_s"] for summary in found], ",.0f"),
                *(
                    _spread([at(summary["curve"], 0, t) for summary in found], ".1f")
                    for t in AT_SECONDS
                ),
                _spread([at(summary["curve"], 1, slowest) for summary in found], ".1f"),
                f"{statistics.median(each['mean'] for each in staleness):.2f}",
                str(max(each["max"] for each in staleness)),
                str(sum(each["violations"] for each in staleness)),
            )


def _spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{statistics.median(known):{form}} ({min(known):{form}} – {max(known):{form}})"


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot returns into ``path`` (SVG), with a colour for each precision."""
    plot_curves([record for record in records if record.case in PRECISIONS], path, lambda r: r.case)


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "precision.json", plot=plot)

if __name__ == "__main__":
    sys.exit(main(MATRIX))
