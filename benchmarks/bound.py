"""Why the bound matters: ``python -m benchmarks.bound`` trains CartPole under bounds, a filter at use and no bound at all.

Three actors share two cores with one learner, which sleeps some multiple of the time it computes. *bound N* paces actors by
credits (law ``staleness``), *filter 4* admits everybody and drops at use what is older than 4 updates (law ``consume_only``), *open
loop* keeps no bound. Every run ends at the target (100 episodes of evaluation), or after `SECONDS` of training.
With ``--only none`` nothing is run, and what was measured earlier is shown and drawn; that needs the extra ``plots``.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import Case, Matrix, Record, main
from benchmarks.results import RESULTS

SECONDS = 30.0
ACTORS = 3
SLOWDOWNS = (0, 4)
"""Seconds the learner sleeps for each that it computes."""
ALGORITHMS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "ppo": ("cartpole_ppo", {"algorithm.decoupled": False}),
    "ppo decoupled": ("cartpole_ppo", {"algorithm.decoupled": True}),
    "impala": ("cartpole_impala", {}),
}
BALANCES: Mapping[str, Mapping[str, object]] = {
    **{f"bound {bound}": {"balance.controller": "staleness", "balance.max_staleness": bound} for bound in (1, 4, 16)},
    "filter 4": {"balance.controller": "consume_only", "balance.max_staleness": 4},
    "open loop": {"balance.controller": "open_loop", "balance.max_staleness": "unbounded"},
}


def name_of(algorithm: str, balance: str, slowdown: int) -> str:
    """The case of one cell of the matrix."""
    return f"{algorithm}, {balance}, slowdown {slowdown}"


def cases() -> tuple[Case, ...]:
    """The whole matrix."""
    common: Mapping[str, object] = {"actors.count": ACTORS, "run.max_seconds": SECONDS, "run.max_env_steps": 1_000_000_000}
    return tuple(
        Case(name_of(algorithm, balance, slowdown), config, {**common, **settings, **law, "learner.slowdown": float(slowdown)}, needed=None)
        for slowdown in SLOWDOWNS
        for algorithm, (config, settings) in ALGORITHMS.items()
        for balance, law in BALANCES.items()
    )


def expired_share(summary: Mapping[str, Any]) -> float:
    """Of the trajectories that were begun, the share dropped for its age."""
    trajectories = summary["trajectories"]
    return float(trajectories["dropped"].get("expired", 0) / max(1, trajectories["begun"]))


HEAD = f"""# Why the bound matters

CartPole, {ACTORS} actors of 32 environments and one learner on two cores; each line: runs with other seeds, to the target of 475 (100
episodes of evaluation) or {SECONDS:.0f} s of training. *slowdown*: seconds the learner sleeps for each it computes. *bound N* paces actors
by credits, *filter 4* drops at use what is older than 4 updates and paces nobody, *open loop* keeps no bound. The time is the median
over runs that reached the target, the return the mean over runs of the last evaluation (of the last 100 training episodes where
none took place), staleness the median of means and the maximum of all, *expired* the mean share of trajectories dropped for their age.

| case | reached | time to target s | return | env steps/s | staleness mean | max | violations | expired |
|---|---|---|---|---|---|---|---|---|
"""


def table(records: Sequence[Record], known: Sequence[Case]) -> str:
    """For people: one line a case."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records, known))


def _lines(records: Sequence[Record], known: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    for case in known:
        found = [record.summary for record in records if record.case == case.name]
        if not found:
            continue
        times = [time_of(summary) for summary in found if summary["target_reached"]]
        ages = [summary["staleness"] for summary in found]
        yield (
            case.name,
            f"{len(times)} of {len(found)}",
            f"{statistics.median(times):.1f}" if times else "-",
            f"{statistics.mean(map(last_return, found)):.0f}",
            f"{statistics.median(summary['steps_per_s'] or 0.0 for summary in found):,.0f}",
            f"{statistics.median(age['mean'] or 0.0 for age in ages):.2f}",
            str(max(age["max"] or 0 for age in ages)),
            str(sum(age["violations"] for age in ages)),
            f"{statistics.mean(map(expired_share, found)):.0%}",
        )


def time_of(summary: Mapping[str, Any]) -> float:
    """Seconds of training to the target; all of them, where only the evaluation at the end met it."""
    reached = summary["time_to_target_s"]
    return float(summary["training_s"] if reached is None else reached)


def last_return(summary: Mapping[str, Any]) -> float:
    """Of the last evaluation, or of training where none took place."""
    evaluated = summary["evaluation"].get("mean_return")
    return float(evaluated if evaluated is not None else summary["mean_return"] or 0.0)


def plot(records: Sequence[Record], path: Path) -> None:
    """``path`` (SVG): mean return by balance, a panel for each algorithm, a bar for each slowdown. Needs the extra ``plots``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: it needs the extra 'plots'", file=sys.stderr)
        return
    shown = [slowdown for slowdown in sorted(SLOWDOWNS) if any(record.case.endswith(f"slowdown {slowdown}") for record in records)]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(ALGORITHMS), sharey=True)
    for panel, algorithm in zip(panels, ALGORITHMS, strict=True):
        for index, slowdown in enumerate(shown):
            names = [name_of(algorithm, balance, slowdown) for balance in BALANCES]
            heights = [statistics.mean([last_return(r.summary) for r in records if r.case == name] or [0.0]) for name in names]
            places = [place + 0.8 * (index - (len(shown) - 1) / 2) / len(shown) for place in range(len(names))]
            panel.bar(places, heights, width=0.8 / len(shown), label=f"slowdown {slowdown}")
        panel.axhline(475, color="black", linewidth=0.8, linestyle=":")
        panel.set_xticks(range(len(BALANCES)), list(BALANCES), rotation=30)
        panel.set_title(algorithm)
    panels[0].set_ylabel(f"return at the target or after {SECONDS:.0f} s")
    panels[-1].legend()
    figure.savefig(path, metadata={"Date": None})


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "bound.json", plot=plot)

if __name__ == "__main__":
    sys.exit(main(MATRIX))
