"""The data of a trajectory lie in the slot of another machine as they were, whatever the encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.channels.test_stacks import played
from tests.support.worlds import small_layout
from tianflow.channels.attachments import Attachments, Encoding
from tianflow.channels.frames import MalformedMessageError, decode, encode, nbytes
from tianflow.config.model import ClusterSettings
from tianflow.core.layout import written_rows
from tianflow.core.payloads import Field, TrajectoryLayout

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
