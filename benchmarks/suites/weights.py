"""Suite: weights to 1, 8 and 64 readers, and a learner with one stalled reader."""

from __future__ import annotations

import os

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Side, Values, quotient
from benchmarks.workers import training, weight_readers

SIZES = {"18 KiB": 18 * 2**10, "6.8 MiB": 6_963_200}
READERS = (1, 8, 64)
CONFIG = training.CONFIGS / "impala_cartpole.toml"
STALLED = "learner, 8 readers"
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    versions, turns = (8, 1) if plan.quick else (60, 20)

    def spread(nbytes: int, readers: int) -> Values:
        return child.run(
            "benchmarks.workers.weight_readers",
            "spread",
            nbytes,
            readers,
            versions,
            timeout_s=TIMEOUT_S,
        ).answer

    def stalled() -> Values:
        return child.run(
            "benchmarks.workers.weight_readers", "stalled", CONFIG, 8, turns, timeout_s=TIMEOUT_S
        ).answer

    cases = {
        f"{size}, {n} reader{'s' * (n > 1)}": (nbytes, n)
        for size, nbytes in SIZES.items()
        for n in READERS
    }
    return Benchmark(
        name="weights",
        title="weights published to many readers, and a stalled reader",
        sides=(
            *(Side(name, lambda _, c=case: spread(*c)) for name, case in cases.items()),  # type: ignore[misc]
            Side(STALLED, lambda _: stalled()),
        ),
        ratios=(
            *(
                Ratio(
                    f"{name}: plain copies over time until the last reader has it",
                    lambda v, n=name, k=readers: _limit(v[n], k),  # type: ignore[misc]
                )
                for name, (_, readers) in cases.items()
            ),
            *(
                Ratio(
                    f"{name}: plain copy over publish",
                    lambda v, n=name: quotient(v[n]["memcpy"], v[n]["publish"]),  # type: ignore[misc]
                )
                for name in cases
            ),
            Ratio(
                "step p99, all readers running over one stalled",
                lambda v: quotient(v[STALLED]["step_all_99"], v[STALLED]["step_stalled_99"]),
                aim=0.98,
            ),
            Ratio(
                "step p99, all readers running over the same repeated",
                lambda v: quotient(v[STALLED]["step_all_99"], v[STALLED]["step_again_99"]),
            ),
        ),
        units={
            "publish": "µs",
            "last_reader": "µs",
            "memcpy": "µs",
            **{
                f"step_{name}_{quantile}": f"µs, p{quantile}"
                for name in ("all", "stalled", "again")
                for quantile in (50, 99)
            },
        },
        settings={
            "versions": f"{versions} of each size, each after the last reader had the previous one",
            "bytes": ", ".join(f"{size} = {nbytes}" for size, nbytes in SIZES.items()),
            "learner": f"{turns} × {weight_readers.TURN} updates of IMPALA on 64 x 32 samples of "
            "CartPole with each version published; the same with one reader stopped, and "
            f"the same with all running again, in turns of {weight_readers.TURN}",
            "processes": "one for each reader; a message to each reader announces a version",
            "cores": "any; with a learner, the first for the learner and the next for the readers",
        },
        notes=(
            "Publishing computes a checksum, and each reading verifies it, beside the copy.",
            "Plain copies: one by the publisher and one by each reader, over all cores.",
        ),
    )


def _limit(values: Values, readers: int) -> float | None:
    memcpy, cores = values["memcpy"], min(readers, len(os.sched_getaffinity(0)))
    return (
        quotient(memcpy * (1 + readers / cores), values["last_reader"])
        if memcpy is not None
        else None
    )
