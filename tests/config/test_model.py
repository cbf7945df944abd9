from __future__ import annotations

import errno
import math
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from tests.support.effort import examples
from tests.support.paths import ROOT
from tests.support.refusing import full_disk
from tianflow.config.loading import (
    load_config,
    nested,
    parse_overrides,
    parse_value,
    shipped,
    to_toml,
    with_changes,
    write_config,
)
from tianflow.config.model import LIVE, AlgorithmSettings, Config, ImpalaSettings, PPOSettings
from tianflow.config.problems import innermost
from tianflow.errors import ConfigError, Problem

TABLES: dict[str, Any] = {
    "env": {"id": "CartPole-v1", "num_envs": 32},
    "algorithm": {"name": "ppo"},
    "actors": {"count": 1, "rollout_steps": 64},
}


def problems(*overrides: str, tables: dict[str, Any] = TABLES) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(tables, overrides)
    return list(caught.value.problems)


def only_problem(*overrides: str, tables: dict[str, Any] = TABLES) -> Problem:
    (problem,) = problems(*overrides, tables=tables)
    return problem


# Sources
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_config_loads(name: str) -> None:
    assert name.rpartition("_")[2] in (load_config(name).algorithm.name, "apex", "seed", "gpu")


def test_a_shipped_config_is_found_by_name_or_by_file() -> None:
    assert load_config("cartpole_ppo") == load_config(ROOT / "configs" / "cartpole_ppo.toml")


def test_the_refusal_of_a_misspelt_shipped_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cartpole_ppo'"):
        load_config("cartpol_ppo")


def test_a_file_that_is_not_toml_is_refused_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("[env]\nid = CartPole-v1\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: is not TOML: .*line 2, column 6"):
        load_config(file)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(file)


# Overrides
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("3e-4", 3e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("'a=b'", "a=b"),
        ("unbounded", "unbounded"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("null", None),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_an_override_is_a_toml_value_or_else_a_bare_string(text: str, expected: object) -> None:
    assert expected == parse_value(text)


def test_overrides_replace_the_values_of_the_file() -> None:
    config = load_config(
        TABLES,
        [
            "env.id=Acrobot-v1",
            "balance.max_staleness=unbounded",
            "network.hidden=[32]",
            "env.kwargs.render_mode=x",
        ],
    )
    assert ("Acrobot-v1", None, (32,)) == (config.env.id, config.bound, config.network.hidden)
    assert {"render_mode": "x"} == config.env.kwargs


def test_overrides_may_be_a_mapping_from_paths_to_values() -> None:
    assert load_config(TABLES, ["balance.max_staleness=4"]) == load_config(
        TABLES, {"balance.max_staleness": 4}
    )


def test_null_resets_a_setting_to_its_default() -> None:
    assert 8 == load_config(TABLES, ["env.num_envs=null"]).env.num_envs


def test_the_config_given_is_not_changed_by_overrides() -> None:
    load_config(TABLES, ["env.num_envs=4"])
    assert 32 == TABLES["env"]["num_envs"]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("foo", "foo"),
        (".x=1", ".x"),
        ("env..id=1", "env..id"),
        ("env.id.deeper=1", "env.id.deeper"),
    ],
)
def test_an_override_without_a_valid_path_is_refused(override: str, path: str) -> None:
    assert path == only_problem(override).path


def test_assignments_become_a_merge_patch() -> None:
    patch = nested(parse_overrides(["balance.parameters.quiet_updates=3", "balance.credits=null"]))
    assert {"balance": {"parameters": {"quiet_updates": 3}, "credits": None}} == patch


def test_a_config_that_cannot_be_written_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    config = load_config(TABLES)
    with full_disk(), pytest.raises(OSError, match="config.toml") as refused:
        write_config(tmp_path, config)
    assert (errno.EFBIG, str(tmp_path / "config.toml")) == (
        refused.value.errno,
        refused.value.filename,
    )
    assert [] == list(tmp_path.iterdir())
    write_config(tmp_path, config)
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize("first", ["balance.parameters=3", "balance.parameters=null"])
def test_a_path_through_a_value_is_refused_by_name(first: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"balance.parameters.quiet_updates = 4: 'parameters' is a value, not a table",
    ):
        nested(parse_overrides([first, "balance.parameters.quiet_updates=4"]))


# Problems
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "accepted", "nearest"),
    [
        ("balance.max_stalness=3", "balance.max_stalness", "max_staleness", "max_staleness"),
        (
            "env.normalisation.observation=true",
            "env.normalisation.observation",
            "observations",
            "observations",
        ),
        ("max_staleness=3", "max_staleness", "balance", "balance.max_staleness"),
        ("learning_rate=3", "learning_rate", "learner", "algorithm.learning_rate"),
        ("learners=3", "learners", "learner", "learner"),
        ("blance.max_staleness=3", "blance", "balance", "balance"),
        ("algorithm.vtrace_lambda=1.0", "algorithm.vtrace_lambda", "gae_lambda", "gae_lambda"),
        ("env.num_envs=true", "env.num_envs", "a whole number", ""),
        ("env.num_envs='4'", "env.num_envs", "a whole number", ""),
        ("env.num_envs=0", "env.num_envs", "a number > 0", ""),
        ("run.max_env_steps=2.5", "run.max_env_steps", "a whole number", ""),
        ("run.seed=4294967296", "run.seed", "a number < 4294967296", ""),
        ("env=3", "env", "a table of settings", "env.id"),
        ("env.wrappers=[3]", "env.wrappers.0", "a string", ""),
        ("network.hidden=64", "network.hidden", "a list", ""),
        ("network.hidden=[64, 'a']", "network.hidden.1", "a whole number", ""),
        ("network.activation=rel", "network.activation", "'relu' or 'tanh'", "relu"),
        ("balance.max_staleness=-1", "balance.max_staleness", "a number >= 0, or 'unbounded'", ""),
        (
            "balance.max_staleness=unbouded",
            "balance.max_staleness",
            "a whole number, or 'unbounded'",
            "unbounded",
        ),
        ("balance.controller=[3]", "balance.controller.0", "a string", ""),
        ("balance.memory_limit=2GG", "balance.memory_limit", "GiB", ""),
        ("balance.parameters.x=y", "balance.parameters.x", "a number", ""),
        ("algorithm.learning_rate=nan", "algorithm.learning_rate", "a finite number", ""),
        ("run.name=../up", "run.name", "a string like", ""),
        ("learner.device=gpu", "learner.device", "auto|cpu|cuda", ""),
        ("env.id=null", "env.id", "", ""),
        (
            "run.target_return=none",
            "run.target_return",
            "a number, or null for no value (in a file: omit the line)",
            "",
        ),
        ("run.max_updates=''", "run.max_updates", "a whole number, or null for no value", ""),
        ("run.seed=None", "run.seed", "a whole number, or null for the default", ""),
        (
            "balance.max_staleness=none",
            "balance.max_staleness",
            "a whole number, or 'unbounded', or null for the default",
            "unbounded",
        ),
        ("balance.parameters.x=none", "balance.parameters.x", "a number", ""),
    ],
)
def test_the_refusal_of_a_bad_setting_names_what_would_be_accepted(
    override: str, path: str, accepted: str, nearest: str
) -> None:
    problem = only_problem(override)
    assert (path, nearest) == (problem.path, problem.nearest)
    assert accepted in problem.accepted


@pytest.mark.parametrize(
    ("override", "path", "known", "nearest"),
    [
        ("algorithm.name=pppo", "algorithm.name", "a2c, dqn, impala, ppo, r2d2, sac, td3", "ppo"),
        ("network.name=mpl", "network.name", "impala_resnet, mlp, nature_cnn", "mlp"),
        (
            "balance.controller=stalenes",
            "balance.controller",
            "freshest, lockstep, open_loop, sample_ratio, staleness",
            "staleness",
        ),
        (
            "placement.launcher=process",
            "placement.launcher",
            "inline, nodes, processes",
            "processes",
        ),
    ],
)
def test_the_refusal_of_an_unknown_name_lists_the_installed_ones(
    override: str, path: str, known: str, nearest: str
) -> None:
    problem = only_problem(override)
    assert (path, nearest) == (problem.path, problem.nearest)
    assert known in problem.accepted


def test_all_problems_are_reported_at_once() -> None:
    found = problems("env.num_envs=0", "actors.count=x", "algorithm.name=pppo", "foo.bar=1")
    assert {"env.num_envs", "actors.count", "algorithm.name", "foo"} == {
        problem.path for problem in found
    }


def test_the_refusal_of_an_empty_config_names_the_required_sections() -> None:
    found = {problem.path: problem.accepted for problem in problems(tables={})}
    assert {
        "env": "a section [env] with id",
        "algorithm.name": "one of a2c, dqn, impala, ppo, r2d2, sac, td3, or module:attribute",
    } == found


def test_the_refusal_of_a_setting_of_another_algorithm_names_the_chosen_one() -> None:
    """A shipped config with another algorithm leads to this."""
    assert (
        "is not a setting of sac"
        == only_problem(tables=TABLES | {"algorithm": {"name": "sac", "clip": 0.2}}).message
    )
    assert (
        "is not a setting"
        == only_problem(tables=TABLES | {"env": {"id": "CartPole-v1", "clip": 0.2}}).message
    )


class Borrowed:
    """An algorithm with the settings model of another one."""

    settings = PPOSettings


def test_the_refusal_of_a_setting_names_the_algorithm_as_it_was_given() -> None:
    name = "tests.config.test_model:Borrowed"
    problem = only_problem(tables=TABLES | {"algorithm": {"name": name, "goood": 1}})
    assert ("algorithm.goood", f"is not a setting of {name}") == (problem.path, problem.message)


@pytest.mark.parametrize(
    ("override", "accepted"),
    [
        (
            "metrics.sinks=[tensorboard, wandb]",
            """a list in TOML, where texts need quotes: '["tensorboard", "wandb"]'""",
        ),
        ("network.hidden=[64", "a list in TOML, where texts need quotes"),
        ("env.kwargs={mode=slow}", "a table in TOML, where texts need quotes"),
        ("metrics.sinks=tensorboard", "a list"),
    ],
)
def test_the_refusal_of_a_list_that_is_not_toml_says_that_texts_need_quotes(
    override: str, accepted: str
) -> None:
    problem = only_problem(override)
    assert ("is of the wrong type", accepted) == (problem.message, problem.accepted)


def test_the_refusal_of_a_lambda_gives_the_accepted_form() -> None:
    problem = only_problem(tables=TABLES | {"env": {"id": lambda: None}})
    assert "env.id" == problem.path
    assert "module:attribute" in problem.accepted


def test_an_importable_object_is_refused_with_its_name() -> None:
    assert (
        "tianflow.config.model:Config"
        == only_problem(tables=TABLES | {"network": {"name": Config}}).nearest
    )


def test_a_name_in_main_is_refused() -> None:
    assert "module of its own" in only_problem("network.name=__main__:Net").message


def test_large_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert 2_000_000 == load_config(TABLES, ["run.max_env_steps=2e6"]).run.max_env_steps


@pytest.mark.parametrize(
    ("text", "expected"), [("'2GiB'", 2 * 2**30), ("'1.5 kB'", 1500), ("4096", 4096)]
)
def test_memory_is_a_number_of_bytes_or_has_a_unit(text: str, expected: int) -> None:
    assert expected == load_config(TABLES, [f"balance.memory_limit={text}"]).balance.memory_limit


# Algorithms
# --------------------------------------------------------------------------------------------------


def test_the_algorithm_section_is_read_by_the_model_of_the_named_algorithm() -> None:
    assert isinstance(load_config(TABLES).algorithm, PPOSettings)
    assert isinstance(load_config(TABLES, ["algorithm.name=impala"]).algorithm, ImpalaSettings)


class _MySettings(AlgorithmSettings):
    temperature: float = 1.0
    widths: tuple[int, ...] = (3,)

    @model_validator(mode="after")
    def _cools_down(self) -> _MySettings:
        if self.temperature > 100.0:
            raise ValueError("the temperature is above 100: nothing would ever cool down")
        return self


class _MyAlgorithm:
    settings = _MySettings


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("a_plug_in")
    module.MyAlgorithm = _MyAlgorithm  # type: ignore[attr-defined]
    module.nothing = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_plug_in", module)
    return "a_plug_in:MyAlgorithm"


def test_a_plug_in_has_its_own_settings(plug_in: str) -> None:
    config = load_config(
        TABLES,
        [f"algorithm.name={plug_in}", "algorithm.temperature=0.5", "algorithm.widths=[1, 2]"],
    )
    assert _MySettings(name=plug_in, temperature=0.5, widths=(1, 2)) == config.algorithm
    assert (
        "temperature"
        == only_problem(f"algorithm.name={plug_in}", "algorithm.temprature=0.5").nearest
    )


def test_a_combination_that_a_section_refuses_is_reported_in_the_sections_words(
    plug_in: str,
) -> None:
    problem = only_problem(f"algorithm.name={plug_in}", "algorithm.temperature=101.0")
    assert "algorithm: the temperature is above 100: nothing would ever cool down" == str(problem)


def test_a_plug_in_survives_being_written_and_read(plug_in: str) -> None:
    config = load_config(TABLES, [f"algorithm.name={plug_in}", "algorithm.temperature=0.5"])
    assert config == load_config(tomllib.loads(to_toml(config)))
    assert config == Config.model_validate_json(config.model_dump_json())


def test_a_plug_in_without_settings_is_refused(plug_in: str) -> None:
    assert "settings" in only_problem("algorithm.name=a_plug_in:nothing").message


# Round trips
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shipped()))
@pytest.mark.parametrize("only_changed", [False, True])
def test_a_config_written_as_toml_reads_back_equal(name: str, only_changed: bool) -> None:
    config = load_config(name)
    assert config == load_config(tomllib.loads(to_toml(config, only_changed=only_changed)))


SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
KEYS = st.text(min_size=1)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=5
)


@examples(10)
@given(st.dictionaries(KEYS, VALUES))
def test_any_environment_arguments_survive_toml_and_json(kwargs: dict[str, Any]) -> None:
    config = load_config(TABLES | {"env": {"id": "CartPole-v1", "kwargs": kwargs}})
    assert kwargs == config.env.kwargs
    assert config == load_config(tomllib.loads(to_toml(config)))
    assert config == Config.model_validate_json(config.model_dump_json())


def test_problems_of_parents_are_dropped_however_many_there_are() -> None:
    paths = [f"a{number}.b.c" for number in range(3000)] + ["a1", "a1.b", "a", "a1.bb"]
    kept = [problem.path for problem in innermost([Problem(path, 1, "no") for path in paths])]
    assert [*paths[:3000], "a", "a1.bb"] == kept


def test_the_models_have_a_json_schema() -> None:
    assert set(Config.model_fields) == set(Config.model_json_schema()["properties"])


# Live changes
# --------------------------------------------------------------------------------------------------


def changed(changes: dict[str, Any]) -> Config:
    return with_changes(load_config(TABLES), changes)


def change_problems(changes: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        changed(changes)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("algorithm", "changed", "value"),
    [
        ("dqn", "epsilon_end", 0.01),
        ("dqn", "target_update_updates", 7),
        ("td3", "noise_end", 0.3),
        ("sac", "target_smoothing", 0.1),
    ],
)
def test_exploration_and_targets_of_replay_algorithms_are_live(
    algorithm: str, changed: str, value: float
) -> None:
    config = load_config({"env": {"id": "X-v0"}, "algorithm": {"name": algorithm}})
    assert value == getattr(
        with_changes(config, {"algorithm": {changed: value}}).algorithm, changed
    )
    with pytest.raises(ConfigError, match=rf"cannot change during a run.*algorithm\.{changed}"):
        with_changes(config, {"algorithm": {"batch_size": 64}})


def test_a_live_setting_of_another_algorithm_is_unknown() -> None:
    config = load_config({"env": {"id": "X-v0"}, "algorithm": {"name": "ppo"}})
    with pytest.raises(
        ConfigError,
        match="is not a setting; accepted: one of batch_trajectories, entropy_cost, learning_rate",
    ):
        with_changes(config, {"algorithm": {"epsilon_end": 0.1}})


def test_live_settings_change_and_nothing_else_does() -> None:
    config = changed({"balance": {"max_staleness": 4}, "algorithm": {"learning_rate": 1e-4}})
    assert (4, 1e-4) == (config.balance.max_staleness, config.algorithm.learning_rate)
    assert load_config(TABLES) == with_changes(
        config, {"balance": {"max_staleness": None}, "algorithm": {"learning_rate": None}}
    )


def test_every_live_setting_exists() -> None:
    config = load_config(TABLES)
    assert [] == [
        f"{section}.{key}"
        for section, keys in LIVE.items()
        for key in keys
        if not hasattr(getattr(config, section), key)
    ]


def test_a_setting_that_needs_a_new_run_is_refused_with_what_is_live() -> None:
    (problem,) = change_problems({"actors": {"rollout_steps": 8}})
    assert "actors.rollout_steps" == problem.path
    assert "balance.max_staleness" in problem.accepted


def test_one_bad_value_refuses_the_whole_change() -> None:
    (problem,) = change_problems({"balance": {"max_staleness": 4, "straggler_patience": -1.0}})
    assert "balance.straggler_patience" == problem.path


@pytest.mark.parametrize(
    ("changes", "path", "nearest"),
    [
        ({"balance": {"max_stalenes": 4}}, "balance.max_stalenes", "max_staleness"),
        ({"blance": {"max_staleness": 4}}, "blance", "balance"),
        ({"balance": 4}, "balance", ""),
        ({"balance": {"controller": "freshst"}}, "balance.controller", "freshest"),
        ({"balance": {"max_staleness": True}}, "balance.max_staleness", ""),
        ({"balance": {"max_staleness": "4"}}, "balance.max_staleness", ""),
        ({"actors": {"count": math.nan}}, "actors.count", ""),
    ],
)
def test_a_bad_change_is_named(changes: dict[str, Any], path: str, nearest: str) -> None:
    (problem,) = change_problems(changes)
    assert (path, nearest) == (problem.path, problem.nearest)


def test_a_change_that_makes_the_combination_impossible_is_refused() -> None:
    config = changed({"balance": {"credits": 4}})
    with pytest.raises(ConfigError, match="4 credits can never feed the learner, which needs 8"):
        with_changes(config, {"algorithm": {"batch_trajectories": 8}})


def test_parameters_of_a_controller_are_merged_one_by_one() -> None:
    config = load_config(
        TABLES, ["balance.controller=freshest", "balance.parameters.quiet_updates=3"]
    )
    config = with_changes(config, {"balance": {"parameters": {"hold_updates": 4}}})
    assert {"quiet_updates": 3.0, "hold_updates": 4.0} == config.balance.parameters


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (f"run.max_updates={2**63}", "run.max_updates"),
        (f"evaluation.episodes={10**40}", "evaluation.episodes"),
        (f"network.hidden=[64, {2**64}]", "network.hidden.1"),
        (f"balance.parameters={{ depth = {-(10**300)} }}", "balance.parameters.depth"),
        ("run.max_env_steps=1e30", "run.max_env_steps"),
        ("balance.memory_limit=9999999TiB", "balance.memory_limit"),
        (f"balance.memory_limit={'9' * 400}TiB", "balance.memory_limit"),
    ],
)
def test_a_number_that_messages_cannot_hold_is_refused_in_every_setting(
    override: str, path: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("cartpole_ppo", [override])
    assert [path] == [problem.path for problem in refused.value.problems]
    assert "is too large; accepted: at most 9223372036854775807" in str(refused.value)


@pytest.mark.parametrize(
    "path", ["actors.rollout_steps", "env.num_envs", "algorithm.batch_trajectories"]
)
def test_an_infinite_count_is_of_the_wrong_type(path: str) -> None:
    with pytest.raises(
        ConfigError, match="is of the wrong type; accepted: a whole number"
    ) as refused:
        load_config("cartpole_ppo", [f"{path}=inf"])
    assert path in {problem.path for problem in refused.value.problems}


def test_the_largest_number_is_accepted() -> None:
    assert (
        2**63 - 1 == load_config("cartpole_ppo", [f"run.max_updates={2**63 - 1}"]).run.max_updates
    )
