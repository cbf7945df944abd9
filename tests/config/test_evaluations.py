"""The evaluations of a run follow from the settings: environment, episodes, seed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.settings import cartpole
from tianflow.config.evaluations import (
    MAIN,
    all_evaluations,
    evaluation_named,
    further_evaluations,
    main_evaluation,
    meaning_of_returns,
)
from tianflow.config.imports import require_allowed, require_trusted
from tianflow.config.loading import load_config, to_toml
from tianflow.config.model import Config
from tianflow.errors import ConfigError

LENGTH = "tests.support.environments:LengthEnv"
WRAPPER = "gymnasium.wrappers:RecordEpisodeStatistics"


def config(**evaluation: Any) -> Config:
    env = {"id": LENGTH, "kwargs": {"length": 3, "reward": 2.0}, "wrappers": [WRAPPER]}
    return cartpole(env=env, evaluation=evaluation)


def test_an_evaluation_plays_the_environment_of_training_by_default() -> None:
    found = config()
    (main,) = all_evaluations(found)
    assert (MAIN, found.env, 4, True, 1) == (
        main.name,
        main.env,
        main.episodes,
        main.deterministic,
        main.seed,
    )


def test_its_keyword_arguments_are_merged_over_those_of_training() -> None:
    env = main_evaluation(config(env={"kwargs": {"length": 8}})).env
    assert (LENGTH, {"length": 8, "reward": 2.0}, (WRAPPER,)) == (env.id, env.kwargs, env.wrappers)


def test_another_id_does_not_inherit_keyword_arguments() -> None:
    env = main_evaluation(
        config(env={"id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}})
    )
    assert ("CartPole-v1", {"sutton_barto_reward": True}, (WRAPPER,)) == (
        env.env.id,
        env.env.kwargs,
        env.env.wrappers,
    )


def test_an_empty_list_of_wrappers_is_not_the_default() -> None:
    assert () == main_evaluation(config(env={"wrappers": []})).env.wrappers


def test_a_further_evaluation_has_the_number_and_the_seed_of_the_main_one_but_not_its_environment() -> (
    None
):
    found = config(
        seed=7,
        deterministic=False,
        env={"kwargs": {"length": 8}},
        further={
            "like": {},
            "large": {
                "env": {"kwargs": {"length": 10}},
                "episodes": 2,
                "deterministic": True,
                "seed": 9,
            },
        },
    )
    like, large = further_evaluations(found)
    assert ({"length": 3, "reward": 2.0}, 4, False, 7) == (
        like.env.kwargs,
        like.episodes,
        like.deterministic,
        like.seed,
    )
    assert ({"length": 10, "reward": 2.0}, 2, True, 9) == (
        large.env.kwargs,
        large.episodes,
        large.deterministic,
        large.seed,
    )
    assert large == evaluation_named(found, "large")
    assert (7, 1) == (main_evaluation(found).seed, found.run.seed)


def test_the_settings_survive_a_file(tmp_path: Any) -> None:
    found = config(
        every_steps=1000,
        env={"kwargs": {"length": 8}, "wrappers": []},
        further={"large": {"env": {"id": "CartPole-v1"}, "episodes": 2}, "like": {}},
    )
    for only_changed in (False, True):
        (tmp_path / "config.toml").write_text(to_toml(found, only_changed=only_changed))
        assert found == load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        (
            {"further": {"large": {"episode": 3}}},
            r"evaluation\.further\.large\.episode = 3: is not a setting.*'episodes'",
        ),
        (
            {"further": {"large": {"episodes": 0}}},
            r"evaluation\.further\.large\.episodes = 0: is out of range",
        ),
        (
            {"further": {"large": {"env": {"kwarg": {}}}}},
            r"evaluation\.further\.large\.env\.kwarg = \{\}: is not a setting.*'kwargs'",
        ),
        ({"further": {"a.b": {}}}, r"evaluation\.further\.a\.b = 'a\.b': has the wrong form"),
        ({"further": {"main": {}}}, r"evaluation\.further\.main: is the name of the evaluation"),
        ({"further": {"large": 3}}, r"evaluation\.further\.large = 3: is of the wrong type"),
        ({"env": {"num_envs": 3}}, r"evaluation\.env\.num_envs = 3: is not a setting"),
        ({"every_steps": 0}, r"evaluation\.every_steps = 0: is out of range"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_path(evaluation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**evaluation)


def test_an_override_reaches_a_further_evaluation() -> None:
    tables = {"env": {"id": LENGTH}, "algorithm": {"name": "ppo"}}
    found = load_config(tables, ["evaluation.further.large.env.kwargs.length=10"])
    assert {"length": 10} == evaluation_named(found, "large").env.kwargs


@pytest.mark.parametrize("table", ["env", "further"])
def test_what_an_evaluation_imports_is_checked_as_what_training_imports(table: str) -> None:
    given = {"id": "stranger:Env", "wrappers": ["stranger:Wrapper"], "kwargs": {"path": "/etc"}}
    evaluation: Any = {"env": given} if table == "env" else {"further": {"a": {"env": given}}}
    path = "evaluation.env" if table == "env" else "evaluation.further.a.env"
    with pytest.raises(ConfigError) as refused:
        require_allowed({"evaluation": evaluation}, ())
    assert {f"{path}.{name}" for name in ("id", "wrappers", "kwargs.path")} == {
        problem.path for problem in refused.value.problems
    }
    with pytest.raises(ConfigError) as mistrusted:
        require_trusted({"evaluation": evaluation}, False)
    assert {f"{path}.id", f"{path}.wrappers"} == {
        problem.path for problem in mistrusted.value.problems
    }


def test_a_colon_in_the_id_of_an_evaluation_counts_in_every_form() -> None:
    """As ``env.id``: it may be an id that a module registers, such as ``module:1-v0``."""
    for evaluation in ({"env": {"id": "m:1"}}, {"further": {"a": {"env": {"id": "m:1"}}}}):
        with pytest.raises(ConfigError, match="not allowed"):
            require_allowed({"evaluation": evaluation}, ())


def test_returns_mean_the_same_while_environment_and_actions_are_the_same() -> None:
    saved = meaning_of_returns(config().model_dump(mode="json"))
    assert saved is not None
    assert saved == meaning_of_returns(config())
    assert saved == meaning_of_returns(config(episodes=9, further={"large": {}}, every_s=3.0))
    assert saved == meaning_of_returns(config(env={"kwargs": {"length": 3}}))
    for other in (
        config(env={"kwargs": {"length": 4}}),
        config(env={"set": {"length": 3}}),
        config(deterministic=False),
    ):
        assert saved != meaning_of_returns(other)
    assert [None, None] == [meaning_of_returns(None), meaning_of_returns({"env": 3})]


def test_a_single_difference_is_named_and_of_several_all() -> None:
    length, other = {"kwargs": {"length": 4}}, {"id": "CartPole-v1", "wrappers": []}
    assert ("evaluation.env.kwargs.length", 4) == main_evaluation(config(env=length)).difference
    several = config(further={"large": {"env": other}})
    path, value = further_evaluations(several)[0].difference
    assert "evaluation.further.large.env" == path
    assert {"id": "CartPole-v1", "wrappers": []} == value


def test_attributes_of_training_reach_an_evaluation_that_does_not_override_them() -> None:
    env = {"id": LENGTH, "set": {"length": 4, "reward": 2.0}}
    found = cartpole(
        env=env,
        evaluation={
            "env": {"set": {"length": 8}},
            "further": {"like": {}, "other": {"env": {"id": "CartPole-v1"}}},
        },
    )
    assert [{"length": 8, "reward": 2.0}, {"length": 4, "reward": 2.0}, {}] == [
        planned.env.set for planned in all_evaluations(found)
    ]
