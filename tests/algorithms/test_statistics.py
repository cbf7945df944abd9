"""Statistics of a batch on a CPU are those of a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.pretended_device import pretended_device
from tianflow.algorithms.common.actor_critic import batch_statistics

T, C = 5, 7


def batch(valid_rows: float) -> tuple[torch.Tensor, ...]:
    """Log ratios, values, targets, and which of them are valid. The others are NaN."""
    draw = torch.Generator().manual_seed(3)
    log_ratio, value, noise = (torch.randn(T, C, generator=draw) for _ in range(3))
    valid = torch.rand(T, C, generator=draw) < valid_rows
    target = value + 0.1 * noise
    return *(torch.where(valid, x, math.nan) for x in (log_ratio, value, target)), valid


@pytest.mark.parametrize("valid_rows", [1.0, 0.6, 0.1])
def test_statistics_on_arrays_are_those_of_masked_tensors(valid_rows: float) -> None:
    given = batch(valid_rows)
    found = {name: float(value) for name, value in batch_statistics(*given).items()}
    with pretended_device() as device:
        there = batch_statistics(*(x.to(device) for x in given))
        expected = {name: float(value) for name, value in there.items()}
    assert expected == pytest.approx(found, rel=1e-5, abs=1e-6)
    assert 0.0 < found["ess_ratio"] <= 1.0


def test_values_that_have_a_gradient_are_accepted() -> None:
    """An algorithm of a user may pass its values as they are."""
    log_ratio, value, target, valid = batch(1.0)
    expected = batch_statistics(log_ratio, value, target, valid)
    assert expected == batch_statistics(log_ratio, value.requires_grad_(), target, valid)


def test_a_batch_without_valid_rows_has_statistics() -> None:
    found = batch_statistics(*batch(0.0))
    assert all(math.isfinite(value) for value in found.values())


def test_ratios_that_are_not_finite_or_very_large_warn_of_nothing() -> None:
    log_ratio, value, target, valid = batch(1.0)
    log_ratio[0, 0] = math.nan
    assert math.isnan(batch_statistics(log_ratio, value, target, valid)["kl"])
    log_ratio[0, 0] = 500.0
    found = batch_statistics(log_ratio, value, target, valid)
    assert 500.0 == found["log_ratio_max"]
    assert all(math.isfinite(each) for each in found.values())
