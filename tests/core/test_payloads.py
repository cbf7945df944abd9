"""The ceiling of credits follows from the staleness bound."""

from __future__ import annotations

import pytest

from tianflow.core.payloads import credits_ceiling


@pytest.mark.parametrize(
    ("max_staleness", "publish_lag", "batch", "expected"),
    [(0, 0, 8, 8), (4, 0, 4, 20), (4, 2, 4, 12), (16, 16, 8, 8), (0, 1, 8, 0), (0, 2, 8, 0)],
)
def test_the_ceiling_is_one_batch_per_admissible_version_and_never_negative(
    max_staleness: int, publish_lag: int, batch: int, expected: int
) -> None:
    assert expected == credits_ceiling(max_staleness, publish_lag=publish_lag, batch=batch)
