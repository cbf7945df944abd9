"""Updates as CUDA graphs: what they compute is what is computed without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms import test_off_policy as off_policy
from tests.algorithms import test_on_policy as on_policy
from tests.support.pretended_device import pretended_device
from tianflow.algorithms.common.graphs import WARM_UP, GraphedStep, wants_graphs
from tianflow.config.model import Config
from tianflow.errors import ConfigError
from tianflow.interfaces import LearnerBatch, StepResult

UPDATES, BROKEN = 20, 7
LIVE = [(1e-3, 0.01), (3e-3, 0.0), (1e-4, 0.5)]
"""Learning rates and entropy costs, which change with every update."""


class Repeats:
    """A capture without a GPU: it repeats the call on the memory of the call.

    Attributes:
        made: number of captures.
        replayed: number of repetitions.
    """

    def __init__(self) -> None:
        self.made, self.replayed = 0, 0

    def __call__(
        self, step: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[Callable[[], None], Mapping[str, Tensor]]:
        self.made += 1
        results: dict[str, Tensor] = {}

        def replay() -> None:
            self.replayed += 1
            results.update(step())

        return replay, results


def doubled(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"y": 2 * inputs["x"]}


def test_a_graph_computes_on_a_copy_of_each_input_from_the_third_call_on() -> None:
    capture = Repeats()
    step = GraphedStep(doubled, capture=capture)
    for number in range(5):
        assert step({"x": torch.tensor([float(number)])})["y"].item() == 2.0 * number
    assert (1, 5 - WARM_UP) == (capture.made, capture.replayed)


def test_other_shapes_or_types_get_a_graph_of_their_own() -> None:
    capture = Repeats()
    step = GraphedStep(doubled, capture=capture)
    for inputs in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
        for _ in range(4):
            assert torch.equal(2 * inputs, step({"x": inputs})["y"])
    assert (3, 6) == (capture.made, capture.replayed)


def test_another_key_gets_a_graph_and_the_last_ones_stay() -> None:
    """The key stands for a number that a graph repeats."""
    factor, capture = 1, Repeats()

    def times(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"y": factor * inputs["x"]}

    step = GraphedStep(times, graphs=2, capture=capture)
    for factor in [1, 2] * 4 + [3] * 3 + [2, 1]:
        assert step({"x": torch.ones(1)}, factor)["y"].item() == factor
    assert (3, 6) == (capture.made, capture.replayed)  # the last call of 1 has no graph any more


def refuses(step: Callable[[], Mapping[str, Tensor]]) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing\nand a long explanation")


def test_a_step_that_cannot_be_captured_is_computed_without_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = GraphedStep(doubled, capture=refuses)
    for _ in range(5):
        assert step({"x": torch.ones(1)})["y"].item() == 2.0
    (warning,) = caplog.records
    assert "without a CUDA graph" in warning.getMessage()
    assert warning.error == "RuntimeError: operation not permitted when stream is capturing"  # type: ignore[attr-defined]


def test_a_step_that_cannot_be_captured_is_refused_where_a_graph_is_required() -> None:
    step = GraphedStep(doubled, required=True, capture=refuses)
    for _ in range(WARM_UP):
        step({"x": torch.ones(1)})
    with pytest.raises(
        ConfigError, match=r"learner\.graphs = 'on': .*stream is capturing"
    ) as found:
        step({"x": torch.ones(1)})
    assert "auto, or off" in str(found.value)


def settings_for(algorithm: str, lstm: int, graphs: Any, **changes: Any) -> Config:
    settings = on_policy.config(algorithm, lstm=lstm, normalise=True, **changes)
    learner = settings.learner.model_copy(update={"graphs": graphs})
    return settings.model_copy(update={"learner": learner})


def trained(learner: Any, batches: list[dict[str, Tensor]]) -> list[StepResult]:
    results = []
    for number, arrays in enumerate(batches):
        learner.set_live(*LIVE[number % len(LIVE)])
        given = {name: array.to(learner.device) for name, array in arrays.items()}
        if number == BROKEN:
            given["reward"] = torch.full_like(given["reward"], math.nan)
        results.append(learner.step(LearnerBatch(given)))
    return results


def assert_same(found: list[StepResult], expected: list[StepResult], rel: float = 0.0) -> None:
    assert [result.finite for result in found] == [n != BROKEN for n in range(len(found))]
    for one, other in zip(found, expected, strict=True):
        assert (one.samples, one.finite) == (other.samples, other.finite)
        if one.finite:
            found_here, expected_here = dict(one.statistics), dict(other.statistics)
            if rel >= 1e-2:  # a ratio at the limit may fall on either side of it
                fractions = (each.pop("clip_fraction", 0.0) for each in (found_here, expected_here))
                assert abs(next(fractions) - next(fractions)) < 1.5 / one.samples
            assert found_here == pytest.approx(expected_here, rel=rel, abs=rel)


@pytest.mark.parametrize("algorithm", ["a2c", "impala"])
@pytest.mark.parametrize("lstm", [0, 5])
def test_updates_by_graph_follow_live_settings_and_undo_what_is_not_finite(
    algorithm: str, lstm: int
) -> None:
    """A number that the captured call has fixed would show in the update after it."""
    env = on_policy.spec(mask=True)
    settings = settings_for(algorithm, lstm, "auto", normalise_advantages=True)
    policy, _ = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(UPDATES)]
    make, capture = on_policy.ALGORITHMS[algorithm].make_learner, Repeats()
    with pretended_device() as device:  # on a CPU, statistics are no tensors
        plain, graphed = (make(settings, env, device) for _ in range(2))
        graphed.use_graphs(capture=capture)
        expected, found = trained(plain, batches), trained(graphed, batches)
        states = plain.state_dict(), graphed.state_dict()
    # the update, and the normaliser, which an update that is not finite does not reach
    assert (2, 2 * (UPDATES - WARM_UP) - 1) == (capture.made, capture.replayed)
    assert_same(found, expected)
    on_policy.same_state(*states)


def updated(learner: Any, batches: list[dict[str, Tensor]]) -> list[StepResult]:
    """Updates with live settings that change; one is not finite."""
    results = []
    for number, arrays in enumerate(batches):
        learner.set_live(LIVE[number % len(LIVE)][0], 0.0)
        if number == UPDATES // 2:
            changed = learner.settings.model_copy(update={"discount": 0.5})
            learner.set_settings(changed, learner.updates)
        given = {name: array.to(learner.device) for name, array in arrays.items()}
        if number == BROKEN:
            given["reward"] = torch.full_like(given["reward"], math.nan)
        results.append(learner.step(LearnerBatch(given)))
    return results


@pytest.mark.parametrize(("name", "kinds"), [("dqn", 1), ("sac", 1), ("td3", 2)])
@pytest.mark.parametrize("normalise", [False, True])
def test_updates_of_replay_algorithms_by_graph_are_those_without(
    name: str, kinds: int, normalise: bool
) -> None:
    """TD3's updates are of two kinds. A setting that changes makes other graphs."""
    plain, graphed = (off_policy.made(name, normalise=normalise)[1] for _ in range(2))
    capture = Repeats()
    graphed.use_graphs(capture=capture)
    batches = [off_policy.windows(name, seed=seed) for seed in range(UPDATES)]
    found, expected = updated(graphed, batches), updated(plain, batches)
    assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.priorities, other.priorities)
    off_policy.same_state(plain.state_dict(), graphed.state_dict())
    # gradients before and after the change; optimisers and normaliser, which read no settings
    assert 3 * kinds + normalise == capture.made


def test_a_statistic_that_is_not_a_tensor_prevents_a_graph_of_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph would repeat the number of one update."""
    _, learner = off_policy.made("dqn")
    inner, count = learner.compute_gradients, iter(range(10))

    def compute(arrays: Any) -> Any:
        found = inner(arrays)
        return replace(found, statistics={**found.statistics, "mine": next(count)})

    learner.compute_gradients = compute
    learner.use_graphs(capture=Repeats())
    for number in range(4):
        found = learner.step(LearnerBatch(off_policy.windows("dqn")))
        assert number == found.statistics["mine"]
    (warning,) = caplog.records
    assert warning.error == "its result statistics/mine is not a tensor"  # type: ignore[attr-defined]


def test_batches_with_final_observations_are_trained_on_without_a_graph() -> None:
    """How many there are differs from batch to batch."""
    env, settings = on_policy.spec(autoreset="same_step"), settings_for("impala", 0, "auto")
    policy, learner = on_policy.pair(settings, env)
    capture = Repeats()
    learner.graphed = GraphedStep(learner.step_on, capture=capture)
    for seed in range(4):
        assert learner.step(LearnerBatch(on_policy.rollout(policy, env, seed=seed))).finite
    assert capture.made == 0


def test_a_stopped_update_changes_nothing() -> None:
    env, settings = on_policy.spec(), settings_for("impala", 0, "auto")
    policy, learner = on_policy.pair(settings, env)
    learner.use_graphs(capture=Repeats())
    before = learner.state_dict()
    asked = iter([False, True])
    batch = LearnerBatch(on_policy.rollout(policy, env))
    assert learner.step(batch, lambda: next(asked)).samples == 0
    on_policy.same_state(before, learner.state_dict())


@pytest.mark.parametrize(
    ("graphs", "network", "wanted"),
    [
        ("auto", "mlp", True),
        ("auto", "my_network:Network", False),
        ("on", "my_network:Network", True),
        ("off", "mlp", False),
    ],
)
def test_networks_of_plug_ins_get_graphs_only_if_asked(
    graphs: str, network: str, wanted: bool
) -> None:
    settings = settings_for("impala", 0, graphs)
    section = settings.network.model_copy(update={"name": network})
    assert wanted == wants_graphs(settings.model_copy(update={"network": section}))


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["a2c", "impala"])
@pytest.mark.parametrize(
    ("network", "lstm", "precision", "rel"),
    [
        ("mlp", 0, "fp32", 0.0),
        ("mlp", 5, "fp32", 0.0),
        ("mlp", 0, "bf16", 0.0),
        ("nature_cnn", 0, "fp32", 1e-3),  # cuDNN adds up in an order of its own
        ("nature_cnn", 0, "tf32", 1e-2),
    ],
)
def test_updates_with_and_without_graphs_are_equal_on_a_gpu(
    algorithm: str, network: str, lstm: int, precision: Any, rel: float
) -> None:
    leaf = on_policy.LEAF if network == "mlp" else on_policy.IMAGE
    env = on_policy.spec(on_policy.DISCRETE, leaf, mask=True)
    learners = {}
    for graphs in ("on", "off"):
        settings = settings_for(algorithm, lstm, graphs, network=network)
        section = settings.learner.model_copy(update={"precision": precision})
        settings = settings.model_copy(update={"learner": section})
        factory = on_policy.ALGORITHMS[algorithm]
        learners[graphs] = factory.make_learner(settings, env, torch.device("cuda"))
    policy, _ = on_policy.pair(settings, env)
    batches = [on_policy.rollout(policy, env, seed=seed) for seed in range(UPDATES)]
    found, expected = (trained(learners[graphs], batches) for graphs in ("on", "off"))
    assert_same(found, expected, rel)
    buffers = [learners[graphs].model.buffer.parameters for graphs in ("on", "off")]
    torch.testing.assert_close(*buffers, rtol=rel, atol=rel)
    resumed = on_policy.ALGORITHMS[algorithm].make_learner(settings, env, torch.device("cpu"))
    resumed.load_state_dict(learners["on"].state_dict())
    on_policy.same_state(learners["on"].state_dict(), resumed.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_updates_of_replay_algorithms_with_and_without_graphs_are_equal_on_a_gpu(
    name: str, precision: Any
) -> None:
    cuda = torch.device("cuda")
    plain, graphed = (
        off_policy.made(name, normalise=True, device=cuda, precision=precision, graphs=graphs)[1]
        for graphs in ("off", "on")
    )
    batches = [off_policy.windows(name, seed=seed) for seed in range(UPDATES)]
    assert_same(updated(graphed, batches), updated(plain, batches))
    off_policy.same_state(plain.state_dict(), graphed.state_dict())
    _, resumed = off_policy.made(name, normalise=True)
    resumed.load_state_dict(graphed.state_dict())
    off_policy.same_state(graphed.state_dict(), resumed.state_dict())
