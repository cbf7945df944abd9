"""Trajectories through shared memory as a run sends them, timed as `benchmarks.carriers` times other ways.

An actor's end, the exchange and a learner's end, a process each. The actor's write goes into the slot itself, and the learner's
copy into the batch is the only other one. The actor asks one grant ahead and the learner pulls one batch ahead, as the shipped ones do;
their loops read the link while another thread computes, these two between two copies.

``slots``  the whole message is written and copied
``cold``   a message of `SMALL` bytes, and beside it as many private bytes are copied as the larger message has: what size does to
           caches and cores, without any of it being sent
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import carriers, child
from benchmarks.relay import through
from tianflow.channels.codec import decode_grant
from tianflow.channels.link import Link, Message
from tianflow.channels.shm import LinkBatchSource, LinkTrajectorySender, SharedArena
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.payloads import Batch, Settlement, Trajectory, Version
from tianflow.tickets import Limits

SLOTS = carriers.IN_FLIGHT
LIMITS = Limits(batch=1, max_staleness=SLOTS - 1, credits=SLOTS)
SMALL = 1024


async def send(end: socket.socket, shared: SharedArena, nbytes: int, counts: tuple[int, int], told: int) -> None:
    """Fill and commit ``1 + counts[0]`` slots as grants come, then ``counts[1]``; ``told`` says when one was copied."""
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    private, sent = np.zeros(nbytes, np.uint8), source[: shared.arena.layout.nbytes]

    def handle(message: Message) -> None:
        sender.grant(decode_grant(message[2]) if message[0] == "grant" else None)

    link = Link(end=end, handle=handle, closed=lambda: sender.close())  # noqa: PLW0108 - there is no sender yet
    sender = LinkTrajectorySender(link=link, arena=shared.arena, holder="actor-0", announce=lambda _: None)
    number, asked = 0, sender.acquire()
    try:
        while True:
            grant = await asked
            asked = sender.acquire()
            link.push()  # with the commit before it
            data = sender.view(grant).arrays["data"]
            if sent.nbytes < nbytes:
                np.copyto(private, source)
            np.copyto(data, sent)
            sender.begin(grant, grant.version)
            alone = counts[0] < number <= sum(counts)
            if alone:
                await asyncio.sleep(carriers.PAUSE_S)
                data[: carriers.STAMP].view(np.int64)[0] = time.monotonic_ns()
            sender.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), ())
            if alone or number == counts[0]:
                await link.flush()  # this process blocks now
                os.read(told, 1)
            number += 1
            link.handle_one()
    except (EndOfChannel, ClosedChannelError):
        link.close()


class Receiver:
    """The learner's end: batches of one, one of them pulled ahead.

    Args:
        link: to the coordinator.
        source: the shipped end, over that link.
        sent: bytes of a slot.
        nbytes: to be copied for each, whether they came or not.
    """

    def __init__(self, link: Link, source: LinkBatchSource, sent: int, nbytes: int) -> None:
        self._link, self._source, self._number = link, source, 0
        self._target, self._private = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._batch, self._beside = self._target[:sent], nbytes > sent
        self._stamp = self._target[: carriers.STAMP].view(np.int64)
        self._ahead = self._pull()

    def _pull(self) -> Coroutine[Any, Any, Batch]:
        return self._source.next_batch(Version(1, self._number))

    async def take(self) -> int:
        """Wait for one, pull the next, copy, settle. When it was there, in monotonic nanoseconds."""
        batch = await self._ahead
        arrived = time.monotonic_ns()
        self._number += 1
        self._ahead = self._pull()  # goes out before the copy, with the settlement before it
        data = self._source.view(batch.trajectories[0])["data"]
        if self._beside:
            np.copyto(self._target, self._private)
        np.copyto(self._batch, data)
        tickets = (batch.trajectories[0].ticket,)
        self._source.settle(Settlement(Version(1, self._number), tickets, LIMITS.max_staleness, True))
        self._link.handle_one()
        return arrived

    def stamp(self) -> int:
        """That of the last one."""
        return int(self._stamp[0])

    def close(self) -> None:
        self._ahead.close()


async def receive(end: socket.socket, shared: SharedArena, nbytes: int, counts: tuple[int, int], *, results: Connection, tell: int) -> None:
    """Take ``1 + counts[0]`` batches as they come and ``counts[1]`` one at a time."""
    link = Link(end=end, handle=lambda message: source.batch(message[1]), closed=lambda: source.batch(None))
    source = LinkBatchSource(link=link, arena=shared.arena)
    source.opened(Version(1, 0))
    receiver = Receiver(link, source, shared.arena.layout.nbytes, nbytes)
    await receiver.take()
    began = time.monotonic_ns()
    for _ in range(counts[0]):
        await receiver.take()
    seconds = time.monotonic_ns() - began
    await link.flush()
    os.write(tell, b".")
    latency = []
    for _ in range(counts[1]):
        latency.append(await receiver.take() - receiver.stamp())
        await link.flush()
        os.write(tell, b".")
    results.send({"seconds": [seconds], "latency": latency})
    receiver.close()
    link.close()


def stream(nbytes: int, share: float, *, sent: int | None = None) -> dict[str, float]:
    """`carriers.figures` of slots of ``sent`` bytes (by default all ``nbytes``)."""
    counts = carriers.counts(nbytes, share)
    told, tell = os.pipe()
    found = through(
        lambda end, shared: send(end, shared, nbytes, counts, told),
        lambda end, shared, results: receive(end, shared, nbytes, counts, results=results, tell=tell),
        nbytes=sent or nbytes,
        slots=SLOTS,
        limits=LIMITS,
    )
    os.close(told)
    os.close(tell)
    return carriers.figures(found["seconds"][0] / 1e9, counts[0], nbytes, found["latency"])


def main() -> None:
    """``slots|cold SHARE NBYTES ...``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("slots", "cold"))
    parser.add_argument("share", type=float)
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    sent = SMALL if given.what == "cold" else None
    child.say(carriers.of_all(lambda nbytes, share: stream(nbytes, share, sent=sent), given.sizes, given.share))


if __name__ == "__main__":
    main()
