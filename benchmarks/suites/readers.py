"""Suite: the cost of 1,000 readers of a run's events for its training, as one run with and without
them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, Together, Values, quotient
from benchmarks.workers import training

CONFIG = training.CONFIGS / "sleeping.toml"
ALONE, BESIDE = "alone", "with the readers"


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    readers, windows, window = (
        (20, 1, training.Window(0.5, 1.0)) if plan.quick else (1000, 3, training.Window(2.0, 5.0))
    )

    def measure(_: int) -> Mapping[str, Values]:
        with tempfile.TemporaryDirectory(dir=plan.scratch) as runs:
            arguments = (CONFIG, window.warm_s, window.seconds, runs, windows, readers)
            found = child.run(
                "benchmarks.workers.event_readers",
                *arguments,
                timeout_s=120.0 + 4.0 * windows * window.seconds,
            ).answer
        return {ALONE: found["alone"], BESIDE: found["beside"]}

    return Benchmark(
        name="readers",
        title=f"a run's training with {readers:,} readers of its events",
        sides=(Together((ALONE, BESIDE), measure),),
        ratios=(
            Ratio(
                "steps/s with the readers over those alone",
                lambda values: quotient(
                    values[BESIDE]["trained_per_s"], values[ALONE]["trained_per_s"]
                ),
                aim=0.95,
            ),
        ),
        units={
            "trained_per_s": training.UNITS["trained_per_s"],
            "staleness_mean": training.UNITS["staleness_mean"],
            "lag": "ms, p99 of the coordinator's loop",
            "events": "events/s, received by all readers",
        },
        settings={
            "run": f"benchmarks/configs/{CONFIG.name}: it sleeps most of the time, so it does not "
            "need the cores that the readers use",
            "readers": f"{readers} connections of one process; http.max_streams and "
            "http.max_connections allow all of them",
            "windows": f"{windows} of {window.seconds:g} s of each kind in a round, in turn, "
            f"after {window.warm_s:g} s of training",
        },
    )
