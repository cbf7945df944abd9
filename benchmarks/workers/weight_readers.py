"""Worker: the weights channel with one publisher and many readers in separate processes.

``spread``   time from the publication of a version until the last reader has a whole, verified copy
``stalled``  the learner's step with its publication, while all readers run and while one is stopped
             (SIGSTOP)

A message to each reader announces a version, as the coordinator announces it to hosts. Each reader
makes its own copy.
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

from benchmarks.lib import child
from benchmarks.workers import bare_loops
from benchmarks.workers.relay import failing
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.messages import VersionPublished, message
from tianflow.channels.shm import SharedMemory, SharedWeights
from tianflow.core.payloads import Version
from tianflow.hosts import event_loop as loops

PATIENCE_S = 20.0
TURN = 100
"""Updates in a turn with or without a stalled reader. This number of messages fits into the socket
of a reader that does not read.
"""


@message
class VersionRead(NamedTuple):
    """A reader had ``version``, at ``time_ns`` (monotonic)."""

    version: Version
    time_ns: int


async def read(end: socket.socket, memory: SharedMemory, nbytes: int) -> None:
    """Run a reader: copy each announced version, and report the time at which the copy was
    complete.
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
        ends: our ends of the links.
        pids: pids of the processes.
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
        """Announce ``version`` to every reader."""
        self._all.clear()
        for link in self._links:
            link.send(VersionPublished(version))

    async def last_had(self, version: Version) -> int:
        """Wait until all readers have ``version``. Return the last one's time, in monotonic
        nanoseconds.
        """
        async with asyncio.timeout(PATIENCE_S):  # a failed reader would never answer
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
    """Fork ``count`` readers of ``memory``, on ``core`` if given. The fork comes before anything
    that a fork could break.
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
        asyncio.events._set_running_loop(None)  # noqa: SLF001 - the fork inherits a running loop that it must not use
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
    """Publish ``versions`` versions, each after the last reader had the previous one."""
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
            await asyncio.sleep(0.0005)  # the readers fall asleep
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
    """Measure turns of `TURN` updates with all readers, with the first one stopped, and with all
    readers again. Return quantiles of the step in µs.

    The difference between ``all`` and ``again`` is noise.
    """
    nbytes, memory = _weights_of(config)
    kinds = ("all", "stalled", "again")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cores = bare_loops.cores()
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
    """Return the size of the flat weights from a child, because this process must not start threads
    before it forks readers.
    """
    nbytes = int(
        child.run("benchmarks.workers.weight_readers", "bytes", config, timeout_s=60.0).answer[
            "nbytes"
        ]
    )
    return nbytes, SharedMemory.create("weights", SharedWeights.nbytes_for(nbytes))


def _update(config: Path, memory: SharedMemory, nbytes: int) -> Callable[[], NDArray[np.uint8]]:
    """Return the shipped learner's step on a resident batch, which returns the flat weights."""
    import torch

    from tianflow.config.loading import load_config

    assert memory.nbytes >= SharedWeights.nbytes_for(nbytes)
    torch.set_num_threads(1)
    algorithm, batch = bare_loops.learning(load_config(config))

    def update() -> NDArray[np.uint8]:
        algorithm.step(batch)
        return algorithm.flat()

    return update


def main() -> None:
    """Arguments: ``spread NBYTES READERS VERSIONS``, ``stalled CONFIG READERS TURNS`` or ``bytes
    CONFIG``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("spread", "stalled", "bytes"))
    parser.add_argument("of")
    parser.add_argument("numbers", type=int, nargs="*")
    given = parser.parse_args()
    if given.what == "bytes":
        from tianflow.config.loading import load_config

        child.report({"nbytes": bare_loops.learning(load_config(Path(given.of)))[0].flat().nbytes})
    elif given.what == "spread":
        child.report(loops.run(spread(int(given.of), *given.numbers)))
    else:
        child.report(loops.run(stalled(Path(given.of), *given.numbers)))


if __name__ == "__main__":
    main()
