"""``tianflow config list`` and ``explain``: every setting is told of, with what it takes and what
it means.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from tianflow.cli import main as cli
from tianflow.cli.config import find, takes
from tianflow.config.loading import shipped
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize("name", [*Config.model_fields, *BUILT_IN_ALGORITHMS])
def test_every_setting_says_what_it_is(name: str) -> None:
    assert [] == [setting.path for setting in find(name) if not setting.text]


def test_a_setting_is_told_of_with_what_it_takes_its_default_and_whether_it_is_live() -> None:
    told = run("config", "explain", "balance.max_staleness").stdout

    assert "balance.max_staleness\n    Maximum staleness" in told
    assert "whole number from 0, or unbounded; default 1; live" in told
    assert "run.max_seconds\n" in run("config", "explain", "max_seconds").stdout
    assert "text; required" in run("config", "explain", "env.id").stdout


def test_tables_inside_a_section_have_paths_of_their_own() -> None:
    paths = {setting.path for setting in find("env")}

    assert "env.normalisation.returns" in paths
    assert {path for path in paths if "normalisation" in path} == {
        setting.path for setting in find("env.normalisation")
    }


def test_an_algorithm_is_told_of_with_what_only_it_has() -> None:
    assert "algorithm.clip" in {setting.path for setting in find("ppo")}
    assert "algorithm.clip" not in {setting.path for setting in find("algorithm")}
    assert ["algorithm.clip"] == [
        setting.path for setting in find("clip") if setting.path.startswith("algorithm")
    ]


def test_what_two_algorithms_have_by_other_defaults_is_told_once() -> None:
    assert 1 == len(find("discount"))


def test_a_name_that_means_nothing_is_refused_with_the_nearest() -> None:
    done = run("config", "explain", "max_stalenes")

    assert 2 == done.exit_code
    assert "did you mean 'max_staleness'?" in done.output


def test_a_name_that_is_like_none_gets_no_suggestion_and_settings_are_said_to_be_accepted() -> None:
    done = run("config", "explain", "nosuch")

    assert 2 == done.exit_code
    assert "did you mean" not in done.output
    assert "td3, or a setting of one of them, such as run.seed or seed\n" in done.output
    assert find("run.seed") == find("seed")


def test_sections_and_configs_are_listed() -> None:
    assert all(section in run("config", "explain").stdout for section in Config.model_fields)
    assert set(shipped()) == {line.split()[0] for line in run("config", "list").stdout.splitlines()}
    assert "PPO on CartPole\n" in run("config", "list").stdout


def test_what_a_setting_takes_is_said_in_words() -> None:
    assert "whole number from 0 to 4096" == takes(
        {"type": "integer", "minimum": 0, "maximum": 4096}
    )
    assert "number above 0" == takes(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
    )
    assert "a, b" == takes({"enum": ["a", "b"], "type": "string"})
    assert "list of text" == takes({"type": "array", "items": {"type": "string"}})
