"""Shared memory: slots and weights lie in nameless memory that all processes of a run map; small
messages go over links.

Memory is made with ``memfd_create``: it has no name, so a dead run leaves nothing behind, and
Docker's limit on ``/dev/shm`` does not apply. Descriptors are handed to children.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.arena import Arena, arena_nbytes
from tianflow.channels.latest import LatestCell
from tianflow.core.payloads import NO_VERSION, TrajectoryLayout, Version, aligned
from tianflow.errors import BrokenChannelError, TianflowError

BUFFERS = 4
"""Copies of the weights: a reader that copies one is overtaken only by a writer that is three
publishes ahead.
"""
_HEADER = 8  # int64 words in front of the buffers, and in front of each
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        raise TianflowError(
            f"no room for {nbytes} bytes of shared memory: {error.strerror}"
        ) from error


class SharedMemory:
    """Nameless memory of a fixed size; pages exist once `reserve` has asked for them."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create_unsized(label: str) -> int:
        """A descriptor of memory whose size whoever first attaches it decides (weights: only the
        learner knows how many).
        """
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedMemory:
        """``nbytes`` that may never grow or shrink (so that no other process can pull pages away
        from under this one).
        """
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
        """Memory handed over by another process; ``fd`` becomes this object's. If it has no size
        yet, it gets ``nbytes``, pages and all.

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
    """The coordinator's slots: address space for ``capacity`` of them, memory for those added so
    far.
    """

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
            raise ValueError(
                f"{self._slots + count} slots in an arena with room for {self.arena.capacity}"
            )
        stride = aligned(self.arena.layout.nbytes)
        head = arena_nbytes(self.arena.layout, self.arena.capacity) - self.arena.capacity * stride
        start = head + self._slots * stride if self._slots else 0
        self.memory.reserve(start, head + (self._slots + count) * stride - start)
        self._slots += count


def weights_checksum(version: Version, flat: NDArray[np.uint8]) -> int:
    """Sum over the words of ``flat`` (uint8, a multiple of 8 long), tied to its version. Tells a
    torn copy, not a malicious one.
    """
    words = int(np.add.reduce(flat.view(np.uint64), dtype=np.uint64))
    return (
        words * 0x9E3779B97F4A7C15 + version.lineage * 0x85EBCA6B + version.number + 1
    ) & 0x7FFF_FFFF_FFFF_FFFF


class SharedWeights:
    """Both ends of the weights channel over one piece of shared memory: four buffers, each with
    version and checksum.

    Readers find what is there without being told; a grant names a version, too (`announce`), and
    nothing older is read from then on. A reader copies the newest buffer and verifies version and
    checksum of its copy; if a writer overtook it, it takes the newest again.

    Args:
        memory: at least `SharedWeights.nbytes_for` long.
        nbytes: of one flat buffer, a multiple of 8.
    """

    def __init__(self, *, memory: SharedMemory, nbytes: int) -> None:
        if nbytes % 8 or memory.nbytes < self.nbytes_for(nbytes):
            raise ValueError(
                f"{nbytes} bytes of weights do not fit into {memory.nbytes} bytes of memory"
            )
        self.memory = memory
        self._nbytes = nbytes
        stride = _HEADER * 8 + aligned(nbytes)
        starts = [_HEADER * 8 + index * stride for index in range(BUFFERS)]
        self._headers = [
            memory.buffer[start : start + _HEADER * 8].view(np.int64) for start in starts
        ]
        self._buffers = [
            memory.buffer[start + _HEADER * 8 : start + _HEADER * 8 + nbytes] for start in starts
        ]
        self._announced: LatestCell[None, Version] = LatestCell(None, NO_VERSION)
        self._newest: tuple[int, Version] | None = None
        """The writer's own newest buffer, and what it wrote there; another writer begins only when
        this one is gone.
        """

    @staticmethod
    def nbytes_for(nbytes: int) -> int:
        """Bytes of memory for weights of ``nbytes``."""
        return _HEADER * 8 + BUFFERS * (_HEADER * 8 + aligned(nbytes))

    @property
    def version(self) -> Version:
        """The newest version that lies here or was announced. A hint: a label may be read while it
        is written; `read_into` verifies.
        """
        return max(
            self._announced.key, *(self._stored(index) or NO_VERSION for index in range(BUFFERS))
        )

    def announce(self, version: Version) -> None:
        """``version`` was published. An older one than is known already is ignored."""
        self._announced.put(None, version)

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None:
        """Write into the oldest buffer, which for versions that come in order is the next one.
        Never waits for a reader.
        """
        if self._newest is not None and version > self._newest[1]:
            index = (self._newest[0] + 1) % BUFFERS
        else:
            index = min(range(BUFFERS), key=lambda i: self._stored(i) or NO_VERSION)
        if self._newest is None or version > self._newest[1]:
            self._newest = index, version
        header = self._headers[index]
        header[0] = 0  # nobody should start on it now; the checksum convicts whoever had started
        self._buffers[index][:] = flat
        header[1], header[2], header[3] = (
            version.lineage,
            version.number,
            weights_checksum(version, flat),
        )
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
        raise BrokenChannelError(
            f"no whole weights of version {self._announced.key} or newer in shared memory"
        )

    async def wait_newer_than(self, version: Version) -> Version:
        """Wait until a newer version is announced."""
        return await self._announced.wait_newer_than(version)

    def _stored(self, index: int) -> Version | None:
        header = self._headers[index]
        return Version(int(header[1]), int(header[2])) if header[0] == 1 else None
