"""Losses and batch statistics, against handed values and by their properties."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.paths import cases
from tianflow.ops.losses import (
    approximate_kl,
    decoupled_ppo_loss,
    effective_sample_ratio,
    explained_variance,
    masked_mean,
    normalised,
    policy_gradient_loss,
    ppo_loss,
    value_loss,
)

CASES = cases("estimators")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_losses_are_the_handed_ones() -> None:
    case = CASES["ppo_decoupled_and_appo_losses"]
    clip = case["inputs"]["clip_ppo"]
    for row in case["expected"]["rows"]:
        new, prox, behaviour, advantage = (
            tensor(row[key]) for key in ("pi_new", "pi_prox", "pi_behaviour", "advantage")
        )
        assert row["loss_ppo_vs_behaviour"] == pytest.approx(
            ppo_loss((new / behaviour).log(), advantage, clip=clip).item(), abs=1e-9
        )
        found = decoupled_ppo_loss((new / prox).log(), prox / behaviour, advantage, clip=clip)
        assert row["loss_decoupled"] == pytest.approx(found.item(), abs=1e-9)


def test_decoupled_ppo_is_ppo_when_the_proximal_policy_acted() -> None:
    log_ratio, advantage = torch.randn(
        2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    expected = ppo_loss(log_ratio, advantage, clip=0.2)
    assert torch.equal(
        expected, decoupled_ppo_loss(log_ratio, torch.ones_like(log_ratio), advantage, clip=0.2)
    )


def test_the_first_ppo_gradient_is_the_policy_gradient() -> None:
    log_prob = tensor(-0.3, -1.0, -2.0).requires_grad_()
    advantage = tensor(1.0, -2.0, 0.5)
    (expected,) = torch.autograd.grad(policy_gradient_loss(log_prob, advantage), log_prob)
    (found,) = torch.autograd.grad(
        ppo_loss(log_prob - log_prob.detach(), advantage, clip=0.2), log_prob
    )
    torch.testing.assert_close(found, expected)


def test_a_clipped_sample_has_no_gradient() -> None:
    log_ratio = tensor(math.log(1.3), math.log(0.7), 0.0).requires_grad_()
    ppo_loss(log_ratio, tensor(1.0, -1.0, 1.0), clip=0.2).backward()
    assert log_ratio.grad is not None
    assert [True, True, False] == (log_ratio.grad == 0.0).tolist()


def test_masked_rows_do_not_influence_a_mean() -> None:
    x = tensor(1.0, math.nan, 3.0)
    assert masked_mean(x, torch.tensor([True, False, True])).item() == 2.0


def test_the_mean_of_no_valid_row_is_zero() -> None:
    assert masked_mean(tensor(1.0, 2.0), torch.tensor([False, False])).item() == 0.0


def test_value_loss_is_half_the_mean_squared_error() -> None:
    assert value_loss(tensor(1.0, 2.0), tensor(3.0, 2.0)).item() == 1.0


def test_value_clipping_uses_the_larger_error() -> None:
    found = value_loss(tensor(2.0), tensor(2.0), old_value=tensor(0.0), clip=0.5)
    assert found.item() == pytest.approx(0.5 * 1.5**2)


def test_value_clipping_without_the_old_value_is_refused() -> None:
    with pytest.raises(ValueError, match="old_value"):
        value_loss(tensor(1.0), tensor(1.0), clip=0.1)


def test_normalised_rows_have_mean_zero_and_deviation_one() -> None:
    x, valid = tensor(1.0, 2.0, 6.0, 1e9), torch.tensor([True, True, True, False])
    found = normalised(x, valid)
    assert found[:3].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert found[:3].std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert found[3].item() == 0.0


def test_kl_from_samples_agrees_with_the_exact_one() -> None:
    p, q = tensor(0.2, 0.8), tensor(0.5, 0.5)
    exact = (p * (p / q).log()).sum().item()
    samples = torch.multinomial(
        p, 200_000, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    assert approximate_kl((q.log() - p.log())[samples]).item() == pytest.approx(exact, rel=0.02)


def test_kl_of_equal_policies_is_zero_and_of_extreme_ones_finite() -> None:
    assert approximate_kl(tensor(0.0, 0.0)).item() == 0.0
    assert math.isfinite(approximate_kl(torch.tensor([500.0, -500.0])).item())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1.0, 1.0, 1.0, 1.0), 1.0), ((1.0, 1e-30, 1e-30, 1e-30), 0.25), ((3.0, 1.0), 0.8)],
)
def test_effective_sample_ratio(weights: tuple[float, ...], expected: float) -> None:
    valid = torch.ones(len(weights), dtype=torch.bool)
    assert expected == pytest.approx(effective_sample_ratio(tensor(*weights).log(), valid).item())


def test_effective_sample_ratio_ignores_invalid_rows_and_does_not_overflow() -> None:
    valid = torch.tensor([True, True, False])
    assert effective_sample_ratio(
        torch.tensor([300.0, 300.0, 900.0]), valid
    ).item() == pytest.approx(1.0)
    assert effective_sample_ratio(torch.tensor([1.0]), torch.tensor([False])).item() == 0.0


def test_explained_variance_is_one_for_perfect_and_zero_for_constant_values() -> None:
    target, valid = tensor(1.0, 2.0, 5.0), torch.ones(3, dtype=torch.bool)
    assert explained_variance(target, target, valid).item() == 1.0
    assert explained_variance(tensor(7.0, 7.0, 7.0), target, valid).item() == pytest.approx(0.0)


def test_parts_of_a_batch_add_up_to_its_mean() -> None:
    torch.manual_seed(0)
    x, y, valid = torch.randn(6, 8), torch.randn(6, 8), torch.rand(6, 8) > 0.3
    total, parts = valid.sum(), (slice(0, 3), slice(3, 8))
    for loss in (policy_gradient_loss, value_loss):
        found = sum(loss(x[:, p], y[:, p], valid[:, p], count=total) for p in parts)
        torch.testing.assert_close(found, loss(x, y, valid))


def test_statistics_of_selected_rows_are_those_of_masked_rows() -> None:
    torch.manual_seed(0)
    x, y, valid = torch.randn(6, 8), torch.randn(6, 8), torch.rand(6, 8) > 0.3
    torch.testing.assert_close(approximate_kl(x[valid]), approximate_kl(x, valid))
    torch.testing.assert_close(effective_sample_ratio(x[valid]), effective_sample_ratio(x, valid))
    torch.testing.assert_close(
        explained_variance(x[valid], y[valid]), explained_variance(x, y, valid)
    )
