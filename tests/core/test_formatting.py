"""Texts of numbers, and the speed that a line of text shows."""

from __future__ import annotations

import pytest

from tianflow.core.formatting import steady_speed

SPEEDS = {"300": 3.0, "10": 1.0, "60": 2.0}


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ({"10": 0.2, "60": 0.2, "300": 0.2}, 1.0),
        ({"10": 0.1, "60": 0.1, "300": 0.1}, 2.0),
        ({"10": 0.0, "60": 1 / 60, "300": 0.01}, 3.0),
        ({"10": 0.0, "60": 0.0, "300": 0.002}, 3.0),
        ({"10": 0.0, "60": 0.0, "300": 0.0}, 1.0),
        ({"10": None, "60": None, "300": None}, 1.0),
        ({}, 1.0),
    ],
)
def test_the_speed_is_of_the_shortest_window_with_two_updates(
    updates: dict[str, float | None], expected: float
) -> None:
    assert expected == steady_speed(SPEEDS, updates)


def test_without_a_window_there_is_no_speed() -> None:
    assert steady_speed({}, {"10": 1.0}) is None
    assert steady_speed({"10": None}, {"10": 1.0}) is None
