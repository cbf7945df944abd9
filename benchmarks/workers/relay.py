"""Worker: the shared-memory channels alone, with an actor's end, the exchange and a learner's end
in separate processes.

It measures the time from an actor's commit to the learner's batch, through the coordinator, with
all processes asleep before.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import child
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import BatchReady, Granted
from tianflow.channels.shm import SharedArena, SharedMemory, SharedWeights
from tianflow.core.limits import Limits
from tianflow.core.payloads import Field, Settlement, Trajectory, TrajectoryLayout, Version
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender, ServedExchange
from tianflow.hosts import event_loop as loops
from tianflow.ledger.ledger import Ledger

STAMP = 8  # bytes at the start of a slot: its commit time in monotonic nanoseconds


def layout_of(nbytes: int) -> TrajectoryLayout:
    """Return a layout of one array of ``nbytes`` bytes."""
    return TrajectoryLayout(1, 1, (Field("data", (nbytes,), "uint8", 0, nbytes),), nbytes)


async def failing(work: Coroutine[None, None, None]) -> None:
    """Run ``work``, and end this process if a message breaks a callback. Otherwise the failure
    would stay unnoticed.
    """

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        loop.default_exception_handler(context)
        os._exit(1)

    asyncio.get_running_loop().set_exception_handler(fail)
    await work


async def send(end: socket.socket, shared: SharedArena, nbytes: int) -> None:
    """Run the actor's end: fill each granted slot, stamp it, and commit it."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def handle(message: object) -> None:
        sender.grant(message.grant if isinstance(message, Granted) else None)

    link = Link(end=end, handle=handle, closed=lambda: sender.close())  # noqa: PLW0108 - the sender is made later
    sender = LinkTrajectorySender(
        link=link, arena=shared.arena, holder="actor-0", announce=lambda _: None
    )
    try:
        while True:
            grant = await sender.acquire()
            data = sender.view(grant).arrays["data"]
            np.copyto(data, source)
            sender.begin(grant, grant.version)
            await asyncio.sleep(0.0005)  # the learner falls asleep
            data[:STAMP].view(np.int64)[0] = time.monotonic_ns()
            sender.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), ())
    except (EndOfChannel, ClosedChannelError):
        link.close()


async def receive(
    end: socket.socket, shared: SharedArena, nbytes: int, count: int, results: Connection
) -> None:
    """Run the learner's end: take ``count`` batches of one, copy each out, and time the arrival,
    the copy, and a plain copy.
    """

    def handle(message: object) -> None:
        if isinstance(message, BatchReady):
            source.batch(*message)
        else:
            source.end()

    link = Link(end=end, handle=handle, closed=lambda: source.end())  # noqa: PLW0108 - as above
    source = LinkBatchSource(link=link, arena=shared.arena)
    source.opened(Version(1, 0))
    target, private = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    latency, copy, memcpy = [], [], []
    for number in range(count):
        batch = await source.next_batch(Version(1, number))
        arrived = time.monotonic_ns()
        data = source.view(batch.trajectories[0])["data"]
        latency.append(arrived - int(data[:STAMP].view(np.int64)[0]))
        copy.append(_timed(target, data))
        memcpy.append(_timed(target, private))
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        source.settle(Settlement(Version(1, number + 1), tickets, 0, True))
    await link.flush()
    results.send({"latency": latency, "copy": copy, "memcpy": memcpy})
    link.close()


def _timed(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> int:
    began = time.monotonic_ns()
    np.copyto(target, source)
    return time.monotonic_ns() - began


def _serve_one(exchange: Exchange, end: socket.socket, closed: Callable[[], None]) -> Link:
    def handle(message: object) -> None:
        handlers[type(message)](message)

    link = Link(end=end, handle=handle, closed=closed)
    handlers = ServedExchange(exchange=exchange, link=link, on_episodes=lambda *_: None).handlers
    return link


async def serve(ends: list[socket.socket], shared: SharedArena, limits: Limits) -> None:
    """Run the coordinator's end until one of the other processes has ended."""
    exchange = Exchange(
        ledger=Ledger(limits=limits, slots=shared.arena.capacity), arena=shared.arena
    )
    over = asyncio.Event()
    links = [_serve_one(exchange, end, over.set) for end in ends]
    await over.wait()
    exchange.close()
    await links[0].flush()
    for link in links:
        link.close()


def _in_child(others: Iterable[socket.socket], work: Coroutine[None, None, None]) -> None:
    """Run ``work`` in a forked child. It closes the other sockets first, because a link ends only
    if no process holds its other end.
    """
    for end in others:
        end.close()
    loops.run(failing(work))


SendEnd = Callable[[socket.socket, SharedArena], Coroutine[None, None, None]]
ReceiveEnd = Callable[[socket.socket, SharedArena, Connection], Coroutine[None, None, None]]


def through(
    send_end: SendEnd, receive_end: ReceiveEnd, *, nbytes: int, slots: int, limits: Limits
) -> dict[str, list[int]]:
    """Run the two ends in separate processes and the exchange in this one. Return the receiving
    end's results.
    """
    shared = SharedArena(layout=layout_of(nbytes), capacity=slots)
    shared.add_slots(slots)
    # this process has started nothing that a fork could break
    context = multiprocessing.get_context("fork")
    pairs = [socket_pair(), socket_pair()]
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    results, results_end = context.Pipe(duplex=False)
    actor = context.Process(
        target=lambda: _in_child([*ours, theirs[1]], send_end(theirs[0], shared))
    )
    learner = context.Process(
        target=lambda: _in_child([*ours, theirs[0]], receive_end(theirs[1], shared, results_end))
    )
    for process in (actor, learner):
        process.start()
    for end in theirs:
        end.close()
    results_end.close()  # so that an early end of the learner is an error here
    loops.run(failing(serve(ours, shared, limits)))
    found: dict[str, list[int]] = results.recv()
    for process in (actor, learner):
        process.join()
    return found


def relay(nbytes: int, count: int) -> dict[str, float]:
    """Send ``count`` slots of ``nbytes`` bytes. Return times of the last three quarters."""
    found = through(
        lambda end, shared: send(end, shared, nbytes),
        lambda end, shared, results: receive(end, shared, nbytes, count, results),
        nbytes=nbytes,
        slots=2,
        limits=Limits(batch=1, max_staleness=0, credits=1),
    )
    times = {name: values[count // 4 :] for name, values in found.items()}
    latency = sorted(times["latency"])
    return {
        "commit_to_receive_p50": latency[len(latency) // 2] / 1e3,
        "commit_to_receive_p99": latency[int(0.99 * (len(latency) - 1))] / 1e3,
        "copy_out": statistics.median(times["copy"]) / 1e3,
        "memcpy": statistics.median(times["memcpy"]) / 1e3,
    }


def weights(nbytes: int, count: int) -> dict[str, float]:
    """Publish and read weights of ``nbytes`` bytes ``count`` times, and make a plain copy of the
    same size. Return medians.
    """
    memory = SharedMemory.create("weights", SharedWeights.nbytes_for(nbytes))
    channel = SharedWeights(memory=memory, nbytes=nbytes)
    flat, target = (
        np.random.default_rng(0).integers(0, 256, nbytes, np.uint8),
        np.zeros(nbytes, np.uint8),
    )
    publish, read, memcpy = [], [], []
    for number in range(count):
        version, began = Version(1, number), time.monotonic_ns()
        channel.publish(version, flat)
        published = time.monotonic_ns()
        channel.announce(version)
        announced = time.monotonic_ns()
        channel.read_into(target)
        publish.append(published - began)
        read.append(time.monotonic_ns() - announced)
        memcpy.append(_timed(target, flat))
    memory.close()
    named = {"publish": publish, "read": read, "memcpy": memcpy}
    return {name: statistics.median(values[count // 4 :]) / 1e3 for name, values in named.items()}


def main() -> None:
    """Arguments: ``trajectories|weights NBYTES COUNT``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("channel", choices=("trajectories", "weights"))
    parser.add_argument("nbytes", type=int)
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    child.report((relay if given.channel == "trajectories" else weights)(given.nbytes, given.count))


if __name__ == "__main__":
    main()
