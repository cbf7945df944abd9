"""Other ways to bring an array from one process to another, each timed as the product's own is.

A message is what a trajectory would be: the producer writes it (a copy into memory that is its
own), sends it, and the consumer copies what came into its batch. First as many as go, after as many
as may be in flight; then one at a time with both ends asleep before, timed from the send on.

``memcpy``   both copies in one process, and nothing between them: the limit
``zmq-ipc`` ``zmq-tcp``   pyzmq PUSH and PULL, without copies of its own from `ZERO_COPY` bytes on
``queue``    multiprocessing.Queue: pickle through a pipe
``mpi``      mpi4py's pickled send and receive, between two ranks of one host
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import child

Bytes = NDArray[np.uint8]
Write = Callable[[int, Bytes], Bytes]
"""Write the numbered message, whose bytes are given, into memory of the producer's: that memory."""
Send = Callable[[Bytes, int], object]
"""Send what was written, by number."""
Receive = Callable[[], Bytes]

STAMP = 8  # bytes at the start of a message: when it was sent, in monotonic nanoseconds
PAUSE_S = 0.0005
"""Before a message that is timed: the consumer sleeps by now."""
ZERO_COPY = 64 * 2**10
BATCHES_IN_FLIGHT = 4
"""So many batches of the product's are in its slots where it learns from more than one trajectory
at a time.
"""


def in_flight(nbytes: int) -> int:
    """How many messages a carrier may hold, and slots of the product there are: 16 MiB of them, 4
    at least, 16 at most.
    """
    return min(16, max(4, 2**24 // nbytes))


def counts(nbytes: int, share: float) -> tuple[int, int]:
    """How many messages are sent one after another (some whole fillings of all slots), and how many
    one at a time.
    """
    many, single = min(4000.0, 2**30 / nbytes), min(200.0, 2**29 / nbytes)
    return max(1, round(many * share / in_flight(nbytes))) * in_flight(nbytes), max(
        3 + int(5 * share), int(single * share)
    )


def figures(seconds: float, many: int, nbytes: int, latency: list[int]) -> dict[str, float]:
    """What is told of one size. The first quarter of the latencies is warm-up."""
    later = sorted(latency[len(latency) // 4 :])
    return {
        "messages": many / seconds,
        "bandwidth": many * nbytes / seconds / 1e6,
        "p50": later[len(later) // 2] / 1e3,
        "p99": later[int(0.99 * (len(later) - 1))] / 1e3,
    }


def produce(
    write: Write, send: Send, acknowledged: Callable[[], object], nbytes: int, share: float
) -> None:
    """The producer's end: all messages of one size. ``acknowledged`` waits until the last one has
    been copied.
    """
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    many, single = counts(nbytes, share)
    for number in range(in_flight(nbytes)):
        send(write(number, source), number)
    acknowledged()  # whatever is set up by the first ones is there now
    for number in range(many):
        send(write(number, source), number)
    acknowledged()
    for number in range(single):
        written = write(number, source)
        time.sleep(PAUSE_S)
        written[:STAMP].view(np.int64)[0] = time.monotonic_ns()
        send(written, number)
        acknowledged()


def consume(
    receive: Receive, acknowledge: Callable[[], object], nbytes: int, share: float
) -> dict[str, float]:
    """The consumer's end. Its batch has as many rows as one of the product's."""
    batch = np.zeros((in_flight(nbytes) // BATCHES_IN_FLIGHT, nbytes), np.uint8)
    many, single = counts(nbytes, share)
    for row in itertools.islice(itertools.cycle(batch), in_flight(nbytes)):
        np.copyto(row, receive())
    acknowledge()
    began = time.perf_counter()
    for row in itertools.islice(itertools.cycle(batch), many):
        np.copyto(row, receive())
    seconds = time.perf_counter() - began
    acknowledge()
    latency = []
    for _ in range(single):
        data = receive()
        latency.append(time.monotonic_ns() - int(data[:STAMP].view(np.int64)[0]))
        np.copyto(batch[0], data)
        acknowledge()
    return figures(seconds, many, nbytes, latency)


# In two processes: over pipes for what the consumer acknowledges
# -----------------------------------------------------------


def between(
    produce_over: Callable[[Callable[[], object]], None],
    consume_over: Callable[[Callable[[], object]], dict[str, float]],
) -> dict[str, float]:
    """Fork a producer; consume here."""
    told, tell = os.pipe()
    producer = multiprocessing.get_context("fork").Process(
        target=lambda: produce_over(lambda: os.read(told, 1)), daemon=True
    )
    producer.start()
    found = consume_over(lambda: os.write(tell, b"."))
    producer.join()
    os.close(told)
    os.close(tell)
    return found


def zmq_over(address: str, nbytes: int, share: float) -> dict[str, float]:
    """PUSH to PULL over ``address``, bound by the consumer."""
    zmq: Any = importlib.import_module("zmq")
    copy = nbytes < ZERO_COPY

    def producing(acknowledged: Callable[[], object]) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.set_hwm(in_flight(nbytes))
        socket.connect(address)
        ring = [
            (np.zeros(nbytes, np.uint8), zmq.MessageTracker()) for _ in range(in_flight(nbytes))
        ]

        def write(number: int, data: Bytes) -> Bytes:
            buffer, tracker = ring[number % len(ring)]
            tracker.wait()
            np.copyto(buffer, data)
            return buffer

        def send(written: Bytes, number: int) -> None:
            sent = socket.send(written, copy=copy, track=not copy)
            if not copy:
                ring[number % len(ring)] = (written, sent)

        produce(write, send, acknowledged, nbytes, share)
        socket.close(linger=-1)
        context.term()

    def consuming(acknowledge: Callable[[], object]) -> dict[str, float]:
        context = zmq.Context()
        socket = context.socket(zmq.PULL)
        socket.set_hwm(in_flight(nbytes))
        socket.bind(address)
        found = consume(
            lambda: np.frombuffer(socket.recv(copy=copy), np.uint8), acknowledge, nbytes, share
        )
        socket.close()
        context.term()
        return found

    return between(producing, consuming)


def zmq_ipc(nbytes: int, share: float) -> dict[str, float]:
    """Over a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="tianflow-bench-") as directory:
        return zmq_over(f"ipc://{directory}/socket", nbytes, share)


def zmq_tcp(nbytes: int, share: float) -> dict[str, float]:
    """Over the loopback device."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return zmq_over(f"tcp://127.0.0.1:{port}", nbytes, share)


def queue(nbytes: int, share: float) -> dict[str, float]:
    """A new array for each message, because its feeder thread pickles later."""
    carrier: multiprocessing.Queue[Bytes] = multiprocessing.get_context("fork").Queue(
        in_flight(nbytes)
    )

    def producing(acknowledged: Callable[[], object]) -> None:
        produce(
            lambda _, data: data.copy(),
            lambda written, _: carrier.put(written),
            acknowledged,
            nbytes,
            share,
        )
        carrier.close()
        carrier.join_thread()

    return between(producing, lambda acknowledge: consume(carrier.get, acknowledge, nbytes, share))


def memcpy(nbytes: int, share: float) -> dict[str, float]:
    """The two copies alone; the time of a pair of them stands for latency."""
    source, slot, target = (np.ones(nbytes, np.uint8) for _ in range(3))
    many, single = counts(nbytes, share)

    def pair() -> int:
        began = time.monotonic_ns()
        np.copyto(slot, source)
        np.copyto(target, slot)
        return time.monotonic_ns() - began

    began = time.perf_counter()
    for _ in range(many):
        pair()
    return figures(time.perf_counter() - began, many, nbytes, [pair() for _ in range(single)])


# Between two ranks
# --------------------------------------------------------------------------------------------------


def mpiexec() -> str | None:
    """Where the launcher is: beside this interpreter, or wherever a shell would find it."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi(sizes: list[int], share: float) -> dict[str, Any]:
    """Start the two ranks; what `of_all` says there."""
    launcher = mpiexec()
    assert launcher is not None
    command = [
        launcher,
        "-n",
        "2",
        sys.executable,
        "-m",
        "benchmarks.workers.carriers",
        "mpi-rank",
        str(share),
        *map(str, sizes),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100.0, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"mpiexec ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return child.parse(done.stdout)


def mpi_rank(nbytes: int, share: float) -> dict[str, float]:
    """Rank 0 consumes, so that what it says is the last word; rank 1 produces."""
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    buffer = np.zeros(nbytes, np.uint8)

    def write(_: int, data: Bytes) -> Bytes:
        np.copyto(buffer, data)
        return buffer

    if world.rank == 0:
        return consume(
            lambda: world.recv(source=1, tag=1),
            lambda: world.send(None, dest=1, tag=2),
            nbytes,
            share,
        )
    produce(
        write,
        lambda written, _: world.send(written, dest=0, tag=1),
        lambda: world.recv(source=0, tag=2),
        nbytes,
        share,
    )
    return {}


Carrier = Callable[[int, float], dict[str, float]]
CARRIERS: dict[str, Carrier] = {
    "memcpy": memcpy,
    "zmq-ipc": zmq_ipc,
    "zmq-tcp": zmq_tcp,
    "queue": queue,
    "mpi-rank": mpi_rank,
}


def of_all(carrier: Carrier, sizes: list[int], share: float) -> dict[str, Any]:
    """Figures of each size in turn, by the number of its bytes."""
    return {str(nbytes): carrier(nbytes, share) for nbytes in sizes}


def main() -> None:
    """``CARRIER SHARE NBYTES ...``: ``share`` of the messages of a full measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("carrier", choices=["mpi", *CARRIERS])
    parser.add_argument("share", type=float)
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    if given.carrier == "mpi":
        child.say(mpi(given.sizes, given.share))
        return
    found = of_all(CARRIERS[given.carrier], given.sizes, given.share)
    if all(found.values()):  # else it is the rank that produced
        child.say(found)


if __name__ == "__main__":
    main()
