"""What other processes do in tests of shared memory; each is started as ``python -m
tests.support.shm_targets NAME FD NBYTES ...``.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable

import numpy as np

from tests.support.worlds import NUM_ENVS, STEPS, small_layout
from tianflow.channels.arena import Arena
from tianflow.channels.link import Link
from tianflow.channels.messages import Granted
from tianflow.channels.shm import SharedMemory, SharedWeights
from tianflow.core.payloads import Episode, Trajectory, Version
from tianflow.errors import EndOfChannel
from tianflow.exchange.remote import LinkTrajectorySender


def hammer(fd: int, nbytes: int) -> None:
    """Publish version after version, as fast as it goes, until it is ended."""
    memory = SharedMemory.attach(fd)
    weights = SharedWeights(memory=memory, nbytes=nbytes)
    words = np.zeros(nbytes // 8, np.int64)
    number = 0
    while True:
        number += 1
        words[:] = number
        weights.publish(Version(1, number), words.view(np.uint8))


def act(fd: int, capacity: int, link_fd: int) -> None:
    """An actor that writes each ticket's number into its slot, until the end of the run; it is
    killed in ticket 5.
    """
    asyncio.run(_act(fd, capacity, link_fd))


async def _act(fd: int, capacity: int, link_fd: int) -> None:
    arena = Arena(layout=small_layout(), buffer=SharedMemory.attach(fd).buffer, capacity=capacity)

    def handle(message: object) -> None:
        sender.grant(message.grant if isinstance(message, Granted) else None)

    link = Link(end=socket.socket(fileno=link_fd), handle=handle, closed=lambda: sender.grant(None))
    sender = LinkTrajectorySender(
        link=link, arena=arena, holder="child", announce=lambda version: None
    )
    try:
        while True:
            grant = await sender.acquire()
            sender.begin(grant, grant.version)
            sender.view(grant).arrays["reward"][:] = grant.ticket
            if grant.ticket == 5:
                await link.flush()
                signal.raise_signal(signal.SIGKILL)
            sender.commit(
                Trajectory(grant.ticket, grant.slot, STEPS, STEPS * NUM_ENVS, grant.version),
                [Episode(1.0, grant.ticket)],
            )
    except EndOfChannel:
        await link.flush()


if __name__ == "__main__":
    targets: dict[str, Callable[..., None]] = {"hammer": hammer, "act": act}
    targets[sys.argv[1]](*map(int, sys.argv[2:]))
