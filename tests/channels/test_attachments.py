"""The data of a trajectory, or of a draw, lie in the slot of another machine as they were, whatever
the encoding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.channels.test_stacks import played
from tests.support.replay_exchange_worlds import DRAWN, DRAWS, SPEC
from tests.support.worlds import small_layout
from tianflow.channels.attachments import AT_SHARD, Attachments, DrawParts, Encoding
from tianflow.channels.frames import MalformedMessageError, decode, encode, nbytes
from tianflow.config.model import ClusterSettings
from tianflow.core.layout import column_axis, make_draw_layout, written_rows
from tianflow.core.payloads import Field, LeafSpec, TrajectoryLayout

STEPS, N = 6, 2
ENCODINGS: tuple[Encoding, ...] = ("stacks", "lz4", "plain")


def images() -> TrajectoryLayout:
    """Stacks of images, rewards, and a field without rows of steps."""
    shapes = {"obs/": (STEPS + 1, N, 4, 40, 40), "reward": (STEPS, N), "state/h": (N, 3)}
    dtypes = {"obs/": "uint8", "reward": "float32", "state/h": "float32"}
    fields, offset = [], 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * np.dtype(dtypes[name]).itemsize
        fields.append(Field(name, shape, dtypes[name], offset, size))
        offset += size
    return TrajectoryLayout(STEPS, N, tuple(fields), offset)


LAYOUTS = {"small": small_layout(), "images": images()}


def slot(layout: TrajectoryLayout, *, full: bool) -> dict[str, Any]:
    """Arrays of a slot, with the data of a trajectory or with zeros."""
    found = {field.name: np.zeros(field.shape, field.dtype) for field in layout.fields}
    for number, array in enumerate(found.values() if full else ()):
        array[...] = number + 1
    if full and found["reward"].shape == (STEPS, N) and "obs/" in found:
        found["obs/"][...] = played(STEPS + 1, N, {(3, 1)}) // 64 * 64
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_written_rows_arrive_and_no_other_row_changes(
    layout: TrajectoryLayout, encoding: Encoding
) -> None:
    here = slot(layout, full=True)
    for length in range(1, layout.steps + 1):
        there = slot(layout, full=False)
        sent = decode(encode("up", 1, Attachments(layout, encoding).of(here, length))).body
        Attachments(layout).write(there, length, sent)
        for name, last in written_rows(layout, length).items():
            np.testing.assert_array_equal(here[name][:last], there[name][:last])
            if last is not None:
                assert not there[name][last:].any()


def test_each_encoding_of_images_needs_fewer_bytes_than_the_one_before() -> None:
    here = slot(LAYOUTS["images"], full=True)
    sizes = [
        nbytes(Attachments(LAYOUTS["images"], encoding).of(here, STEPS))
        for encoding in ("plain", "stacks", "lz4")
    ]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.9 * sizes[1]


def test_every_encoding_of_the_settings_is_known() -> None:
    for encoding in ENCODINGS:
        assert encoding == ClusterSettings(encoding=encoding).encoding
    with pytest.raises(ValueError, match="'stacks', 'lz4' or 'plain'"):
        ClusterSettings(encoding="zip")  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (0, {}, "length"),
        (STEPS + 1, {}, "length"),
        (True, {}, "length"),
        ("1", {}, "length"),
        (STEPS, {"more": np.zeros(3)}, "other fields"),
        (STEPS, {"reward": {"first": 1}}, "data type"),
        (STEPS, {"reward": np.zeros((STEPS, N))}, "data type"),
        (STEPS, {"reward": np.zeros((N, STEPS), np.float32)}, "shape"),
        (STEPS, {"obs/": {"first": 1}}, "not complete"),
        (STEPS, {"obs/": {"lz4": np.zeros(3, np.uint8), "dtype": "|u1", "shape": (9,)}}, "damag"),
    ],
)
def test_what_does_not_fit_is_refused(length: Any, changes: dict[str, Any], message: str) -> None:
    layout = LAYOUTS["images"]
    sent = Attachments(layout).of(slot(layout, full=True), STEPS)
    with pytest.raises(MalformedMessageError, match=message):
        Attachments(layout).write(slot(layout, full=False), length, {**sent, **changes})


# Draws
# --------------------------------------------------------------------------------------------------

SEEN = replace(SPEC, observation=(LeafSpec("", (4, 40, 40), "uint8"),))
DRAWN_IMAGES = make_draw_layout(SEEN, length=3, items=DRAWN, state_spec={"h": (3,)})


def draw(layout: TrajectoryLayout, *, full: bool) -> dict[str, Any]:
    """Arrays of a slot of draws, each column with values of its own, or zeros."""
    found = {field.name: np.zeros(field.shape, field.dtype) for field in layout.fields}
    for name, array in found.items() if full else ():
        columns = np.moveaxis(array, column_axis(name), 0)
        for column in range(DRAWN):
            columns[column] = column % 2 if array.dtype == bool else column + 1
    return found


@pytest.mark.parametrize("layout", [DRAWS, DRAWN_IMAGES], ids=["small", "images"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_columns_of_a_shard_arrive_and_no_other_column_changes(
    layout: TrajectoryLayout, encoding: Encoding
) -> None:
    here, there = draw(layout, full=True), draw(layout, full=False)
    sent = decode(encode("up", 1, DrawParts(layout, encoding).of(here, 2, 3))).body
    DrawParts(layout).write(there, 2, 3, sent)
    for name, array in here.items():
        before, after = (np.moveaxis(found, column_axis(name), 0) for found in (array, there[name]))
        changed = slice(2, 2) if name in AT_SHARD else slice(2, 5)
        np.testing.assert_array_equal(before[changed], after[changed])
        assert not after[: changed.start].any()
        assert not after[changed.stop :].any()


def test_priorities_return_to_the_columns_that_they_are_of() -> None:
    here, there = draw(DRAWS, full=True), draw(DRAWS, full=False)
    columns = DrawParts(DRAWS)
    columns.write_priorities(
        there, 2, 3, decode(encode("down", 1, columns.priorities(here, 2, 3))).body
    )
    assert [0.0, 0.0, 3.0, 4.0, 5.0, 0.0] == there.pop("priority").tolist()
    assert not any(array.any() for array in there.values())


@pytest.mark.parametrize(
    ("first", "items", "changes", "message"),
    [
        (-1, 3, {}, "no draw has 3 columns from -1 on"),
        (4, 3, {}, "no draw has 3 columns from 4 on"),
        (0, 0, {}, "no draw has 0 columns"),
        (0, -1, {}, "no draw has -1 columns"),
        (True, 3, {}, "not numbers"),
        (0, "3", {}, "not numbers"),
        (0, 3, {"key": np.zeros(3, np.int64)}, "other fields"),
        (0, 3, {"version": np.zeros(2, np.int64)}, "shape"),
        (0, 3, {"version": np.zeros(3, np.float64)}, "data type"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    first: Any, items: Any, changes: dict[str, Any], message: str
) -> None:
    columns = DrawParts(DRAWS)
    sent = columns.of(draw(DRAWS, full=True), 0, 3)
    with pytest.raises(MalformedMessageError, match=message):
        columns.write(draw(DRAWS, full=False), first, items, {**sent, **changes})


@pytest.mark.parametrize(
    "arrays", [None, {}, {"priority": 3}, {"priority": np.zeros(2, np.float32)}]
)
def test_priorities_that_do_not_fit_are_refused(arrays: object) -> None:
    with pytest.raises(MalformedMessageError):
        DrawParts(DRAWS).write_priorities(draw(DRAWS, full=False), 0, 3, arrays)
