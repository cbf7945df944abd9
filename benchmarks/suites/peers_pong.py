"""Suite: ALE Pong at 84 x 84 x 4 with the Nature CNN. It compares environment steps/s in training
with Sample Factory and other peers.
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
from benchmarks.workers import training

ONE_PASS, FOUR_PASSES, IMPALA = (
    "tianflow PPO, 1 pass",
    "tianflow PPO, 4 passes",
    "tianflow IMPALA, 1 pass",
)
EPOCHS = ("algorithm.epochs=4", "actors.rollout_steps=32", "learner.threads=2")
BF16 = ("learner.precision=bf16", "actors.precision=bf16")
CONFIGS = {
    IMPALA: ("pong_impala.toml", ()),
    ONE_PASS: ("pong_ppo.toml", ()),
    f"{ONE_PASS}, bf16": ("pong_ppo.toml", BF16),
    FOUR_PASSES: ("pong_ppo.toml", EPOCHS),
    f"{FOUR_PASSES}, bf16": ("pong_ppo.toml", (*EPOCHS, *BF16)),
}
"""Config in ``benchmarks/configs`` and overrides, by row."""
RIVALS = (
    Rival(
        "Sample Factory, 1 pass",
        "sample_factory",
        "benchmarks.peers.factory_appo",
        "asynchronous, 2 workers of 8 environments, rollout 32, batch 256, 1 epoch",
        ("epochs=1",),
        threads=None,
    ),
    Rival(
        "RLlib IMPALA, 1 pass",
        "rllib",
        "benchmarks.peers.rllib_algorithms",
        "1 runner of 5 environments, batch 500",
        threads=None,
    ),
    Rival(
        "CleanRL-style PPO, 4 passes",
        "cleanrl",
        "benchmarks.peers.cleanrl_ppo",
        "settings of ppo_atari_envpool.py, 8 environments",
        threads=None,
    ),
    Rival(
        "Stable-Baselines3 PPO, 4 passes",
        "sb3",
        "benchmarks.peers.sb3_ppo",
        "RL Zoo's settings, 8 environments",
        threads=None,
    ),
    Rival(
        "Sample Factory, its defaults",
        "sample_factory",
        "benchmarks.peers.factory_appo",
        "those of its Atari example, 4 epochs",
        threads=None,
    ),
)
PAIRS = (
    (IMPALA, "RLlib IMPALA, 1 pass"),
    (ONE_PASS, "Sample Factory, 1 pass"),
    (FOUR_PASSES, "CleanRL-style PPO, 4 passes"),
    (FOUR_PASSES, "Stable-Baselines3 PPO, 4 passes"),
    (FOUR_PASSES, "Sample Factory, its defaults"),
)
"""Comparable rows: the same number of passes over the data, in float32."""


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. A peer that is not installed is a row that says
    so.

    Raises:
        BenchmarkError: ale-py is not installed.
    """
    require_atari()
    seconds = plan.seconds or (20.0 if plan.quick else 60.0)
    window = training.Window(5.0 if plan.quick else 10.0, seconds - (5.0 if plan.quick else 10.0))
    seeds = tuple(range(1, plan.rounds + 1))

    def ours(name: str) -> Side:
        file, overrides = CONFIGS[name]

        def measure(number: int) -> Values:
            return comparison.ours_sustained(
                training.CONFIGS / file, (f"run.seed={seeds[number]}", *overrides), plan, window
            )

        return Side(name, measure)

    def theirs(rival: Rival) -> Side:
        return comparison.rival_side(rival, ("pong", "--warm", window.warm_s), seconds, seeds)

    return Benchmark(
        name="peers_pong",
        title="ALE Pong, 84 x 84 x 4, frame skip 4, Nature CNN: environment steps/s in training, "
        "with peers",
        sides=(*map(ours, CONFIGS), *map(theirs, RIVALS)),
        ratios=(
            *(Ratio(f"{our} over {their}", faster(our, their)) for our, their in PAIRS),
            *(
                Ratio(f"{name}: bf16 over float32", faster(f"{name}, bf16", name))
                for name in (ONE_PASS, FOUR_PASSES)
            ),
        ),
        units=comparison.UNITS,
        settings={
            **{
                name: f"benchmarks/configs/{file}{', ' if overrides else ''}{', '.join(overrides)}"
                for name, (file, overrides) in CONFIGS.items()
            },
            **comparison.versions(RIVALS),
            "threads": "tianflow 1 in each process unless a row says otherwise; the peers choose",
            "cores": len(os.sched_getaffinity(0)),
            "window": f"{window.seconds:g} s after {window.warm_s:g} s of training",
        },
        seeds=seeds,
        notes=(
            (
                "An environment step is four frames. Rates are of whole cycles of sampling and "
                "learning."
            ),
            "A minute is too short to learn Pong, so the returns are those of a beginner.",
            (
                "Each row reports its own policy lag: tianflow and RLlib in updates, Sample "
                "Factory in minibatches."
            ),
            f"Memory is sampled every {comparison.POLL_S:g} s.",
        ),
    )


def faster(our: str, their: str) -> Callable[[RoundValues], float | None]:
    """Return how many times more steps/s the row ``our`` makes."""
    return lambda values: quotient(
        values[our]["env_steps_per_s"], values[their].get("env_steps_per_s")
    )
