"""The weights channel with many readers: one publisher, and readers in processes of their own that
take every version.

``spread``   from the moment a version is published until the last of the readers has a whole copy,
verified
``stalled``  the learner's step with its publishing, while all readers run and while one of them is
stopped (SIGSTOP)

A version is announced by a message to each reader, as the coordinator announces it to hosts; the
copy is the reader's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import bare, child
from benchmarks.relay import failing
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import VersionPublished, message
from tianflow.channels.shm import SharedMemory, SharedWeights
from tianflow.core.payloads import Version
from tianflow.hosts import event_loop as loops

PATIENCE_S = 20.0
TURN = 100
"""Updates with and without a stalled reader, in turn: so few messages fit into the socket of one
that does not read.
"""


@message
class VersionRead(NamedTuple):
    """A reader had ``version``, at ``time_ns`` (monotonic)."""

    version: Version
    time_ns: int


async def read(end: socket.socket, memory: SharedMemory, nbytes: int) -> None:
    """A reader: copies each version that is announced, and says so with the time at which it had
    it.
    """
    over = asyncio.Event()
    weights, flat = SharedWeights(memory=memory, nbytes=nbytes), np.zeros(nbytes, np.uint8)

    def handle(message: object) -> None:
        assert isinstance(message, VersionPublished)
        weights.announce(message.version)
        version = weights.read_into(flat)
        link.send(VersionRead(version, time.monotonic_ns()))

    link = Link(end=end, handle=handle, closed=over.set)
    await over.wait()


class Readers:
    """``count`` reading processes and the links to them.

    Args:
        ends: our ends.
        pids: of the processes.
    """

    def __init__(self, ends: list[socket.socket], pids: list[int]) -> None:
        self.pids = pids
        self._had: dict[int, dict[int, int]] = {}
        self._all = asyncio.Event()
        self._links = [
            Link(end=end, handle=self._make_handle(reader), closed=lambda: None)
            for reader, end in enumerate(ends)
        ]

    def _make_handle(self, reader: int) -> Callable[[object], None]:
        def handle(message: object) -> None:
            assert isinstance(message, VersionRead)
            had = self._had.setdefault(message.version.number, {})
            had[reader] = message.time_ns
            if len(had) == len(self._links):
                self._all.set()

        return handle

    def announce(self, version: Version) -> None:
        """Tell every reader."""
        self._all.clear()
        for link in self._links:
            link.send(VersionPublished(version))

    async def last_had(self, version: Version) -> int:
        """Wait until all have ``version``; when the last one had it, in monotonic nanoseconds."""
        async with asyncio.timeout(PATIENCE_S):  # one that failed would be waited for without end
            while len(self._had.get(version.number, {})) < len(self._links):
                self._all.clear()
                await self._all.wait()
        last = max(self._had.pop(version.number).values())
        for earlier in [number for number in self._had if number < version.number]:
            del self._had[earlier]
        return last

    def close(self) -> None:
        for link in self._links:
            link.close()


@contextlib.asynccontextmanager
async def readers(
    count: int, memory: SharedMemory, nbytes: int, core: int | None = None
) -> AsyncIterator[Readers]:
    """Fork ``count`` readers of ``memory``, on ``core`` if given. Before anything is started that a
    fork could break.
    """
    pairs = [socket_pair() for _ in range(count)]
    context = multiprocessing.get_context("fork")

    def work(index: int) -> None:
        for other, (ours, theirs) in enumerate(pairs):
            ours.close()
            if other != index:
                theirs.close()
        if core is not None:
            os.sched_setaffinity(0, {core})
        asyncio.set_event_loop(None)
        asyncio.events._set_running_loop(None)  # noqa: SLF001 - forked inside a running loop, of which nothing is used
        loops.run(failing(read(pairs[index][1], memory, nbytes)))

    processes: list[BaseProcess] = []
    try:
        for index in range(count):
            processes.append(context.Process(target=work, args=(index,), daemon=True))
            processes[-1].start()
        for _, theirs in pairs:
            theirs.close()
        found = Readers([ours for ours, _ in pairs], [process.pid or 0 for process in processes])
        yield found
        found.close()
    finally:
        for process in processes:
            process.kill()
            process.join()


async def spread(nbytes: int, count: int, versions: int) -> dict[str, float]:
    """Publish ``versions`` versions, each after the last reader had the one before."""
    memory = SharedMemory.create("weights", SharedWeights.nbytes_for(nbytes))
    weights, flat = (
        SharedWeights(memory=memory, nbytes=nbytes),
        np.random.default_rng(0).integers(0, 256, nbytes, np.uint8),
    )
    publish, last = [], []
    async with readers(count, memory, nbytes) as found:
        for number in range(versions):
            version, began = Version(1, number), time.monotonic_ns()
            weights.publish(version, flat)
            published = time.monotonic_ns()
            found.announce(version)
            last.append((await found.last_had(version) - began) / 1e3)
            publish.append((published - began) / 1e3)
            await asyncio.sleep(0.0005)  # they sleep by now
    copies = _copies(flat, max(8, versions // 4))
    return {
        "publish": statistics.median(publish[versions // 4 :]),
        "last_reader": statistics.median(last[versions // 4 :]),
        "memcpy": statistics.median(copies),
    }


def _copies(flat: NDArray[np.uint8], count: int) -> list[float]:
    target, times = np.ones_like(flat), []
    for _ in range(count):
        began = time.monotonic_ns()
        np.copyto(target, flat)
        times.append((time.monotonic_ns() - began) / 1e3)
    return times


async def stalled(config: Path, count: int, turns: int) -> dict[str, float]:
    """Turns of `TURN` updates, every third one with the first reader stopped; quantiles of the step
    with its publishing, in µs.

    Turns with all readers running are counted twice, as ``all`` and as ``again``: how these differ
    is what chance does.
    """
    nbytes, memory = _weights_of(config)
    kinds = ("all", "stalled", "again")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cores = bare.cores()
    async with readers(count, memory, nbytes, cores["actor"]) as found:
        if cores["learner"] is not None:
            os.sched_setaffinity(0, {cores["learner"]})
        update, weights, number = (
            _update(config, memory, nbytes),
            SharedWeights(memory=memory, nbytes=nbytes),
            0,
        )
        for turn in range(-1, len(kinds) * turns):
            kind = kinds[turn % len(kinds)]
            if turn >= 0 and kind == "stalled":
                os.kill(found.pids[0], signal.SIGSTOP)
            for _ in range(TURN):
                began, version = time.monotonic_ns(), Version(1, number)
                weights.publish(version, update())
                found.announce(version)
                await asyncio.sleep(0)
                if turn >= 0:
                    times[kind].append((time.monotonic_ns() - began) / 1e3)
                number += 1
            os.kill(found.pids[0], signal.SIGCONT)
            await found.last_had(Version(1, number - 1))
    return {
        f"step_{name}_{quantile}": float(np.percentile(took, quantile))
        for name, took in times.items()
        for quantile in (50, 99)
    }


def _weights_of(config: Path) -> tuple[int, SharedMemory]:
    """How many bytes the flat weights have, asked of a child, because nothing may be started here
    before readers are forked.
    """
    nbytes = int(
        child.run("benchmarks.parameters", "bytes", config, timeout_s=60.0).answer["nbytes"]
    )
    return nbytes, SharedMemory.create("weights", SharedWeights.nbytes_for(nbytes))


def _update(config: Path, memory: SharedMemory, nbytes: int) -> Callable[[], NDArray[np.uint8]]:
    """The shipped learner's step on a resident batch, and its flat weights."""
    import torch

    from tianflow.config.loading import load_config

    assert memory.nbytes >= SharedWeights.nbytes_for(nbytes)
    torch.set_num_threads(1)
    algorithm, batch = bare.learning(load_config(config))

    def update() -> NDArray[np.uint8]:
        algorithm.step(batch)
        return algorithm.flat()

    return update


def main() -> None:
    """``spread NBYTES READERS VERSIONS``, ``stalled CONFIG READERS TURNS`` or ``bytes CONFIG``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("spread", "stalled", "bytes"))
    parser.add_argument("of")
    parser.add_argument("numbers", type=int, nargs="*")
    given = parser.parse_args()
    if given.what == "bytes":
        from tianflow.config.loading import load_config

        child.say({"nbytes": bare.learning(load_config(Path(given.of)))[0].flat().nbytes})
    elif given.what == "spread":
        child.say(loops.run(spread(int(given.of), *given.numbers)))
    else:
        child.say(loops.run(stalled(Path(given.of), *given.numbers)))


if __name__ == "__main__":
    main()
