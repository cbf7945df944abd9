"""At staleness 0 actors and learner agree; a network that breaks this is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.algorithms.test_on_policy import (
    ALGORITHMS,
    BOX,
    CPU,
    DISCRETE,
    IMAGE,
    SEVERAL,
    config,
    rollout,
    spec,
)
from tests.support.effort import grid
from tianflow.algorithms.common.actor_critic import ActorCriticLearner
from tianflow.components import agreement as agreement_module
from tianflow.components.agreement import PolicyAgreement
from tianflow.config.model import (
    ActorSettings,
    Config,
    InferenceSettings,
    LearnerSettings,
    NetworkSettings,
    Precision,
)
from tianflow.core.payloads import Batch, EnvironmentSpec, Trajectory, Version
from tianflow.interfaces import LearnerBatch, StepResult
from tianflow.networks import Network, Output

NOW = Version(1, 7)
DIFFER = "actors and learner compute different policies from the same weights"


class Plain(Network):
    """One layer of policy and value. Faults derive from it."""

    def __init__(self, settings: NetworkSettings, env: EnvironmentSpec) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        x = self.features(observation[""])
        return Output(self.policy(x), self.value(x).squeeze(-1), {})


class Module(Plain):
    """Dropout as a module, which evaluation mode switches off."""

    def __init__(self, settings: NetworkSettings, env: EnvironmentSpec) -> None:
        super().__init__(settings, env)
        self.dropout = nn.Dropout(0.5)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(super().features(x))
        return out


class Dropping(Plain):
    """Dropout as a function, which is always active."""

    def features(self, x: Tensor) -> Tensor:
        return functional.dropout(super().features(x), 0.5)


class Normed(Plain):
    """Batch normalisation without running statistics."""

    def __init__(self, settings: NetworkSettings, env: EnvironmentSpec) -> None:
        super().__init__(settings, env)
        self.norm = nn.BatchNorm1d(5, track_running_stats=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.norm(x.flatten(0, 1)).view(x.shape))


class Centred(Plain):
    """A batch normalisation by hand."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x - x.mean((0, 1)))


class Sharper(Plain):
    """An actor with another policy than the learner's."""

    def act(self, observation: Any, state: Any) -> tuple[Tensor, Any]:
        parameters, after = super().act(observation, state)
        return parameters * 2.0, after


class Remembering(Plain):
    """A recurrent cell that gets the state of the episode before, and no act."""

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:
        return {"h": (16,)}

    def __init__(self, settings: NetworkSettings, env: EnvironmentSpec) -> None:
        super().__init__(settings, env)
        self.cell = nn.GRUCell(16, 16)

    def before(self, h: Tensor, begins: Tensor) -> Tensor:
        """The state before a row."""
        return h

    def forward(self, observation: Any, state: Any, start: Tensor) -> Output:
        x, h, after = self.features(observation[""]), state["h"], []
        for t, begins in enumerate(start):
            h = self.cell(x[t], self.before(h, begins))
            after.append(h)
        hs = torch.stack(after)
        return Output(self.policy(hs), self.value(hs).squeeze(-1), {"h": hs})


class Forgetting(Remembering):
    """The same with a state of zeros where an episode begins."""

    def before(self, h: Tensor, begins: Tensor) -> Tensor:
        return h.masked_fill(begins.unsqueeze(-1), 0.0)


class Reversed(Plain):
    """Rows of a sequence in another order, and no act."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.flip(0))


def checked(
    settings: Config,
    env: EnvironmentSpec,
    *,
    acting: str = "fp32",
    central: bool = False,
    version: Version = NOW,
    agreement: PolicyAgreement | None = None,
) -> PolicyAgreement:
    """An agreement after the first update with a trajectory of ``version``."""
    factory: Any = ALGORITHMS[settings.algorithm.name]
    learner, policy = factory.make_learner(settings, env, CPU), factory.make_policy(settings, env)
    policy.load(learner.flat())
    if acting == "bf16":
        policy.act_in_bfloat16()
        bf16: dict[str, Any] = (
            {
                "actors": ActorSettings(inference="central"),
                "inference": InferenceSettings(precision="bf16"),
            }
            if central
            else {"actors": ActorSettings(precision="bf16")}
        )
        settings = settings.model_copy(update=bf16)
    arrays = LearnerBatch(rollout(policy, env))
    agreement = agreement or PolicyAgreement()
    agreement.check(
        config=settings,
        algorithm=learner,
        version=NOW,
        batch=Batch(NOW, (Trajectory(0, 0, 6, 48, version),)),
        arrays=arrays,
        result=learner.step(arrays),
    )
    return agreement


def own(network: str, algorithm: str = "ppo") -> Config:
    found = config(algorithm)
    name = NetworkSettings(name=f"{__name__}:{network}")
    return found.model_copy(update={"network": name})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("network", "cause"),
    [
        ("Dropping", "functional.dropout is active unless it gets training=self.training"),
        ("Normed", r"batch normalisation \(norm\) uses the statistics of the batch"),
        ("Centred", "an output of the network depends on other rows of the batch"),
        (
            "Remembering",
            "does not set its recurrent state to zero before a row where start is true",
        ),
        ("Sharper", "the network's act computes another policy than its forward"),
        ("Reversed", "another policy for several rows than for one row after another"),
    ],
)
def test_a_network_with_which_the_policies_differ_is_a_warning_with_the_likely_cause(
    algorithm: str, network: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    agreement = checked(own(network, algorithm), spec())
    (record,) = [r for r in caplog.records if r.getMessage() == DIFFER]
    told = vars(record)
    assert agreement.newest is not None
    assert agreement.newest > 10 * told["tolerance"]
    assert pytest.approx(agreement.newest, abs=1e-6) == told["largest_log_ratio"]
    assert re.search(cause, told["likely_cause"])


@pytest.mark.parametrize("network", ["Plain", "Module", "Forgetting"])
def test_a_plug_in_network_that_is_right_causes_no_warning(
    network: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = checked(own(network), spec()).newest
    assert newest is not None
    assert newest < 1e-5
    assert DIFFER not in caplog.text


@grid(
    precisions=[("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")],
    place=[
        ("mlp", spec(DISCRETE, mask=True)),
        ("mlp", spec(SEVERAL)),
        ("mlp", spec(BOX)),
        ("nature_cnn", spec(DISCRETE, IMAGE)),
    ],
    lstm=[0, 5],
    algorithm=list(ALGORITHMS),
)
def test_built_in_networks_agree_in_every_precision(
    *,
    precisions: tuple[Any, str],
    place: tuple[str, EnvironmentSpec],
    lstm: int,
    algorithm: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (learning, acting), (network, env) = precisions, place
    settings = config(algorithm, lstm=lstm, network=network, normalise=network == "mlp")
    settings = settings.model_copy(update={"learner": LearnerSettings(precision=learning)})
    assert checked(settings, env, acting=acting).newest is not None
    assert DIFFER not in caplog.text


def test_the_precision_of_inference_servers_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(agreement_module.TOLERANCE, "fp32", 0.0)
    checked(config("ppo"), spec(DISCRETE), acting="bf16", central=True)
    assert DIFFER not in caplog.text


def test_stale_batches_are_not_compared_and_the_first_fresh_one_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agreement = checked(own("Dropping"), spec(), version=Version(1, 6))
    assert agreement.newest is None
    assert DIFFER not in caplog.text
    for _ in range(3):
        checked(own("Dropping"), spec(), agreement=agreement)
        assert 1 == caplog.text.count(DIFFER)
    assert agreement.newest is not None


def test_a_comparison_that_fails_costs_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(ActorCriticLearner, "explain_difference", fail)
    agreement = PolicyAgreement()
    for _ in range(2):
        checked(own("Dropping"), spec(), agreement=agreement)
    assert 1 == caplog.text.count("could not be compared")
    assert agreement.newest is not None


@pytest.mark.parametrize(
    "result",
    [StepResult(8, True, {"loss": 1.0}), StepResult(8, False, {"log_ratio_max": float("nan")})],
)
def test_algorithms_without_log_probabilities_and_skipped_updates_are_not_compared(
    result: StepResult,
) -> None:
    agreement = PolicyAgreement()
    agreement.check(
        config=config(),
        algorithm=None,  # type: ignore[arg-type]  # it is not asked
        version=NOW,
        batch=Batch(NOW, (Trajectory(0, 0, 6, 48, NOW),)),
        arrays=LearnerBatch({}),
        result=result,
    )
    assert agreement.newest is None


@pytest.mark.parametrize(
    ("expected", "learner", "actors"),
    [
        (0.005, "fp32", "fp32"),
        (0.02, "tf32", "tf32"),
        (0.05, "bf16", "bf16"),
        (0.1, "tf32", "fp32"),
        (0.5, "bf16", "fp32"),
        (0.5, "tf32", "bf16"),
    ],
)
def test_the_tolerance_is_that_of_the_coarser_side(
    expected: float, learner: Precision, actors: Precision
) -> None:
    assert expected == agreement_module.tolerance_of(learner, actors)
