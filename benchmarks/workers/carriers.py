"""Worker: transports of other libraries that bring an array to another process, timed as tianflow's
own is.

A message stands for a trajectory. The producer writes it (a copy into its own memory) and sends it.
The consumer copies it into its batch. The first part measures throughput with as many messages as
may be in flight. The second part measures latency: one message at a time, both ends asleep before,
timed from the send.

``memcpy``   both copies in one process, without a transport: the limit
``zmq-ipc`` ``zmq-tcp``   pyzmq PUSH and PULL, zero-copy from `ZERO_COPY` bytes
``queue``    multiprocessing.Queue: pickle through a pipe
``mpi``      mpi4py's pickled send and receive between two ranks of one host
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
"""Writes the numbered message into the producer's memory, and returns that memory."""
Send = Callable[[Bytes, int], object]
"""Sends a written message, by number."""
Receive = Callable[[], Bytes]

STAMP = 8  # bytes at the start of a message: its send time in monotonic nanoseconds
PAUSE_S = 0.0005
"""Pause before a timed message, in which the consumer falls asleep."""
ZERO_COPY = 64 * 2**10
BATCHES_IN_FLIGHT = 4
"""Number of batches that fit into tianflow's slots if it learns from several trajectories at a
time.
"""


def in_flight(nbytes: int) -> int:
    """Return the largest number of messages in a carrier, and of slots in tianflow: 16 MiB of them,
    at least 4 and at most 16.
    """
    return min(16, max(4, 2**24 // nbytes))


def counts(nbytes: int, share: float) -> tuple[int, int]:
    """Return the number of messages of the throughput part (a multiple of all slots) and of the
    latency part.
    """
    many, single = min(4000.0, 2**30 / nbytes), min(200.0, 2**29 / nbytes)
    return max(1, round(many * share / in_flight(nbytes))) * in_flight(nbytes), max(
        3 + int(5 * share), int(single * share)
    )


def figures(seconds: float, many: int, nbytes: int, latency: list[int]) -> dict[str, float]:
    """Return the figures of one size. The first quarter of the latencies is warm-up."""
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
    """Run the producer's end for all messages of one size. ``acknowledged`` waits until the last
    message was copied.
    """
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    many, single = counts(nbytes, share)
    for number in range(in_flight(nbytes)):
        send(write(number, source), number)
    acknowledged()  # the first messages have set up the carrier
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
    """Run the consumer's end. Its batch has as many rows as a batch of tianflow."""
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


# Between two processes
# --------------------------------------------------------------------------------------------------


def between(
    produce_over: Callable[[Callable[[], object]], None],
    consume_over: Callable[[Callable[[], object]], dict[str, float]],
) -> dict[str, float]:
    """Fork a producer and consume here. A pipe carries the acknowledgements."""
    ack_reader, ack_writer = os.pipe()
    producer = multiprocessing.get_context("fork").Process(
        target=lambda: produce_over(lambda: os.read(ack_reader, 1)), daemon=True
    )
    producer.start()
    found = consume_over(lambda: os.write(ack_writer, b"."))
    producer.join()
    os.close(ack_reader)
    os.close(ack_writer)
    return found


def zmq_over(address: str, nbytes: int, share: float) -> dict[str, float]:
    """Send from PUSH to PULL over ``address``, which the consumer binds."""
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
    """Send over a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="tianflow-bench-") as directory:
        return zmq_over(f"ipc://{directory}/socket", nbytes, share)


def zmq_tcp(nbytes: int, share: float) -> dict[str, float]:
    """Send over the loopback device."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return zmq_over(f"tcp://127.0.0.1:{port}", nbytes, share)


def queue(nbytes: int, share: float) -> dict[str, float]:
    """Send a new array for each message, because the queue's feeder thread pickles later."""
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
    """Make the two copies alone. The time of a pair stands for latency."""
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
    """Return the path of the launcher beside this interpreter, or on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi(sizes: list[int], share: float) -> dict[str, Any]:
    """Start the two ranks and return rank 0's result of `of_all`."""
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
    """Consume on rank 0, which prints the answer, and produce on rank 1."""
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
    """Return the figures of each size, by its number of bytes."""
    return {str(nbytes): carrier(nbytes, share) for nbytes in sizes}


def main() -> None:
    """Arguments: ``CARRIER SHARE NBYTES ...``. ``share``: part of the messages of a full
    measurement.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("carrier", choices=["mpi", *CARRIERS])
    parser.add_argument("share", type=float)
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    if given.carrier == "mpi":
        child.report(mpi(given.sizes, given.share))
        return
    found = of_all(CARRIERS[given.carrier], given.sizes, given.share)
    if all(found.values()):  # the producing rank has no figures
        child.report(found)


if __name__ == "__main__":
    main()
