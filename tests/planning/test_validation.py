from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import networks
from tianflow import envs
from tianflow.config.loading import load_config
from tianflow.config.model import Config
from tianflow.errors import ConfigError
from tianflow.planning.validation import require_valid, validate

TABLES = {
    "env": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"name": "ppo"},
    "actors": {"count": 1, "rollout_steps": 16},
}


def config(*overrides: str) -> Config:
    return load_config(TABLES, overrides)


def refusal(*overrides: str) -> tuple[str, str]:
    (problem,) = validate(config(*overrides)).problems
    return problem.path, problem.nearest


def test_a_valid_config_is_told_its_environment_and_its_costs() -> None:
    validation = require_valid(config("actors.count=8", "run.max_updates=1"))
    assert validation.spec is not None
    assert ("CartPole-v1", 2, "discrete") == (
        validation.spec.id,
        validation.spec.num_envs,
        validation.spec.action.kind,
    )
    assert "idle because of the bound" in validation.advice[0]


@pytest.mark.parametrize(
    ("override", "path", "nearest"),
    [
        ("env.id=CartPol-v1", "env.id", "CartPole-v1"),
        ("env.id=tests.support.environments:NoSuchThing", "env.id", ""),
        ("env.id=no_such_module:Thing", "env.id", ""),
        ("env.kwargs.no_such_argument=1", "env.kwargs", ""),
        ("env.wrappers=['gymnasium.wrappers:TimeLimt']", "env.wrappers", "TimeLimit"),
        ("network.name=nature_cnn", "network.name", ""),
        ("network.kwargs.unit=3", "network.kwargs.unit", ""),
        ("balance.memory_limit=1", "balance.memory_limit", ""),
        ("network.hidden=[1000000000, 1000000000]", "network.hidden", ""),
    ],
)
def test_what_does_not_fit_the_environment_is_named(override: str, path: str, nearest: str) -> None:
    found_path, found_nearest = refusal(override, "env.vectorization=sync")
    assert found_path.startswith(path)
    assert nearest in found_nearest


@pytest.mark.parametrize(
    ("vector", "refused"), [("SameStepVector", True), ("NextStepVector", False)]
)
def test_a_graph_is_refused_for_an_environment_that_resets_within_a_step(
    vector: str, refused: bool
) -> None:
    settings = (f"env.id=tests.support.environments:{vector}", "algorithm.name=impala")
    problems = validate(config(*settings, "learner.graphs=on")).problems
    assert ["learner.graphs"] * refused == [problem.path for problem in problems]
    assert () == validate(config(*settings)).problems


def test_an_impossible_combination_is_refused_before_the_environment_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envs, "probe", lambda config: pytest.fail("made an environment"))
    good = config()
    bad = good.model_copy(
        update={"balance": good.balance.model_copy(update={"controller": "stalenes"})}
    )
    with pytest.raises(ConfigError, match="did you mean 'staleness'"):
        require_valid(bad)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("Narrow", "for 2 environments are [2, 1], so no actions of CartPole-v1 follow from them"),
        ("Forgetful", "its recurrent state after a step for 2 environments is {}"),
        ("Unsqueezed", "its values for one step of 2 environments are [1, 2, 1]"),
        ("Misfit", "cannot act on the observations of CartPole-v1: RuntimeError: "),
        ("Unmakeable", "cannot be made for CartPole-v1: KeyError: 'units'"),
    ],
)
def test_an_own_network_that_does_not_fit_is_refused_in_words(network: str, words: str) -> None:
    (problem,) = validate(config(f"network.name=tests.support.networks:{network}")).problems
    assert "network.name" == problem.path
    assert words in problem.message


@pytest.mark.parametrize(
    ("network", "code"),
    [
        ("Misfit", "return Output(self.policy(x), self.value(x).squeeze(-1), {})"),
        ("Unmakeable", 'self.units = settings.kwargs["units"]'),
    ],
)
def test_an_error_in_an_own_network_ends_with_its_file_and_line(network: str, code: str) -> None:
    """Misfit fails inside PyTorch: the line is that of the network which called it."""
    file = Path(networks.__file__)
    line = 1 + [text.strip() for text in file.read_text().splitlines()].index(code)
    (problem,) = validate(config(f"network.name=tests.support.networks:{network}")).problems
    assert problem.message.endswith(f" ({file}, line {line})")


def test_a_leaf_that_does_not_exist_is_refused_with_those_that_do() -> None:
    (problem,) = validate(config("network.name=tests.support.networks:Undeclared")).problems
    assert "KeyError: 'h'" in problem.message
    expected = "leaves of the observation: ['']; leaves of the state: [], as state_spec declares"
    assert expected == problem.accepted


def test_an_own_network_that_fits_is_accepted() -> None:
    assert () == validate(config("network.name=tests.support.networks:Fitting")).problems
