"""Equations of Q-learning, exploration and squashed actors, against handed values and each
other.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from tests.support.paths import DATA
from tianflow.ops.exploration import apex_epsilons, epsilon_noise, scores_of
from tianflow.ops.q_values import (
    double_q_value,
    huber,
    masked_values,
    n_step_target,
    rescaled,
    rows_after,
    sequence_priority,
    taken,
    unrescaled,
    weighted_loss,
)
from tianflow.ops.returns import NStep, n_step
from tianflow.ops.squashed_gaussian import (
    log_slope,
    squashed_kl,
    squashed_log_prob,
    squashed_sample,
)

CASES = {
    case["name"]: case
    for name in ("estimators", "off_policy")
    for case in json.loads((DATA / f"{name}.json").read_text())["cases"]
}


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def same(expected: Tensor, found: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


def test_value_rescaling_gives_the_handed_values() -> None:
    case = CASES["r2d2_value_rescale_eps1e-3"]
    x, epsilon = tensor(case["inputs"]["x"]), case["inputs"]["eps"]
    same(tensor(case["expected"]["h"]), rescaled(x, epsilon), case["tolerance_abs"])
    torch.testing.assert_close(unrescaled(rescaled(x, epsilon), epsilon), x, atol=1e-9, rtol=1e-12)
    torch.testing.assert_close(
        unrescaled(x, epsilon), tensor(case["expected"]["hinv_at_x"]), atol=1e-9, rtol=1e-12
    )


def test_value_rescaling_keeps_its_precision_in_float32() -> None:
    """In its published form, the inverse loses half of its digits near 0."""
    x = torch.cat([-torch.logspace(-6, 6, 200), torch.logspace(-6, 6, 200)])
    torch.testing.assert_close(unrescaled(rescaled(x, 1e-3), 1e-3), x, atol=0.0, rtol=5e-6)
    assert 0.0 == unrescaled(torch.zeros(()), 1e-3).item() == rescaled(torch.zeros(()), 1e-3).item()


def test_a_sequence_has_the_handed_priority() -> None:
    case = CASES["r2d2_sequence_priority_eta0.9"]
    error = tensor(case["inputs"]["td_errors"]).unsqueeze(1)
    every = torch.ones_like(error, dtype=torch.bool)
    for eta, name in (
        (case["inputs"]["eta"], "priority"),
        (1.0, "eta1_is_max"),
        (0.0, "eta0_is_mean"),
    ):
        assert case["expected"][name] == pytest.approx(
            sequence_priority(error, every, eta=eta).item(), abs=1e-9
        )


def test_padding_does_not_influence_a_priority() -> None:
    case = CASES["r2d2_sequence_priority_eta0.9"]
    error = tensor([*case["inputs"]["td_errors"], 7.0, math.nan]).unsqueeze(1)
    learned = torch.tensor([True] * 4 + [False] * 2).unsqueeze(1)
    assert case["expected"]["priority"] == pytest.approx(
        sequence_priority(error, learned, eta=0.9).item(), abs=1e-9
    )
    assert 0.0 == sequence_priority(error, torch.zeros_like(learned), eta=0.9).item()


@pytest.mark.parametrize("terminated", [False, True])
def test_an_initial_priority_of_an_actor_is_the_handed_one(terminated: bool) -> None:
    """From recorded values: the value taken, and the largest value n steps later, which is 0 after
    a termination.
    """
    inputs, expected = (
        CASES["apex_initial_priority_on_actor"][key] for key in ("inputs", "expected")
    )
    r_t = tensor(inputs["rewards"]).unsqueeze(1)
    ended = torch.tensor([False, False, terminated]).unsqueeze(1)
    discount_t = inputs["gamma"] * (~ended).double()
    step = n_step(
        r_t=r_t, discount_t=discount_t, done_t=ended, valid_t=torch.ones_like(ended), n=inputs["n"]
    )
    target = n_step_target(
        NStep(*(rows[0] for rows in step)), tensor(inputs["q_at_t_plus_n"]).max().unsqueeze(0)
    )
    q_taken = inputs["q_at_t"][inputs["action"]]
    priority = expected["priority"] - (inputs["gamma"] ** 3 * 1.2 if terminated else 0.0)
    assert priority == pytest.approx((target - q_taken).abs().item(), abs=1e-9)


def test_apex_epsilons_are_the_handed_ones_for_any_division_among_actors() -> None:
    inputs, expected = (CASES["apex_epsilons_N8"][key] for key in ("inputs", "expected"))
    words = {"epsilon": inputs["eps"], "alpha": inputs["alpha"]}
    found = [apex_epsilons(first, 2, inputs["N"], **words) for first in (0, 2, 4, 6)]
    assert expected["epsilons"] == pytest.approx(np.concatenate(found).tolist(), abs=1e-12)
    assert [inputs["eps"]] == apex_epsilons(0, 1, 1, **words).tolist()
    assert [inputs["eps"]] * 3 == apex_epsilons(0, 3, 3, epsilon=inputs["eps"], alpha=0.0).tolist()
    assert expected["epsilons"][-1] == pytest.approx(
        apex_epsilons(9, 1, inputs["N"], **words).item()
    )


def test_noise_explores_with_probability_epsilon_and_uniformly_among_allowed_actions() -> None:
    generator = np.random.default_rng(0)
    noise = epsilon_noise(20_000, np.array([0.0, 0.25, 1.0]), 4, generator)
    explores = (noise > 0.0).any(-1)
    assert [0.0, 0.25, 1.0] == pytest.approx(explores.double().mean(0).tolist(), abs=0.015)
    q, mask = torch.tensor([3.0, 2.0, 1.0, 9.0]), torch.tensor([True, True, True, False])
    chosen = masked_values(
        scores_of(q.expand(20_000, 3, 4), noise), mask.expand(20_000, 3, 4)
    ).argmax(-1)
    shares = torch.stack([(chosen == action).double().mean(0) for action in range(4)])
    expected = tensor(
        [
            [1.0, 0.75 + 0.25 / 3, 1 / 3],
            [0.0, 0.25 / 3, 1 / 3],
            [0.0, 0.25 / 3, 1 / 3],
            [0.0, 0.0, 0.0],
        ]
    )
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0.0)


def test_a_squashed_action_has_the_handed_log_probability() -> None:
    inputs, expected = (CASES["logprob_gaussian_and_tanh"][key] for key in ("inputs", "expected"))
    mean, log_std, before = (
        tensor([value]) for value in (inputs["mu"], math.log(inputs["std"]), inputs["pre_tanh_u"])
    )
    assert expected["log_prob_action"] == pytest.approx(
        squashed_log_prob(before, mean, log_std).item(), abs=1e-9
    )
    action, log_prob = squashed_sample(mean, log_std, (before - mean) / inputs["std"])
    assert (expected["action"], expected["log_prob_action"]) == pytest.approx(
        (action.item(), log_prob.item()), abs=1e-9
    )


def test_the_density_of_squashed_actions_sums_to_one() -> None:
    before = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64).unsqueeze(1)
    density = squashed_log_prob(before, tensor([0.4]), tensor([-0.3])).exp()
    assert 1.0 == pytest.approx(torch.trapezoid(density, before.tanh().squeeze(1)).item(), abs=1e-6)


def test_the_divergence_of_squashed_gaussians_agrees_with_torch_distributions() -> None:
    p, q = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    squash = [reference.TanhTransform()]
    expected = reference.kl_divergence(
        *(
            reference.TransformedDistribution(
                reference.Independent(reference.Normal(x[:, :3], x[:, 3:].exp()), 1), squash
            )
            for x in (p, q)
        )
    )
    assert expected.min() > 0.1
    torch.testing.assert_close(squashed_kl(p, q), expected)


def test_the_divergence_of_squashed_gaussians_is_that_of_their_densities() -> None:
    """The slope of tanh cancels: an integral over actions in -1..1 gives the closed form."""
    p, q = tensor([0.4, -0.3]), tensor([-0.2, 0.1])
    before = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64).unsqueeze(1)
    log_p, log_q = (squashed_log_prob(before, *x.unsqueeze(-1)) for x in (p, q))
    action = before.tanh().squeeze(1)
    integral = torch.trapezoid(log_p.exp() * (log_p - log_q), action).item()
    assert integral == pytest.approx(squashed_kl(p, q).item(), abs=1e-6)


def test_log_probabilities_are_finite_where_tanh_rounds_to_one() -> None:
    before = torch.tensor([-60.0, -9.5, 9.5, 60.0], requires_grad=True)
    slope = log_slope(before)
    expected = 2.0 * (math.log(2.0) - before.detach().abs())
    torch.testing.assert_close(slope.detach(), expected, atol=1e-5, rtol=1e-6)
    (gradient,) = torch.autograd.grad(slope.sum(), before)
    torch.testing.assert_close(gradient, torch.tensor([2.0, 2.0, -2.0, -2.0]), atol=1e-5, rtol=0.0)


def test_double_q_evaluates_the_action_that_the_other_network_selects() -> None:
    selecting, valuing = tensor([[1.0, 3.0, 2.0]]), tensor([[9.0, 5.0, 7.0]])
    assert 5.0 == double_q_value(selecting, valuing).item()
    assert 7.0 == double_q_value(selecting, valuing, torch.tensor([[True, False, True]])).item()
    assert 9.0 == double_q_value(valuing, valuing).item()


def test_targets_bootstrap_after_a_truncation_and_not_after_a_termination() -> None:
    """Column 0 continues, 1 is truncated after step 1, 2 is terminated there; n is 3, later values
    are 10, 20, 30, 40.
    """
    over = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    terminated = over & torch.tensor([False, False, True])
    valid = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    step = n_step(
        r_t=torch.ones(3, 3),
        discount_t=torch.where(terminated, 0.0, 0.5),
        done_t=over,
        valid_t=valid,
        n=3,
    )
    bootstrap = torch.tensor([0.0, 20.0, 30.0, 40.0]).unsqueeze(1).repeat(1, 3)
    bootstrap[2, 2] = math.nan  # has no influence after a termination
    found = n_step_target(step, rows_after(bootstrap, step.steps_t))
    expected = [
        [1.75 + 40 / 8, 1.5 + 30 / 4, 1.5],
        [1.5 + 40 / 4, 1.0 + 30 / 2, 1.0],
        [1.0 + 40 / 2],
    ]
    assert expected[0] == found[0].tolist()
    assert expected[1] == found[1].tolist()
    assert expected[2] == found[2, :1].tolist()


def test_rescaled_targets_are_targets_of_returns() -> None:
    step = NStep(tensor([2.0, 0.5]), tensor([0.9, 0.0]), torch.tensor([1, 1]))
    returns = tensor([50.0, 70.0])
    expected = rescaled(tensor([2.0 + 0.9 * 50.0, 0.5]), 1e-2)
    same(expected, n_step_target(step, rescaled(returns, 1e-2), rescaling=1e-2))


def test_targets_carry_no_gradient() -> None:
    bootstrap = torch.ones(2, requires_grad=True)
    step = NStep(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not n_step_target(step, bootstrap).requires_grad
    assert not n_step_target(step, bootstrap, rescaling=1e-3).requires_grad


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_huber_is_pytorchs_huber_and_squared_without_a_limit(delta: float) -> None:
    error = torch.linspace(-4.0, 4.0, 33, requires_grad=True)
    expected = torch.nn.functional.huber_loss(error, torch.zeros(33), delta=delta, reduction="none")
    torch.testing.assert_close(huber(error, delta), expected)
    (gradient,) = torch.autograd.grad(huber(error, delta).sum(), error)
    torch.testing.assert_close(gradient, error.detach().clamp(-delta, delta))
    torch.testing.assert_close(huber(error, None), 0.5 * error.square())


def test_a_loss_is_weighted_per_item_and_averaged_over_trained_rows() -> None:
    error = tensor([[1.0, 2.0], [3.0, math.inf]]).requires_grad_()
    learned = torch.tensor([[True, True], [True, False]])
    loss = weighted_loss(error, tensor([1.0, 0.5]), learned, delta=None)
    assert (0.5 + 0.5 * 2.0 + 4.5) / 3 == pytest.approx(loss.item())
    (gradient,) = torch.autograd.grad(
        weighted_loss(error, tensor([1.0, 0.5]), learned, delta=1.0), error
    )
    assert [1 / 3, 0.5 / 3, 1 / 3, 0.0] == pytest.approx(gradient.ravel().tolist())
    assert (
        0.0
        == weighted_loss(error, tensor([1.0, 0.5]), torch.zeros_like(learned), delta=None).item()
    )


def test_taken_picks_the_value_of_each_action() -> None:
    assert [[2.0, 3.0]] == taken(
        tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1, 0]])
    ).tolist()
