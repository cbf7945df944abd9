"""Statistics that a subclass adds to those of an update: numbers are recorded, whatever their type,
and nothing else fails the update.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tests.algorithms.test_ranks import part, together
from tests.support.pretended_device import pretended_device
from tianflow.algorithms.common.scalars import as_numbers
from tianflow.core.learning import LearningTally
from tianflow.interfaces import LearnerBatch

CPU = torch.device("cpu")
NUMBERS: dict[str, Any] = {
    "float": 2.0,
    "int": 3,
    "numpy": np.float64(4.0),
    "array": np.array([5]),
    "tensor": torch.tensor(6),
    "one_element": torch.ones(1, 1, dtype=torch.float64) * 7,
    "needs_gradient": torch.tensor(8.0, requires_grad=True),
    "yes": torch.tensor(True),
    "not_finite": math.nan,
    "tensor_not_finite": torch.tensor(math.inf),
}
OTHERS: dict[str, Any] = {
    "vector": torch.ones(3),
    "empty": torch.ones(0),
    "complex": torch.tensor(1j),
    "text": "9",
    "nothing": None,
}
VALUES = {
    **dict(zip(NUMBERS, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0], strict=False)),
    "not_finite": math.nan,
    "tensor_not_finite": math.inf,
}


def on(name: str) -> tuple[Any, Any]:
    """A learner of an on-policy algorithm that reports more, and a batch."""
    env, settings = on_policy.spec(), on_policy.config(name)
    policy, learner = on_policy.pair(settings, env)
    inner = learner.update
    learner.update = lambda *given: {**inner(*given), **NUMBERS, **OTHERS}
    return learner, on_policy.rollout(policy, env, seed=1)


def off(name: str) -> tuple[Any, Any]:
    """A learner of an off-policy algorithm that reports more, and a batch."""
    learner = off_policy.made(name)[1]
    inner = learner.compute_gradients

    def compute(arrays: Any) -> Any:
        found = inner(arrays)
        return dataclasses.replace(found, statistics={**found.statistics, **NUMBERS, **OTHERS})

    learner.compute_gradients = compute
    return learner, off_policy.windows(name, seed=1)


def accepted(statistics: Any) -> dict[str, float]:
    """What is recorded of ``statistics``, of those that were added; the others are refused."""
    tally = LearningTally(group="train", source="test")
    found = tally.accept(statistics)
    assert len(OTHERS) == tally.refused
    return {name: value for name, value in found.items() if name in NUMBERS}


@pytest.mark.parametrize(
    ("make", "name"), [(on, "ppo"), (on, "impala"), (off, "dqn"), (off, "sac"), (off, "td3")]
)
def test_numbers_of_a_subclass_are_recorded_and_others_fail_no_update(make: Any, name: str) -> None:
    learner, arrays = make(name)
    before = learner.flat().tobytes()
    found = learner.step(LearnerBatch(arrays))
    assert found.finite
    assert found.samples > 0
    assert before != learner.flat().tobytes()
    assert accepted(found.statistics) == pytest.approx(VALUES, nan_ok=True)
    assert math.isfinite(found.statistics["loss"])


@pytest.mark.parametrize("make", [on, off])
def test_ranks_report_them_too(make: Any, tmp_path: Path) -> None:
    name = "a2c" if make is on else "dqn"
    learners, (_, arrays) = [make(name)[0] for _ in range(2)], make(name)

    def work(ranks: Any) -> Any:
        learner = learners[ranks.rank]
        ranks.copy_state(learner)
        learner.join(ranks)
        return learner.step(LearnerBatch(part(arrays, ranks)))

    for found in together(tmp_path, 2, work):
        assert found.finite
        assert accepted(found.statistics) == pytest.approx(VALUES, nan_ok=True)


def test_tensors_of_the_device_and_of_the_cpu_are_read() -> None:
    with pretended_device() as device:
        given = {"there": torch.tensor([1.0]).to(device)[0], "here": torch.tensor(2.0), "n": 3}
        assert {"there": 1.0, "here": 2.0, "n": 3} == as_numbers(given, device)
