"""The recipe for an algorithm: one file and one entry point."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.recipes.package import UserPackage
from tests.recipes.training import UPDATES, train
from tianflow.cli.common import complete_config_or_algorithm
from tianflow.cli.main import app
from tianflow.config.loading import load_config
from tianflow.errors import ConfigError

REINFORCE = '''
    """REINFORCE with a baseline and a gain."""

    import torch
    from tianflow.algorithms.common.actor_critic import ActorCriticPolicy
    from tianflow.algorithms.common.single_pass import SinglePassLearner
    from tianflow.config.on_policy import AlgorithmSettings
    from tianflow.ops.returns import actor_critic_returns

    GAINS = []


    class ReinforceSettings(AlgorithmSettings):
        gain: float = 1.0


    class ReinforceLearner(SinglePassLearner):
        normalise_advantages = False

        def estimate(self, samples, log_ratio, v_t, v_tp1):
            GAINS.append(self.settings.gain)
            found = actor_critic_returns(
                r_t=samples.r_t, discount_t=samples.discount_t, v_t=v_t, v_tp1=v_tp1,
                done_t=samples.done_t, valid_t=samples.valid_t,
            )
            return found._replace(advantage_t=self.settings.gain * found[0])

        def clipped(self, log_ratio):
            return torch.zeros_like(log_ratio, dtype=torch.bool)


    class Reinforce:
        settings, make_policy, make_learner = ReinforceSettings, ActorCriticPolicy, ReinforceLearner
'''


@pytest.fixture
def installed(user_package: UserPackage) -> UserPackage:
    user_package.write("reinforce", REINFORCE)
    user_package.entry_point("tianflow.algorithms", "reinforce", "reinforce:Reinforce")
    return user_package


def test_an_installed_algorithm_trains_by_its_name(installed: UserPackage, tmp_path: Path) -> None:
    finished = train(tmp_path, algorithm={"name": "reinforce", "gain": 2.0})
    assert UPDATES == finished.summary["updates"]
    assert [2.0] * UPDATES == installed.load("reinforce").GAINS
    assert 'name = "reinforce"' in (finished.directory / "config.toml").read_text(encoding="utf-8")


def test_its_policy_is_loaded_from_a_checkpoint(installed: UserPackage, tmp_path: Path) -> None:
    policy = train(tmp_path, algorithm={"name": "reinforce"}).policy
    action, _ = policy.act([0.0, 0.0, 0.0, 0.0])
    assert action in (0, 1)


def test_its_own_settings_are_checked(installed: UserPackage) -> None:
    tables = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "reinforce", "gian": 2.0}}
    with pytest.raises(ConfigError, match="did you mean 'gain'"):
        load_config(tables)


def tianflow(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert 0 == done.exit_code, done.output
    return done.stdout


@pytest.mark.parametrize("name", ["reinforce", "reinforce:Reinforce"])
def test_config_show_and_validate_accept_it_with_an_environment(
    installed: UserPackage, name: str
) -> None:
    arguments = [name, "--env", "CartPole-v1", "algorithm.gain=2.5"]
    shown = tianflow("config", "show", *arguments)
    whole = tianflow("config", "show", *arguments, "--resolved")
    algorithm = tomllib.loads(shown)["algorithm"]
    assert {"name": name, "gain": 2.5} == algorithm
    assert 2.5 == tomllib.loads(whole)["algorithm"]["gain"]
    assert load_config(tomllib.loads(shown)) == load_config(tomllib.loads(whole))
    assert f"{name}: valid\n" in tianflow("validate", *arguments)


@pytest.mark.parametrize("name", ["reinforce", "reinforce:Reinforce"])
def test_config_explain_has_its_settings(installed: UserPackage, name: str) -> None:
    assert "algorithm.gain\n    number; default 1.0\n" in tianflow("config", "explain", name)


def test_its_name_is_offered_where_algorithms_are(installed: UserPackage) -> None:
    assert "reinforce, sac" in tianflow("config", "explain")
    assert "reinforce" in complete_config_or_algorithm("rei")
    for arguments in (["validate", "reinforce"], ["config", "explain", "reinforced"]):
        done = CliRunner().invoke(app, arguments)
        assert 2 == done.exit_code
        assert "reinforce --env ID" in done.output or "did you mean 'reinforce'" in done.output
    with pytest.raises(ConfigError, match=r"is required.*reinforce, .*module:attribute"):
        load_config({"env": {"id": "CartPole-v1"}})


def test_the_error_for_a_misspelt_name_suggests_it(installed: UserPackage) -> None:
    tables = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "reinforced"}}
    with pytest.raises(ConfigError, match="did you mean 'reinforce'"):
        load_config(tables)
