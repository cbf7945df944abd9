"""Study: memory of a run with 128 actors whose learner stands still for half an hour, with the
actors on this machine and on a node. It must not grow.
"""

from __future__ import annotations

import tempfile

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, quotient
from benchmarks.suites.many_actors import CONFIG, MOST, overrides

HOSTS = 2
STALLED, OVER_TCP = "128 actors, learner stalled", "128 actors on a node, learner stalled"
TIMEOUT_S = 180.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    seconds = 2.0 if plan.quick else 60.0 * (plan.minutes or 30.0)
    actors = 8 if plan.quick else MOST

    def stalled(*options: str) -> Values:
        with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
            arguments = (CONFIG, 2.0, seconds, runs, *options, *overrides(actors, HOSTS))
            return child.run(
                "benchmarks.workers.stalled_run", *arguments, timeout_s=TIMEOUT_S + 2 * seconds
            ).answer

    return Benchmark(
        name="stalled",
        title="memory of a run with 128 actors while its learner stands still",
        sides=(
            Side(STALLED, lambda _: stalled()),
            Side(OVER_TCP, lambda _: stalled("--on-node")),
        ),
        ratios=tuple(
            Ratio(
                f"{name}: memory at the start over memory at the end",
                lambda v, side=side, part=part: quotient(  # type: ignore[misc]
                    v[side][f"{part}first"], v[side][f"{part}last"]
                ),
                aim=0.98,
                sides=(side,),
            )
            for name, side, part in (
                ("one machine", STALLED, ""),
                ("head of a node", OVER_TCP, ""),
                ("node", OVER_TCP, "node_"),
            )
        ),
        units={
            f"{part}{when}": f"MiB, {whose}, {then}"
            for part, whose in (("", "all processes, or those of the head"), ("node_", "the node"))
            for when, then in (
                ("first", "10 s after the learner stalls"),
                ("last", f"{seconds / 60:g} minutes later"),
                ("highest", "between the two"),
            )
        }
        | {
            "processes": "processes",
        },
        settings={
            "run": f"benchmarks/configs/{CONFIG.name} with {actors} actors in {HOSTS} hosts; "
            "learner.slowdown = 1e6 after 2 s of training"
        },
        notes=("Proportional set sizes of anonymous and shared memory, sampled once a minute.",),
    )
