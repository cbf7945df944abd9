"""Scaling, one-hot and running moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tianflow.ops import transforms
from tianflow.ops.transforms import (
    as_float,
    batch_moments,
    channels_innermost,
    filled,
    indexed,
    merged_moments,
    normalise,
    one_hot,
)


def test_uint8_is_scaled_to_one_and_other_dtypes_keep_their_values() -> None:
    assert as_float(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == pytest.approx(
        [0.0, 0.2, 1.0]
    )
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
        found = as_float(torch.tensor([0, 1], dtype=dtype))
        assert found.dtype == torch.float32
        assert found.tolist() == [0.0, 1.0]


def test_scaling_does_not_change_the_stored_observation() -> None:
    stored = torch.tensor([255], dtype=torch.uint8)
    as_float(stored)
    assert stored.item() == 255


def test_one_hot_of_a_scalar_leaf_and_of_a_vector_leaf() -> None:
    assert one_hot(torch.tensor([2, 0]), (3,)).tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert one_hot(torch.tensor([[1, 2]]), (2, 3)).tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]


def test_moments_of_parts_merge_to_the_moments_of_the_whole() -> None:
    x = 5.0 + 3.0 * torch.randn(
        1000, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    merged = batch_moments(x[:0])
    for part in x.split([1, 400, 599]):
        merged = merged_moments(merged, batch_moments(part))
    assert merged.samples.item() == 1000.0
    torch.testing.assert_close(merged.mean, x.mean(0))
    torch.testing.assert_close(merged.variance, x.var(0, correction=0))


def test_merging_an_empty_batch_changes_nothing() -> None:
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    expected = batch_moments(x)
    assert all(
        torch.equal(a, b)
        for a, b in zip(expected, merged_moments(expected, batch_moments(x[:0])), strict=True)
    )


def test_moments_without_samples_are_those_of_the_identity() -> None:
    empty = batch_moments(torch.zeros(0, 2))
    merged = merged_moments(empty, empty)
    assert [merged.mean.tolist(), merged.variance.tolist(), merged.samples.item()] == [
        [0.0, 0.0],
        [1.0, 1.0],
        0.0,
    ]


def test_a_large_offset_does_not_reduce_the_precision_of_the_variance() -> None:
    """A running sum of squares in float32 would: the offset is 1e6 deviations away."""
    x = 1e6 + torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    merged = merged_moments(batch_moments(x[:5000]), batch_moments(x[5000:]))
    assert merged.variance.item() == pytest.approx(x.var(correction=0).item(), rel=1e-6)


def test_moments_of_bytes_are_exact_and_those_of_their_scaled_values() -> None:
    x = torch.randint(
        256, (700, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    x[:, 0, 0] = 255  # constant: its variance is 0, without rounding
    found, expected = batch_moments(x), batch_moments(x.double() / 255.0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert found.variance[0, 0].item() == 0.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("chosen", [0, 1, 40, 333])
def test_moments_of_chosen_samples_are_those_of_their_selection(
    dtype: torch.dtype, chosen: int
) -> None:
    """A GPU masks the others, whatever they hold."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(256, (333, 5), generator=generator).to(dtype)
    valid = torch.randperm(333, generator=generator) < chosen
    if dtype.is_floating_point:
        x[~valid] = torch.nan
    expected = batch_moments(x[valid])
    for found in (batch_moments(x, valid), transforms._masked_moments(x, valid)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_gpus_sums_of_bytes_are_those_of_a_cpu() -> None:
    x = torch.randint(256, (333, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for a, b in zip(transforms._integer_sums(x), transforms._exact_sums(x), strict=True):
        assert (a.dtype, True) == (torch.float64, torch.equal(a, b))


def test_sums_of_the_brightest_bytes_are_exact() -> None:
    """More rows than the number of squares of 255 that fit into 32 bits."""
    count = transforms.ROWS_IN_32_BITS + 1001
    x = torch.full((count, 1), 255, dtype=torch.uint8)
    x[0] = 254
    total, squares = transforms._exact_sums(x)
    assert (255 * count - 1, 255**2 * count - 255**2 + 254**2) == (total.item(), squares.item())
    assert batch_moments(x).variance.item() * 255.0**2 * count == pytest.approx(
        1 - 1 / count, rel=1e-4
    )


def test_images_with_channels_innermost_are_the_same_images() -> None:
    stored = torch.randint(
        256, (3, 5, 4, 6, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    for images in (stored, stored[:, 1:3], stored[0]):
        found = channels_innermost(images)
        assert torch.equal(found, images)
        assert found.movedim(-3, -1).is_contiguous()
        assert channels_innermost(found).data_ptr() == found.data_ptr()
    assert channels_innermost(stored[0]).is_contiguous(memory_format=torch.channels_last)


def test_normalised_values_stay_within_the_clip() -> None:
    found = normalise(
        torch.tensor([3.0, 1000.0, -1000.0]), torch.tensor(1.0), torch.tensor(0.5), 10.0
    )
    assert found.tolist() == [1.0, 10.0, -10.0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "float32"])
def test_rows_of_any_stored_type_can_be_indexed_and_filled(dtype: str) -> None:
    top = min(2**62, torch.iinfo(getattr(torch, dtype)).max) if "int" in dtype else 1000
    values = np.array([[[1], [2], [3]], [[4], [5], [top]]], dtype)
    x, rows, columns = torch.from_numpy(values), torch.tensor([1, 0]), torch.tensor([2, 1])
    assert values[[1, 0], [2, 1]].tolist() == indexed(x, rows, columns).numpy().tolist()
    assert values[:1, [2, 1]].tolist() == indexed(x, slice(1), columns).numpy().tolist()
    where = np.array([[True, False, False], [False, True, False]])
    expected = np.where(where[..., None], np.zeros_like(values), values)
    found = filled(x, torch.from_numpy(where)).numpy()
    assert (expected.dtype, expected.tolist()) == (found.dtype, found.tolist())
