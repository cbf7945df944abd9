"""A run whose learner and actors compute in bfloat16 learns as others do, and its result is like
any other's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_learning import train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_ppo_solves_cartpole_in_bfloat16(tmp_path: Path) -> None:
    result = train(tmp_path, "cartpole_ppo", learner__precision="bf16", actors__precision="bf16")
    assert (True, "target_return") == (result["target_reached"], result["reason"])
    assert 475.0 <= result["evaluation"]["mean_return"]
