"""Study of the staleness bound: ``python -m benchmarks.studies.bound`` trains with several speeds
of the learner, bounds, controllers and algorithms.

Four actors feed one learner, which runs at full speed, or sleeps a multiple of its computing time.
Data become as stale as the limit allows. The limit is a bound held by pacing (controller
``staleness``), the same bound held by dropping at the learner (``consume_only``), or memory for
`SLOTS` trajectories (``open_loop``). A run ends when 100 evaluation episodes average the target, or
after `SECONDS` of training. ``--only none`` runs nothing, and formats and plots the recorded runs.
Plots need the extra ``plots``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.matrix import Case, Matrix, Record, main
from benchmarks.lib.results import RESULTS

SECONDS = 30.0
ACTORS = 4
SLOTS = 32
SLOWDOWNS = (0.0, 4.0, 10.0)
"""Seconds of sleep for each second of the learner's computing."""
ALGORITHMS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "PPO": ("cartpole_ppo", {"algorithm.decoupled": False}),
    "decoupled PPO": ("cartpole_ppo", {"algorithm.decoupled": True}),
    "IMPALA": ("cartpole_impala", {}),
}
HOLDERS: Mapping[str, Mapping[str, object]] = {
    "η = 1": {"balance.max_staleness": 1},
    "η = 4": {"balance.max_staleness": 4},
    "η = 16": {"balance.max_staleness": 16},
    "filter at 4": {"balance.max_staleness": 4, "balance.controller": "consume_only"},
    "filter at 16": {"balance.max_staleness": 16, "balance.controller": "consume_only"},
    "open loop": {"balance.max_staleness": "unbounded", "balance.controller": "open_loop"},
}
"""Settings that limit staleness."""
COMMON: Mapping[str, object] = {
    "actors.count": ACTORS,
    "run.max_seconds": SECONDS,
    "run.max_env_steps": None,
}
HEAD = f"""# Effect of the staleness bound

CartPole to a mean of 475 over 100 evaluation episodes, {ACTORS} actors of 32 environments, two cores
for each run, at most {SECONDS:.0f} s of training. *slowed*: the learner sleeps this multiple of its
computing time. η: the bound, held by pacing actors. *filter*: actors are not paced, and the learner
drops expired trajectories. *open loop*: no bound, memory for {SLOTS} trajectories. Values are medians
over seeds. A run that did not reach the target counts as {SECONDS:.0f} s. Final return: return of the
last evaluation. Dropped: share of the begun trajectories that were not trained on.

| algorithm | slowed | limit | reached | time to target, s (range) | final return | steps/s trained | staleness mean | max | dropped |
|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501 - a row of a Markdown table


def name(algorithm: str, slowdown: float, holder: str) -> str:
    """Return the name of a case."""
    return f"{algorithm}, slowed {slowdown:g}, {holder}"


def cases() -> tuple[Case, ...]:
    """Return every algorithm with every speed of the learner and every limit."""
    return tuple(
        Case(
            name(algorithm, slowdown, holder),
            config,
            {**COMMON, **settings, **held, "learner.slowdown": slowdown},
            needed=None,
        )
        for algorithm, (config, settings) in ALGORITHMS.items()
        for slowdown in SLOWDOWNS
        for holder, held in HOLDERS.items()
    )


def seconds_to_target(summary: Mapping[str, Any]) -> float:
    """Return the seconds of training until the target, or ``SECONDS`` if only the final evaluation
    reached it, or none did.
    """
    found = summary["time_to_target_s"] if summary["target_reached"] else None
    return SECONDS if found is None else min(SECONDS, float(found))


def table(records: Sequence[Record], _known: Sequence[Case]) -> str:
    """Format one line for each case."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for algorithm in ALGORITHMS:
        for slowdown in SLOWDOWNS:
            for holder in HOLDERS:
                found = [
                    record.summary
                    for record in records
                    if record.case == name(algorithm, slowdown, holder)
                ]
                if found:
                    yield (
                        algorithm,
                        f"{slowdown:g}×" if slowdown else "no",
                        holder,
                        *_figures(found),
                    )


def _figures(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    times = [seconds_to_target(summary) for summary in found]
    staleness = [summary["staleness"] for summary in found]
    dropped = sum(sum(summary["trajectories"]["dropped"].values()) for summary in found)
    begun = sum(summary["trajectories"]["begun"] for summary in found)
    trained = [
        summary["steps_per_s"]
        * summary["trajectories"]["trained"]
        / summary["trajectories"]["begun"]
        for summary in found
    ]
    final = [summary["evaluation"].get("mean_return", 0.0) for summary in found]
    return (
        f"{sum(bool(summary['target_reached']) for summary in found)} of {len(found)}",
        f"{statistics.median(times):.1f} ({min(times):.1f} – {max(times):.1f})",
        f"{statistics.median(final):.0f}",
        f"{statistics.median(trained):,.0f}",
        f"{statistics.median(each['mean'] for each in staleness):.2f}",
        str(max(each["max"] for each in staleness)),
        f"{dropped / begun:.0%}",
    )


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot time to target over the learner's slowdown into ``path`` (SVG): one panel for each
    algorithm, one line for each limit.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: install the extra 'plots'", file=sys.stderr)
        return
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(ALGORITHMS), sharey=True)
    for panel, algorithm in zip(panels, ALGORITHMS, strict=True):
        for index, holder in enumerate(HOLDERS):
            style = "-" if holder.startswith("η") else "--" if holder.startswith("filter") else ":"
            times = [
                [
                    seconds_to_target(r.summary)
                    for r in records
                    if r.case == name(algorithm, slow, holder)
                ]
                for slow in SLOWDOWNS
            ]
            points = [
                (1 + slow, found) for slow, found in zip(SLOWDOWNS, times, strict=True) if found
            ]
            middles = [statistics.median(found) for _, found in points]
            spread = [
                [middle - min(found) for middle, (_, found) in zip(middles, points, strict=True)],
                [max(found) - middle for middle, (_, found) in zip(middles, points, strict=True)],
            ]
            # bars of the same slowdown must not overlap
            positions = [x * 1.03 ** (index - 2.5) for x, _ in points]
            panel.errorbar(
                positions,
                middles,
                yerr=spread,
                label=holder,
                linestyle=style,
                marker="o",
                markersize=4,
                capsize=2,
            )
        panel.set(title=algorithm, xscale="log", xlabel="slowdown of an update")
        panel.set_xticks([1 + slow for slow in SLOWDOWNS], [f"{1 + slow:g}" for slow in SLOWDOWNS])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"seconds to 475 ({SECONDS:.0f}: not reached)")
    panels[0].legend(fontsize="x-small")
    figure.savefig(path, metadata={"Date": None})


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "bound.json", plot=plot)

if __name__ == "__main__":
    sys.exit(main(MATRIX))
