"""Settings of algorithms that learn from replay: items, refusals and their reasons."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tianflow.algorithms.dqn import DQN
from tianflow.algorithms.r2d2 import R2D2
from tianflow.config.describe import find
from tianflow.config.loading import load_config
from tianflow.config.model import (
    Config,
    EnvSettings,
    NetworkSettings,
    NormalisationSettings,
    PPOSettings,
    ReplaySettings,
)
from tianflow.config.off_policy import (
    DQNSettings,
    OffPolicySettings,
    R2D2Settings,
    SACSettings,
    TD3Settings,
    check,
)
from tianflow.core.payloads import ActionSpec, EnvironmentSpec, LeafSpec
from tianflow.errors import ConfigError
from tianflow.networks.q_values import ActionRange

SETTINGS: list[Any] = [DQNSettings, R2D2Settings, SACSettings, TD3Settings]
DISCRETE = ActionSpec(kind="discrete", shape=(), dtype="int64", categories=(3,), start=(0,))
SEVERAL = ActionSpec(kind="multi_discrete", shape=(2,), dtype="int64", categories=(2, 3))
BOX = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=(1.0, 1.0))
LEAF = LeafSpec("", (4,), "float32")
every_settings = pytest.mark.parametrize("settings", SETTINGS)


def problems(
    algorithm: Any, action: ActionSpec, *, returns: bool = False, **network: Any
) -> dict[str, str]:
    """Problems by path."""
    env = EnvSettings(id="Test-v0", normalisation=NormalisationSettings(returns=returns))
    memory = {"lstm": 8} if algorithm.name == "r2d2" else {}
    config = Config(env=env, algorithm=algorithm, network=NetworkSettings(**{**memory, **network}))
    found = check(config, EnvironmentSpec("Test-v0", (LEAF,), action, 4, "next_step"))
    assert len(found) == len({problem.path for problem in found})
    return {problem.path: str(problem) for problem in found}


@every_settings
def test_settings_can_be_read_back_from_a_dump(settings: Any) -> None:
    made = settings(batch_size=7)
    assert made == settings.model_validate(made.model_dump())
    assert isinstance(made, OffPolicySettings)


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        (DQNSettings(n_step=3), (3, 1)),
        (SACSettings(), (1, 1)),
        (TD3Settings(n_step=2), (2, 1)),
        (R2D2Settings(burn_in=40, unroll=80), (120, 80)),
        (R2D2Settings(burn_in=0, unroll=80, overlap=40), (80, 40)),
    ],
)
def test_items_are_windows_of_the_configured_length(
    settings: OffPolicySettings, window: tuple[int, int]
) -> None:
    assert window == settings.window
    assert settings.batch_size == settings.items


def test_actors_record_the_inputs_of_initial_priorities() -> None:
    assert ("q_taken", "q_max") == DQNSettings().recorded == R2D2Settings().recorded
    assert () == SACSettings().recorded == TD3Settings().recorded


def test_epsilon_decreases_linearly_unless_every_environment_has_its_own() -> None:
    settings = DQNSettings(epsilon_start=1.0, epsilon_end=0.2, epsilon_updates=10)
    assert [1.0, 0.6, 0.2, 0.2] == pytest.approx(
        [settings.exploration(updates)["epsilon"] for updates in (0, 5, 10, 99)]
    )
    assert 0.0 == settings.exploration(0)["alpha"]
    assert {"epsilon": 0.4, "alpha": 7.0} == DQNSettings(epsilon_base=0.4).exploration(3)
    assert 0.2 == settings.model_copy(update={"epsilon_updates": 0}).exploration(0)["epsilon"]


@every_settings
@pytest.mark.parametrize("cost", ["entropy_cost", "value_cost"])
def test_a_cost_that_the_loss_does_not_have_is_refused_by_path_with_the_settings_there_are(
    settings: Any, cost: str
) -> None:
    name = settings().name
    tables = {"env": {"id": "Test-v0"}, "algorithm": {"name": name, cost: 0.1}}
    with pytest.raises(ConfigError) as raised:
        load_config(tables)
    [problem] = raised.value.problems
    assert (f"algorithm.{cost}", f"is not a setting of {name}") == (problem.path, problem.message)
    assert {"batch_size", "learning_rate"} <= set(re.findall(r"\w+", problem.accepted))
    assert cost not in problem.accepted
    assert f"algorithm.{cost}" != problem.nearest


@every_settings
@pytest.mark.parametrize(("cost", "default"), [("entropy_cost", 0.0), ("value_cost", 0.5)])
def test_a_cost_that_the_loss_does_not_have_is_neither_written_nor_explained(
    settings: Any, cost: str, default: float
) -> None:
    assert cost not in settings().model_dump()
    assert settings() == settings.model_validate({cost: default})  # of an older version
    assert f"algorithm.{cost}" not in {setting.path for setting in find(settings().name)}
    assert cost not in settings.model_json_schema()["properties"]


@every_settings
def test_a_linear_learning_rate_schedule_is_refused(settings: Any) -> None:
    with pytest.raises(ValidationError, match="the rate would be 0 long before the end of the run"):
        settings(learning_rate_schedule="linear")


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (
            R2D2Settings,
            {"unroll": 10, "overlap": 10},
            "overlap = 10 is not below unroll = 10: items would never advance; lower overlap",
        ),
        (R2D2Settings, {"priority_eta": 1.5}, "less than or equal to 1"),
        (DQNSettings, {"n_step": 0}, "greater than 0"),
        (DQNSettings, {"epsilon_start": 2.0}, "less than or equal to 1"),
        (SACSettings, {"target_smoothing": 0.0}, "greater than 0"),
        (SACSettings, {"target_entropy": "some"}, "'auto'"),
        (TD3Settings, {"policy_delay": 0}, "greater than 0"),
        (TD3Settings, {"double": True}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


def test_settings_that_can_work_have_no_problems() -> None:
    assert {} == problems(DQNSettings(), DISCRETE) == problems(R2D2Settings(), DISCRETE)
    assert {} == problems(SACSettings(), BOX) == problems(TD3Settings(), BOX)
    assert {} == problems(PPOSettings(), SEVERAL, returns=True, lstm=3, share_torso=True)


@pytest.mark.parametrize("algorithm", [DQNSettings(), R2D2Settings()])
def test_q_learning_needs_one_discrete_choice(algorithm: Any) -> None:
    assert (
        "infinitely many actions (box [2]); accepted: sac or td3"
        in problems(algorithm, BOX)["algorithm.name"]
    )
    assert "6 combinations of actions" in problems(algorithm, SEVERAL)["algorithm.name"]


@pytest.mark.parametrize("algorithm", [SACSettings(), TD3Settings()])
@pytest.mark.parametrize("high", [(1.0, float("inf")), (1.0, -1.0)])
def test_squashed_actions_need_bounds(algorithm: Any, high: tuple[float, float]) -> None:
    assert "accepted: dqn or r2d2" in problems(algorithm, DISCRETE)["algorithm.name"]
    assert (
        "the actions of Test-v0 are multi_discrete"
        in problems(algorithm, SEVERAL)["algorithm.name"]
    )
    unbounded = ActionSpec(kind="box", shape=(2,), dtype="float32", low=(-1.0, -1.0), high=high)
    assert "has no bounds, or an empty range" in problems(algorithm, unbounded)["algorithm.name"]


def box(*ranges: tuple[float, float]) -> ActionSpec:
    low, high = zip(*ranges, strict=True)
    return ActionSpec(kind="box", shape=(len(low),), dtype="float64", low=low, high=high)


@pytest.mark.parametrize("algorithm", [SACSettings(), TD3Settings()])
@pytest.mark.parametrize(
    "limits",
    [
        (-3.4e38, 3.4e38),
        (-1e300, 1e300),
        (1e38, 3e38),
        (-3e38, -1e38),
        (1.0, 1.0 + 1e-12),
        (1e8, 1e8 + 4.0),
        (0.0, 1e-300),
    ],
    ids=str,
)
def test_a_range_that_float32_cannot_represent_is_refused_by_path(
    algorithm: Any, limits: tuple[float, float]
) -> None:
    said = problems(algorithm, box((-1.0, 1.0), limits))["algorithm.name"]
    assert f"float32 cannot represent the range {limits[0]:g} to {limits[1]:g} of Test-v0" in said
    assert {} == problems(PPOSettings(), box(limits))


@pytest.mark.parametrize("algorithm", [SACSettings(), TD3Settings()])
@pytest.mark.parametrize(
    ("low", "high"), [(-math.inf, 1.0), (0.0, math.inf), (1.0, 1.0), (2.0, 1.0)]
)
def test_half_a_bound_and_an_empty_range_are_refused(
    algorithm: Any, low: float, high: float
) -> None:
    said = problems(algorithm, box((low, high)))["algorithm.name"]
    assert "has no bounds, or an empty range" in said


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
)
@example(-3.4e38, 3.4e38)
@example(1e8, 1e8 + 16.0)
def test_an_accepted_range_gives_finite_actions(low: float, high: float) -> None:
    spec = box((low, high))
    if problems(SACSettings(), spec):
        return
    scale = ActionRange(spec, torch.device("cpu"))
    ends = torch.tensor([[-1.0], [0.0], [1.0]])
    stored = scale.stored(ends)
    assert torch.isfinite(stored).all()
    torch.testing.assert_close(scale.scaled(stored), ends, atol=0.05, rtol=0.0)


@every_settings
def test_networks_on_which_q_networks_cannot_be_built_are_refused(settings: Any) -> None:
    algorithm = settings()
    action = DISCRETE if algorithm.name in ("dqn", "r2d2") else BOX
    found = problems(
        algorithm,
        action,
        name="my.networks:Net",
        share_torso=True,
        kwargs={"log_std": -1.0},
        lstm=0 if action == DISCRETE else 3,
    )
    memory = set() if algorithm.name == "dqn" else {"network.lstm"}
    assert {
        "network.name",
        "network.share_torso",
        "network.kwargs.log_std",
    } | memory == found.keys()
    assert "accepted: mlp, nature_cnn, impala_resnet" in found["network.name"]


def test_only_r2d2_has_a_recurrent_state() -> None:
    assert (
        {"network.lstm"}
        == problems(DQNSettings(), DISCRETE, lstm=4).keys()
        == problems(R2D2Settings(), DISCRETE, lstm=0).keys()
    )


class DerivedSettings(R2D2Settings):
    """Settings of a plug-in that derives from R2D2."""

    bonus: float = 0.0


class Derived(R2D2):
    """Algorithm of a plug-in with settings of its own."""

    settings = DerivedSettings


class Renamed(R2D2):
    """Algorithm of a plug-in with the settings of R2D2."""


@pytest.mark.parametrize("attribute", ["Derived", "Renamed"])
def test_a_plug_in_that_derives_from_r2d2_has_its_recurrent_state(attribute: str) -> None:
    name = f"{__name__}:{attribute}"
    config = Config.model_validate(
        {
            "env": {"id": "Test-v0"},
            "algorithm": {"name": name},
            "network": {"lstm": 8},
        }
    )
    assert isinstance(config.algorithm, R2D2Settings)
    assert name == config.algorithm.name
    assert config == Config.model_validate(config.model_dump(mode="json"))
    assert {} == problems(config.algorithm, DISCRETE, lstm=8)
    assert {"network.lstm"} == problems(config.algorithm, DISCRETE, lstm=0).keys()


class BanditSettings(OffPolicySettings):
    """Settings of a plug-in with a policy and networks of its own."""

    name: str = "my.module:Bandit"


@pytest.mark.parametrize("action", [DISCRETE, SEVERAL, BOX])
def test_a_plug_in_on_replay_alone_brings_its_own_actions_and_networks(action: ActionSpec) -> None:
    assert {} == problems(BanditSettings(), action, name="my.networks:Net", lstm=8)


def test_returns_are_not_normalised_when_rewards_are_replayed() -> None:
    assert (
        "false; value_rescaling limits large returns"
        in problems(R2D2Settings(), DISCRETE, returns=True)["env.normalisation.returns"]
    )
    assert {"env.normalisation.returns"} == problems(SACSettings(), BOX, returns=True).keys()


def test_settings_are_available_without_pytorch() -> None:
    code = (
        "import sys, tianflow.config.off_policy; assert not {'torch', 'numpy', 'gymnasium'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_factories_name_their_settings() -> None:
    assert DQNSettings is DQN.settings


def exponents(algorithm: OffPolicySettings, **replay: Any) -> tuple[float, float]:
    return Config(
        env=EnvSettings(id="Test-v0"), algorithm=algorithm, replay=ReplaySettings(**replay)
    ).priority_exponents


def test_exponents_of_priorities_are_those_of_the_paper_unless_they_are_set() -> None:
    assert (0.9, 0.6) == exponents(R2D2Settings())
    assert (0.6, 0.4) == exponents(DQNSettings()) == exponents(SACSettings())
    assert (0.6, 0.4) == exponents(BanditSettings())
    assert (0.9, 0.6) == exponents(DerivedSettings())
    assert (0.0, 0.6) == exponents(R2D2Settings(), alpha=0.0)
    assert (0.9, 0.0) == exponents(R2D2Settings(), beta=0.0)
