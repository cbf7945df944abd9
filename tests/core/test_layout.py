import numpy as np
import pytest

from tianflow.core.layout import make_draw_layout, make_layout, views
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec

DISCRETE = ActionSpec("discrete", (), "int64", (3,), (1,))
BOX = ActionSpec("box", (2,), "float32", low=(-np.inf, -1.0), high=(np.inf, 1.0))
LEAVES = (LeafSpec("camera", (1, 5, 5), "uint8"), LeafSpec("mode", (), "int64", (4,)))
PLAIN = EnvironmentSpec("Plain-v0", (LeafSpec("", (4,), "float32"),), BOX, 3, "next_step")
FULL = EnvironmentSpec(
    "Full-v0", LEAVES, DISCRETE, 3, "same_step", action_mask=True, frames_per_step=4
)


def test_the_layout_has_the_fields_shapes_and_dtypes_of_the_table():
    layout = make_layout(FULL, steps=5, state_spec={"h": (7,)}, return_accumulator=True)
    expected = {
        "obs/camera": ((6, 3, 1, 5, 5), "uint8"),
        "obs/mode": ((6, 3), "int64"),
        "action": ((5, 3), "int64"),
        "log_prob": ((5, 3), "float32"),
        "reward": ((5, 3), "float32"),
        "terminated": ((5, 3), "bool"),
        "truncated": ((5, 3), "bool"),
        "valid": ((5, 3), "bool"),
        "start": ((6, 3), "bool"),
        "version": ((5,), "int64"),
        "state/h": ((3, 7), "float32"),
        "action_mask": ((6, 3, 3), "bool"),
        "final_obs/camera": ((5, 3, 1, 5, 5), "uint8"),
        "final_obs/mode": ((5, 3), "int64"),
        "return_so_far": ((5, 3), "float64"),
    }
    assert expected == {field.name: (field.shape, field.dtype) for field in layout.fields}


def test_what_is_not_needed_takes_no_memory():
    names = {
        field.name
        for field in make_layout(PLAIN, steps=5, state_spec={}, return_accumulator=False).fields
    }
    assert names == {
        "obs/",
        "action",
        "log_prob",
        "reward",
        "terminated",
        "truncated",
        "valid",
        "start",
        "version",
    }


def test_fields_begin_on_cache_lines_and_do_not_overlap():
    layout = make_layout(FULL, steps=5, state_spec={"h": (7,)}, return_accumulator=True)
    end = 0
    for field in layout.fields:
        assert field.offset % 64 == 0
        assert field.offset >= end
        end = field.offset + field.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % 64 == 0


def test_frames_are_stored_as_single_bytes():
    spec = EnvironmentSpec(
        "Frames-v0", (LeafSpec("", (4, 84, 84), "uint8"),), DISCRETE, 8, "next_step"
    )
    layout = make_layout(spec, steps=20, state_spec={}, return_accumulator=False)
    assert 21 * 8 * 4 * 84 * 84 == layout.field("obs/").nbytes
    assert layout.nbytes < 1.01 * layout.field("obs/").nbytes


@pytest.mark.parametrize("wrap", [lambda data: data, memoryview])
def test_views_write_through_to_the_buffer(wrap):
    layout = make_layout(PLAIN, steps=2, state_spec={}, return_accumulator=False)
    buffer = np.zeros(layout.nbytes, np.uint8)
    arrays = views(layout, wrap(buffer))
    arrays["reward"][1, 2] = 1.5
    assert views(layout, buffer)["reward"][1, 2] == 1.5
    assert all(np.shares_memory(array, buffer) for array in arrays.values())


def test_a_draw_is_laid_out_as_windows_side_by_side_with_what_belongs_to_each_item():
    layout = make_draw_layout(FULL, length=5, items=11, state_spec={"h": (7,)})
    expected = {
        "obs/camera": ((6, 11, 1, 5, 5), "uint8"),
        "obs/mode": ((6, 11), "int64"),
        "action": ((5, 11), "int64"),
        "reward": ((5, 11), "float32"),
        "terminated": ((5, 11), "bool"),
        "truncated": ((5, 11), "bool"),
        "valid": ((5, 11), "bool"),
        "start": ((6, 11), "bool"),
        "state/h": ((11, 7), "float32"),
        "action_mask": ((6, 11, 3), "bool"),
        "version": ((11,), "int64"),
        "key": ((11,), "int64"),
        "probability": ((11,), "float64"),
        "weight": ((11,), "float32"),
        "priority": ((11,), "float32"),
    }
    assert expected == {field.name: (field.shape, field.dtype) for field in layout.fields}
    assert (5, 11) == (layout.steps, layout.num_envs)
    ends = make_draw_layout(FULL, length=5, items=11, state_spec={"h": (7,)}, ends_only=True)
    two = {"obs/camera": (2, 11, 1, 5, 5), "obs/mode": (2, 11), "action_mask": (2, 11, 3)}
    shapes = {name: two.get(name, shape) for name, (shape, _) in expected.items()}
    assert shapes == {field.name: field.shape for field in ends.fields}


def test_a_trajectory_for_replay_has_the_state_of_every_step_and_says_which_stream_it_continues():
    layout = make_layout(
        FULL,
        steps=5,
        state_spec={"h": (7,)},
        return_accumulator=False,
        recorded=("q_taken",),
        replayed=True,
    )
    shapes = {field.name: field.shape for field in layout.fields}
    assert ((5, 3, 7), (4,), (5, 3)) == (shapes["state/h"], shapes["stream"], shapes["q_taken"])
    assert "log_prob" not in shapes
