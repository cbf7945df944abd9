"""The copy from slots to the batch: complete trajectories exactly, cut ones without data past their
end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tianflow.components.stacking import NOT_TRAINED_ON, BatchStacker, DrawStacker
from tianflow.core.layout import make_draw_layout, make_layout, views
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec, TrajectoryLayout

T, N, B = 5, 3, 4
CPU = torch.device("cpu")


def full_layout() -> TrajectoryLayout:
    """Every kind of field."""
    observation = (
        LeafSpec("camera", (2, 2), "uint8"),
        LeafSpec("arm/joints", (3,), "float32"),
        LeafSpec("gear", (), "int64", (4,)),
    )
    action = ActionSpec("multi_discrete", (2,), "int64", (3, 2), (0, 0))
    spec = EnvironmentSpec("Full-v0", observation, action, N, "same_step", action_mask=True)
    return make_layout(spec, steps=T, state_spec={"hidden": (6,)}, return_accumulator=True)


LAYOUT = full_layout()


def trajectory(seed: int) -> dict[str, NDArray[Any]]:
    """Random values everywhere; tests put NaN past row ``length``, where the writer may never have
    been.
    """
    draw = np.random.default_rng(seed)
    return views(LAYOUT, draw.integers(0, 2, LAYOUT.nbytes, np.uint8)) | {
        "version": np.arange(seed, seed + T, dtype=np.int64),
        "reward": draw.standard_normal((T, N)).astype(np.float32),
    }


def spoilt(arrays: dict[str, NDArray[Any]], length: int) -> dict[str, NDArray[Any]]:
    """``arrays`` with garbage in every row past ``length``."""
    garbage = {name: array.copy() for name, array in arrays.items()}
    for name, array in garbage.items():
        if not name.startswith("state/"):
            behind = array[length + (len(array) == T + 1) :]
            behind[...] = np.nan if array.dtype.kind == "f" else True if array.dtype == bool else 99
    return garbage


@pytest.fixture
def stacker() -> BatchStacker:
    return BatchStacker(layout=LAYOUT, trajectories=B, device=CPU)


def columns(index: int) -> slice:
    return slice(index * N, (index + 1) * N)


def test_a_batch_has_the_documented_shapes(stacker: BatchStacker) -> None:
    arrays = stacker.batch().arrays
    assert {field.name for field in LAYOUT.fields} == set(arrays)
    assert {
        "obs/camera": ((T + 1, B * N, 2, 2), torch.uint8),
        "obs/arm/joints": ((T + 1, B * N, 3), torch.float32),
        "obs/gear": ((T + 1, B * N), torch.int64),
        "action": ((T, B * N, 2), torch.int64),
        "log_prob": ((T, B * N), torch.float32),
        "reward": ((T, B * N), torch.float32),
        "terminated": ((T, B * N), torch.bool),
        "truncated": ((T, B * N), torch.bool),
        "valid": ((T, B * N), torch.bool),
        "start": ((T + 1, B * N), torch.bool),
        "version": ((T, B), torch.int64),
        "state/hidden": ((B * N, 6), torch.float32),
        "action_mask": ((T + 1, B * N, 5), torch.bool),
        "final_obs/camera": ((T, B * N, 2, 2), torch.uint8),
        "final_obs/arm/joints": ((T, B * N, 3), torch.float32),
        "final_obs/gear": ((T, B * N), torch.int64),
        "return_so_far": ((T, B * N), torch.float64),
    } == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in arrays.items()}


def test_complete_trajectories_are_copied_exactly_side_by_side(stacker: BatchStacker) -> None:
    sources = [trajectory(seed) for seed in range(B)]
    for index, source in enumerate(sources):
        stacker.fill(index, source, T)
    arrays = stacker.batch().arrays
    for index, source in enumerate(sources):
        for name, array in source.items():
            if name == "version":
                found = arrays[name][:, index]
            elif name.startswith("state/"):
                found = arrays[name][columns(index)]
            else:
                found = arrays[name][:, columns(index)]
            assert array.tobytes() == found.numpy().tobytes(), name


@pytest.mark.parametrize("length", range(1, T))
def test_a_cut_trajectory_has_its_own_rows_only(stacker: BatchStacker, length: int) -> None:
    for index in range(B):
        stacker.fill(index, spoilt(trajectory(50 + index), T), T)  # data of the last batch
    source = trajectory(1)
    stacker.fill(2, spoilt(source, length), length)
    for name, tensor in stacker.batch().arrays.items():
        if name == "version":
            assert [*source[name][:length]] + [source[name][length - 1]] * (T - length) == tensor[
                :, 2
            ].tolist()
        elif name.startswith("state/"):
            assert source[name].tobytes() == tensor[columns(2)].numpy().tobytes()
        else:
            rows = length + 1 if len(tensor) == T + 1 else length
            mine = tensor[:, columns(2)].numpy()
            assert source[name][:rows].tobytes() == mine[:rows].tobytes(), name
            assert (mine[rows:] == (name == "action_mask")).all(), name


@pytest.mark.parametrize("length", range(1, T))
def test_rows_past_the_end_are_not_valid_and_the_bootstrap_row_is_kept(
    stacker: BatchStacker, length: int
) -> None:
    source = spoilt(trajectory(3), length)
    stacker.fill(0, source, length)
    arrays = stacker.batch().arrays
    assert not arrays["valid"][length:, columns(0)].any()
    for leaf in ("obs/camera", "obs/arm/joints", "obs/gear", "action_mask", "start"):
        assert (arrays[leaf][length, columns(0)].numpy() == source[leaf][length]).all(), leaf
    assert all(torch.isfinite(tensor).all() for tensor in arrays.values())


def test_masks_past_the_end_allow_all_actions(stacker: BatchStacker) -> None:
    source = trajectory(4)
    source["action_mask"][:] = False
    stacker.fill(1, source, 2)
    mask = stacker.batch().arrays["action_mask"][:, columns(1)]
    assert (False, True) == (bool(mask[:3].any()), bool(mask[3:].all()))


def test_filling_one_place_keeps_the_others(stacker: BatchStacker) -> None:
    for index in range(B):
        stacker.fill(index, trajectory(index), T)
    before = {name: tensor.clone() for name, tensor in stacker.batch().arrays.items()}
    stacker.fill(1, trajectory(9), 2)
    for name, tensor in stacker.batch().arrays.items():
        for index in (0, 2, 3):
            across = index if name == "version" else columns(index)
            place = across if name.startswith("state/") else (slice(None), across)
            assert torch.equal(before[name][place], tensor[place]), name


def test_a_batch_does_not_change_with_its_slots(stacker: BatchStacker) -> None:
    source = trajectory(0)
    stacker.fill(0, source, T)
    kept = source["obs/camera"].copy()
    source["obs/camera"][:] = 77
    assert (stacker.batch().arrays["obs/camera"][:, columns(0)].numpy() == kept).all()


# Draws from replay


def test_a_draw_is_copied_without_the_fields_of_replay() -> None:
    action = ActionSpec("discrete", (), "int64", (3,), (0,))
    spec = EnvironmentSpec(
        "Drawn-v0", (LeafSpec("camera", (2, 2), "uint8"),), action, N, "same_step", action_mask=True
    )
    layout = make_draw_layout(spec, length=T, items=7, state_spec={"hidden": (6,)})
    buffer = np.random.default_rng(3).integers(0, 2, layout.nbytes, np.uint8)
    drawn, before = views(layout, buffer), buffer.copy()
    stacker = DrawStacker(layout=layout, device=CPU)
    assert 1 == stacker.trajectories
    stacker.fill(0, drawn, T)
    arrays = stacker.batch().arrays
    assert set(drawn) - set(NOT_TRAINED_ON) == set(arrays)
    assert {"weight", "version"} < set(arrays)
    for name, array in arrays.items():
        assert layout_shape(layout, name) == tuple(array.shape)
        np.testing.assert_array_equal(drawn[name], array.numpy())
    buffer[:] = 1  # the slot may be reused, because the learner has a copy
    again = views(layout, before)
    for name, array in arrays.items():
        np.testing.assert_array_equal(again[name], array.numpy())


def layout_shape(layout: TrajectoryLayout, name: str) -> tuple[int, ...]:
    return next(field.shape for field in layout.fields if field.name == name)
