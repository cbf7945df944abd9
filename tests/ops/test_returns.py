"""Returns and advantages, against handed values, each other, and across ends of episodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.paths import cases
from tests.support.pretended_device import pretended_device
from tianflow.ops.returns import actor_critic_returns, gae, n_step, vtrace

CASES = cases("estimators")
LIMITS = ("rho_bar", "c_bar", "pg_rho_bar")


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flags(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def transitions(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """A handed case as the arguments of an estimator."""
    r_t, v_t = tensor(inputs["rewards"]), tensor(inputs["values"])
    terminated = flags(inputs["terminated"])
    truncated = flags(inputs.get("truncated", [False] * len(r_t)))
    v_tp1 = (
        tensor(inputs["next_values"])
        if "next_values" in inputs
        else torch.cat([v_t[1:], tensor([inputs["bootstrap_value"]])])
    )
    return {
        "r_t": r_t,
        "discount_t": inputs["gamma"] * (~terminated).double(),
        "v_t": v_t,
        "v_tp1": v_tp1,
        "done_t": terminated | truncated,
        "valid_t": torch.ones_like(terminated),
    }


def random_transitions(
    steps: int = 12, columns: int = 7, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    r_t, v_t, v_tp1 = torch.randn(3, steps, columns, generator=generator, dtype=dtype)
    terminated = torch.rand(steps, columns, generator=generator) < 0.15
    truncated = torch.rand(steps, columns, generator=generator) < 0.15
    return {
        "r_t": r_t,
        "discount_t": 0.9 * (~terminated).to(dtype),
        "v_t": v_t,
        "v_tp1": v_tp1,
        "done_t": terminated | truncated,
        "valid_t": torch.rand(steps, columns, generator=generator) < 0.85,
    }


def same(expected: Tensor, found: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in CASES.items()
        if case["group"] == "vtrace" and "values" in case["inputs"]
    ],
)
def test_vtrace_gives_the_handed_values(name: str) -> None:
    case = CASES[name]
    limits = {key: float(case["inputs"].get(key, 1.0)) for key in (*LIMITS, "lambda_")}
    found = vtrace(
        **transitions(case["inputs"]), log_rho_t=tensor(case["inputs"]["rho"]).log(), **limits
    )
    same(tensor(case["expected"]["vs"]), found.target_t, case["tolerance_abs"])
    same(tensor(case["expected"]["pg_advantages"]), found.advantage_t, case["tolerance_abs"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_vtrace_gives_the_values_of_deepminds_unit_test(
    dtype: torch.dtype, tolerance: float
) -> None:
    inputs, expected = (
        CASES["vtrace_deepmind_test_inputs_B1"][key] for key in ("inputs", "expected")
    )
    v_t = tensor(inputs["values_TB"]).to(dtype)
    found = vtrace(
        log_rho_t=tensor(inputs["log_rho_TB"]).to(dtype),
        r_t=tensor(inputs["rewards_TB"]).to(dtype),
        discount_t=tensor(inputs["discounts_TB"]).to(dtype),
        v_t=v_t,
        v_tp1=torch.cat([v_t[1:], tensor([inputs["bootstrap_value_B"]]).to(dtype)]),
        done_t=torch.zeros(v_t.shape, dtype=torch.bool),
        valid_t=torch.ones(v_t.shape, dtype=torch.bool),
        **{key: inputs[key] for key in LIMITS},
    )
    same(tensor(expected["vs_TB"]), found.target_t.double(), tolerance)
    same(tensor(expected["pg_advantages_TB"]), found.advantage_t.double(), tolerance)


def test_the_seed_rl_variant_differs_and_is_not_used() -> None:
    inputs, expected = (
        CASES["vtrace_seed_policy_gradient_variant_T4"][key] for key in ("inputs", "expected")
    )
    given = inputs | {
        "values": inputs["values_T_plus_1"][:-1],
        "bootstrap_value": inputs["values_T_plus_1"][-1],
    }
    found = vtrace(
        **transitions(given), log_rho_t=tensor(inputs["rho"]).log(), lambda_=inputs["lambda_"]
    )
    assert not torch.allclose(found.advantage_t, tensor(expected["advantages"]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["group"] == "gae"])
def test_gae_gives_the_handed_values(name: str) -> None:
    case = CASES[name]
    found = gae(**transitions(case["inputs"]), lambda_=case["inputs"]["lambda_"])
    same(tensor(case["expected"]["advantages"]), found.advantage_t, case["tolerance_abs"])
    same(tensor(case["expected"]["returns"]), found.target_t, case["tolerance_abs"])
    for wrong in (key for key in case["expected"] if key.startswith("wrong")):
        assert not torch.allclose(found.advantage_t, tensor(case["expected"][wrong]))


@pytest.mark.parametrize("name", ["nstep_no_end", "nstep_terminated_at_2"])
def test_n_step_gives_the_handed_values(name: str) -> None:
    inputs, rows = CASES[name]["inputs"], CASES[name]["expected"]["rows"]
    terminated, truncated = flags(inputs["terminated"]), flags(inputs["truncated"])
    found = n_step(
        r_t=tensor(inputs["rewards"]),
        discount_t=inputs["gamma"] * (~terminated).double(),
        done_t=terminated | truncated,
        valid_t=torch.ones_like(terminated),
        n=inputs["n"],
    )
    same(tensor([row["n_step_reward"] for row in rows]), found.reward_t)
    same(tensor([row["discount"] for row in rows]), found.discount_t)
    assert [row["steps"] for row in rows] == found.steps_t.tolist()
    assert [row["bootstrap_from_obs_after_step"] for row in rows] == [
        row["t"] + m - 1 for row, m in zip(rows, found.steps_t, strict=True)
    ]


@pytest.mark.parametrize(
    ("ending", "terminal"), [("returns_nonterminal", False), ("returns_terminal", True)]
)
def test_actor_critic_returns_give_the_handed_a3c_values(ending: str, terminal: bool) -> None:
    case = CASES["a3c_tmax5_returns"]
    given = case["inputs"] | {
        "values": [0.3, -1.0, 2.0, 0.7, 5.0],
        "terminated": [False] * 4 + [terminal],
    }
    same(tensor(case["expected"][ending]), actor_critic_returns(**transitions(given)).target_t)


def test_an_n_step_target_over_the_whole_fragment_is_the_actor_critic_return() -> None:
    given = random_transitions(seed=1)
    expected = actor_critic_returns(**given).target_t
    steps = n_step(**{key: given[key] for key in ("r_t", "discount_t", "done_t", "valid_t")}, n=12)
    last = torch.arange(12)[:, None] + (steps.steps_t - 1).clamp(min=0)
    target = steps.reward_t + steps.discount_t * given["v_tp1"].gather(0, last)
    same(expected[given["valid_t"]], target[given["valid_t"]])


def test_n_step_does_not_cross_a_truncation_and_keeps_its_discount() -> None:
    done = flags([False, True, False])
    found = n_step(
        r_t=tensor([1.0, 2.0, 100.0]),
        discount_t=tensor([0.9] * 3),
        done_t=done,
        valid_t=torch.ones_like(done),
        n=3,
    )
    same(tensor([2.8, 2.0, 100.0]), found.reward_t)
    same(tensor([0.81, 0.9, 0.9]), found.discount_t)


def test_n_step_refuses_zero_steps() -> None:
    given = {key: random_transitions()[key] for key in ("r_t", "discount_t", "done_t", "valid_t")}
    with pytest.raises(ValueError, match="at least one"):
        n_step(**given, n=0)


@pytest.mark.parametrize("lambda_", [1.0, 0.6])
def test_on_policy_vtrace_is_gae(lambda_: float) -> None:
    given = random_transitions(seed=2)
    expected = gae(**given, lambda_=lambda_).target_t
    same(
        expected,
        vtrace(**given, log_rho_t=torch.zeros_like(given["r_t"]), lambda_=lambda_).target_t,
    )


def test_on_policy_vtrace_advantage_is_target_minus_value() -> None:
    given = random_transitions(seed=3) | {"valid_t": torch.ones(12, 7, dtype=torch.bool)}
    given["v_tp1"] = torch.where(
        given["done_t"], given["v_tp1"], torch.cat([given["v_t"][1:], given["v_tp1"][-1:]])
    )
    found = vtrace(**given, log_rho_t=torch.zeros_like(given["r_t"]))
    same(found.target_t - given["v_t"], found.advantage_t)


def test_lambda_one_telescopes_with_a_bootstrap_value_that_is_not_zero() -> None:
    gamma, r_t, v_t, v_last = 0.9, tensor([1.0, -2.0, 0.5]), tensor([3.0, 4.0, 5.0]), 7.0
    given = transitions(
        {
            "gamma": gamma,
            "rewards": r_t.tolist(),
            "values": v_t.tolist(),
            "bootstrap_value": v_last,
            "terminated": [False] * 3,
        }
    )
    expected = sum(gamma**k * r_t[k] for k in range(3)) + gamma**3 * v_last - v_t[0]
    same(torch.as_tensor(expected), gae(**given, lambda_=1.0).advantage_t[0])


def test_exact_values_of_a_deterministic_chain_are_a_fixed_point_for_any_ratio() -> None:
    gamma, r_t = 0.9, torch.arange(1.0, 6.0, dtype=torch.float64)
    values = [0.0]
    for reward in reversed(r_t.tolist()):
        values.insert(0, reward + gamma * values[0])
    given = transitions(
        {
            "gamma": gamma,
            "rewards": r_t.tolist(),
            "values": values[:-1],
            "bootstrap_value": 0.0,
            "terminated": [False] * 5,
        }
    )
    found = vtrace(**given, log_rho_t=tensor([-1.0, 2.0, 0.3, -0.2, 5.0]))
    same(given["v_t"], found.target_t)
    same(torch.zeros(5, dtype=torch.float64), found.advantage_t)


def test_ratios_above_every_limit_have_no_further_effect() -> None:
    given = random_transitions(seed=4)
    low, high = (
        vtrace(**given, log_rho_t=torch.full_like(given["r_t"], value)) for value in (0.1, 3.0)
    )
    same(low.target_t, high.target_t)
    same(low.advantage_t, high.advantage_t)


@pytest.mark.parametrize("log_rho", [200.0, -200.0])
def test_extreme_ratios_give_finite_float32_results(log_rho: float) -> None:
    given = random_transitions(dtype=torch.float32)
    found = vtrace(**given, log_rho_t=torch.full_like(given["r_t"], log_rho))
    assert found.target_t.isfinite().all()
    assert found.advantage_t.isfinite().all()


@pytest.mark.parametrize("rho_bar", [1.0, 1.5, math.inf])
@pytest.mark.parametrize("c_bar", [0.2, 0.7, 1.0])
def test_the_ratio_limit_sets_the_fixed_point_and_the_trace_limit_does_not(
    rho_bar: float, c_bar: float
) -> None:
    """One state, three actions: the expected target is V where V is the value of pi_rho,
    proportional to min(rho_bar * mu, pi).
    """
    gamma, steps = 0.9, 3
    mu, pi, reward = tensor([0.6, 0.3, 0.1]), tensor([0.1, 0.3, 0.6]), tensor([1.0, 0.0, 5.0])
    limited = torch.minimum(rho_bar * mu, pi) if math.isfinite(rho_bar) else pi
    value = (limited / limited.sum() * reward).sum() / (1 - gamma)
    action = torch.cartesian_prod(*[torch.arange(3)] * steps).T
    v_t = value.expand(action.shape)
    found = vtrace(
        r_t=reward[action],
        discount_t=torch.full_like(v_t, gamma),
        v_t=v_t,
        v_tp1=v_t,
        done_t=torch.zeros_like(action, dtype=torch.bool),
        valid_t=torch.ones_like(action, dtype=torch.bool),
        log_rho_t=(pi / mu).log()[action],
        rho_bar=rho_bar,
        c_bar=c_bar,
    )
    same(value, (mu[action].prod(0) * found.target_t[0]).sum())


def test_an_infinite_limit_is_no_limit() -> None:
    given = random_transitions(seed=5)
    found = vtrace(
        **given, log_rho_t=torch.full_like(given["r_t"], 3.0), rho_bar=math.inf, pg_rho_bar=1.0
    )
    last = given["valid_t"][-1]
    td_error = given["r_t"] + given["discount_t"] * given["v_tp1"] - given["v_t"]
    same((math.exp(3.0) * td_error)[-1][last], (found.target_t - given["v_t"])[-1][last])


def test_vtrace_refuses_a_trace_limit_above_the_ratio_limit() -> None:
    given = random_transitions()
    with pytest.raises(ValueError, match="c_bar = 2"):
        vtrace(**given, log_rho_t=given["r_t"], c_bar=2.0)


ESTIMATORS = {
    "gae": lambda given: gae(**given, lambda_=0.95),
    "returns": lambda given: actor_critic_returns(**given),
    "vtrace": lambda given: vtrace(**given, log_rho_t=torch.full_like(given["r_t"], -0.3)),
}


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
class TestEveryEstimator:
    def test_keeps_episodes_apart(self, estimator: Any) -> None:
        """Concatenated episodes give the concatenated results of each alone, truncated ones too."""
        given = random_transitions(steps=10, seed=6) | {
            "valid_t": torch.ones(10, 7, dtype=torch.bool)
        }
        given["done_t"][4] = True
        whole = estimator(given)
        parts = [
            estimator({key: value[rows] for key, value in given.items()})
            for rows in (slice(0, 5), slice(5, 10))
        ]
        same(torch.cat([part.advantage_t for part in parts]), whole.advantage_t)
        same(torch.cat([part.target_t for part in parts]), whole.target_t)

    def test_ignores_invalid_rows(self, estimator: Any) -> None:
        given = random_transitions(seed=7)
        expected = estimator(given)
        poisoned = {
            key: torch.where(given["valid_t"], value, 1e6)
            for key, value in given.items()
            if value.dtype == torch.float64
        }
        found = estimator(given | poisoned)
        same(expected.advantage_t, found.advantage_t)
        same(expected.target_t[given["valid_t"]], found.target_t[given["valid_t"]])
        assert not expected.advantage_t[~given["valid_t"]].any()

    def test_skipping_reset_rows_equals_their_absence(self, estimator: Any) -> None:
        """Rows of NEXT_STEP autoreset with the reset step, against those of SAME_STEP."""
        given = random_transitions(steps=6, columns=1, seed=8) | {
            "valid_t": torch.ones(6, 1, dtype=torch.bool)
        }
        given["done_t"][2] = True
        keep = torch.tensor([0, 1, 2, 2, 3, 4, 5])
        with_reset = {key: value[keep] for key, value in given.items()}
        with_reset["valid_t"][3] = False
        with_reset["done_t"][3] = False
        rows = torch.tensor([0, 1, 2, 4, 5, 6])
        same(estimator(given).advantage_t, estimator(with_reset).advantage_t[rows])

    def test_a_cut_fragment_bootstraps_after_its_last_row(self, estimator: Any) -> None:
        given = random_transitions(steps=8, seed=9) | {
            "valid_t": torch.ones(8, 7, dtype=torch.bool)
        }
        given["valid_t"][5:] = False
        short = estimator({key: value[:5] for key, value in given.items()})
        same(short.advantage_t, estimator(given).advantage_t[:5])

    def test_carries_no_gradient(self, estimator: Any) -> None:
        given = random_transitions()
        given["v_t"].requires_grad_()
        given["v_tp1"].requires_grad_()
        assert not any(result.requires_grad for result in estimator(given))

    def test_refuses_shapes_that_differ(self, estimator: Any) -> None:
        given = random_transitions()
        with pytest.raises(ValueError, match=r"v_t \(11, 7\)"):
            estimator(given | {"v_t": given["v_t"][1:]})

    def test_values_of_one_state_converge_to_the_truth(self, estimator: Any) -> None:
        """One state, reward 1: a truncation does not end it, so V tends to 1 / (1 - gamma); a
        termination after 5 steps ends it.
        """
        gamma, value = 0.9, torch.zeros(())
        for _ in range(200):
            v_t = value.expand(5, 1).clone()
            done = torch.zeros(5, 1, dtype=torch.bool)
            done[-1] = True
            given = {
                "r_t": torch.ones(5, 1),
                "discount_t": torch.full((5, 1), gamma),
                "v_t": v_t,
                "v_tp1": v_t.clone(),
                "done_t": done,
            }
            value = value + 0.5 * (
                estimator(given | {"valid_t": torch.ones_like(done)}).target_t.mean() - value
            )
        assert value.item() == pytest.approx(10.0, rel=1e-4)
        given["discount_t"][-1] = 0.0
        v_t = torch.tensor([[sum(gamma**k for k in range(5 - t))] for t in range(5)])
        given |= {
            "v_t": v_t,
            "v_tp1": torch.cat([v_t[1:], v_t[:1]]),
            "valid_t": torch.ones_like(done),
        }
        same(v_t, estimator(given).target_t, 1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 33])
def test_another_device_sums_the_same_rows(steps: int) -> None:
    """It does not add one row after the other."""
    given = random_transitions(steps)
    expected = [estimate(**given) for estimate in (actor_critic_returns, every_row)]
    with pretended_device() as device:
        there = {name: value.to(device) for name, value in given.items()}
        found = [estimate(**there) for estimate in (actor_critic_returns, every_row)]
        for one, other in zip(found, expected, strict=True):
            same(other.advantage_t, one.advantage_t.cpu())
            same(other.target_t, one.target_t.cpu())


def every_row(**given: Tensor) -> Any:
    """Advantages to which every later row contributes."""
    return gae(**{**given, "done_t": torch.zeros_like(given["done_t"])}, lambda_=0.97)


@pytest.mark.gpu
def test_a_cuda_device_gives_what_the_cpu_gives() -> None:
    given = random_transitions()
    expected = vtrace(**given, log_rho_t=given["r_t"])
    found = vtrace(
        **{key: value.cuda() for key, value in given.items()}, log_rho_t=given["r_t"].cuda()
    )
    same(expected.target_t, found.target_t.cpu())
