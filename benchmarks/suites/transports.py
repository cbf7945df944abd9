"""Suite: trajectories of 1 KiB to 64 MiB through shared memory, compared with other transports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from benchmarks.lib import child
from benchmarks.lib.harness import Benchmark, Plan, Ratio, RoundValues, Side, Values, quotient
from benchmarks.workers import carriers

SIZES = {"1 KiB": 2**10, "16 KiB": 2**14, "1 MiB": 2**20, "16 MiB": 2**24, "64 MiB": 2**26}
OURS, ONES, COLD, COPY, QUEUE, MPI = (
    "tianflow",
    "tianflow, batches of one",
    "tianflow, 1 KiB while copying as much",
    "memcpy",
    "multiprocessing.Queue",
    "mpi4py",
)
ZMQ = {"zmq ipc": "zmq-ipc", "zmq tcp": "zmq-tcp"}
FIGURES = {"messages": "messages/s", "bandwidth": "MB/s", "p50": "µs", "p99": "µs"}
TIMEOUT_S = 120.0


def make(plan: Plan) -> Benchmark:
    """Make the benchmark in the size of ``plan``. A note names each library that is not
    installed.
    """
    share = 0.02 if plan.quick else 1.0
    missing = missing_carriers()

    def side(name: str, module: str, what: str, sizes: tuple[str, ...] = tuple(SIZES)) -> Side:
        def measure(_: int) -> Values:
            answer = child.run(
                module, what, share, *(SIZES[size] for size in sizes), timeout_s=TIMEOUT_S
            ).answer
            return {
                f"{size}: {name}": answer[str(SIZES[size])][name]
                for size in sizes
                for name in FIGURES
            }

        return Side(name, measure)

    sides = (
        side(OURS, "benchmarks.workers.streaming", "slots"),
        side(ONES, "benchmarks.workers.streaming", "ones", ("1 KiB", "16 KiB", "1 MiB")),
        side(COLD, "benchmarks.workers.streaming", "cold", ("16 MiB", "64 MiB")),
        side(COPY, "benchmarks.workers.carriers", "memcpy"),
        *(
            side(name, "benchmarks.workers.carriers", what)
            for name, what in ZMQ.items()
            if name not in missing
        ),
        side(QUEUE, "benchmarks.workers.carriers", "queue"),
        *(
            side(name, "benchmarks.workers.carriers", "mpi")
            for name in (MPI,)
            if name not in missing
        ),
    )
    return Benchmark(
        name="transports",
        title="trajectories of 1 KiB to 64 MiB through shared memory, and through other transports",
        sides=sides,
        ratios=ratios(missing),
        units={f"{size}: {name}": unit for size in SIZES for name, unit in FIGURES.items()},
        settings={
            "messages": ", ".join(
                "{} + {} of {}".format(*carriers.counts(nbytes, share), size)
                for size, nbytes in SIZES.items()
            ),
            "in flight": ", ".join(
                f"{carriers.in_flight(nbytes)} of {size}" for size, nbytes in SIZES.items()
            ),
            "pause before a timed message": f"{carriers.PAUSE_S * 1e3:g} ms",
            "processes": "producer and consumer on any cores; for tianflow also the coordinator",
        },
        notes=(
            (
                "Messages/s and MB/s (10^6 bytes of payload) include the producer's write and the "
                "consumer's copy into its batch."
            ),
            (
                "p50 and p99: from commit or send until the consumer has data that were written "
                "before, one message at a time. For memcpy, both copies."
            ),
            "tianflow: the actor asks for grants ahead and the learner pulls one batch ahead.",
            (
                "A batch is a quarter of the messages in flight: 4 messages up to 1 MiB, else 1. "
                f"{ONES}: always 1."
            ),
            "Latency: messages one at a time, each a batch, from four slots.",
            (
                f"{COLD}: a message of 1 KiB while both ends copy as much privately, which shows "
                "the cost of size without sending it."
            ),
            *(f"{name} is not installed and was skipped." for name in missing),
        ),
    )


def missing_carriers() -> tuple[str, ...]:
    """Return the sides whose library is not installed."""
    zmq = () if importlib.util.find_spec("zmq") else tuple(ZMQ)
    return zmq if importlib.util.find_spec("mpi4py") and carriers.mpiexec() else (*zmq, MPI)


def ratios(missing: tuple[str, ...]) -> tuple[Ratio, ...]:
    """Return the ratios of latency, which must not grow with size, and of bandwidth, over the limit
    and over other transports.

    A process that has just copied 16 MiB has cold caches, and any message is then slower. The
    effect of a message's own size shows in comparison with a message of 1 KiB whose ends copied as
    much.
    """

    def latency(side: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(values[OURS]["1 KiB: p50"], values[side]["16 MiB: p50"])

    def while_copying(values: RoundValues) -> float | None:
        return quotient(values[COLD]["16 MiB: p50"], values[OURS]["16 MiB: p50"])

    def bandwidth(size: str, other: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(
            values[OURS][f"{size}: bandwidth"], values[other][f"{size}: bandwidth"]
        )

    def ones_over(other: str) -> Callable[[RoundValues], float | None]:
        return lambda values: quotient(
            values[ONES]["1 MiB: bandwidth"], values[other]["1 MiB: bandwidth"]
        )

    return (
        Ratio("latency of 1 KiB over that of 16 MiB", latency(OURS), aim=0.5),
        Ratio("latency of 1 KiB over that of 1 KiB while copying 16 MiB", latency(COLD)),
        Ratio("latency of 1 KiB while copying 16 MiB over that of 16 MiB", while_copying, aim=0.8),
        *(Ratio(f"{size}: MB/s over two plain copies", bandwidth(size, COPY)) for size in SIZES),
        *(
            Ratio(f"1 MiB: MB/s over {other}", bandwidth("1 MiB", other), aim=5.0)
            for other in (QUEUE, MPI)
            if other not in missing
        ),
        *(
            Ratio(f"1 MiB, batches of one: MB/s over {other}", ones_over(other))
            for other in (QUEUE, MPI)
            if other not in missing
        ),
        *(
            Ratio(f"1 MiB: MB/s over {other}", bandwidth("1 MiB", other))
            for other in ZMQ
            if other not in missing
        ),
    )
