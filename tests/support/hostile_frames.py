"""Frames that no honest peer sends, for the receiving sides of head and node.

``TIANFLOW_FUZZ_FRAMES=100000`` tries so many messages in each test; by default they are few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support.effort import FACTOR
from tianflow.channels import frames
from tianflow.channels.frames import MAX_LENGTH, encode

FRAMES = int(os.environ.get("TIANFLOW_FUZZ_FRAMES", str(60 * FACTOR)))
"""Messages that a test sends."""
A_TURN = 12
"""Messages of one example at most."""
A_TURN_ON_AVERAGE = 5
"""Hypothesis draws a little more."""
TIMEOUT_S = max(60, FRAMES // 50)
GROWTH = 64 * 2**20 + FRAMES * 2**14
"""Bytes by which the process of a test may grow: hypothesis retains what it has tried."""
DELETED = object()
Frames = list[bytes]

fuzz = settings(
    max_examples=max(5, FRAMES // A_TURN_ON_AVERAGE),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)

NUMBERS = st.sampled_from(
    [
        *(0, 1, -1, 2, 3, 255, 2**16, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), True, False),
        *(0.0, -0.5, 1.5, 1e308, float("inf"), float("-inf"), float("nan")),
    ]
)
ARRAYS = st.sampled_from(
    [
        np.float32(1.5),
        np.float64(np.nan),
        np.int64(3),
        np.bool_(True),
        np.zeros(0, np.uint8),
        np.zeros((3, 2), np.float32),
        np.zeros((4, 2), np.float64),
        np.ones(64, np.uint8),
        np.ones(2000, np.uint8),
    ]
)
TEXTS = st.sampled_from(["", "x", "Commit", "Stop", "a" * 5000, "../x", "\x1b[2J\n", "\0"])
ODD = st.recursive(
    st.none() | NUMBERS | ARRAYS | TEXTS | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS | NUMBERS.filter(lambda key: key == key), inner, max_size=3)  # noqa: PLR0124 - not NaN
    ),
    max_leaves=4,
)
"""What stands where something else is expected."""


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain containers, the whole of them first."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def replaced(value: Any, path: Sequence[Any], new: object) -> Any:
    """``value`` with ``new`` at ``path``; `DELETED`: without that place."""
    if not path:
        return None if new is DELETED else new
    key, rest = path[0], path[1:]
    gone = not rest and new is DELETED
    if isinstance(value, dict):
        others = {name: item for name, item in value.items() if name != key}
        return others if gone else {**others, key: replaced(value[key], rest, new)}
    items = list(value)
    items[key : key + 1] = [] if gone else [replaced(items[key], rest, new)]
    return items


@st.composite
def altered(draw: st.DrawFn, value: Any) -> Any:
    """``value`` as it is, or with one or two places that hold something else, or nothing."""
    for _ in range(draw(st.integers(0, 2))):
        path = draw(st.sampled_from(list(places(value))))
        value = replaced(value, path, draw(ODD | st.just(DELETED)))
    return value


def encoded(kind: str, number: int, body: object) -> Frames:
    """The frames of a message; of one that cannot be sent, its kind alone."""
    try:
        return [bytes(frame) for frame in encode(kind, number, body)]
    except (TypeError, ValueError):
        return [bytes(frame) for frame in encode(kind, number, None)]


@st.composite
def damaged(draw: st.DrawFn, message: st.SearchStrategy[Frames]) -> Frames:
    """Frames of a message with changed bytes, cut off, repeated or without one of them."""
    parts = [bytearray(frame) for frame in draw(message)]
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(parts))
        place = draw(st.integers(0, max(0, len(part) - 1)))
        match draw(st.integers(0, 4)):
            case 0:
                del part[place:]
            case 1:
                parts.append(part)
            case 2 if len(parts) > 1:
                parts.remove(part)
            case _ if part:
                part[place] = draw(st.integers(0, 255))
    return [bytes(part) for part in parts]


def deep(level: bytes, depth: int) -> bytes:
    return b"\x93\xa2up\x01" + level * depth


def tuples(depth: int) -> bytes:
    value = b"\x90"
    for _ in range(depth):
        value = msgpack.packb(msgpack.ExtType(frames.TUPLE, value))
    return b"\x93\xa2up\x01" + value


def array(shape: Sequence[int], raw: object) -> bytes:
    inner = msgpack.packb(["|u1", shape, raw])
    return msgpack.packb(["up", 1, msgpack.ExtType(frames.ARRAY, inner)])


BOMBS: dict[str, Frames] = {
    "lists in lists": [deep(b"\x91", 100_000)],
    "lists that announce what they may": [deep(b"\xdd" + MAX_LENGTH.to_bytes(4, "big"), 1000)],
    "a list that announces all there is": [deep(b"\xdd\xff\xff\xff\xff", 1)],
    "maps that announce what they may": [deep(b"\xdf" + MAX_LENGTH.to_bytes(4, "big"), 1000)],
    "a map that announces all there is": [deep(b"\xdf\xff\xff\xff\xff", 1)],
    "a text that announces all there is": [deep(b"\xdb\xff\xff\xff\xff", 1)],
    "bytes that announce all there is": [deep(b"\xc6\xff\xff\xff\xff", 1)],
    "an extension that announces all there is": [deep(b"\xc9\xff\xff\xff\xff\x01", 1)],
    "tuples in tuples": [tuples(3000)],
    "an array that announces all there is": [array([2**31 - 1] * 8, 1), b"x" * 2000],
    "an array of nothing, in many dimensions": [array([0] + [2**31 - 1] * 60, b"")],
    "many empty frames": [deep(b"\xc0", 1), *[b""] * 300],
    "a header of a mebibyte": [deep(b"\xc6\x00\x10\x00\x00", 1) + bytes(2**20)],
}
"""Short messages that would cost much, if a receiver believed what they announce."""


def messages(honest: Sequence[tuple[str, int, object]]) -> st.SearchStrategy[Frames]:
    """Messages of a peer: honest ones, nearly honest ones, and bytes.

    Args:
        honest: kind, number and body of messages as the peer sends them.
    """
    kinds = st.sampled_from(sorted({kind for kind, _, _ in honest} | {"noop", "bye", "x"}))
    numbers = st.sampled_from([0, 1, 2, 3, -1, 2**63, 2**64 - 1])
    near = st.one_of(
        [
            st.builds(encoded, st.just(kind), st.just(number) | numbers, altered(body))
            for kind, number, body in honest
        ]
    )
    return st.one_of(
        near,
        near,
        damaged(near),
        st.builds(encoded, kinds, numbers, ODD),
        st.lists(st.binary(max_size=40), min_size=1, max_size=3),
        st.sampled_from(list(BOMBS.values())),
    )
