"""Dataclasses become JSON by their fields, and numbers that JSON lacks become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tianflow.core.jsonable import JsonDocument, json_ready
from tianflow.core.payloads import Version


@dataclass(frozen=True, slots=True)
class Inner(JsonDocument):
    ratio: float
    by_place: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Outer(JsonDocument):
    return_: float
    inner: tuple[Inner, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (1.5, 1.5),
        (True, True),
        ((1, {2: (math.inf,)}), [1, {"2": [None]}]),
        ({3}, [3]),
        (Path("a/b"), "a/b"),
        (Version(1, 2), [1, 2]),
    ],
)
def test_values_become_plain_and_strict_json(value: object, expected: object) -> None:
    assert expected == json_ready(value)
    json.dumps(json_ready(value), allow_nan=False)


def test_a_dataclass_becomes_an_object_and_loses_the_underscore_of_a_keyword() -> None:
    outer = Outer(1.0, (Inner(math.nan, {7: 0.5}),))
    assert {"return": 1.0, "inner": [{"ratio": None, "by_place": {"7": 0.5}}]} == json_ready(outer)
