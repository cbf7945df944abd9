"""Suite: trajectories over TCP into slots of the head, over bare ZeroMQ, without and with CURVE."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient
from benchmarks.workers import network

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "4 MiB": 2**22, "16 MiB": 2**24}
AIMED = ("1 MiB", "4 MiB", "16 MiB")
HOWS = {"tianflow": "gateway", "bare ZeroMQ": "bare"}
FIGURES = {"bandwidth": "MB/s", "coordinator": "µs", "gateway": "µs", "node": "µs"}
TIMEOUT_S = 300.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``."""
    share = 0.01 if plan.quick else 1.0

    def side(name: str, how: str, curve: int) -> Side:
        def measure(_: int) -> Values:
            given = how, curve, share, *SIZES.values()
            answer = child.run("benchmarks.workers.network", *given, timeout_s=TIMEOUT_S).answer
            return {
                f"{size}: {figure}": answer[str(nbytes)].get(figure)
                for size, nbytes in SIZES.items()
                for figure in FIGURES
            }

        return Side(name, measure)

    def over(size: str, numerator: str, denominator: str) -> Callable[[RoundValues], float | None]:
        key = f"{size}: bandwidth"
        return lambda values: quotient(values[numerator][key], values[denominator][key])

    ours, bare = HOWS
    return Benchmark(
        name="network",
        title="trajectories over TCP into slots of the head, over bare ZeroMQ",
        sides=tuple(
            side(f"{name}{' with CURVE' * curve}", how, curve)
            for curve in (0, 1)
            for name, how in HOWS.items()
        ),
        ratios=(
            *(
                Ratio(
                    f"{size}: MB/s over bare ZeroMQ{suffix}",
                    over(size, ours + suffix, bare + suffix),
                    aim=0.9 if size in AIMED else None,
                    sides=(ours + suffix, bare + suffix),
                )
                for suffix in ("", " with CURVE")
                for size in SIZES
            ),
            *(
                Ratio(
                    f"{size}: MB/s with CURVE over without",
                    over(size, f"{ours} with CURVE", ours),
                    sides=(ours, f"{ours} with CURVE"),
                )
                for size in SIZES
            ),
        ),
        units={f"{size}: {name}": unit for size in SIZES for name, unit in FIGURES.items()},
        settings={
            "trajectories": ", ".join(
                f"{network.counts(nbytes, share)} of {size}" for size, nbytes in SIZES.items()
            ),
            "in flight": f"{network.IN_FLIGHT}, {network.BATCH} acknowledged at once",
            "processes": "node, gateway and coordinator on one machine, over the loopback",
        },
        notes=(
            "MB/s are 10^6 bytes of trajectories. Other figures: CPU time of a process for each.",
            "Bare ZeroMQ: a DEALER sends without a copy, a ROUTER copies once into a slot.",
        ),
    )
