"""Worker: trajectories through shared memory as a run sends them, timed as in
`benchmarks.workers.carriers`.

An actor's end, the exchange and a learner's end have a process each. The actor writes into the slot
itself, and the learner's copy into the batch is the only other copy. The actor asks for grants
ahead and the learner pulls one batch ahead, as the shipped ones do. In a run, an event loop reads
the link while another thread computes. Here the ends read it between two copies.

``slots``  batches of a quarter of the slots, each trajectory copied to its place in the batch
``ones``   the same slots, and a batch of each trajectory
``cold``   messages of `SMALL` bytes, while both ends copy as many private bytes as the larger
             message has: the effect of size on caches and cores without sending it

Latency is always that of a batch of one, sent alone.
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
from numpy.typing import NDArray

from benchmarks.lib import child
from benchmarks.workers import carriers
from benchmarks.workers.relay import through
from tianflow.channels.link import Link
from tianflow.channels.messages import BatchReady, Granted
from tianflow.channels.shm import SharedArena
from tianflow.core.limits import Limits
from tianflow.core.payloads import Batch, Grant, Settlement, Trajectory, Version
from tianflow.errors import ClosedChannelError, EndOfChannel
from tianflow.exchange.remote import LinkBatchSource, LinkTrajectorySender

SMALL = 1024
SLOTS_ALONE = 4
"""Number of slots in the latency part."""


class Sender:
    """Actor's end: fills and commits acquired slots.

    Args:
        end: socket of its link.
        shared: arena of the slots.
        nbytes: bytes to copy for each slot, sent or not.
    """

    def __init__(self, end: socket.socket, shared: SharedArena, nbytes: int) -> None:
        self._source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._private = np.zeros(nbytes, np.uint8)
        self._sent = self._source[: shared.arena.layout.nbytes]
        self.link = Link(end=end, handle=self._handle, closed=self._closed)
        self._sender = LinkTrajectorySender(
            link=self.link, arena=shared.arena, holder="actor-0", announce=lambda _: None
        )

    def _handle(self, message: object) -> None:
        self._sender.grant(message.grant if isinstance(message, Granted) else None)

    def _closed(self) -> None:
        self._sender.close()

    def acquire(self) -> Coroutine[Any, Any, Grant]:
        """Request a grant. The request leaves now, together with the previous commit."""
        request = self._sender.acquire()
        self.link.push()
        return request

    def write(self, grant: Grant) -> NDArray[np.uint8]:
        """Fill the slot and announce its begin. Return the slot's bytes."""
        data: NDArray[np.uint8] = self._sender.view(grant).arrays["data"]
        if self._sent.nbytes < self._source.nbytes:
            np.copyto(self._private, self._source)
        np.copyto(data, self._sent)
        self._sender.begin(grant, grant.version)
        return data

    def commit(self, grant: Grant) -> None:
        """Commit the slot."""
        self._sender.commit(Trajectory(grant.ticket, grant.slot, 1, 1, grant.version), ())


async def send_many(end: socket.socket, shared: SharedArena, nbytes: int) -> None:
    """Fill and commit slots as grants come, until the other end closes."""
    sender = Sender(end, shared, nbytes)
    request = sender.acquire()
    try:
        while True:
            grant = await request
            request = sender.acquire()
            sender.write(grant)
            sender.commit(grant)
            sender.link.handle_one()
    except (EndOfChannel, ClosedChannelError):
        sender.link.close()


async def send_alone(
    end: socket.socket, shared: SharedArena, nbytes: int, single: int, acks: int
) -> None:
    """Fill a slot, sleep, stamp it and commit it. Read ``acks`` before the next slot."""
    sender = Sender(end, shared, nbytes)
    for _ in range(SLOTS_ALONE + single):
        grant = await sender.acquire()
        data = sender.write(grant)
        await asyncio.sleep(carriers.PAUSE_S)
        data[: carriers.STAMP].view(np.int64)[0] = time.monotonic_ns()
        sender.commit(grant)
        await sender.link.flush()  # the next line blocks this process
        os.read(acks, 1)
    sender.link.close()


class Receiver:
    """Learner's end: takes batches and pulls one ahead.

    Args:
        end: socket of its link.
        shared: arena of the batches.
        nbytes: bytes to copy for each message, received or not.
        limits: limits of the exchange.
    """

    def __init__(
        self, end: socket.socket, shared: SharedArena, nbytes: int, limits: Limits
    ) -> None:
        self.link = Link(
            end=end,
            handle=self._handle,
            closed=lambda: self._source.end(),  # noqa: PLW0108 - made below
        )
        self._source = LinkBatchSource(link=self.link, arena=shared.arena)
        self._source.opened(Version(1, 0))
        sent = shared.arena.layout.nbytes
        self._limits, self._number, self._copies_private = limits, 0, nbytes > sent
        self._private = np.ones(nbytes, np.uint8)
        self._target = np.zeros((limits.batch, nbytes), np.uint8)
        self._batch = list(self._target[:, :sent])
        self._ahead = self._pull()

    def _handle(self, message: object) -> None:
        if isinstance(message, BatchReady):
            self._source.batch(*message)
        else:
            self._source.end()

    def _pull(self) -> Coroutine[Any, Any, Batch]:
        return self._source.next_batch(Version(1, self._number))

    async def take(self) -> int:
        """Wait for one batch, pull the next, copy, and settle. Return the arrival time in monotonic
        nanoseconds.
        """
        batch = await self._ahead
        arrived = time.monotonic_ns()
        self._number += 1
        self._ahead = (
            self._pull()
        )  # the request leaves before the copy, with the previous settlement
        for row, target, trajectory in zip(
            self._batch, self._target, batch.trajectories, strict=True
        ):
            if self._copies_private:
                np.copyto(target, self._private)
            np.copyto(row, self._source.view(trajectory)["data"])
        tickets = tuple(trajectory.ticket for trajectory in batch.trajectories)
        self._source.settle(
            Settlement(Version(1, self._number), tickets, self._limits.max_staleness, True)
        )
        self.link.handle_one()
        return arrived

    def stamp(self) -> int:
        """Return the stamp of the last message."""
        return int(self._target[0, : carriers.STAMP].view(np.int64)[0])

    def close(self) -> None:
        """Stop taking batches."""
        self._ahead.close()
        self.link.close()


async def receive_many(
    end: socket.socket,
    shared: SharedArena,
    nbytes: int,
    many: int,
    *,
    limits: Limits,
    slots: int,
    results: Connection,
) -> None:
    """Time ``many`` messages, after a warm-up of one message for each slot."""
    receiver = Receiver(end, shared, nbytes, limits)
    for _ in range(slots // limits.batch):
        await receiver.take()
    began = time.monotonic_ns()
    for _ in range(many // limits.batch):
        await receiver.take()
    results.send({"nanoseconds": [time.monotonic_ns() - began]})
    await receiver.link.flush()
    receiver.close()


async def receive_alone(
    end: socket.socket,
    shared: SharedArena,
    nbytes: int,
    single: int,
    *,
    limits: Limits,
    results: Connection,
    acks: int,
) -> None:
    """Time ``single`` messages that come one at a time, after a warm-up of one message for each
    slot.
    """
    receiver = Receiver(end, shared, nbytes, limits)
    latency = []
    for _ in range(SLOTS_ALONE + single):
        latency.append(await receiver.take() - receiver.stamp())
        await receiver.link.flush()
        os.write(acks, b".")
    results.send({"latency": latency[SLOTS_ALONE:]})
    receiver.close()


def limits_of(slots: int, batch: int) -> Limits:
    """Return limits with one credit for each slot."""
    return Limits(batch=batch, max_staleness=slots // batch - 1, credits=slots)


def stream(
    nbytes: int, share: float, *, sent: int | None = None, ones: bool = False
) -> dict[str, float]:
    """Return `carriers.figures` of slots of ``sent`` bytes (by default all ``nbytes``)."""
    many, single = carriers.counts(nbytes, share)
    slots = carriers.in_flight(nbytes)
    limits, alone = (
        limits_of(slots, 1 if ones else slots // carriers.BATCHES_IN_FLIGHT),
        limits_of(SLOTS_ALONE, 1),
    )
    streamed = through(
        lambda end, shared: send_many(end, shared, nbytes),
        lambda end, shared, results: receive_many(
            end, shared, nbytes, many, limits=limits, slots=slots, results=results
        ),
        nbytes=sent or nbytes,
        slots=slots,
        limits=limits,
    )
    ack_reader, ack_writer = os.pipe()
    found = through(
        lambda end, shared: send_alone(end, shared, nbytes, single, ack_reader),
        lambda end, shared, results: receive_alone(
            end, shared, nbytes, single, limits=alone, results=results, acks=ack_writer
        ),
        nbytes=sent or nbytes,
        slots=SLOTS_ALONE,
        limits=alone,
    )
    os.close(ack_reader)
    os.close(ack_writer)
    return carriers.figures(streamed["nanoseconds"][0] / 1e9, many, nbytes, found["latency"])


def main() -> None:
    """Arguments: ``slots|ones|cold SHARE NBYTES ...``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("slots", "ones", "cold"))
    parser.add_argument("share", type=float)
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    sent, ones = SMALL if given.what == "cold" else None, given.what == "ones"
    child.report(
        carriers.of_all(
            lambda nbytes, share: stream(nbytes, share, sent=sent, ones=ones),
            given.sizes,
            given.share,
        )
    )


if __name__ == "__main__":
    main()
