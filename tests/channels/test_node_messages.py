"""Messages of nodes: what was packed is unpacked, and nothing else."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile_frames import altered, fuzz
from tianflow.channels import node_messages
from tianflow.channels.node_messages import (
    NODE_MESSAGES,
    ForkHost,
    FromHost,
    HostForked,
    HostGone,
    NodeReady,
    RequestCut,
    SetSlots,
    pack,
    unpack,
)
from tianflow.core.payloads import Version
from tianflow.errors import BrokenChannelError

SENT = [
    NodeReady(),
    HostForked(3, 77),
    HostGone(3, -9),
    FromHost(3, ["Heartbeat", [[]]]),
    ForkHost(4, "actors-0", b"payload", Version(0, 2)),
    RequestCut(2, 9),
    SetSlots(8),
]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_messages_come_out_as_they_went_in(count: int) -> None:
    assert unpack(pack(SENT * count)) == SENT * count


@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("missing", [1, 3])
def test_a_message_that_is_cut_off_is_refused(count: int, missing: int) -> None:
    with pytest.raises(BrokenChannelError):
        unpack(pack(SENT * count)[:-missing])


def level(entries: int, kind: bytes = b"\xdd") -> bytes:
    """A list that announces ``entries``. The first one is the next level."""
    return kind + entries.to_bytes(4, "big")


BOMBS = {
    "lists that announce as many entries as there are bytes": level(10**6) * 200_000,
    "maps that announce entries": level(10**5, b"\xdf") * 200_000,
    "lists that announce more entries than bytes": level(2 * 10**6) * 200_000,
    "lists in lists": b"\x91" * 2**20,
    "a text": b"\xdb\xff\xff\xff\xff",
    "more bytes than are read": b"\x90" * (16 * 2**20 + 1),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_and_reserves_little_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BrokenChannelError):
            unpack(bomb)
        assert tracemalloc.get_traced_memory()[1] < 32 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\xd4\xff\x00",
        b"\xa3\xff\xff\xff",
        b"\x81\x90\x01",
        msgpack.packb(3),
        msgpack.packb(["Unknown", []]),
        msgpack.packb([["NodeReady"], []]),
        msgpack.packb(["HostForked", [True, 1]]),
        msgpack.packb(["HostForked", [1]]),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenChannelError):
        unpack(pack([NodeReady()]) + data)


@fuzz
@given(st.sampled_from(SENT).map(NODE_MESSAGES.encode).flatmap(altered), st.binary(max_size=3))
def test_whatever_arrives_is_messages_or_is_refused(values: object, more: bytes) -> None:
    try:
        data = msgpack.packb(values) + more
    except (TypeError, ValueError, OverflowError):  # no peer could send it
        return
    with contextlib.suppress(BrokenChannelError):
        assert all(type(found) in NODE_MESSAGES.classes for found in unpack(data))


def test_lengths_of_long_data_are_verified_first() -> None:
    """The bomb of this size is what `unpack` accepts without a look ahead."""
    data = level(node_messages.SMALL - 10) * (node_messages.SMALL // 5)
    assert len(data) <= node_messages.SMALL
    tracemalloc.start()
    try:
        with pytest.raises(BrokenChannelError):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 32 * 1024**2
    finally:
        tracemalloc.stop()
