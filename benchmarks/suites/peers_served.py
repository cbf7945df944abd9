"""Suite: central inference on ALE Pong, beside TorchRL's ``AsyncBatchedCollector`` with an
inference server in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
    require_atari,
)
from benchmarks.peers import comparison
from benchmarks.peers.comparison import Rival
from benchmarks.suites import inference
from benchmarks.workers import training
from tianflow.core.statistics import LATENCY_BUCKETS

CENTRAL, LOCAL = "tianflow IMPALA, central", "tianflow IMPALA, local"
CASES = {
    CENTRAL: inference.cases(1)[inference.SERVED],
    LOCAL: inference.cases(1)[inference.LOCAL],
}
SERVED, COLLECTED = "TorchRL, served", "TorchRL, served, collecting only"
VECTOR, VECTOR_COLLECTED = (
    "TorchRL, vector environments, served",
    "TorchRL, vector environments, served, collecting only",
)
EDGES = f"edges={','.join(map(str, LATENCY_BUCKETS))}"
"""The peer counts requests between the edges of tianflow's histogram, so that quantiles compare."""
FAST = (
    "the fast configuration of the collector's documentation: a server in its own process, 8 "
    "environments in a process each, messages of 64 steps, answers without a wait for more requests"
)
LIKE_OURS = (
    "the same with 2 processes of 16 games in ALE's vector environment each, as tianflow has with "
    "central inference; messages of 32 steps of 16 games"
)
GAMES = ("envs=2", "vector=16")
PPO, ALONE = "PPO, batch 512, 1 pass", "no learner"


def rival(name: str, settings: str, *options: str) -> Rival:
    """Make a row of TorchRL. Its processes import PyTorch and TorchRL before the clock starts."""
    script = "benchmarks.peers.torchrl_served"
    return Rival(name, "torchrl", script, settings, (EDGES, *options), start_s=60.0)


RIVALS = (
    rival(SERVED, f"{FAST}; {PPO}"),
    rival(COLLECTED, f"{FAST}; {ALONE}", "learner=none"),
    rival(VECTOR, f"{LIKE_OURS}; {PPO}", *GAMES),
    rival(VECTOR_COLLECTED, f"{LIKE_OURS}; {ALONE}", *GAMES, "learner=none"),
)
UNITS = comparison.UNITS | {
    "cores": "cores used in the window",
    "cpu_per_step": "ms of CPU an env step",
    **{name: training.UNITS[name] for name in comparison.OF_SERVERS},
}


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. A peer that is not installed is a row that says
    so.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    require_atari()
    warm_s = 5.0 if plan.quick else 10.0
    seconds = plan.seconds or (20.0 if plan.quick else 60.0)
    window = training.Window(warm_s, seconds - warm_s)
    seeds = tuple(range(1, plan.rounds + 1))

    def ours(name: str) -> Side:
        case = CASES[name]

        def measure(number: int) -> Values:
            overrides = (f"run.seed={seeds[number]}", *case.overrides)
            return with_cost_of_a_step(
                comparison.ours_served(training.CONFIGS / case.config, overrides, plan, window)
            )

        return Side(name, measure)

    def theirs(row: Rival) -> Side:
        side = comparison.rival_side(row, ("pong", "--warm", warm_s), seconds, seeds)
        return Side(row.name, lambda number: with_cost_of_a_step(side.measure(number)))

    return Benchmark(
        name="peers_served",
        title="ALE Pong, 84 x 84 x 4, frame skip 4, Nature CNN, one pass: central inference beside "
        "TorchRL's",
        sides=(*map(ours, CASES), *map(theirs, RIVALS)),
        ratios=(
            *(
                Ratio(f"steps/s: {CENTRAL}, over {row.name}", over(CENTRAL, row.name))
                for row in RIVALS
            ),
            *(
                Ratio(
                    f"steps for a CPU second: {CENTRAL}, over {name}",
                    over(name, CENTRAL, "cpu_per_step"),
                )
                for name in (SERVED, VECTOR)
            ),
            Ratio("steps/s: tianflow central over local", over(CENTRAL, LOCAL)),
        ),
        units=UNITS,
        settings={
            **{
                name: f"benchmarks/configs/{case.config}: {', '.join(case.overrides)}"
                for name, case in CASES.items()
            },
            **comparison.versions(RIVALS),
            "threads": "1 in each process",
            "cores": len(os.sched_getaffinity(0)),
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training",
            "p50, p99": "interpolated between the edges of a histogram, "
            "tianflow_inference_wait_seconds or the peer's with the same edges",
        },
        seeds=seeds,
        notes=(
            (
                "An environment step is four frames. Rates are of whole cycles of sampling and "
                "learning, except where a row only collects."
            ),
            (
                "A request has the observations of all games that step at once: 16, or 1 in the "
                "documented configuration of TorchRL. TorchRL steps them with gymnasium's wrappers "
                "there, and in the other rows with ALE's vector environment as tianflow does."
            ),
            (
                "On both sides a request begins when it is written into shared memory and ends "
                "when its answer is written and its process is woken. TorchRL's is counted by a "
                "subclass of its ProcessSlotTransport, which the collector accepts as an argument."
            ),
            (
                "tianflow trains with V-trace, TorchRL with PPO and GAE as in its Atari example, "
                "which computes the network's features for actor and critic separately."
            ),
            "A minute is too short to learn Pong, so the returns are those of a beginner.",
            "Lag is in updates: of 512 steps each, on both sides.",
            f"Memory is sampled every {comparison.POLL_S:g} s.",
        ),
    )


def with_cost_of_a_step(values: Values) -> Values:
    """Add the processor time of an environment step, if the side has both of its parts."""
    if values.get("cores") is None or not values.get("env_steps_per_s"):
        return values
    share = quotient(values["cores"], values["env_steps_per_s"])
    return values | {"cpu_per_step": None if share is None else 1e3 * share}


def over(
    first: str, second: str, name: str = "env_steps_per_s"
) -> Callable[[RoundValues], float | None]:
    """Return the quotient of a value of two rows."""
    return lambda values: quotient(values[first].get(name), values[second].get(name))
