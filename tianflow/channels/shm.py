"""The shared-memory transport (``shm://``): slots and weights in nameless memory that all processes
of a run map, messages over socket pairs.

``memfd_create`` makes the memory: it has no name, so a dead run leaves nothing behind, and Docker's
limit on ``/dev/shm`` does not apply. Host processes inherit the descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from tianflow.channels.arena import Arena, arena_nbytes
from tianflow.channels.doorbell import Doorbell
from tianflow.channels.latest import LatestCell
from tianflow.channels.link import Link, socket_pair
from tianflow.core.payloads import NO_VERSION, TrajectoryLayout, Version, aligned
from tianflow.core.resource_limits import refusal
from tianflow.errors import BrokenChannelError, TianflowError
from tianflow.interfaces import Connection

if TYPE_CHECKING:
    from tianflow.interfaces import OpenLink

BUFFERS = 4
"""Copies of the weights: a writer overtakes the reader of one copy only after three more publishes.
"""
_HEADER = 8  # int64 words in front of the buffers, and in front of each
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        raise _refused(error, nbytes, size=start + nbytes) from error


def _refused(error: OSError, nbytes: int, *, size: int) -> TianflowError:
    """``size`` bytes are those that a limit has to permit."""
    said = refusal(error, f"no room for {nbytes} bytes of shared memory", nbytes=size)
    return TianflowError(f"{said}, or lower balance.memory_limit")


class SharedMemory:
    """Nameless memory of a fixed size; pages exist once `reserve` has asked for them."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        try:
            self._map = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise _refused(error, nbytes, size=nbytes) from error
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @staticmethod
    def create_unsized(label: str) -> int:
        """A descriptor of memory without a size. The first process that attaches it sets the size:
        only the learner knows how large the weights are.
        """
        return os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @classmethod
    def create(cls, label: str, nbytes: int) -> SharedMemory:
        """Make ``nbytes`` that may never grow or shrink, so that no other process can remove pages
        of this one.
        """
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.ftruncate(fd, nbytes)
            except OSError as error:
                raise _refused(error, nbytes, size=nbytes) from error
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int = 0) -> SharedMemory:
        """Map the memory of another process; this object owns ``fd`` from now on. Memory without a
        size gets ``nbytes``, pages included.

        Raises:
            TianflowError: the machine has no room.
        """
        if os.fstat(fd).st_size == 0 and nbytes:
            _allocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, os.fstat(fd).st_size)

    def reserve(self, start: int, nbytes: int) -> None:
        """Allocate the pages now, so that a full machine is an error here and not a crash later.

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
    """The coordinator's slots: address space for ``capacity`` of them, memory for those added."""

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
        self.arena.slots = self._slots


def weights_checksum(version: Version, flat: NDArray[np.uint8]) -> int:
    """Sum over the words of ``flat`` (uint8, a multiple of 8 long), tied to its version. It detects
    a torn copy, not a malicious one.
    """
    words = int(np.add.reduce(flat.view(np.uint64), dtype=np.uint64))
    return (
        words * 0x9E3779B97F4A7C15 + version.lineage * 0x85EBCA6B + version.number + 1
    ) & 0x7FFF_FFFF_FFFF_FFFF


class SharedWeights:
    """Both ends of the weights channel over one piece of shared memory: four buffers, each with
    version and checksum.

    Readers look at the memory itself; a grant also names a version (`announce`), and nothing older
    is read from then on. A reader copies the newest buffer and verifies version and checksum of its
    copy. If a writer overtook it, it copies the newest buffer again.

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
        """The writer's own newest buffer, and its version. Another writer starts only when this one
        is gone.
        """

    @property
    def flat_nbytes(self) -> int:
        """Bytes of one flat buffer."""
        return self._nbytes

    @staticmethod
    def nbytes_for(nbytes: int) -> int:
        """Bytes of memory for weights of ``nbytes``."""
        return _HEADER * 8 + BUFFERS * (_HEADER * 8 + aligned(nbytes))

    @property
    def version(self) -> Version:
        """The newest version that is stored here or was announced. A hint: a label may be read
        while it is written; `read_into` verifies.
        """
        return max(
            self._announced.key, *(self._stored(index) or NO_VERSION for index in range(BUFFERS))
        )

    def announce(self, version: Version) -> None:
        """``version`` was published. A version older than a known one is ignored."""
        self._announced.put(None, version)

    def publish(self, version: Version, flat: NDArray[np.uint8]) -> None:
        """Write into the oldest buffer: for versions in order, the next one. Never waits for a
        reader.
        """
        if self._newest is not None and version > self._newest[1]:
            index = (self._newest[0] + 1) % BUFFERS
        else:
            index = min(range(BUFFERS), key=lambda i: self._stored(i) or NO_VERSION)
        if self._newest is None or version > self._newest[1]:
            self._newest = index, version
        header = self._headers[index]
        header[0] = 0  # no reader starts on it now; the checksum shows one that had started
        self._buffers[index][:] = flat
        header[1], header[2], header[3] = (
            version.lineage,
            version.number,
            weights_checksum(version, flat),
        )
        header[0] = 1

    def read_into(self, flat: NDArray[np.uint8]) -> Version:
        """Copy the newest weights into ``flat`` (uint8 [nbytes]). Returns their version.

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


def stored_nbytes(memory: int) -> int:
    """Bytes of one flat buffer in ``memory`` bytes of weights, with the zeros that align it. They
    do not change its checksum.
    """
    return (memory - _HEADER * 8) // BUFFERS - _HEADER * 8


class SharedTransport:
    """`tianflow.interfaces.Transport` over shared memory: the coordinator's side.

    Args:
        layout: of a trajectory.
        capacity: slots that the arena has address space for.
        draws: with replay, the layout of a draw.
        draw_slots: slots of draws; they are allocated at once.
        bells: number of doorbells.
    """

    address = "shm://"

    def __init__(
        self,
        *,
        layout: TrajectoryLayout,
        capacity: int,
        draws: TrajectoryLayout | None = None,
        draw_slots: int = 0,
        bells: int = 0,
    ) -> None:
        with contextlib.ExitStack() as made:
            self._slots = SharedArena(layout=layout, capacity=capacity)
            made.callback(self._slots.memory.close)
            self._draws = None
            if draws is not None:
                self._draws = SharedArena(layout=draws, capacity=draw_slots)
                made.callback(self._draws.memory.close)
                self._draws.add_slots(draw_slots)
            self._weights = SharedMemory.create_unsized("tianflow-weights")
            made.callback(os.close, self._weights)
            self._bells = []
            for _ in range(bells):
                self._bells.append(Doorbell.create())
                made.callback(self._bells[-1].close)
            self._memory = made.pop_all()
        self.grown: Callable[[], None] | None = None
        """Called after slots were added."""

    @property
    def arena(self) -> Arena:
        """Slots of trajectories, as the coordinator sees them."""
        return self._slots.arena

    @property
    def draws(self) -> Arena | None:
        """With replay, slots of draws."""
        return None if self._draws is None else self._draws.arena

    @property
    def bells(self) -> Sequence[Doorbell]:
        """Doorbells of inference servers, then of hosts of actors."""
        return self._bells

    def add_slots(self, count: int) -> None:
        """Allocate ``count`` more slots. TianflowError, and nothing changes, if memory is full."""
        self._slots.add_slots(count)
        if self.grown is not None:
            self.grown()

    @property
    def slots(self) -> int:
        """Descriptor of the memory of the slots."""
        return self._slots.memory.fd

    @property
    def weights(self) -> int:
        """Descriptor of the memory of the weights, which has no size before the learner starts."""
        return self._weights

    def connect(self, link: type[Link] = Link) -> Connection:
        """A connection to a process that is about to start. It inherits its socket, the slots, the
        weights, with replay the draws, and the doorbells.
        """
        ours, theirs = socket_pair()
        draws = () if self._draws is None else (self._draws.memory.fd,)
        bells = [bell.fd for bell in self._bells]
        inherited = (theirs.fileno(), self._slots.memory.fd, self._weights, *draws, *bells)
        return Connection(partial(link, end=ours), inherited, theirs.close)

    def close(self) -> None:
        """Close all descriptors. The memory is free once every host has left. Idempotent."""
        self._memory.close()


class SharedHostTransport:
    """`tianflow.interfaces.HostTransport` over shared memory: a host's side."""

    def __init__(
        self,
        *,
        end: socket.socket,
        arena: Arena,
        weights: int,
        draws: Arena | None,
        bells: Sequence[Doorbell],
    ) -> None:
        self.arena, self.draws, self._weights, self.bells = arena, draws, weights, bells
        self.open_link: OpenLink = partial(Link, end=end)

    @classmethod
    def attach(
        cls,
        address: str,  # noqa: ARG003 - the descriptors say everything
        descriptors: Sequence[int],
        *,
        layout: TrajectoryLayout,
        draws: TrajectoryLayout | None,
    ) -> Self:
        """Map the memory behind the descriptors of `SharedTransport.connect`."""
        number, slots, weights, *rest = descriptors
        end = socket.socket(fileno=number)
        end.setblocking(False)
        return cls(
            end=end,
            arena=mapped_arena(layout, slots),
            weights=weights,
            draws=None if draws is None else mapped_arena(draws, rest.pop(0)),
            bells=[Doorbell(bell) for bell in rest],
        )

    def open_weights(self, nbytes: int) -> SharedWeights:
        """The weights channel. The learner's process allocates it."""
        wanted = SharedWeights.nbytes_for(nbytes)
        memory = SharedMemory.attach(self._weights, wanted)
        if nbytes and memory.nbytes != wanted:
            raise BrokenChannelError(
                f"this process has {nbytes} bytes of weights, the run has another size; the code "
                "may have changed while the run was going"
            )
        return SharedWeights(memory=memory, nbytes=nbytes)


def mapped_arena(layout: TrajectoryLayout, fd: int) -> Arena:
    """All the slots of a `SharedArena` of another process."""
    memory = SharedMemory.attach(fd)
    capacity = memory.nbytes // arena_nbytes(layout, 1)
    return Arena(layout=layout, buffer=memory.buffer, capacity=capacity)
