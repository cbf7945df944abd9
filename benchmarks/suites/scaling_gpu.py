"""Suite: IMPALA on Pong with a GPU on 1 to 16 cores.

It is compared with the environments alone on as many cores, and with one process that steps, acts
and learns in turn.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from benchmarks.lib import child, machine
from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Side,
    Together,
    Values,
    quotient,
    require_atari,
    require_gpu,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import training

CONFIG = ROOT / "configs" / "pong_gpu.toml"
COUNTS = (1, 2, 4, 8, 16)
"""Numbers of cores."""
IN_TURN = {"in turn, policy on the GPU": "cuda", "in turn, policy on its core": "cpu"}
"""Device of the process that does everything in turn."""
TIMES_IN_TURN = 20.0
"""Training on 16 cores, over one process in turn."""
TIMEOUT_S = 120.0


def run_on(count: int) -> str:
    """Return the side that trains on ``count`` cores."""
    return f"IMPALA, {_cores(count)}"


def alone_on(count: int) -> str:
    """Return the side with the environments alone on ``count`` cores."""
    return f"environments, {_cores(count)}"


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count > 1)}"


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    require_atari()
    require_gpu(plan)
    window = training.Window(*((0.5, 1.0) if plan.quick else (6.0, 8.0)), every_actor=True)
    alone_s, in_turn_s = (0.2, 0.2) if plan.quick else (3.0, 6.0)
    cores = sorted(os.sched_getaffinity(0))
    counts = tuple(n for n in COUNTS[: 2 if plan.quick else None] if n <= len(cores))
    seeds = tuple(range(1, plan.rounds + 1))
    shorter = ("env.num_envs=2",) if plan.quick else ()

    def train(count: int, seed: int) -> Values:
        settings = (
            f"run.seed={seed}",
            "run.target_return=null",
            f"algorithm.batch_trajectories={count}",
            *shorter,
        )
        return training.measure(str(CONFIG), settings, window, plan.scratch, cores[:count])

    def alone(_: int) -> Mapping[str, Values]:
        """Start one process on every core, and let the first ones work."""
        with contextlib.ExitStack() as stack:
            partners = [
                stack.enter_context(
                    child.Partner(
                        "benchmarks.workers.bare_loops",
                        *("environments", CONFIG, alone_s, *shorter, "--turns", "--core", core),
                    )
                )
                for core in cores[: counts[-1]]
            ]

            def turn(count: int) -> float:
                for partner in partners[:count]:
                    partner.send("go")
                found = [partner.receive(timeout_s=TIMEOUT_S) for partner in partners[:count]]
                return sum(float(said["per_s"]) for said in found)

            turn(len(partners))  # no process starts beside a measurement
            return {alone_on(count): {"environments": turn(count)} for count in counts}

    def in_turn(device: str) -> Values:
        return child.run(
            "benchmarks.workers.in_turn",
            *(CONFIG, in_turn_s, "cpu" if plan.quick else device, "--core", cores[0], *shorter),
            timeout_s=TIMEOUT_S + 4.0 * in_turn_s,
        ).answer

    most = counts[-1]
    return Benchmark(
        name="scaling_gpu",
        title="IMPALA on Pong with a GPU, by number of cores",
        sides=(
            Together(tuple(map(alone_on, counts)), alone),
            *(
                Side(run_on(count), lambda number, n=count: train(n, seeds[number]))  # type: ignore[misc]
                for count in counts
            ),
            *(Side(name, lambda _, d=device: in_turn(d)) for name, device in IN_TURN.items()),  # type: ignore[misc]
        ),
        ratios=(
            *(
                Ratio(
                    f"{_cores(count)} over one: trained steps/s, over the same of the environments "
                    "alone",
                    _gain(count),
                    aim=0.9,
                    sides=(run_on(count), run_on(1), alone_on(count), alone_on(1)),
                )
                for count in counts
                if count > 1
            ),
            *(
                Ratio(
                    f"{_cores(count)}: trained steps/s over the environments alone",
                    _over_alone(count),
                    sides=(run_on(count), alone_on(count)),
                )
                for count in counts
            ),
            *(
                Ratio(
                    f"{_cores(most)}: trained steps/s over {name}",
                    _over_in_turn(most, name),
                    aim=TIMES_IN_TURN if most == COUNTS[-1] else None,
                    sides=(run_on(most), name),
                )
                for name in IN_TURN
            ),
        ),
        units={
            **training.UNITS,
            "environments": "env steps/s, all cores of the side",
            "steps_per_s": "env steps/s, stepped and trained on",
        },
        settings={
            "cards": machine.cards(),
            "IMPALA": "configs/pong_gpu.toml, all processes on the cores of the side, "
            "algorithm.batch_trajectories = their number, actors.count = auto; frame skip 4, not "
            "multiplied",
            "window": f"{window.seconds:g} s, {window.warm_s:g} s after every actor has started",
            "environments": "one process of 16 environments on each core of the side, one thread, "
            f"random actions, {alone_s:g} s",
            "in turn": "one process on one core, plain PyTorch in its default formats: 16 "
            f"environments of one thread, nature_cnn, A2C on 20 steps of them; {in_turn_s:g} s",
            "threads": "1 a process, and those of CUDA",
        },
        seeds=seeds,
        notes=(
            (
                "Learner, inference server and coordinator have no core of their own. On one core "
                "they take their time from the environments."
            ),
        ),
    )


def _gain(count: int) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(
        quotient(values[run_on(count)]["trained_per_s"], values[run_on(1)]["trained_per_s"]),
        quotient(values[alone_on(count)]["environments"], values[alone_on(1)]["environments"]),
    )


def _over_alone(count: int) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(
        values[run_on(count)]["trained_per_s"], values[alone_on(count)]["environments"]
    )


def _over_in_turn(count: int, name: str) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(
        values[run_on(count)]["trained_per_s"], values[name]["steps_per_s"]
    )
