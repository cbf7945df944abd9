"""Suite: training time to a mean return of 475 on CartPole, compared with Stable-Baselines3."""

from __future__ import annotations

import importlib.util
import tempfile

from benchmarks.lib import child
from benchmarks.lib.harness import (
    Benchmark,
    BenchmarkError,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Values,
    quotient,
)

OURS, PEER = "tianflow ppo", "Stable-Baselines3 PPO"
EPISODES = 100
TIMEOUT_S = 300.0
UNITS = {
    "time_to_target": "s of training",
    "env_steps": "env steps",
    "env_steps_per_s": "env steps/s",
    "evaluation_return": "mean of 100 episodes",
    "staleness_mean": "updates",
    "staleness_max": "updates",
    "whole_process": "s, evaluation included",
    "cores": "cores used",
    "peak_pss": "MiB, process tree",
}


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    if importlib.util.find_spec("stable_baselines3") is None:
        raise BenchmarkError(
            "time_to_target needs Stable-Baselines3, which is not installed: pip install -e "
            "'.[bench]'"
        )
    target = 100.0 if plan.quick else 475.0
    seeds = tuple(range(1, plan.rounds + 1))

    def ours(seed: int, *, watch_memory: bool = False) -> Values:
        with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
            settings = (
                f"run.seed={seed}",
                f"run.target_return={target}",
                f"evaluation.episodes={EPISODES}",
            )
            arguments = (
                "train",
                "cartpole_ppo",
                *settings,
                "--plain",
                "--json",
                "--runs-dir",
                runs,
            )
            done = child.run("tianflow", *arguments, timeout_s=TIMEOUT_S, watch_memory=watch_memory)
        summary = done.answer
        return {
            "time_to_target": summary["time_to_target_s"],
            "env_steps": summary["env_steps"],
            "env_steps_per_s": quotient(summary["env_steps"], summary["time_to_target_s"]),
            "evaluation_return": summary["evaluation"].get("mean_return"),
            "staleness_mean": summary["staleness"]["mean"],
            "staleness_max": summary["staleness"]["max"],
            **_cost(done),
        }

    def peer(seed: int, *, watch_memory: bool = False) -> Values:
        arguments = (
            "cartpole",
            "--seed",
            seed,
            "--target",
            target,
            "--seconds",
            TIMEOUT_S,
            f"episodes={EPISODES}",
        )
        done = child.run(
            "benchmarks.peers.sb3_ppo",
            *arguments,
            timeout_s=2 * TIMEOUT_S,
            watch_memory=watch_memory,
        )
        answer = done.answer
        return {
            "time_to_target": answer["time_to_target_s"],
            "env_steps": answer["env_steps"],
            "env_steps_per_s": answer["env_steps_per_s"],
            "evaluation_return": answer["evaluation_return"],
            **_cost(done),
        }

    return Benchmark(
        name="time_to_target",
        title=f"CartPole-v1, training time until the last 100 episodes average {target:.0f}",
        sides=(
            Side(
                OURS,
                lambda number: ours(seeds[number]),
                lambda: _memory(ours(0, watch_memory=True)),
            ),
            Side(
                PEER,
                lambda number: peer(seeds[number]),
                lambda: _memory(peer(0, watch_memory=True)),
            ),
        ),
        ratios=(Ratio("Stable-Baselines3's time over tianflow's", _speed_up, aim=1.0),),
        units=UNITS,
        settings={
            "tianflow": "configs/cartpole_ppo.toml, shipped",
            "Stable-Baselines3": "RL Zoo's ppo: 8 environments, 32 steps, minibatch 256, 20 "
            "epochs, schedules over 100,000 steps",
            "threads": "1 a process",
            "target": target,
            "evaluation": f"{EPISODES} episodes, most probable action, after the target",
        },
        seeds=seeds,
        notes=(
            (
                "The clock of training starts when the learner and an actor are up, and for "
                "Stable-Baselines3 with learn()."
            ),
            "Whole-process time starts with the interpreter. CartPole has no frame skip.",
            (
                "A run that never reaches the target counts as infinitely slow in the median, and "
                "is not in the range."
            ),
            "tianflow's learner and actors have a core each. Stable-Baselines3 is one process.",
            "Memory comes from the warm-up run, because sampling it costs time.",
        ),
    )


def _cost(done: child.Finished) -> Values:
    cost: Values = {"whole_process": done.wall_s, "cores": done.cpu_s / done.wall_s}
    return cost if done.peak_mib is None else {**cost, "peak_pss": done.peak_mib}


def _memory(values: Values) -> Values:
    return {name: values[name] for name in ("peak_pss", "time_to_target", "whole_process")}


def _speed_up(values: RoundValues) -> float | None:
    return quotient(values[PEER]["time_to_target"], values[OURS]["time_to_target"])
