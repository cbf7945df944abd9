"""The shared-memory form: data lie in nameless memory that all processes of a run map, small messages go over links.

Memory is made with ``memfd_create``: it has no name, so a dead run leaves nothing behind, and Docker's limit on
``/dev/shm`` does not apply. Descriptors are handed to children.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.arena import Arena, ArenaSlot, arena_nbytes
from tianflow.channels.codec import decode_batch, encode_trajectory
from tianflow.channels.latest import LatestCell
from tianflow.channels.link import Link
from tianflow.channels.waiting import Answered, Asked, uncollected
from tianflow.errors import BrokenChannelError, ClosedChannelError, EndOfChannel, TianflowError
from tianflow.payloads import NO_VERSION, Batch, Episode, Grant, Settlement, Trajectory, TrajectoryLayout, Version, aligned

BUFFERS = 4
"""Copies of the weights: a reader that copies one is overtaken only by a writer that is three publishes ahead."""
_HEADER = 8  # int64 words in front of the buffers, and in front of each
IN_HAND_S = 0.002
"""Seconds of work that an actor asks for ahead: more than an answer of the coordinator takes, too little to be noticed at a pause."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        raise TianflowError(f"no room for {nbytes} bytes of shared memory: {error.strerror}") from error


class SharedMemory:
    """Nameless memory of a fixed size; pages exist once `reserve` has asked for them."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create_unsized(label: str) -> int:
        """A descriptor of memory whose size whoever first attaches it decides (weights: only the learner knows how many)."""
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedMemory:
        """``nbytes`` that may never grow or shrink (so that no other process can pull pages away from under this one)."""
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int = 0) -> SharedMemory:
        """Memory handed over by another process; ``fd`` becomes this object's. If it has no size yet, it gets ``nbytes``, pages and all.

        Raises:
            TianflowError: the machine has no room.
        """
        if os.fstat(fd).st_size == 0 and nbytes:
            _allocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, os.fstat(fd).st_size)

    def reserve(self, start: int, nbytes: int) -> None:
        """Make the pages exist now, so that a full machine is an error here and not a crash later.

        Raises:
            TianflowError: the machine has no room.
        """
        _allocate(self.fd, start, nbytes)

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedArena:
    """The coordinator's slots: address space for ``capacity`` of them, memory for those added so far."""

    def __init__(self, *, layout: TrajectoryLayout, capacity: int) -> None:
        self.memory = SharedMemory.create("tianflow-slots", arena_nbytes(layout, capacity))
        self.arena = Arena(layout=layout, buffer=self.memory.buffer, capacity=capacity)
        self._slots = 0

    def add_slots(self, count: int) -> None:
        """Give ``count`` more slots their pages.

        Raises:
            TianflowError: the machine has no room. Nothing changed.
        """
        if self._slots + count > self.arena.capacity:
            raise ValueError(f"{self._slots + count} slots in an arena with room for {self.arena.capacity}")
        stride = aligned(self.arena.layout.nbytes)
        head = arena_nbytes(self.arena.layout, self.arena.capacity) - self.arena.capacity * stride
        start = head + self._slots * stride if self._slots else 0
        self.memory.reserve(start, head + (self._slots + count) * stride - start)
        self._slots += count


def weights_checksum(version: Version, flat: NDArray[np.uint8]) -> int:
    """Sum over the words of ``flat`` (uint8, a multiple of 8 long), tied to its version. Tells a torn copy, not a malicious one."""
    words = int(np.add.reduce(flat.view(np.uint64), dtype=np.uint64))
    return (words * 0x9E3779B97F4A7C15 + version.lineage * 0x85EBCA6B + version.number + 1) & 0x7FFF_FFFF_FFFF_FFFF


class SharedWeights:
    """Both ends of the weights channel over one piece of shared memory: four buffers, each with version and checksum.

    Readers find what is there without being told; a grant names a version, too (`announce`), and nothing older is read from
    then on. A reader copies the newest buffer and verifies version and checksum of its copy; if a writer overtook it, it takes
    the newest again.

    Args:
        memory: at least `SharedWeights.nbytes_for` long.
        nbytes: of one flat buffer, a multiple of 8.
    """

    def __init__(self, *, memory: SharedMemory, nbytes: int) -> None:
        if nbytes % 8 or memory.nbytes < self.nbytes_for(nbytes):
            raise ValueError(f"{nbytes} bytes of weights do not fit into {memory.nbytes} bytes of memory")
        self.memory = memory
        self._nbytes = nbytes
        stride = _HEADER * 8 + aligned(nbytes)
        starts = [_HEADER * 8 + index * stride for index in range(BUFFERS)]
        self._headers = [memory.buffer[start : start + _HEADER * 8].view(np.int64) for start in starts]
        self._buffers = [memory.buffer[start + _HEADER * 8 : start + _HEADER * 8 + nbytes] for start in starts]
        self._announced: LatestCell[None, Version] = LatestCell(None, NO_VERSION)
        self._newest: tuple[int, Version] | None = None
        """The writer's own newest buffer, and what it wrote there; another writer begins only when this one is gone."""

    @staticmethod
    def nbytes_for(nbytes: int) -> int:
        """Bytes of memory for weights of ``nbytes``."""
        return _HEADER * 8 + BUFFERS * (_HEADER * 8 + aligned(nbytes))

    @property
    def version(self) -> Version:
        """The newest version that lies here or was announced. A hint: a label may be read while it is written; `read_into` verifies."""
        return max(self._announced.key, *(self._stored(index) or NO_VERSION for index in range(BUFFERS)))

    def announce(self, version: Version) -> None:
        """``version`` was published. An older one than is known already is ignored."""
        self._announced.put(None, version)

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None:
        """Write into the oldest buffer, which for versions that come in order is the next one. Never waits for a reader."""
        if self._newest is not None and version > self._newest[1]:
            index = (self._newest[0] + 1) % BUFFERS
        else:
            index = min(range(BUFFERS), key=lambda i: self._stored(i) or NO_VERSION)
        if self._newest is None or version > self._newest[1]:
            self._newest = index, version
        header = self._headers[index]
        header[0] = 0  # nobody should start on it now; the checksum convicts whoever had started
        self._buffers[index][:] = flat
        header[1], header[2], header[3] = version.lineage, version.number, weights_checksum(version, flat)
        header[0] = 1

    def read_into(self, flat: NDArray[np.uint8]) -> Version:
        """Copy the newest weights into ``flat`` (uint8 [nbytes]) and say which version they are.

        Raises:
            BrokenChannelError: no whole version was found in a hundred tries.
        """
        for _ in range(100):
            index = max(range(BUFFERS), key=lambda i: self._stored(i) or NO_VERSION)
            version = self._stored(index)
            if version is None or version < self._announced.key:
                continue
            checksum = int(self._headers[index][3])
            flat[:] = self._buffers[index]
            if self._stored(index) == version and checksum == weights_checksum(version, flat):
                return version
        raise BrokenChannelError(f"no whole weights of version {self._announced.key} or newer in shared memory")

    async def wait_newer_than(self, version: Version) -> Version:
        """Wait until a newer version is announced."""
        return await self._announced.wait_newer_than(version)

    def _stored(self, index: int) -> Version | None:
        header = self._headers[index]
        return Version(int(header[1]), int(header[2])) if header[0] == 1 else None


class LinkTrajectorySender:
    """An actor's end in a host process. `grant` is called by whoever reads the link.

    Waits: for a credit and a slot. Unblocked by: the coordinator's grant, or the end.

    It asks for several at once where trajectories are so short that an actor would wait for the coordinator after each: for as
    many as were lately made in ``in_hand_s``, and never for more than a grant allows (`Grant.ahead`).

    Args:
        link: to the coordinator.
        arena: where granted slots lie.
        holder: the actor, as the ledger knows it.
        announce: hears which versions were published.
        in_hand_s: seconds of work to have in stock.
    """

    def __init__(self, *, link: Link, arena: Arena, holder: str, announce: Callable[[Version], None], in_hand_s: float = IN_HAND_S) -> None:
        self._link, self._arena, self._holder, self._announce, self._in_hand_s = link, arena, holder, announce, in_hand_s
        self._waiting: asyncio.Future[Grant | None] | None = None
        self._in_stock: deque[Grant] = deque()
        self._asked = self._allowed = self._few = 0
        self._since, self._acquired = time.monotonic(), 0
        """When it asked last, and how many were acquired from then on."""
        self._between_s = in_hand_s
        """Seconds from one `acquire` to the next, lately."""
        self._closed = False

    def acquire(self) -> Coroutine[Any, Any, Grant]:
        """Ask, and wait for the answer; EndOfChannel when the run wants no more. Asked at the call, as `LinkBatchSource.next_batch` is."""
        if self._closed:
            raise ClosedChannelError(f"{self._holder} closed its end")
        self._acquired += 1
        if self._asked + len(self._in_stock) <= self._few:
            self._ask()
        if self._in_stock:
            return Answered(self._in_stock.popleft())
        self._waiting = asyncio.get_running_loop().create_future()
        return Asked(self._granted(self._waiting))

    def _ask(self) -> None:
        """For the one that is acquired, and for what is to lie in stock: half of it has been used."""
        now = time.monotonic()
        self._between_s += ((now - self._since) / self._acquired - self._between_s) / 8
        self._since, self._acquired = now, 0
        stock = max(0, min(self._allowed, int(self._in_hand_s / self._between_s)))
        self._few = stock // 2
        count = 1 + stock - self._asked - len(self._in_stock)
        if count > 0:
            self._link.send("want", self._holder, count)
            self._asked += count

    async def _granted(self, waiting: asyncio.Future[Grant | None]) -> Grant:
        try:
            grant = await waiting
        except asyncio.CancelledError:
            if (late := uncollected(waiting)) is not None:
                self.abort(late, "cancelled")
            self.close()
            raise
        if grant is None:
            raise EndOfChannel
        return grant

    def grant(self, grant: Grant | None) -> None:
        """One answer of the coordinator; None: the end. What comes after `close` goes back."""
        self._asked -= 1
        if grant is None:
            self._give_back_stock()
        else:
            self._announce(grant.version)
            self._allowed = grant.ahead - 1  # whoever acquires may have one in line already
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(grant)
        elif grant is not None and self._closed:
            self.abort(grant, "cancelled")
        elif grant is not None:
            self._in_stock.append(grant)

    def _give_back_stock(self) -> None:
        while self._in_stock:
            self.abort(self._in_stock.popleft(), "cancelled")

    def view(self, grant: Grant) -> ArenaSlot:
        """The granted slot."""
        return self._arena.lease(grant)

    def begin(self, grant: Grant, version: Version) -> None:
        """The first step is about to be taken."""
        self._link.send("begin", grant.ticket, *version)

    def commit(self, trajectory: Trajectory, episodes: Sequence[Episode]) -> None:
        """Hand the trajectory over, with the episodes that ended in it."""
        self._link.send("commit", self._holder, encode_trajectory(trajectory), episodes)

    def abort(self, grant: Grant, reason: str) -> None:
        """Give the ticket back unused."""
        self._link.send("abort", grant.ticket, grant.slot, reason)

    def close(self) -> None:
        """Ask for nothing more: whoever waits gets the end. What is out may still be committed or aborted."""
        if not self._closed:
            self._closed = True
            self._link.send("unwant", self._holder)
            self._give_back_stock()
            if self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)


class LinkBatchSource:
    """The learner's end in a host process. `batch` is called by whoever reads the link.

    Waits: for B admissible trajectories. Unblocked by: the coordinator's answer, or the end.

    Args:
        link: to the coordinator.
        arena: where the data of batches lie.
    """

    def __init__(self, *, link: Link, arena: Arena) -> None:
        self._link, self._arena = link, arena
        self._waiting: asyncio.Future[Batch | None] | None = None
        self._pull = 0

    def next_batch(self, for_version: Version) -> Coroutine[Any, Any, Batch]:
        """Pull; EndOfChannel at the end. Asked at the call, together with whatever else was sent in this turn of the loop."""
        self._waiting = asyncio.get_running_loop().create_future()
        self._pull += 1
        self._link.send("pull", self._pull, *for_version)
        self._link.push()  # actors may wait for the credits of the settlement before it, and this loop has an update to begin
        return Asked(self._pulled(self._waiting))

    async def _pulled(self, waiting: asyncio.Future[Batch | None]) -> Batch:
        try:
            batch = await waiting
        except asyncio.CancelledError:
            self._link.send("unpull")
            if (late := uncollected(waiting)) is not None:
                self.give_back(late)
            waiting.cancel()
            raise
        if batch is None:
            raise EndOfChannel
        return batch

    def batch(self, fields: Sequence[Any] | None) -> None:
        """The coordinator's answer: the number of the pull and the batch. One to a pull that was cancelled goes back."""
        pull, batch = (self._pull, None) if fields is None else (fields[0], decode_batch(fields[1:]))
        if pull == self._pull and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(batch)
        elif batch is not None:
            self.give_back(batch)

    def view(self, trajectory: Trajectory) -> Mapping[str, NDArray[Any]]:
        """The data of a taken trajectory."""
        return self._arena.views(trajectory.slot)

    def give_back(self, batch: Batch) -> None:
        """Nothing of the batch was used."""
        self._link.send("back", [trajectory.ticket for trajectory in batch.trajectories])

    def opened(self, version: Version) -> None:
        """The first version of a lineage is published."""
        self._link.send("opened", *version)

    def settle(self, settlement: Settlement) -> None:
        """One update is over."""
        bound = settlement.bound
        self._link.send("settle", list(settlement.version), list(settlement.tickets), bound, settlement.published, settlement.skipped)

    def published(self, version: Version) -> None:
        """A version was published between updates."""
        self._link.send("published", *version)
