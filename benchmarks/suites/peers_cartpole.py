"""CartPole-v1 to 475, beside Stable-Baselines3, RLlib, Sample Factory, CleanRL-style PPO and
TorchRL; steps/s beside PufferLib.
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
"""Overrides of what is sustained: what a step costs shrinks with the number of them that are taken
at once.
"""
SECONDS = 60.0
"""Each run's training at most; three rounds of all take some twelve minutes then."""
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
PUFFER = (
    "its defaults, 64 relu; environments and processes with which it was quickest among "
    "sixteen settings"
)
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
"""For the rate alone: with these settings it does not reach the target."""


def make(plan: Plan) -> Benchmark:
    """The benchmark, sized by ``plan``. A peer that is not installed is a row that says so."""
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
        title=f"CartPole-v1 until the last 100 training episodes average {target:.0f}, beside "
        "peers",
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
            "threads": "1 in each process: two are slower, and far less steady, on networks this "
            "small",
            "cores": len(os.sched_getaffinity(0)),
            "seconds of training at most": seconds,
        },
        seeds=seeds,
        notes=(
            (
                "One machine and the same cores for all, each at the settings that its own project "
                "recommends, the network among them."
            ),
            (
                "The clock of training starts when all is made: an actor and the learner, the "
                "algorithm, or its processes are up."
            ),
            (
                "Since the process started: imports and building included. tianflow's is up to its "
                "end, with an evaluation, so an upper bound."
            ),
            (
                f"A run not there within {seconds:g} s counts as endlessly slow in the median, "
                "and as "
                "no sample in the range."
            ),
            (
                "Policy lag as each tells it: tianflow and RLlib in updates, Sample Factory in "
                "minibatches. The others have none to tell."
            ),
            f"Memory is looked at every {comparison.LOOK_S:g} s, in every run.",
        ),
    )


def over_the_quicker(values: RoundValues) -> float | None:
    """How many times as many steps a second."""
    rates = [
        rate for rival in FASTEST if (rate := values[rival.name].get("env_steps_per_s")) is not None
    ]
    return quotient(values[SUSTAINED]["env_steps_per_s"], max(rates)) if rates else None


def slower(name: str) -> Callable[[RoundValues], float | None]:
    """How many times longer ``name`` takes."""
    return lambda values: quotient(
        values[name].get("time_to_target"), values[OURS]["time_to_target"]
    )
