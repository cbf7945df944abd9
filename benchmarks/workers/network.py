"""Worker: trajectories over TCP into slots of another process, as nodes send them, and over bare
ZeroMQ.

``gateway``  the gateway of a run: a node sends each trajectory with the message that commits it,
             the gateway writes it into its slot and reports it to the coordinator, which
             acknowledges `BATCH` of them at once
``bare``     a DEALER that sends without a copy, a ROUTER that copies once into a slot and
             acknowledges as many at once

``KEYS`` 1: with CURVE. At most `IN_FLIGHT` trajectories are not acknowledged. The answer has MB/s
(10^6 bytes) and CPU seconds of each process for a trajectory, by size.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import zmq

from benchmarks.lib import child
from tianflow.channels.frames import Message, encode
from tianflow.channels.keys import Keys
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import (
    MESSAGES,
    AdmitNode,
    GatewayListens,
    NodeArrived,
    NodeSent,
    SendToNode,
    StartGateway,
)
from tianflow.channels.shm import SharedTransport
from tianflow.channels.stream import ReliableStream
from tianflow.channels.tcp import TcpConnection, new_context
from tianflow.core.layout import written_rows
from tianflow.core.payloads import Field, TrajectoryLayout
from tianflow.hosts import event_loop as loops
from tianflow.hosts import gateway

IN_FLIGHT = 8
"""Trajectories that are not acknowledged."""
BATCH = 2
"""Trajectories that one message acknowledges. In a run it brings the grants for the next batch."""
WARM = 4
"""Trajectories before the first that counts."""
TOTAL = 2 * 10**9
"""Bytes of one measurement, about."""
BARE = "tcp://127.0.0.1:*"


def layout(nbytes: int) -> TrajectoryLayout:
    """A trajectory of ``nbytes`` in one field of four rows."""
    field = Field("obs/", (4, nbytes // 4), "uint8", 0, nbytes)
    return TrajectoryLayout(4, 1, (field,), nbytes)


def counts(nbytes: int, share: float) -> int:
    """Trajectories of one measurement."""
    return max(2 * IN_FLIGHT, min(4000, int(share * TOTAL / nbytes)))


def cpu_s() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run ``work`` in a child process: its pid, and the descriptor from which its answer is read.
    It gets the descriptor to write the answer to.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        try:
            work(writes)
        finally:
            os._exit(0)
    os.close(writes)
    return pid, reads


def through_gateway(nbytes: int, count: int, keys: Keys | None) -> dict[str, float]:
    """Carry ``count`` trajectories through a gateway."""
    shape = layout(nbytes)
    slots = SharedTransport(layout=shape, capacity=IN_FLIGHT)
    slots.add_slots(IN_FLIGHT)
    ours, theirs = socket_pair()
    start = StartGateway("tcp://127.0.0.1:*", {} if keys is None else keys.texts, shape)
    payload = msgpack.packb(MESSAGES.encode(start))

    def serve(answer: int) -> None:
        ours.close()
        gateway.main(payload, (theirs.detach(), os.dup(slots.slots), os.dup(slots.weights)))
        os.write(answer, msgpack.packb(cpu_s()))

    gateway_pid, gateway_says = forked(serve)
    theirs.close()

    async def coordinate() -> dict[str, float]:
        done = asyncio.get_running_loop().create_future()
        began = [0.0, 0.0]
        node: list[int] = []

        def handle(message: Any) -> None:
            match message:
                case GatewayListens(address):
                    node.extend(
                        forked(lambda answer: send_as_node(address, keys, nbytes, count, answer))
                    )
                case NodeArrived(connection, _):
                    link.send(AdmitNode(connection, "n", 0, True, 60.0))
                case NodeSent(_, number, _, _) if number:
                    if number == WARM:
                        began[:] = time.perf_counter(), cpu_s()
                    if number % BATCH == 0 or number == WARM + count:
                        link.send(SendToNode("n", 0, number, b""))
                    if number == WARM + count:
                        done.set_result(time.perf_counter() - began[0])

        link = Link(end=ours, handle=handle, closed=lambda: None)
        seconds = await done
        own = cpu_s() - began[1]
        await link.flush()
        node_cpu = msgpack.unpackb(os.read(node[1], 100))
        link.close()
        gateway_cpu = msgpack.unpackb(os.read(gateway_says, 100))
        for pid in (node[0], gateway_pid):
            os.waitpid(pid, 0)  # noqa: ASYNC222 - both have said their last word
        return {
            "bandwidth": count * nbytes / seconds / 1e6,
            "coordinator": 1e6 * own / count,
            "gateway": 1e6 * gateway_cpu / (count + WARM),
            "node": 1e6 * node_cpu / (count + WARM),
        }

    try:
        return loops.run(coordinate())
    finally:
        slots.close()


def send_as_node(address: str, keys: Keys | None, nbytes: int, count: int, answer: int) -> None:
    """Send trajectories as a node does. Their arrays lie in slots of this process."""
    shape = layout(nbytes)
    own = SharedTransport(layout=shape, capacity=IN_FLIGHT)
    own.add_slots(IN_FLIGHT)
    rows = written_rows(shape, 4)

    async def send() -> None:
        stream: ReliableStream[list[Any]] = ReliableStream()
        done, posted = asyncio.get_running_loop().create_future(), 0

        def receive(message: Message) -> None:
            nonlocal posted
            match message.kind, message.body:
                case "welcome", _:
                    stream.connected(0)
                case "down", [received, *_]:
                    stream.acknowledge(received)
            while posted < WARM + count and len(stream) < IN_FLIGHT:
                slot = posted % IN_FLIGHT
                views = own.arena.views(slot)
                stream.post([slot, 4, {name: views[name][:last] for name, last in rows.items()}])
                posted += 1
            for number, attachment in stream.due():
                body = [0, np.zeros(64, np.uint8), [attachment], []]
                connection.send(encode("up", number, body))
            if posted == WARM + count and not len(stream) and not done.done():
                done.set_result(None)

        context = new_context()
        connection = TcpConnection(context, address, keys=keys)
        connection.serve(receive, done.set_exception)
        connection.send(encode("hello", 0, {"name": "n"}))
        await done
        connection.close()
        context.destroy(linger=0)

    loops.run(send())
    os.write(answer, msgpack.packb(cpu_s()))


def bare(nbytes: int, count: int, keys: Keys | None) -> dict[str, float]:
    """Carry ``count`` trajectories through two sockets of ZeroMQ, with one copy at the end."""
    reads, writes = os.pipe()

    def send(answer: int) -> None:
        address = os.read(reads, 200).decode()
        context = zmq.Context()
        end = context.socket(zmq.DEALER)
        if keys is not None:
            end.curve_serverkey = keys.server_public
            end.curve_publickey, end.curve_secretkey = keys.client_public, keys.client_secret
        end.connect(address)
        data = [np.ones(nbytes, np.uint8) for _ in range(IN_FLIGHT)]
        open_ = 0
        for number in range(WARM + count):
            if open_ == IN_FLIGHT:
                end.recv()
                open_ -= BATCH
            end.send(data[number % IN_FLIGHT].data, copy=False)
            open_ += 1
        for _ in range(0, open_, BATCH):
            end.recv()
        os.write(answer, msgpack.packb(cpu_s()))
        context.destroy(linger=0)

    pid, says = forked(send)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = context.socket(zmq.ROUTER)
    if keys is not None:
        end.curve_server, end.curve_secretkey = True, keys.server_secret
    end.bind(BARE)
    os.write(writes, end.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").encode())
    slots = [np.zeros(nbytes, np.uint8) for _ in range(IN_FLIGHT)]
    began = cpu = 0.0
    for number in range(WARM + count):
        peer, data = end.recv_multipart(copy=False)
        slots[number % IN_FLIGHT][...] = np.frombuffer(data.buffer, np.uint8)
        if (number + 1) % BATCH == 0 or number + 1 == WARM + count:
            end.send_multipart([peer.bytes, b""])
        if number == WARM - 1:
            began, cpu = time.perf_counter(), cpu_s()
    seconds, used = time.perf_counter() - began, cpu_s() - cpu
    sender = msgpack.unpackb(os.read(says, 100))
    os.waitpid(pid, 0)
    context.destroy(linger=0)
    return {
        "bandwidth": count * nbytes / seconds / 1e6,
        "gateway": 1e6 * used / count,
        "node": 1e6 * sender / (count + WARM),
    }


def main() -> None:
    """Measure, and print the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=("gateway", "bare"))
    parser.add_argument("curve", type=int, choices=(0, 1))
    parser.add_argument("share", type=float)
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    signal.alarm(600)
    measure = through_gateway if given.how == "gateway" else bare
    keys = Keys.generate() if given.curve else None
    child.report(
        {str(size): measure(size, counts(size, given.share), keys) for size in given.sizes}
    )


if __name__ == "__main__":
    main()
