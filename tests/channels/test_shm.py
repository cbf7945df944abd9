"""Memory without a name, weights that no reader takes torn, and both across real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.effort import FACTOR
from tests.support.paths import ROOT
from tests.support.worlds import FIRST, small_layout, tickets
from tianflow.channels import shm
from tianflow.channels.arena import arena_nbytes
from tianflow.channels.link import Link, socket_pair
from tianflow.channels.memory import heap_arena
from tianflow.channels.shm import (
    BUFFERS,
    SharedArena,
    SharedMemory,
    SharedWeights,
    weights_checksum,
)
from tianflow.core.limits import Limits
from tianflow.core.payloads import NO_VERSION, Episode, Settlement, Version, aligned
from tianflow.errors import BrokenChannelError, TianflowError
from tianflow.exchange.exchange import Exchange
from tianflow.exchange.local import MemoryBatchSource
from tianflow.exchange.remote import LinkBatchSource, ServedExchange
from tianflow.ledger.ledger import Ledger

PAGE = os.sysconf("SC_PAGE_SIZE")
SMALL = 4096


def start(target: str, *arguments: int) -> subprocess.Popen[bytes]:
    """``tests.support.shm_targets`` in a process of its own, which gets ``arguments`` and every
    descriptor among them.
    """
    fds = [
        number for number in arguments if number > 2 and Path(f"/proc/self/fd/{number}").exists()
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.shm_targets", target, *map(str, arguments)],
        pass_fds=fds,
        cwd=ROOT,
    )


def no_room(_fd: int, _start: int, _nbytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create("tianflow-test", 4 * PAGE)
    yield made
    made.close()


# Memory
# --------------------------------------------------------------------------------------------------


def test_memory_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    made = SharedMemory.create("tianflow-test", PAGE)
    assert set(Path("/dev/shm").iterdir()) == before
    assert "memfd:tianflow-test (deleted)" in str(Path(f"/proc/self/fd/{made.fd}").readlink())
    made.close()


def test_memory_can_neither_grow_nor_shrink_nor_be_unsealed(memory: SharedMemory) -> None:
    for nbytes in (PAGE, 8 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_is_not_inherited_by_programs_that_are_started(memory: SharedMemory) -> None:
    assert not os.get_inheritable(memory.fd)


def test_what_one_mapping_writes_another_reads(memory: SharedMemory) -> None:
    other = SharedMemory.attach(os.dup(memory.fd))
    memory.buffer[[0, -1]] = 7, 9
    assert (memory.nbytes, 7, 9) == (other.nbytes, other.buffer[0], other.buffer[-1])
    other.close()


def test_views_outlive_the_descriptor() -> None:
    made = SharedMemory.create("tianflow-test", PAGE)
    view = made.buffer[:8]
    made.close()
    made.close()
    view[:] = 5
    assert 5 == view[3]


def test_reserved_pages_exist(memory: SharedMemory) -> None:
    assert 0 == os.fstat(memory.fd).st_blocks
    memory.reserve(PAGE, 2 * PAGE)
    assert 2 * PAGE == os.fstat(memory.fd).st_blocks * 512


def test_a_full_machine_is_an_error_with_a_sentence(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(
        TianflowError, match=f"no room for {PAGE} bytes of shared memory: No space left on device"
    ):
        memory.reserve(0, PAGE)


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(TianflowError, match="no room for 4096 bytes.*Cannot allocate memory"):
        SharedMemory.create("tianflow-test", PAGE)
    assert before == len(list(Path("/proc/self/fd").iterdir()))


def test_who_attaches_unsized_memory_first_gives_it_size_pages_and_seals() -> None:
    fd = SharedMemory.create_unsized("tianflow-test")
    first = SharedMemory.attach(os.dup(fd), 3 * PAGE)
    second = SharedMemory.attach(fd, 5 * PAGE)
    assert (3 * PAGE, 3 * PAGE) == (first.nbytes, second.nbytes)
    assert 3 * PAGE == os.fstat(fd).st_blocks * 512
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 5 * PAGE)
    first.close()
    second.close()


def test_unsized_memory_without_room_stays_unsized(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = SharedMemory.create_unsized("tianflow-test")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(TianflowError, match="no room"):
            SharedMemory.attach(fd, PAGE)
    assert 0 == os.fstat(fd).st_size
    made = SharedMemory.attach(fd, 2 * PAGE)
    assert 2 * PAGE == made.nbytes
    made.close()


# Arena
# --------------------------------------------------------------------------------------------------


def test_slots_get_their_pages_when_they_are_added() -> None:
    layout = small_layout()
    shared = SharedArena(layout=layout, capacity=1000)
    size, stride = os.fstat(shared.memory.fd).st_size, aligned(layout.nbytes)
    head = size - 1000 * stride
    for added, total in ((10, 10), (500, 510), (490, 1000)):
        shared.add_slots(added)
        wanted = head + total * stride
        assert wanted <= os.fstat(shared.memory.fd).st_blocks * 512 < wanted + PAGE
    assert arena_nbytes(layout, 1000) == size
    shared.memory.close()


def test_slots_that_find_no_room_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedArena(layout=small_layout(), capacity=10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(TianflowError, match="no room"):
            shared.add_slots(10)
    shared.add_slots(10)
    with pytest.raises(ValueError, match="11 slots in an arena with room for 10"):
        shared.add_slots(1)
    shared.memory.close()


# Weights
# --------------------------------------------------------------------------------------------------


def open_weights(memory: SharedMemory | None = None, nbytes: int = SMALL) -> SharedWeights:
    memory = memory or SharedMemory.create("tianflow-weights", SharedWeights.nbytes_for(nbytes))
    return SharedWeights(memory=memory, nbytes=nbytes)


def flat(value: int, nbytes: int = SMALL) -> NDArray[np.uint8]:
    return np.full(nbytes // 8, value, np.int64).view(np.uint8)


def newest(weights: SharedWeights) -> int:
    return max(
        range(len(weights._buffers)),
        key=lambda index: int(weights._headers[index][2]) if weights._headers[index][0] else -1,
    )


def publish(weights: SharedWeights, *numbers: int) -> None:
    for number in numbers:
        weights.publish(Version(1, number), flat(number))


@pytest.mark.parametrize("nbytes", [12, 64])
def test_weights_that_do_not_fit_are_refused(memory: SharedMemory, nbytes: int) -> None:
    with pytest.raises(ValueError, match="bytes of weights do not fit into"):
        SharedWeights(memory=memory, nbytes=nbytes if nbytes % 8 else memory.nbytes)


def test_the_buffers_of_weights_do_not_overlap() -> None:
    weights = open_weights(nbytes=SMALL + 8)
    for index, (header, buffer) in enumerate(zip(weights._headers, weights._buffers, strict=True)):
        header[:] = index
        buffer[:] = index
    assert [[index] * 2 for index in range(BUFFERS)] == [
        [*{int(value) for value in header}, *{int(value) for value in buffer}]
        for header, buffer in zip(weights._headers, weights._buffers, strict=True)
    ]


@pytest.mark.parametrize("place", [0, 1000, SMALL - 1])
def test_a_torn_buffer_is_convicted_by_its_checksum(place: int) -> None:
    weights = open_weights()
    publish(weights, 1, 2)
    weights._buffers[newest(weights)][place] ^= 1
    with pytest.raises(BrokenChannelError, match="no whole weights of version"):
        weights.read_into(flat(0))


def test_bytes_under_the_label_of_another_version_are_convicted() -> None:
    weights = open_weights()
    publish(weights, 1, 2)
    weights._headers[newest(weights)][2] = 3
    with pytest.raises(BrokenChannelError):
        weights.read_into(flat(0))


def test_the_checksum_is_tied_to_lineage_and_number() -> None:
    sums = {
        weights_checksum(Version(lineage, number), flat(7))
        for lineage in range(8)
        for number in range(1000)
    }
    assert 8000 == len(sums)


def test_a_writer_that_died_while_it_wrote_leaves_the_version_before() -> None:
    weights = open_weights()
    publish(weights, 1, 2, 3)
    weights._headers[newest(weights)][0] = 0
    into = flat(0)
    assert Version(1, 2) == weights.read_into(into)
    assert (into == flat(2)).all()


def test_what_was_published_is_known_before_anybody_says_so() -> None:
    """An actor whose grant was given a trajectory ago begins the next one with what has been
    published since.
    """
    reader = open_weights()
    writer = open_weights(reader.memory)
    assert NO_VERSION == reader.version
    reader.announce(Version(1, 2))
    for number in (2, 3, 4, 5, 6):
        publish(writer, number)
        assert Version(1, number) == reader.version == reader.read_into(flat(0))


def test_nothing_older_than_what_was_announced_is_read() -> None:
    weights = open_weights()
    publish(weights, 1, 2)
    weights.announce(Version(1, 3))
    with pytest.raises(BrokenChannelError, match="number=3"):
        weights.read_into(flat(0))


class Overtaken:
    """A buffer whose writer publishes, while the reader has copied one half of it."""

    def __init__(self, buffer: NDArray[np.uint8], meanwhile: Callable[[], None]) -> None:
        self._buffer, self._meanwhile, self.copies = buffer, meanwhile, 0

    def __array__(self, *_: Any, **__: Any) -> NDArray[np.uint8]:
        self.copies += 1
        copy = self._buffer.copy()
        if self.copies == 1:
            self._meanwhile()
        half = len(copy) // 2
        copy[half:] = self._buffer[half:]
        return copy


@pytest.mark.parametrize(("buffers", "survived"), [(2, 1), (3, 2), (4, 3)])
def test_a_reader_is_overtaken_only_by_a_writer_that_is_as_many_publishes_ahead_as_there_are_buffers(
    monkeypatch: pytest.MonkeyPatch, buffers: int, survived: int
) -> None:
    monkeypatch.setattr(shm, "BUFFERS", buffers)
    for ahead in range(1, buffers + 1):
        reader = open_weights()
        writer = open_weights(reader.memory)
        publish(writer, *range(1, 11))
        index = newest(writer)
        torn = Overtaken(reader._buffers[index], partial(publish, writer, *range(11, 11 + ahead)))
        reader._buffers[index] = torn  # type: ignore[call-overload]  # stands in for an array
        into = flat(0)
        version = reader.read_into(into)
        assert (Version(1, 10) if ahead <= survived else Version(1, 10 + ahead)) == version
        assert (into == flat(version.number)).all()
        assert (1 if ahead <= survived else 2) == torn.copies


def test_a_torn_copy_whose_sum_happens_to_be_right_is_convicted_by_the_label() -> None:
    def ordered(number: int) -> NDArray[np.uint8]:
        return (
            np.roll(np.arange(SMALL // 8).reshape(2, -1), number, axis=1).reshape(-1).view(np.uint8)
        )

    def publish_ordered(writer: SharedWeights, *numbers: int) -> None:
        for number in numbers:
            writer.publish(Version(1, number), ordered(number))

    reader = open_weights()
    writer = open_weights(reader.memory)
    publish_ordered(writer, *range(1, 11))
    index = newest(writer)
    reader._buffers[index] = Overtaken(
        reader._buffers[index], partial(publish_ordered, writer, *range(11, 15))
    )  # type: ignore[call-overload]  # as above
    into = flat(0)
    assert Version(1, 14) == reader.read_into(into)
    assert (into == ordered(14)).all()


@pytest.mark.e2e
def test_thousands_of_reads_beside_a_writer_in_another_process_are_whole_and_never_go_back() -> (
    None
):
    nbytes = 16 * 1024
    reader = open_weights(nbytes=nbytes)
    writer = start("hammer", reader.memory.fd, nbytes)
    try:
        into, before, versions = flat(0, nbytes), Version(0, 0), set[Version]()
        while not reader._stored(0):
            assert writer.poll() is None
        reads = 0
        while (
            reads < 1_000 * FACTOR or len(versions) <= 100
        ):  # on one core the two take turns, so it takes more
            reads += 1
            version = reader.read_into(into)
            assert (into.view(np.int64) == version.number).all()
            assert before <= version
            before = version
            versions.add(version)
    finally:
        writer.kill()
        writer.wait()


# Trajectories across processes
# ------------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_an_actor_in_another_process_hands_over_its_slots_and_its_death_gives_the_open_one_back() -> (
    None
):
    shared = SharedArena(layout=small_layout(), capacity=4)
    shared.add_slots(4)
    exchange = Exchange(
        ledger=Ledger(limits=Limits(batch=1, max_staleness=1, credits=4), slots=4),
        arena=shared.arena,
    )
    exchange.open_lineage(FIRST)
    episodes: list[Episode] = []
    ours, theirs = socket_pair()
    gone = asyncio.Event()

    def handle(message: object) -> None:
        served.handlers[type(message)](message)

    link = Link(end=ours, handle=handle, closed=gone.set)
    served = ServedExchange(
        exchange=exchange, link=link, on_episodes=lambda _, ended: episodes.extend(ended)
    )
    child = await asyncio.to_thread(start, "act", shared.memory.fd, 4, theirs.fileno())
    theirs.close()
    source = MemoryBatchSource(exchange=exchange)
    for number in range(5):
        batch = await asyncio.wait_for(source.next_batch(Version(1, number)), 30)
        assert (number,) == tickets(batch)
        assert {float(number)} == set(source.view(batch.trajectories[0])["reward"].ravel().tolist())
        source.settle(Settlement(Version(1, number + 1), tickets(batch), 1, published=True))
    await asyncio.wait_for(gone.wait(), 30)
    assert -9 == await asyncio.to_thread(child.wait)
    seen = exchange.ledger.snapshot()
    assert (1, 3) == (seen.open, seen.free_slots)
    assert 1 == exchange.holder_lost("child", "host_lost")
    seen = exchange.ledger.snapshot()
    assert (5, {"host_lost": 1}, 0, 4) == (seen.trained, seen.dropped, seen.in_use, seen.free_slots)
    assert [Episode(1.0, number) for number in range(5)] == episodes
    shared.memory.close()


@pytest.mark.asyncio
async def test_a_settlement_and_the_next_pull_are_one_packet() -> None:
    ours, theirs = socket_pair()
    link = Link(end=ours, handle=lambda _: None, closed=lambda: None)
    source = LinkBatchSource(link=link, arena=heap_arena(small_layout(), 1))
    source.settle(Settlement(Version(1, 1), (3,), None, True))
    waiting = asyncio.create_task(source.next_batch(Version(1, 1)))
    for _ in range(3):
        await asyncio.sleep(0)
    packets = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packets.append([message[0] for message in msgpack.unpackb(theirs.recv(2**16))])
    assert [["Settlement", "PullBatch"]] == packets
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    link.close()
    theirs.close()
