"""Study of publication by divergence: ``python -m benchmarks.studies.divergence`` trains PPO on
CartPole with several thresholds, at two learning rates.

`ACTORS` actors feed one learner under a bound of `BOUND`. A version is published after each update,
or when the policy has moved by more than a threshold of nats. With B = 1 the bound and the actors
permit a publish lag of `LARGEST_LAG`, so at least one version in `LARGEST_LAG` + 1 is published. A
run ends when 100 evaluation episodes average the target, or after `SECONDS` of training. ``--only
none`` runs nothing, and formats the recorded runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.lib.matrix import Case, Matrix, Record, main
from benchmarks.lib.results import RESULTS

SECONDS = 30.0
BOUND = 8
ACTORS = 2
LARGEST_LAG = BOUND - ACTORS
RATES: Mapping[str, float] = {"5e-4": 5e-4, "2.5e-5": 2.5e-5}
"""Learning rates: that of the config, and one 20 times smaller."""
RULES: Mapping[str, Mapping[str, object]] = {
    "every update": {},
    **{
        f"{nats:g} nats": {"weights.publish": "divergence", "weights.divergence_nats": nats}
        for nats in (1e-4, 1e-3, 1e-2, 1e-1)
    },
}
"""Rules of publication."""
COMMON: Mapping[str, object] = {
    "actors.count": ACTORS,
    "balance.max_staleness": BOUND,
    "run.max_seconds": SECONDS,
    "run.max_env_steps": None,
}
HEAD = f"""# Publication by divergence

PPO on CartPole to a mean of 475 over 100 evaluation episodes, {ACTORS} actors of 32 environments, two
cores for each run, η = {BOUND}, at most {SECONDS:.0f} s of training. *Published*: share of the versions
that were published; η and the actors require {1 / (LARGEST_LAG + 1):.0%}. Values are medians over
seeds, with the range. *To 475*: of the runs that reached it.

| learning rate | published when | runs | published | reached | steps to 475 | s to 475 | steps/s | staleness mean | max | violations |
|---|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501 - a row of a Markdown table


def name(rate: str, rule: str) -> str:
    """Return the name of a case."""
    return f"learning rate {rate}, {rule}"


def cases() -> tuple[Case, ...]:
    """Return every learning rate with every rule of publication."""
    return tuple(
        Case(
            name(rate, rule),
            "cartpole_ppo",
            {**COMMON, **settings, "algorithm.learning_rate": value},
            needed=None,
        )
        for rate, value in RATES.items()
        for rule, settings in RULES.items()
    )


def published_share(summary: Mapping[str, Any]) -> float:
    """Return the share of the updates whose version was published when they ended."""
    updates: int = summary["updates"]
    return 1.0 - summary["weights"]["skipped"] / updates if updates else 0.0


def table(records: Sequence[Record], _known: Sequence[Case]) -> str:
    """Format one line for each case."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records))


def _lines(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for rate in RATES:
        for rule in RULES:
            found = [record.summary for record in records if record.case == name(rate, rule)]
            if found:
                yield (rate, rule, str(len(found)), *_figures(found))


def _figures(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    reached = [summary for summary in found if summary["target_reached"]]
    staleness = [summary["staleness"] for summary in found]
    return (
        _spread([published_share(summary) for summary in found], ".0%"),
        f"{len(reached)} of {len(found)}",
        _spread([summary["env_steps"] for summary in reached], ",.0f"),
        _spread([summary["training_s"] for summary in reached], ".1f"),
        _spread([summary["steps_per_s"] for summary in found], ",.0f"),
        f"{statistics.median(each['mean'] for each in staleness):.2f}",
        str(max(each["max"] for each in staleness)),
        str(sum(each["violations"] for each in staleness)),
    )


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "divergence.json")

if __name__ == "__main__":
    sys.exit(main(MATRIX))
