"""How many cases of a property a test tries.

``TIANFLOW_EXAMPLES`` is a factor, 1 by default: `make test` has to be short. CI sets it to 8.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")

FACTOR = max(1, int(os.environ.get("TIANFLOW_EXAMPLES", "1")))
FULL = 8
"""The factor at which a test tries every case of a grid, and looks at every event."""
EVERY = max(1, FULL // FACTOR)
"""Of so many events a test looks at one."""


def examples(count: int, **others: int) -> settings:
    """Settings of a hypothesis test with ``count`` examples at the factor 2."""
    return settings(max_examples=max(4, count * FACTOR // 2), deadline=None, **others)  # type: ignore[arg-type]


def grid(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrises a test with some cases of a grid, which have every value of every axis; with all
    of them at the factor `FULL`.
    """
    cases = list(itertools.product(*axes.values()))
    found = list(some(cases))
    for place, values in enumerate(axes.values()):
        for value in values:
            if all(case[place] is not value for case in found):
                found.append(next(case for case in cases if case[place] is value))
    return pytest.mark.parametrize(tuple(axes), found)


def some(cases: Sequence[T]) -> Sequence[T]:
    """Every fifth case of a grid; all of them at the factor `FULL`. The axes of a grid have two to
    four values, so a step of five meets each of them.
    """
    return cases if EVERY == 1 else cases[::5]
