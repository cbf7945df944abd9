"""Action distributions: against torch.distributions, exact numbers, and samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions as reference

from tests.support.paths import cases
from tianflow.core.payloads import ActionSpec
from tianflow.ops.distributions import Categorical, DiagonalGaussian, distribution_for
from tianflow.ops.losses import masked_mean

CASES = cases("estimators")
ONE, SEVERAL, BOX = (
    Categorical((4,), scalar=True),
    Categorical((2, 3), scalar=False),
    DiagonalGaussian((2, 2)),
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_categorical_agrees_with_torch_distributions() -> None:
    p, q, action = draw(5, 3, 4), draw(5, 3, 4, seed=1), torch.randint(4, (5, 3))
    expected_p, expected_q = reference.Categorical(logits=p), reference.Categorical(logits=q)
    log_prob, entropy = ONE.evaluate(p, action)
    torch.testing.assert_close(log_prob, expected_p.log_prob(action))
    torch.testing.assert_close(entropy, expected_p.entropy())
    torch.testing.assert_close(ONE.kl(p, q), reference.kl_divergence(expected_p, expected_q))


def test_the_divergence_of_categoricals_has_the_handed_values_per_state_and_on_average() -> None:
    inputs, expected = (CASES["aaps_kl_mean_and_sum_4_envs"][key] for key in ("inputs", "expected"))
    local, central = (
        torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("local_logits", "central_logits")
    )
    found = Categorical((3,), scalar=True).kl(local, central)
    assert expected["kl_per_state"] == pytest.approx(found.tolist(), abs=1e-9)
    assert expected["kl_mean"] == pytest.approx(masked_mean(found, None).item(), abs=1e-9)
    back = Categorical((3,), scalar=True).kl(central, local)
    assert expected["reverse_kl_mean"] == pytest.approx(back.mean().item(), abs=1e-9)


def test_one_policy_diverges_across_states_but_not_on_one_state() -> None:
    inputs, expected = (
        CASES["aaps_kl_same_policy_other_state_is_not_divergence"][key]
        for key in ("inputs", "expected")
    )
    first, second = (
        torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("logits_at_state_t", "logits_at_state_t_plus_1")
    )
    distribution = Categorical((3,), scalar=True)
    assert expected["kl_same_state"] == distribution.kl(first, first).item()
    assert expected["kl_wrong_across_states"] == pytest.approx(
        distribution.kl(first, second).item(), abs=1e-9
    )


def test_the_divergence_of_masked_categoricals_counts_allowed_actions_only() -> None:
    p, q, mask = draw(5, 4), draw(5, 4, seed=1), torch.tensor([True, False, True, True])
    allowed = [reference.Categorical(logits=x[:, mask]) for x in (p, q)]
    found = ONE.kl(ONE.masked(p, mask), ONE.masked(q, mask))
    torch.testing.assert_close(found, reference.kl_divergence(*allowed))


def test_several_choices_are_the_sum_of_their_heads() -> None:
    p, q = draw(6, 5), draw(6, 5, seed=1)
    action = torch.stack([torch.randint(2, (6,)), torch.randint(3, (6,))], -1)
    heads = [
        (reference.Categorical(logits=x[:, :2]), reference.Categorical(logits=x[:, 2:]))
        for x in (p, q)
    ]
    log_prob, entropy = SEVERAL.evaluate(p, action)
    torch.testing.assert_close(
        log_prob, sum(head.log_prob(action[:, k]) for k, head in enumerate(heads[0]))
    )
    torch.testing.assert_close(entropy, sum(head.entropy() for head in heads[0]))
    torch.testing.assert_close(
        SEVERAL.kl(p, q), sum(reference.kl_divergence(*pair) for pair in zip(*heads, strict=True))
    )


def test_a_gaussian_agrees_with_torch_distributions() -> None:
    p, q, action = draw(6, 8), draw(6, 8, seed=1), draw(6, 2, 2, seed=2)
    normal = [reference.Independent(reference.Normal(x[:, :4], x[:, 4:].exp()), 1) for x in (p, q)]
    log_prob, entropy = BOX.evaluate(p, action)
    torch.testing.assert_close(log_prob, normal[0].log_prob(action.reshape(6, 4)))
    torch.testing.assert_close(entropy, normal[0].entropy())
    torch.testing.assert_close(BOX.kl(p, q), reference.kl_divergence(*normal))


def test_a_gaussian_gives_the_handed_log_probability_of_the_unclipped_sample() -> None:
    inputs, expected = (CASES["logprob_gaussian_and_tanh"][key] for key in ("inputs", "expected"))
    parameters = torch.tensor([inputs["mu"], math.log(inputs["std"])], dtype=torch.float64)
    found = (
        DiagonalGaussian((1,))
        .log_prob(parameters, torch.tensor([inputs["pre_tanh_u"]], dtype=torch.float64))
        .item()
    )
    assert expected["log_prob_u"] == pytest.approx(found, abs=1e-9)
    assert found != pytest.approx(
        expected["wrong_log_prob_if_clipped_action_1_0_used_with_u_1_2"], abs=0.1
    )


@pytest.mark.parametrize("distribution", [ONE, SEVERAL, BOX], ids=["one", "several", "box"])
def test_log_prob_alone_and_entropy_alone_equal_both_together(
    distribution: Categorical | DiagonalGaussian,
) -> None:
    parameters = draw(7, distribution.size)
    action = distribution.sample(parameters, distribution.noise((7,), np.random.default_rng(0)))
    log_prob, entropy = distribution.evaluate(parameters, action)
    assert torch.equal(log_prob, distribution.log_prob(parameters, action))
    assert torch.equal(entropy, distribution.entropy(parameters))


def test_gumbel_samples_have_the_probabilities_of_the_logits() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    noise = ONE.noise((200_000,), np.random.default_rng(0))
    counts = torch.bincount(ONE.sample(probabilities.log(), noise), minlength=4)
    torch.testing.assert_close(counts / 200_000, probabilities, atol=0.005, rtol=0.0)


def test_gaussian_samples_have_the_mean_and_deviation_of_the_parameters() -> None:
    distribution = DiagonalGaussian((2,))
    parameters = torch.tensor([1.0, -2.0, math.log(0.5), math.log(3.0)])
    actions = distribution.sample(
        parameters.expand(200_000, 4), distribution.noise((200_000,), np.random.default_rng(0))
    )
    torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -2.0]), atol=0.03, rtol=0.0)
    torch.testing.assert_close(actions.std(0), torch.tensor([0.5, 3.0]), atol=0.03, rtol=0.0)


def test_the_mode_is_the_most_probable_action() -> None:
    assert ONE.mode(torch.tensor([[0.0, 3.0, 1.0, 2.0]])).tolist() == [1]
    assert SEVERAL.mode(torch.tensor([[0.0, 1.0, 5.0, 3.0, 4.0]])).tolist() == [[1, 0]]
    assert DiagonalGaussian((2,)).mode(torch.tensor([[0.5, -0.5, 1.0, 1.0]])).tolist() == [
        [0.5, -0.5]
    ]


def test_stored_actions_have_the_shape_and_dtype_of_the_action_spec() -> None:
    specs = [
        ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(4,), start=(2,)),
        ActionSpec(kind="multi_discrete", shape=(2,), dtype="int64", categories=(2, 3)),
        ActionSpec(kind="box", shape=(2, 2), dtype="float32", low=(-1.0,) * 4, high=(1.0,) * 4),
    ]
    for spec in specs:
        distribution = distribution_for(spec)
        action = distribution.sample(
            draw(5, distribution.size), distribution.noise((5,), np.random.default_rng(0))
        )
        assert (5, *spec.stored_shape) == tuple(action.shape)
        assert spec.stored_dtype == str(action.dtype).removeprefix("torch.")


def test_a_forbidden_action_is_never_taken_and_has_probability_zero() -> None:
    mask = torch.tensor([True, False, True, False]).expand(1000, 4)
    masked = ONE.masked(torch.zeros(1000, 4), mask)
    assert set(ONE.sample(masked, ONE.noise((1000,), np.random.default_rng(0))).tolist()) == {0, 2}
    assert ONE.entropy(masked)[0].item() == pytest.approx(math.log(2))
    assert ONE.log_prob(masked, torch.zeros(1000, dtype=torch.int64))[0].item() == pytest.approx(
        -math.log(2)
    )


def test_masks_keep_gradients_finite_even_when_they_forbid_everything() -> None:
    logits = draw(2, 4).requires_grad_()
    log_prob, entropy = ONE.evaluate(
        ONE.masked(logits, torch.tensor([[True, False, False, False], [False] * 4])),
        torch.tensor([0, 0]),
    )
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_no_mask_and_continuous_actions_keep_parameters_unchanged() -> None:
    parameters = draw(3, 8)
    assert BOX.masked(parameters, torch.zeros(3, 0, dtype=torch.bool)) is parameters
    assert ONE.masked(parameters, None) is parameters


def test_noise_is_finite_float32_and_repeats_with_its_seed() -> None:
    for distribution in (ONE, SEVERAL, BOX):
        noise, again = (distribution.noise((50, 8), np.random.default_rng(3)) for _ in range(2))
        assert (50, 8, distribution.noise_size) == tuple(noise.shape)
        assert noise.dtype == torch.float32
        assert noise.isfinite().all()
        assert torch.equal(noise, again)


@pytest.mark.parametrize(("distribution", "parameters"), [(ONE, 4), (SEVERAL, 5), (BOX, 8)])
def test_log_probs_of_arrays_are_those_of_tensors(
    distribution: Categorical | DiagonalGaussian, parameters: int
) -> None:
    given = 30.0 * draw(7, 5, parameters)
    action = distribution.sample(given, distribution.noise((7, 5), np.random.default_rng(0)))
    found = distribution.log_prob_on_arrays(given.numpy(), action.numpy())
    assert np.float32 == found.dtype
    np.testing.assert_allclose(
        found, distribution.log_prob(given, action).numpy(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("distribution", "parameters", "stored"), [(ONE, 4, ()), (SEVERAL, 5, (2,)), (BOX, 8, (2, 2))]
)
def test_choosing_on_arrays_is_sampling(
    distribution: Categorical | DiagonalGaussian, parameters: int, stored: tuple[int, ...]
) -> None:
    given, noise = draw(50, parameters), distribution.noise((50,), np.random.default_rng(0))
    expected = distribution.sample(given, noise).numpy()
    out = np.full((50, *stored), 9, expected.dtype)
    distribution.choose(given.numpy(), noise.numpy(), out)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert len(np.unique(out)) > 1
