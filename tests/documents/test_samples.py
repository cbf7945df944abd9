"""The table of the fields of a batch, on the page of own algorithms, is that of real batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pages import DOCS, rows
from tianflow.algorithms.common.actor_critic import Samples, read_batch
from tianflow.components.stacking import BatchStacker
from tianflow.core.layout import make_layout, views
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec

T, B, N = 5, 3, 2
LEAVES = (LeafSpec("picture", (4, 4, 3), "uint8"), LeafSpec("place", (2,), "float32"))
STATE = {"h": (7,), "c": (7,)}
ACTIONS = {
    "discrete": ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(2,)),
    "multi_discrete": ActionSpec("multi_discrete", (2,), "int64", categories=(2, 3)),
    "box": ActionSpec("box", (4,), "float32", low=(-1.0,) * 4, high=(1.0,) * 4),
}
TABLE = {
    cells[0].strip("`"): cells[1:]
    for cells in rows((DOCS / "own-algorithm.md").read_text())
    if cells[0].strip("`") in {field.name for field in fields(Samples)}
}
"""Shape, dtype and meaning of each field."""


def real(kind: str, *, mask: bool, memory: bool, autoreset: Any) -> Samples:
    """A batch as the learner of a run gets it."""
    spec = EnvironmentSpec("Test-v0", LEAVES, ACTIONS[kind], N, autoreset, action_mask=mask)
    layout = make_layout(
        spec, steps=T, state_spec=STATE if memory else {}, return_accumulator=False
    )
    stacker = BatchStacker(layout=layout, trajectories=B, device=torch.device("cpu"))
    for index in range(B):
        stacker.fill(index, views(layout, np.zeros(layout.nbytes, np.uint8)), T)
    arrays = stacker.batch().arrays
    return read_batch(arrays, reward=arrays["reward"], discount=0.99)


def said(name: str, kind: str) -> tuple[tuple[int, ...], str]:
    """First axes and dtype of a field on the page; for ``action``, of this ``kind``."""
    shape, dtype, _ = TABLE[name]
    choice = list(ACTIONS).index(kind) if name == "action" else 0
    axes = re.findall(r"\[([^\]]+)\]", shape)[choice].removesuffix(", ...").split(", ")
    sizes = {"T": T, "T+1": T + 1, "C": B * N, "K": 2, "choices": ACTIONS[kind].mask_size}
    if name == "action":
        dtype = dtype.partition("; of a Box ")[2 if kind == "box" else 0]
    return tuple(sizes[axis] for axis in axes), dtype


def test_the_table_has_every_field_in_the_order_of_the_class() -> None:
    assert [field.name for field in fields(Samples)] == list(TABLE)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_shapes_and_dtypes_are_those_of_a_real_batch(
    kind: str, *, memory: bool, autoreset: Any
) -> None:
    samples = real(kind, mask=kind != "box", memory=memory, autoreset=autoreset)
    leaves = {leaf.name: (leaf.shape, leaf.dtype) for leaf in LEAVES}
    inside: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
        "observation": leaves,
        "final_observation": leaves if autoreset != "next_step" else {},
        "state": {leaf: (shape, "") for leaf, shape in STATE.items()} if memory else {},
        "action": {"": (ACTIONS[kind].shape if kind == "box" else (), "")},
        "mask": {} if kind == "box" else {"": ((), "")},
    }
    for name in TABLE:
        found = getattr(samples, name)
        tensors = found if isinstance(found, Mapping) else {} if found is None else {"": found}
        expected = inside.get(name, {"": ((), "")})
        assert list(expected) == list(tensors), name
        for leaf, (rest, of_leaf) in expected.items():
            shape, dtype = said(name, kind)
            assert (*shape, *rest) == tuple(tensors[leaf].shape), name
            assert getattr(torch, of_leaf or dtype) == tensors[leaf].dtype, name
