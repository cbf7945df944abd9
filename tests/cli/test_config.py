"""``tianflow config list`` and ``explain``: settings with meaning, accepted values and default."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from tianflow.cli import main as cli
from tianflow.config.describe import find
from tianflow.config.loading import shipped
from tianflow.config.model import Config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def test_a_setting_is_told_of_with_what_it_takes_its_default_and_whether_it_is_live() -> None:
    told = run("config", "explain", "balance.max_staleness").stdout

    assert "balance.max_staleness\n    Maximum staleness" in told
    assert "whole number from 0, or unbounded; default 1; live" in told
    assert "run.max_seconds\n" in run("config", "explain", "max_seconds").stdout
    assert "text; required" in run("config", "explain", "env.id").stdout


def test_a_name_that_means_nothing_is_refused_with_the_nearest() -> None:
    done = run("config", "explain", "max_stalenes")

    assert 2 == done.exit_code
    assert "did you mean 'max_staleness'?" in done.output


def test_a_name_that_is_like_none_gets_no_suggestion_and_settings_are_said_to_be_accepted() -> None:
    done = run("config", "explain", "nosuch")

    assert 2 == done.exit_code
    assert "did you mean" not in done.output
    assert "td3, or a setting of one of them, such as run.seed or seed\n" in done.output
    assert find("run.barrier_updates") == find("barrier_updates")


def test_sections_and_configs_are_listed() -> None:
    assert all(section in run("config", "explain").stdout for section in Config.model_fields)
    assert set(shipped()) == {line.split()[0] for line in run("config", "list").stdout.splitlines()}
    assert "PPO on CartPole\n" in run("config", "list").stdout
