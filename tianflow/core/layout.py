"""Layouts: where the arrays of one trajectory, or of one draw, lie in a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tianflow.core.payloads import EnvironmentSpec, Field, TrajectoryLayout, aligned

Shapes = dict[str, tuple[tuple[int, ...], str]]
ASKED_AT = "asked/at"
"""Field of a request: its time."""
ONE_AXIS = ("version", "key", "probability", "weight", "priority")
"""Fields of a draw without a row for each step."""


def _shapes(
    spec: EnvironmentSpec,
    steps: int,
    state: Mapping[str, tuple[int, ...]],
    *,
    return_accumulator: bool = False,
    recorded: Sequence[str] = (),
    replayed: bool = False,
) -> Shapes:
    """Shape and dtype of every field, in their order in a slot."""
    t, t1, n = (steps, spec.num_envs), (steps + 1, spec.num_envs), (spec.num_envs,)
    shapes: Shapes = {
        f"obs/{leaf.name}": ((*t1, *leaf.shape), leaf.dtype) for leaf in spec.observation
    }
    shapes |= {
        "action": ((*t, *spec.action.stored_shape), spec.action.stored_dtype),
        **dict.fromkeys(recorded, (t, "float32")),
        "reward": (t, "float32"),
        "terminated": (t, "bool"),
        "truncated": (t, "bool"),
        "valid": (t, "bool"),
        "start": (t1, "bool"),
        "version": ((steps,), "int64"),
    }
    shapes |= {
        f"state/{name}": ((*(t if replayed else n), *shape), "float32")
        for name, shape in state.items()
    }
    if spec.action_mask:
        shapes["action_mask"] = ((*t1, spec.action.mask_size), "bool")
    if spec.autoreset != "next_step":
        shapes |= {
            f"final_obs/{leaf.name}": ((*t, *leaf.shape), leaf.dtype) for leaf in spec.observation
        }
    if return_accumulator:
        shapes["return_so_far"] = (t, "float64")
    if replayed:
        shapes["stream"] = ((4,), "int64")
    return shapes


def make_layout(
    spec: EnvironmentSpec,
    *,
    steps: int,
    state_spec: Mapping[str, tuple[int, ...]],
    return_accumulator: bool,
    recorded: Sequence[str] = ("log_prob",),
    replayed: bool = False,
    request_noise: int = 0,
) -> TrajectoryLayout:
    """The layout of `TrajectoryLayout`'s table for ``steps`` rows, each field on a cache line of
    its own.

    Args:
        spec: of the environments.
        steps: T, rows of the trajectory.
        state_spec: {leaf: shape for one environment} of the policy's recurrent state; empty without
            memory.
        return_accumulator: whether returns are normalised.
        recorded: names of the values that the policy adds to each step.
        replayed: whether it goes into replay, where windows begin at any step and span
            trajectories.
        request_noise: K, random numbers for one action, if an inference server computes the
            actions: a slot then has room for requests (`TrajectoryLayout.request`). 0: it has none.
    """
    shapes = _shapes(
        spec,
        steps,
        state_spec,
        return_accumulator=return_accumulator,
        recorded=recorded,
        replayed=replayed,
    )
    asked = {}
    if request_noise:
        noise = (steps, spec.num_envs, request_noise)
        asked = _request_shapes(spec, noise, state_spec, recorded)
    return _laid_out(spec, steps, shapes, asked)


def _request_shapes(
    spec: EnvironmentSpec,
    noise: tuple[int, ...],
    state: Mapping[str, tuple[int, ...]],
    recorded: Sequence[str],
) -> Shapes:
    """Shape and dtype of the fields of a request, those of the actor first."""
    n = spec.num_envs
    return {
        "noise": (noise, "float32"),
        ASKED_AT: ((), "float64"),
        **{f"state/{name}": ((n, *shape), "float32") for name, shape in state.items()},
        "action": ((n, *spec.action.stored_shape), spec.action.stored_dtype),
        **dict.fromkeys(recorded, ((n,), "float32")),
        **{f"next_state/{name}": ((n, *shape), "float32") for name, shape in state.items()},
    }


def make_draw_layout(
    spec: EnvironmentSpec,
    *,
    length: int,
    items: int,
    state_spec: Mapping[str, tuple[int, ...]],
    ends_only: bool = False,
) -> TrajectoryLayout:
    """The layout of a draw for one update: ``items`` windows of ``length`` steps side by side, in
    the fields of a trajectory. With ``ends_only``, observations and masks have two rows: the first
    of a window, and the one after its last step.

    Each item has these fields, too: ``version`` [M] int64 (of its oldest step), ``key`` [M] int64
    (in its shard), ``probability`` [M] float64 (of being drawn, given the shard), ``weight`` [M]
    float32 (its importance weight) and ``priority`` [M] float32 (the new one, from the learner).
    """
    windows = replace(spec, num_envs=items, autoreset="next_step")
    shapes = _shapes(windows, length, state_spec)
    if ends_only:
        shapes |= {
            name: ((2, *shape[1:]), dtype)
            for name, (shape, dtype) in shapes.items()
            if name.startswith("obs/") or name == "action_mask"
        }
    m = (items,)
    shapes |= {"version": (m, "int64"), "key": (m, "int64"), "probability": (m, "float64")}
    shapes |= {"weight": (m, "float32"), "priority": (m, "float32")}
    return _laid_out(windows, length, shapes)


def column_axis(name: str) -> int:
    """The axis of the items in field ``name`` of a draw."""
    return 0 if name in ONE_AXIS or name.startswith("state/") else 1


def _laid_out(
    spec: EnvironmentSpec, steps: int, shapes: Shapes, request: Shapes | None = None
) -> TrajectoryLayout:
    fields, end = _fields(shapes, 0)
    asked, end = _fields(request or {}, end)
    return TrajectoryLayout(steps, spec.num_envs, fields, end, asked)


def _fields(shapes: Shapes, offset: int) -> tuple[tuple[Field, ...], int]:
    """Fields from ``offset`` on, and the end of the last one."""
    fields = []
    for name, (shape, dtype) in shapes.items():
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        fields.append(Field(name, shape, dtype, offset, nbytes))
        offset += aligned(nbytes)
    return tuple(fields), offset


def views(
    layout: TrajectoryLayout, buffer: memoryview | NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """The arrays of a trajectory as views of ``buffer``, which has at least ``layout.nbytes``.
    Nothing is copied.
    """
    return _views(layout.fields, buffer)


def request_views(
    layout: TrajectoryLayout, buffer: memoryview | NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """The arrays of ``layout.request``, likewise."""
    return _views(layout.request, buffer)


def _views(
    fields: Sequence[Field], buffer: memoryview | NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    return {
        field.name: np.ndarray(field.shape, field.dtype, buffer, field.offset) for field in fields
    }


def written_rows(layout: TrajectoryLayout, length: int) -> dict[str, int | None]:
    """Rows of each field that a trajectory of ``length`` steps has written; None: the field has no
    row for each step, and is whole.
    """
    names = {field.name for field in layout.fields}
    whole = {"stream"} if "stream" in names else {n for n in names if n.startswith("state/")}
    return {
        field.name: None if field.name in whole else length + (field.shape[0] > layout.steps)
        for field in layout.fields
    }
