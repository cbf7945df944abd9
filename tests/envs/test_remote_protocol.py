"""Spaces travel as plain data, and what does not describe one is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from tianflow.channels.frames import MalformedMessageError, decode, encode
from tianflow.envs.remote_protocol import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_SPACES,
    Leaves,
    build,
    describe,
    part,
    require_rows,
    writable,
)
from tianflow.errors import ConfigError

SPACES: list[Any] = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64),
    spaces.Box(0, 255, (84, 84, 4), np.uint8),
    spaces.Box(-2.0, 2.0, (), np.float64),
    spaces.Box(0, 1, (0,), np.int8),
    spaces.Box(np.array([[1, 2], [3, 4]]), np.array([[5, 6], [7, 8]]), dtype=np.int64),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1, dtype=np.int32),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 7]], dtype=np.int32),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Box(0, 1, (2,))])}),
    spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.MultiBinary(2))])),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.MultiDiscrete([3])})]),
]
EACH = pytest.mark.parametrize("space", SPACES, ids=lambda space: str(space)[:50])


@EACH
def test_a_space_is_the_same_on_the_other_side(space: Any) -> None:
    found = build(decode([bytes(frame) for frame in encode("", 0, describe(space))]).body)
    assert space == found
    assert type(space) is type(found)
    assert Leaves(space).leaves == Leaves(found).leaves


@EACH
def test_a_batch_is_split_and_joined(space: Any) -> None:
    batched = batch_space(space, 3)
    batch = batched.sample()
    leaves = Leaves(space)
    parts = leaves.split(batch)
    assert leaves.require(parts, 3) == parts
    assert batched.contains(leaves.join(parts))
    arrays = leaves.empty(3)
    for row in range(3):
        leaves.write(leaves.join([array[row] for array in parts]), arrays, row)
    assert all(map(np.array_equal, arrays, parts))
    assert leaves.nbytes * 3 == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_a_space_without_a_fixed_shape_is_refused(space: Any) -> None:
    for outer in (space, spaces.Dict({"inner": space})):
        with pytest.raises(ConfigError, match="no fixed shape"):
            describe(outer)
        with pytest.raises(ConfigError, match="no fixed shape"):
            Leaves(outer)


def deep(depth: int) -> Any:
    value: Any = ["discrete", 2, 0, "<i8"]
    for _ in range(depth):
        value = ["tuple", [value]]
    return value


LOW, HIGH = np.float32(0.0), np.float32(1.0)


@pytest.mark.parametrize(
    "description",
    [
        None,
        [],
        ["cube", 3],
        ["box", LOW, HIGH, [2]],
        ["box", LOW, HIGH, [-1], "<f4"],
        ["box", LOW, HIGH, [2.0], "<f4"],
        ["box", LOW, HIGH, [MAX_ENTRIES + 1], "<f4"],
        ["box", LOW, HIGH, [2**31, 2**31], "<f4"],
        ["box", LOW, HIGH, [2], "|O"],
        ["box", "low", HIGH, [2], "<f4"],
        ["box", np.zeros(3, np.float32), HIGH, [2], "<f4"],
        ["discrete", 0, 0, "<i8"],
        ["discrete", "many", 0, "<i8"],
        ["discrete", 2, 0, "<f4"],
        ["multi_discrete", 3, 0, "<i8"],
        ["multi_discrete", np.array([0]), np.array([0]), "<i8"],
        ["multi_binary", [2**40], True],
        ["multi_binary", [], True],
        ["dict", [[1.5, ["discrete", 2, 0, "<i8"]]]],
        ["dict", [["a"]]],
        ["tuple", 3],
        ["tuple", [["discrete", 2, 0, "<i8"]] * MAX_SPACES],
        deep(MAX_DEPTH + 1),
        deep(200),
    ],
)
def test_an_invalid_description_is_refused(description: Any) -> None:
    with pytest.raises(MalformedMessageError):
        build(description)


@pytest.mark.parametrize("rows", [None, 3, [], [0, 0], [1, 0], [-1], [3], ["0"], [0.0], [True]])
def test_rows_are_ascending_indices(rows: Any) -> None:
    with pytest.raises(MalformedMessageError):
        require_rows({"rows": rows}, 3)
    assert [0, 2] == require_rows({"rows": [0, 2]}, 3)


def test_a_part_has_exactly_its_type() -> None:
    assert 3 == part({"count": 3}, "count", int)
    for body in (None, [], {}, {"count": True}, {"count": 3.0}, {"count": None}):
        with pytest.raises(MalformedMessageError, match="count"):
            part(body, "count", int)


def test_arrays_of_frames_become_the_callers() -> None:
    frame = np.frombuffer(bytes(8), np.uint8)
    found = writable({"a": [frame, (frame, 1)], "b": np.zeros(2)})
    for array in (found["a"][0], found["a"][1][0], found["b"]):
        array[:] = 1
    assert not frame.any()
    assert isinstance(found["a"][1], tuple)


@pytest.mark.parametrize("shape", [(), (2,), (3, 1)])
def test_a_value_of_another_shape_is_not_broadcast(shape: tuple[int, ...]) -> None:
    leaves = Leaves(spaces.Box(-1.0, 1.0, (3,), np.float32))
    with pytest.raises(ValueError, match="instead of"):
        leaves.write(np.zeros(shape, np.float32), leaves.empty(2), 0)
