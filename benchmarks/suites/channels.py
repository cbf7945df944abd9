"""Suite: the shared-memory channels alone, compared with a plain copy of the same number of
bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient

SLOTS = {
    "trajectory 64 KiB": 64 * 2**10,
    "trajectory 1 MiB": 2**20,
    "trajectory 16 MiB": 16 * 2**20,
}
WEIGHTS = {"weights 18 KiB": 18 * 2**10, "weights 1 MiB": 2**20, "weights 6.8 MiB": 6_963_200}
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    slots, weights = (40, 40) if plan.quick else (1000, 400)

    def measure(channel: str, nbytes: int, count: int) -> Values:
        return child.run(
            "benchmarks.workers.relay", channel, nbytes, count, timeout_s=TIMEOUT_S
        ).answer

    def side(name: str, channel: str, nbytes: int, count: int) -> Side:
        return Side(name, lambda _: measure(channel, nbytes, count))

    def over(name: str, numerator: str, denominator: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(values[name][numerator], values[name][denominator])

    return Benchmark(
        name="channels",
        title="shared memory: trajectories from commit to batch, weights published and read",
        sides=(
            *(side(name, "trajectories", nbytes, slots) for name, nbytes in SLOTS.items()),
            *(side(name, "weights", nbytes, weights) for name, nbytes in WEIGHTS.items()),
        ),
        ratios=(
            *(
                Ratio(
                    f"{name}: plain copy over copy out of the slot",
                    over(name, "memcpy", "copy_out"),
                )
                for name in SLOTS
            ),
            *(
                Ratio(f"{name}: plain copy over publish", over(name, "memcpy", "publish"))
                for name in WEIGHTS
            ),
            *(
                Ratio(f"{name}: plain copy over read", over(name, "memcpy", "read"))
                for name in WEIGHTS
            ),
        ),
        units={
            "commit_to_receive_p50": "µs",
            "commit_to_receive_p99": "µs",
            "copy_out": "µs",
            "publish": "µs",
            "read": "µs",
            "memcpy": "µs",
        },
        settings={
            "slots": f"{slots} trajectories, one credit, max_staleness 0",
            "weights": f"{weights} versions",
            "processes": "actor, coordinator, learner",
        },
        notes=(
            "Commit to receive: two messages and two wake-ups, through the coordinator.",
            "The channel does not copy data. Writing and copying leave cold caches for messages.",
            "Publishing computes a checksum, and reading verifies it, beside the copy.",
        ),
    )
