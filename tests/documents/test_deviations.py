"""Values on the page of deviations from papers are those of the settings."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tianflow.config.model import BUILT_IN_ALGORITHMS
from tianflow.core.payloads import PRIORITY_EPSILON

PAGE = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
SECTIONS = {part.split(maxsplit=1)[0].lower(): part for part in PAGE.split("\n## ")[1:]}


@pytest.mark.parametrize(
    ("algorithm", "setting", "value", "phrase"),
    [
        ("impala", "max_grad_norm", 0.5, "`algorithm.max_grad_norm` = 0.5"),
        ("impala", "vtrace_lambda", 1.0, "`algorithm.vtrace_lambda` = 1,"),
        ("ppo", "target_kl", None, "`algorithm.target_kl` is checked after each whole pass"),
        ("dqn", "n_step", 3, "three steps, duelling streams, double Q-learning"),
        ("dqn", "duelling", True, "three steps, duelling streams, double Q-learning"),
        ("dqn", "double", True, "three steps, duelling streams, double Q-learning"),
        ("r2d2", "burn_in", 40, "40 trained steps without overlap, after a burn-in of 40"),
        ("r2d2", "unroll", 40, "40 trained steps without overlap, after a burn-in of 40"),
        ("r2d2", "overlap", 0, "40 trained steps without overlap, after a burn-in of 40"),
        ("r2d2", "target_update_updates", 500, "500; `algorithm.target_update_updates`"),
        ("r2d2", "max_grad_norm", 40.0, "norm up to 40"),
        ("sac", "max_grad_norm", 40.0, "norm up to 40 for each network"),
        ("sac", "learning_rate", 3e-4, "one `algorithm.learning_rate`, for the temperature, too"),
        ("td3", "max_grad_norm", 40.0, "norm up to 40"),
        ("td3", "learning_rate", 3e-4, "3 · 10⁻⁴, 256"),
        ("td3", "batch_size", 256, "3 · 10⁻⁴, 256"),
    ],
)
def test_a_value_on_the_page_is_the_default(
    algorithm: str, setting: str, value: object, phrase: str
) -> None:
    assert phrase in SECTIONS[algorithm]
    assert value == BUILT_IN_ALGORITHMS[algorithm].model_fields[setting].default


def test_inputs_exponents_and_epsilon_are_those_of_the_page() -> None:
    r2d2, others = BUILT_IN_ALGORITHMS["r2d2"], set(BUILT_IN_ALGORITHMS) - {"r2d2"}
    assert "exponents of priorities are 0.9 and 0.6" in SECTIONS["r2d2"]
    assert (0.9, 0.6) == r2d2.priority_exponents  # type: ignore[attr-defined]  # of replay
    assert "Previous action and reward are inputs of the LSTM" in SECTIONS["r2d2"]
    assert r2d2.previous_step
    assert "off; `network.previous_step = true`" in SECTIONS["impala"]
    assert not any(BUILT_IN_ALGORITHMS[name].previous_step for name in others)
    assert "10⁻⁶" in PAGE
    assert 1e-6 == PRIORITY_EPSILON


def test_every_algorithm_has_a_section() -> None:
    assert set(BUILT_IN_ALGORITHMS) <= set(SECTIONS)
