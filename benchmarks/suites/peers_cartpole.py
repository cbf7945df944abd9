"""Suite: CartPole-v1 to 475, compared with Stable-Baselines3, RLlib, Sample Factory, CleanRL-style
PPO and TorchRL; steps/s compared with PufferLib.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, quotient
from benchmarks.peers import comparison
from benchmarks.peers.comparison import Rival
from benchmarks.workers import training

OURS, SUSTAINED = "tianflow PPO", "tianflow IMPALA, sustained"
WIDE = ("env.num_envs=256",)
"""Overrides of the sustained run. The cost of a step falls with the number of environments that
step at once.
"""
SECONDS = 60.0
"""Longest training of a run. Three rounds of all sides take about twelve minutes."""
RIVALS = (
    Rival(
        "Stable-Baselines3 PPO",
        "sb3",
        "benchmarks.peers.sb3_ppo",
        "RL Zoo's settings: 8 environments, 1 process, 64-64 tanh",
    ),
    Rival(
        "RLlib PPO",
        "rllib",
        "benchmarks.peers.rllib_algorithms",
        "its tuned example, 2 runners of 8 environments, 32 linear",
    ),
    Rival(
        "Sample Factory APPO",
        "sample_factory",
        "benchmarks.peers.factory_appo",
        "its documented command, a worker a core, 20 environments each, 512-512 elu",
    ),
    Rival(
        "CleanRL-style PPO",
        "cleanrl",
        "benchmarks.peers.cleanrl_ppo",
        "settings of ppo.py: 4 environments, 1 process, 64-64 tanh",
    ),
    Rival(
        "TorchRL PPO",
        "torchrl",
        "benchmarks.peers.torchrl_ppo",
        "RL Zoo's settings, 8 environments, 1 process, 64-64 tanh",
    ),
)
PUFFER = "its defaults, 64 relu; the quickest of sixteen settings of environments and processes"
FASTEST = (
    Rival(
        "PufferLib PPO, sustained",
        "pufferlib",
        "benchmarks.peers.puffer_ppo",
        f"{PUFFER}: 1,024, 1 process",
        ("envs=1024",),
    ),
    Rival(
        "PufferLib PPO, 2 workers, sustained",
        "pufferlib",
        "benchmarks.peers.puffer_ppo",
        f"{PUFFER}: 4,096, half of them stepping, 32 steps",
        ("envs=4096", "workers=2", "horizon=32"),
    ),
)
"""Rows for the rate alone. PufferLib does not reach the target with these settings."""


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. A peer that is not installed is a row that says
    so.
    """
    target = 30.0 if plan.quick else 475.0
    seconds = plan.seconds or (20.0 if plan.quick else SECONDS)
    window = training.Window(0.5, 1.5) if plan.quick else training.Window(3.0, 12.0)
    seeds = tuple(range(1, plan.rounds + 1))

    def ours(number: int) -> dict[str, float | None]:
        return comparison.ours_to_target(
            "cartpole_ppo",
            (f"run.seed={seeds[number]}", f"run.target_return={target}"),
            plan,
            seconds,
        )

    def sustained(number: int) -> dict[str, float | None]:
        config = training.CONFIGS / "impala_cartpole.toml"
        return comparison.ours_sustained(config, (f"run.seed={seeds[number]}", *WIDE), plan, window)

    return Benchmark(
        name="peers_cartpole",
        title=f"CartPole-v1 until the last 100 training episodes average {target:.0f}, with peers",
        sides=(
            Side(OURS, ours),
            *(
                comparison.rival_side(rival, ("cartpole", "--target", target), seconds, seeds)
                for rival in RIVALS
            ),
            Side(SUSTAINED, sustained),
            *(
                comparison.rival_side(
                    rival,
                    ("cartpole", "--warm", window.warm_s),
                    window.warm_s + window.seconds,
                    seeds,
                )
                for rival in FASTEST
            ),
        ),
        ratios=(
            *(
                Ratio(f"{rival.name}: its time to target over {OURS}'s", slower(rival.name))
                for rival in RIVALS
            ),
            Ratio(
                f"{SUSTAINED}: steps/s over those of the quicker PufferLib",
                over_the_quicker,
                aim=6.0,
            ),
        ),
        units=comparison.UNITS,
        settings={
            OURS: "configs/cartpole_ppo.toml, shipped: 1 actor of 32 environments, 64-64 relu",
            SUSTAINED: f"benchmarks/configs/impala_cartpole.toml, {' '.join(WIDE)}, "
            f"{window.seconds:g} s after {window.warm_s:g} s, no target",
            **comparison.versions((*RIVALS, *FASTEST)),
            "threads": "1 in each process, because two are slower and much less steady on networks "
            "this small",
            "cores": len(os.sched_getaffinity(0)),
            "seconds of training at most": seconds,
        },
        seeds=seeds,
        notes=(
            (
                "All rows use the same cores of one machine. Each has the settings that its own "
                "project recommends, including the network."
            ),
            (
                "The clock of training starts when an actor and the learner, the algorithm, or its "
                "processes are up."
            ),
            (
                "Time since the process started includes imports and building. tianflow's value is "
                "an upper bound, because it includes an evaluation and the end of the process."
            ),
            (
                f"A run that has not reached the target within {seconds:g} s counts as infinitely "
                "slow in the median, and is not in the range."
            ),
            (
                "Each row reports its own policy lag: tianflow and RLlib in updates, Sample "
                "Factory in minibatches. The others do not report it."
            ),
            f"Memory is sampled every {comparison.POLL_S:g} s in every run.",
        ),
    )


def over_the_quicker(values: RoundValues) -> float | None:
    """Return tianflow's steps/s over those of the quicker peer."""
    rates = [
        rate for rival in FASTEST if (rate := values[rival.name].get("env_steps_per_s")) is not None
    ]
    return quotient(values[SUSTAINED]["env_steps_per_s"], max(rates)) if rates else None


def slower(name: str) -> Callable[[RoundValues], float | None]:
    """Return how many times longer ``name`` takes."""
    return lambda values: quotient(
        values[name].get("time_to_target"), values[OURS]["time_to_target"]
    )
