"""Messages and frames: what comes out is what went in, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import pickle
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.hostile_frames import BOMBS
from tianflow.channels import frames
from tianflow.channels.frames import (
    MalformedMessageError,
    Message,
    decode,
    encode,
    joined,
    pieces,
)

ARRAYS = arrays.arrays(
    st.sampled_from(sorted(frames.DTYPES)).map(np.dtype),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | ARRAYS
)
BODIES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic):
        return (
            isinstance(two, np.ndarray | np.generic)
            and one.dtype == two.dtype
            and one.shape == two.shape
            and np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(map(same, one.values(), two.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two or (one != one and two != two))  # noqa: PLR0124 - NaN


@given(BODIES)
def test_a_message_comes_out_as_it_went_in(body: Any) -> None:
    found = decode([bytes(frame) for frame in encode("kind", 7, body)])
    assert ("kind", 7) == (found.kind, found.number)
    assert same(body, found.body)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_whatever_arrives_is_a_message_or_malformed(header: bytes, others: list[bytes]) -> None:
    with contextlib.suppress(MalformedMessageError):
        assert isinstance(decode([header, *others]), Message)


@given(BODIES, st.data())
def test_a_changed_message_is_a_message_or_malformed(body: Any, data: st.DataObject) -> None:
    parts = [bytearray(frame) for frame in encode("kind", 7, body)]
    part = data.draw(st.sampled_from(parts))
    if part:
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessageError):
        assert isinstance(decode([bytes(frame) for frame in parts]), Message)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), np.float64(0.5)),
        (np.bool_(True), np.bool_(True)),
        (np.str_("x"), "x"),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype=np.int32)),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T),
        (np.zeros((60, 60))[:, ::2], np.zeros((60, 30))),
        (type("Table", (dict,), {})(a=1), {"a": 1}),
    ],
)
def test_what_is_like_plain_data_travels_as_such(value: Any, expected: Any) -> None:
    found = decode(encode("", 0, [value])).body[0]
    assert same(expected, found)


def test_booleans_are_0_or_1_whatever_was_sent() -> None:
    inner = msgpack.packb(["|b1", [3], b"\x00\x01\xff"])
    header = msgpack.packb(["", 0, msgpack.ExtType(frames.ARRAY, inner)])
    found = decode([header]).body
    assert [0, 1, 1] == found.view(np.uint8).tolist()


def test_only_large_arrays_have_frames_of_their_own_and_those_are_not_copied() -> None:
    small, large = np.zeros(frames.INLINE, np.uint8), np.arange(5000.0)
    sent = encode("", 0, [small, large, large])
    assert 3 == len(sent)
    assert np.shares_memory(np.frombuffer(sent[1], np.uint8), large)
    assert np.shares_memory(np.frombuffer(sent[1], np.uint8), decode(sent).body[1])


@pytest.mark.parametrize(
    "body",
    [object(), {1, 2}, np.array(["x"]), np.zeros(2, complex), np.array([None]), 1j],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_data_cannot_be_sent(body: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode("", 0, body)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    "body",
    [
        2**64,
        "\ud800",
        list(range(frames.MAX_LENGTH + 1)),
        dict.fromkeys(range(frames.MAX_LENGTH + 1)),
        "x" * (frames.MAX_HEADER + 1),
        [np.zeros(2000)] * frames.MAX_FRAMES,
        nested(frames.MAX_DEPTH + 1),
    ],
    ids=["int", "surrogate", "list", "dict", "header", "frames", "depth"],
)
def test_what_a_receiver_would_not_accept_is_not_sent(body: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several texts, of msgpack, too
        encode("", 0, body)


def test_a_frame_above_the_limit_of_the_receiver_is_not_sent() -> None:
    assert 2 == len(encode("", 0, np.zeros(1000, np.float64), max_frame=8000))
    with pytest.raises(ValueError, match="7999"):
        encode("", 0, np.zeros(1000, np.float64), max_frame=7999)


def test_the_limits_themselves_are_accepted() -> None:
    body = [list(range(frames.MAX_LENGTH)), nested(frames.MAX_DEPTH)]
    assert body == decode(encode("", 0, body)).body


def ext(code: int, value: object) -> msgpack.ExtType:
    return msgpack.ExtType(code, value if isinstance(value, bytes) else msgpack.packb(value))


def array(name: object, shape: object, raw: object) -> msgpack.ExtType:
    return ext(frames.ARRAY, [name, shape, raw])


LARGE = b"\0" * 2000
MALFORMED: dict[str, list[bytes]] = {
    "nothing": [],
    "empty": [b""],
    "no list": [msgpack.packb(3)],
    "no number": [msgpack.packb(["kind", "1", None])],
    "a truth for a number": [msgpack.packb(["kind", True, None])],
    "no body": [msgpack.packb(["kind", 1])],
    "too much": [msgpack.packb(["kind", 1, None, 2])],
    "bytes after it": [msgpack.packb(["kind", 1, None]) + b"\0"],
    "a pickle": [pickle.dumps(["kind", 1, None])],
    "text that is not UTF-8": [msgpack.packb(["kind", 1]).replace(b"kind", b"\xff\xff\xff\xff")],
    "an unused frame": [msgpack.packb(["kind", 1, None]), b""],
    "too many frames": [msgpack.packb(["kind", 1, None])] + [b""] * frames.MAX_FRAMES,
    "a frame that is missing": [msgpack.packb(["kind", 1, array("|u1", [2000], 1)])],
    "a frame used twice": [
        msgpack.packb(["kind", 1, [array("|u1", [2000], 1), array("|u1", [2000], 1)]]),
        LARGE,
    ],
    "the header as a frame": [msgpack.packb(["kind", 1, array("|u1", [1], 0)])],
    "a negative frame": [msgpack.packb(["kind", 1, array("|u1", [1], -1)])],
    "a frame used twice, and one not at all": [
        msgpack.packb(["kind", 1, [array("|u1", [2000], 1), array("|u1", [2000], 1)]]),
        LARGE,
        LARGE,
    ],
    "a header that is too large": [msgpack.packb(["kind", 1, "x" * frames.MAX_HEADER])],
    "bytes of an empty array": [msgpack.packb(["kind", 1, array("|u1", [0], b"x")])],
    "a size that is text": [msgpack.packb(["kind", 1, array("|u1", ["x", 2**40], b"x")])],
    "an unknown extension": [msgpack.packb(["kind", 1, ext(9, b"x")])],
    "an object array": [msgpack.packb(["kind", 1, array("|O", [1], b"\0" * 8)])],
    "a dtype that is not a name": [msgpack.packb(["kind", 1, array([1], [1], b"\0")])],
    "too few bytes": [msgpack.packb(["kind", 1, array("<f8", [2], b"\0" * 8)])],
    "a negative size": [msgpack.packb(["kind", 1, array("|u1", [-1, -1], b"\0")])],
    "a size that overflows": [msgpack.packb(["kind", 1, array("|u1", [2**32, 2**32], b"")])],
    "sizes of an empty array": [
        msgpack.packb(["kind", 1, array("|u1", [0] + [2**31 - 1] * 9, b"")])
    ],
    "a shape that is a number": [msgpack.packb(["kind", 1, array("|u1", 1, b"\0")])],
    "bytes that are text": [msgpack.packb(["kind", 1, array("|u1", [1], "x")])],
    "a tuple that is a number": [msgpack.packb(["kind", 1, ext(frames.TUPLE, 3)])],
    "a list as a key": [b"\x93\xa4kind\x01\x81\x90\x01"],
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_frames_are_refused(sent: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError):
        decode(sent)


def bomb_of_lists() -> bytes:
    """Each list announces as many entries as are allowed, and holds the next one."""
    level = b"\xdd" + frames.MAX_LENGTH.to_bytes(4, "big")
    return b"\x93\xa4kind\x01" + level * 1000


def bomb_of_tuples() -> bytes:
    value = b"\x90"
    for _ in range(5000):
        value = msgpack.packb(msgpack.ExtType(frames.TUPLE, value))
    return b"\x93\xa4kind\x01" + value


def bomb_of_announcements() -> bytes:
    return b"\x93\xa4kind\x01\xdd\xff\xff\xff\xff"


@pytest.mark.parametrize("bomb", [bomb_of_lists, bomb_of_tuples, bomb_of_announcements])
def test_a_short_header_cannot_reserve_much_memory(bomb: Any) -> None:
    header = bomb()
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError):
            decode([header])
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sent", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_memory_is_reserved(sent: list[bytes]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError):
            decode(sent)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_an_array_that_is_too_large_for_a_frame_is_sent_in_parts(
    rows: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PIECE", 4 * 6)
    array = np.arange(rows * 3, dtype=np.int16).reshape(rows, 3)
    sent = pieces(array)
    assert (len(sent) if isinstance(sent, list) else 1) == parts
    assert all(np.shares_memory(part, array) for part in sent)
    place = np.zeros_like(array)
    joined(place, sent)
    assert (place == array).all()


@pytest.mark.parametrize(
    "sent",
    [
        np.zeros((3, 2), np.int16),
        np.zeros((2, 3), np.int32),
        np.zeros(6, np.int16),
        [np.zeros((1, 3), np.int16)],
        [np.zeros((1, 3), np.int16), np.zeros((2, 3), np.int16)],
        [np.zeros((1, 3), np.int16), np.zeros((1, 2), np.int16)],
        [np.zeros((2, 3), np.int16), np.int16(3)],
        [np.zeros((2, 3), np.int64)],
        [],
        [[1, 2, 3], [4, 5, 6]],
        None,
        3,
        b"abc",
    ],
    ids=repr,
)
def test_what_does_not_fit_into_its_place_is_refused_and_changes_nothing(sent: object) -> None:
    place = np.full((2, 3), 7, np.int16)
    with pytest.raises(MalformedMessageError):
        joined(place, sent)
    assert (place == 7).all()
