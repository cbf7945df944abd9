"""Parameters are read from a state file by name, and compared by name and shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tianflow.core.payloads import TableEntry, WeightsTable
from tianflow.rundir.parameters import KEY, encode_tables, fit, lines, read_parameters

TABLE = WeightsTable(
    (
        TableEntry("network/weight", (2, 3), "float32", 0, 24),
        TableEntry("return/samples", (), "float64", 64, 8),
    ),
    128,
)


def flat() -> NDArray[np.uint8]:
    data = np.zeros(128, np.uint8)
    data[:24] = np.arange(6, dtype=np.float32).view(np.uint8)
    data[64:72] = np.asarray([7.0]).view(np.uint8)
    return data


def metadata(rows: object) -> dict[str, str]:
    return {KEY: json.dumps(rows)}


def zeros(**shapes: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    return {name.replace("__", "/"): np.zeros(shape) for name, shape in shapes.items()}


def test_parameters_are_views_of_their_bytes_by_name() -> None:
    vector = np.arange(6, dtype=np.float32)
    tables = {"flat": TABLE, "critics": WeightsTable(TABLE.entries[:1], 24)}
    found = read_parameters({"flat": flat(), "critics": vector}, encode_tables(tables))
    assert ["network/weight", "return/samples", "critics/network/weight"] == list(found)
    assert vector.reshape(2, 3).tolist() == found["network/weight"].tolist()
    assert vector.reshape(2, 3).tolist() == found["critics/network/weight"].tolist()
    assert (7.0, np.float64) == (found["return/samples"], found["return/samples"].dtype)


def test_no_tables_are_no_metadata() -> None:
    assert {} == encode_tables({})


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({"flat": [["network/a", "float32", [2, 3], 108]]}, "beyond the end of 'flat'"),
        ({"flat": [["a", "float32", [2**40, 2**40], 0]]}, "beyond the end of 'flat'"),
        ({"flat": [["a", "float32", [1], 0], ["a", "float32", [1], 4]]}, "'a' twice"),
        ({"other": [["a", "float32", [1], 0]]}, "an array that it lacks"),
        ({"flat": [["a", "object", [1], 0]]}, "damaged names"),
        ({"flat": [["a", "float32", [-1], 0]]}, "damaged names"),
        ({"flat": [["a", "float32", [1.5], 0]]}, "damaged names"),
        ({"flat": [["a", "float32", [1], -4]]}, "damaged names"),
        ({"flat": [["", "float32", [1], 0]]}, "damaged names"),
        ({"flat": [["a", "float32", [1]]]}, "damaged names"),
        ([], "damaged names"),
    ],
)
def test_names_that_do_not_fit_their_arrays_are_refused(rows: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_parameters({"flat": flat()}, metadata(rows))


def test_a_state_without_names_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="continue that run with --resume"):
        read_parameters({"flat": flat()}, {})
    with pytest.raises(ValueError, match="damaged names"):
        read_parameters({"flat": flat()}, {KEY: "{"})


def test_a_parameter_fits_by_name_and_shape() -> None:
    there = zeros(network__a=(2,), network__b=(2, 3), network__old=(1,))
    here = zeros(network__a=(2,), network__b=(4, 3), network__new=(1,))
    found = fit(there, here)
    assert ("network/a",) == found.taken
    assert (("network/b", "float64[2, 3]", "float64[4, 3]"),) == found.differing
    assert (("network/new",), ("network/old",)) == (found.new, found.unused)
    assert [
        "of another shape: network/b (float64[2, 3], here float64[4, 3])",
        "only in this run: network/new",
        "only in the source: network/old",
    ] == list(lines(found))


def test_another_dtype_does_not_fit() -> None:
    found = fit({"network/a": np.zeros(2, np.float32)}, {"network/a": np.zeros(2)})
    assert ((), 1) == (found.taken, len(found.differing))


def test_moments_are_taken_together_or_not_at_all() -> None:
    """A large count beside means of 0 would freeze the normaliser at them."""
    there = zeros(observation__x__mean=(4,), observation__x__samples=(), return__samples=())
    here = zeros(observation__x__mean=(8,), observation__x__samples=(), return__samples=())
    found = fit(there, here)
    assert (("return/samples",), ("observation/x/samples",)) == (found.taken, found.apart)
    assert "part of moments that do not fit: observation/x/samples" in list(lines(found))


def test_moments_of_a_leaf_without_a_name_are_apart_from_those_of_others() -> None:
    there = {"observation//mean": np.zeros(4), "observation//samples": np.zeros(())}
    there |= {"observation/x/samples": np.zeros(())}
    here = {**there, "observation//mean": np.zeros(8)}
    assert ("observation/x/samples",) == fit(there, here).taken


def test_exploration_follows_from_settings() -> None:
    found = fit(zeros(exploration__epsilon=()), zeros(exploration__epsilon=()))
    assert ((), (), (), ()) == (found.taken, found.differing, found.new, found.unused)
