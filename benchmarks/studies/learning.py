"""Study of learning: ``python -m benchmarks.studies.learning`` trains the shipped configs and a
memory task at every staleness bound, over many seeds.

A run ends when 100 evaluation episodes average the target, or when its steps are used up. The study
measures returns, steps and staleness. It does not measure time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.lib.matrix import Case, Matrix, Record, main
from benchmarks.lib.results import RESULTS

BOUNDS = (0, 1, 4, 16)
SLOWED: Mapping[str, object] = {"learner.slowdown": 3.0, "actors.count": 2}
"""The learner takes four times as long, and two actors fill its queue, so batches become as
stale as the bound allows.
"""
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
"""A task in which the policy must repeat in one fragment what it saw in another."""
MEMORY_BY: Mapping[str, Mapping[str, object]] = {
    "ppo": {
        "algorithm.learning_rate": 3e-3,
        "algorithm.batch_trajectories": 2,
        "algorithm.gae_lambda": 0.95,
        "algorithm.epochs": 4,
    },
    "impala": {"algorithm.learning_rate": 2e-3, "algorithm.normalise_advantages": False},
}
PONG_RISES = -20.0
"""A player that does nothing loses every point, which is a return of -21."""


def cases() -> tuple[Case, ...]:
    """Return the whole matrix in the order of the table."""
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


HEAD = """# Learning

Each line: runs of `tianflow train` with different seeds, to the target of the config (100
evaluation episodes) or to the end of its steps. *slowed*: the learner sleeps three times as long as
it computes, so that data become as stale as the bound allows. Staleness is in updates, for each
trained trajectory. Its mean is the median over runs, its maximum is that of all runs.

| case | solved | wanted | median env steps | median updates | staleness mean | max | violations |
|---|---|---|---|---|---|---|---|
"""


def table(records: Sequence[Record], known: Sequence[Case]) -> str:
    """Format one line for each case."""
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in _lines(records, known))


def _lines(records: Sequence[Record], known: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    for case in known:
        found = [record.summary for record in records if record.case == case.name]
        if found:
            solved = [
                summary for summary in found if case.solved(summary) and case.old_enough(summary)
            ]
            staleness = [summary["staleness"] for summary in found]
            yield (
                case.name,
                f"{len(solved)} of {len(found)}",
                f"{case.needed} of {case.seeds}" if case.needed else "none",
                f"{statistics.median(summary['env_steps'] for summary in solved or found):,.0f}",
                f"{statistics.median(summary['updates'] for summary in solved or found):,.0f}",
                f"{statistics.median(each['mean'] for each in staleness):.2f}",
                str(max(each["max"] for each in staleness)),
                str(sum(each["violations"] for each in staleness)),
            )


MATRIX = Matrix(doc=__doc__, cases=cases(), table=table, out=RESULTS / "learning.json")

if __name__ == "__main__":
    sys.exit(main(MATRIX))
