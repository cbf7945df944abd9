"""Suite: inference servers on a GPU, alone and beside a learner that is always busy on the same
card.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.lib import child, machine
from benchmarks.lib.harness import (
    Benchmark,
    Plan,
    Ratio,
    RoundValues,
    Together,
    Values,
    quotient,
    require_atari,
    require_gpu,
)
from benchmarks.lib.machine import ROOT
from benchmarks.workers import inference_server

CONFIG = ROOT / "configs" / "pong_gpu.toml"
COUNTS = (1, 2, 4)
"""Numbers of servers."""
REQUESTS = 16
"""Open requests of a server."""
LEARNER = "learner alone"
TIMEOUT_S = 120.0


def alone(count: int) -> str:
    """Return the side of ``count`` servers alone."""
    return f"{count} server{'s' * (count > 1)}"


def beside(count: int) -> str:
    """Return the side of ``count`` servers beside a learner."""
    return f"{alone(count)} beside a learner"


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``.

    Raises:
        BenchmarkError: there is no GPU, or ale-py is not installed.
    """
    require_atari()
    require_gpu(plan)
    device, seconds = ("cpu", 0.2) if plan.quick else ("cuda", 4.0)
    requests = 2 if plan.quick else REQUESTS
    counts = COUNTS[: 2 if plan.quick else None]
    smaller = ("env.num_envs=2", "algorithm.batch_trajectories=2") if plan.quick else ()

    def measure(_: int) -> Mapping[str, Values]:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(
                    child.Partner(
                        "benchmarks.workers.inference_server",
                        *(CONFIG, f"actors.count={requests}", f"inference.device={device}"),
                        *smaller,
                    )
                )
                for _ in range(counts[-1])
            ]
            learner = stack.enter_context(
                child.Partner(
                    "benchmarks.workers.gpu_learner", CONFIG, "--device", device, *smaller
                )
            )
            turn(servers, learner, seconds / 10.0)  # no process starts beside a measurement
            found = {LEARNER: turn((), learner, seconds)}
            for count in counts:
                found[alone(count)] = turn(servers[:count], None, seconds)
                found[beside(count)] = turn(servers[:count], learner, seconds)
            return found

    return Benchmark(
        name="inference_gpu",
        title="inference servers on a GPU, alone and beside a learner",
        sides=(
            Together(
                (LEARNER, *(side(count) for count in counts for side in (alone, beside))), measure
            ),
        ),
        ratios=(
            *(
                Ratio(
                    f"{side(count)} over one: observations/s",
                    _over(side(count), side(1), "observations"),
                )
                for side in (alone, beside)
                for count in counts
                if count > 1
            ),
            *(
                Ratio(
                    f"{beside(count)} over alone: {what}",
                    _over(beside(count), alone(count), value),
                )
                for what, value in (("observations/s", "observations"), ("p99", "wait_p99"))
                for count in counts
            ),
            *(
                Ratio(
                    f"a learner beside {alone(count)} over alone: samples/s",
                    _over(beside(count), LEARNER, "samples_per_s"),
                )
                for count in counts
            ),
        ),
        units={
            "observations": "observations/s, all servers",
            "wait_p50": "s, from request to answer, slowest server",
            "wait_p99": "s, from request to answer, slowest server",
            "batch_requests": "requests, mean",
            "samples_per_s": "samples/s of the learner",
        },
        settings={
            "cards": machine.cards(),
            "servers": f"configs/pong_gpu.toml: a process each with one of its own that has "
            f"{requests} requests of 16 observations open, 84 x 84 x 4, and makes the next one as "
            "soon as one is answered; no environments, weights never change",
            "learner": "configs/pong_gpu.toml: updates on one resident batch of 16 trajectories "
            "of 20 x 16 samples, in a process",
            "turns": f"{seconds:g} s each, after {inference_server.WARM_S:g} s; all processes "
            "exist all the time",
            "threads": "1 a process, and those of CUDA",
        },
    )


def turn(servers: Sequence[child.Partner], learner: child.Partner | None, seconds: float) -> Values:
    """Let ``servers`` and ``learner`` work at the same time. Return what they measure."""
    found: Values = {}
    if learner is not None:
        learner.send(f"resident {seconds + inference_server.WARM_S}")
    for server in servers:
        server.send(seconds)
    said = [server.receive(timeout_s=TIMEOUT_S) for server in servers]
    if said:
        found |= {
            "observations": sum(one["observations"] for one in said),
            **{name: largest([one[name] for one in said]) for name in ("wait_p50", "wait_p99")},
            "batch_requests": statistics.fmean(one["batch_requests"] for one in said),
        }
    if learner is not None:
        found["samples_per_s"] = learner.receive(timeout_s=TIMEOUT_S)["samples_per_s"]
    return found


def largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value; None if one is missing."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _over(side: str, other: str, value: str) -> Callable[[RoundValues], float | None]:
    return lambda values: quotient(values[side][value], values[other][value])
