"""Suite: 1 to 128 actors on the same cores. It measures their overhead and the lag of the
coordinator's loop.
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
assert (BOUND + 1) * BATCH >= MOST + BATCH  # the controller idles no actor
TURNS = 6


def side_of(actors: int) -> str:
    """Return the name of the side with ``actors`` actors."""
    return f"A = {actors}"


def overrides(actors: int, hosts: int) -> tuple[str, ...]:
    """Return the settings of one run. The updates are the same for any number of actors."""
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
    """Make the benchmark in the size of ``plan``."""
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
            "windows": f"{times} of {window.seconds:g} s in each round for each side, in turn, "
            f"while the other runs are paused; each run trains {window.warm_s:g} s before the "
            f"first, and {turns.SETTLE_S:g} s after each pause",
            "lag": f"delay of sleeps of {1000 * turns.ASLEEP_S:g} ms, over all windows of a round",
            "threads": "1 a process",
        },
        seeds=seeds,
    )


def _over(other: str, most: str) -> Callable[[RoundValues], float | None]:
    """Compare with each other side alone. The best of several equal sides is above their median by
    chance.
    """
    return lambda values: quotient(values[most]["trained_per_s"], values[other]["trained_per_s"])
