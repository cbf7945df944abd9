"""1 to 128 actors that share the same cores: what having many of them costs, and how late the
coordinator's loop is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Together, Values, quotient
from benchmarks.workers import training, turns

CONFIG = training.CONFIGS / "impala_cartpole.toml"
COUNTS = (1, 8, 32, 128)
MOST = COUNTS[-1]
ENVS, STEPS, BATCH, BOUND = 16, 32, 32, 4
assert (BOUND + 1) * BATCH >= MOST + BATCH  # nobody is idle by controller
TURNS = 6


def side_of(actors: int) -> str:
    """Its name."""
    return f"A = {actors}"


def overrides(actors: int, hosts: int) -> tuple[str, ...]:
    """Settings of one run: the same updates, whoever makes their trajectories."""
    return (
        f"actors.count={actors}",
        f"actors.hosts={min(actors, hosts)}",
        f"actors.rollout_steps={STEPS}",
        f"env.num_envs={ENVS}",
        f"algorithm.batch_trajectories={BATCH}",
        f"balance.max_staleness={BOUND}",
        "run.max_seconds=10000",
    )


def make(plan: Plan) -> Benchmark:
    """The benchmark, sized by ``plan``."""
    counts = (1, 8) if plan.quick else COUNTS
    window, times = (
        (training.Window(0.5, 0.5), 2) if plan.quick else (training.Window(4.0, 1.0), TURNS)
    )
    hosts = max(1, len(os.sched_getaffinity(0)) - 1)
    seeds = tuple(range(1, plan.rounds + 1))

    def measure(number: int) -> Mapping[str, Values]:
        settings = {
            count: (f"run.seed={seeds[number]}", *overrides(count, hosts)) for count in counts
        }
        cases = {side_of(count): (CONFIG, settings[count]) for count in counts}
        windows = turns.measure(cases, turns=times, window=window, scratch=plan.scratch)
        return {name: turns.merged(found) for name, found in windows.items()}

    most = side_of(counts[-1])
    return Benchmark(
        name="many_actors",
        title="throughput of 1 to 128 actors on the same cores, and lag of the coordinator's loop",
        sides=(Together(tuple(map(side_of, counts)), measure),),
        ratios=(
            *(
                Ratio(
                    f"steps/s at {most} over {side_of(count)}", _over(side_of(count), most), aim=0.9
                )
                for count in counts[:-1]
            ),
            Ratio(
                f"3 times the p99 lag of a bare loop, over the coordinator's, at {most}",
                lambda values: quotient(
                    3.0 * (values[most]["bare_lag"] or 0.0), values[most]["lag"]
                ),
                aim=1.0,
            ),
        ),
        units={
            **{
                name: training.UNITS[name]
                for name in (
                    "trained_per_s",
                    "return",
                    "staleness_mean",
                    "staleness_max",
                    "learner_waits",
                )
            },
            "lag": "ms, p99 of the coordinator's loop",
            "bare_lag": "ms, p99 of a bare loop beside it",
        },
        settings={
            "run": f"benchmarks/configs/{CONFIG.name}: {ENVS} environments an actor, T = {STEPS}, "
            f"B = {BATCH}, max_staleness = {BOUND}",
            "hosts": f"as many as actors, at most {hosts}: a core each, the learner on its own",
            "windows": f"{times} of {window.seconds:g} s a round and side, in turn: all runs are "
            "up, and all but one of them paused; "
            f"each trained for {window.warm_s:g} s before, and {turns.SETTLE_S:g} s after a pause",
            "lag": f"how much later than asked sleeps of {1000 * turns.ASLEEP_S:g} ms end, in all "
            "windows of a round",
            "threads": "1 a process",
        },
        seeds=seeds,
    )


def _over(other: str, most: str) -> Callable[[RoundValues], float | None]:
    """Over each of the others by itself: the best of several samples of the same thing is above
    their median by chance alone.
    """
    return lambda values: quotient(values[most]["trained_per_s"], values[other]["trained_per_s"])
