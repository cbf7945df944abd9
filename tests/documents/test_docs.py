"""The pages in ``docs/``, without running them: files are short and well formed, settings and links
exist, the reader is strict.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import get_origin

import pytest
import typer
from pydantic import BaseModel

from tests.support.pages import (
    DOCS,
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    PageError,
    Reader,
    blocks,
    rows,
    unseen,
)
from tianflow.cli.main import app
from tianflow.config.loading import load_config
from tianflow.config.model import BUILT_IN_ALGORITHMS, Config

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
TICKS = re.compile(r"`([^`]+)`")
SETTING = re.compile(rf"({'|'.join(Config.model_fields)})\.([a-z_]+(?:\.[a-z_]+)*)(?![\w(/])")
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # it is a group


def exists(path: str) -> bool:
    """Whether the config has this setting; one of an algorithm, if any built-in one has it."""
    section, _, rest = path.partition(".")
    models: list[type[BaseModel]] = (
        list(BUILT_IN_ALGORITHMS.values())
        if section == "algorithm"
        else [Config.model_fields[section].annotation]  # type: ignore[list-item]
    )
    for key in rest.split("."):
        models = [
            field.annotation
            for model in models
            if key in model.model_fields and (field := model.model_fields[key])
        ]  # type: ignore[misc]
        if not models:
            return False
        if any(get_origin(model) is dict for model in models):
            return True  # its keys have any name
        models = [
            model for model in models if isinstance(model, type) and issubclass(model, BaseModel)
        ]
    return True


def settings(text: str) -> set[str]:
    """Settings between backticks, in prose and tables."""
    return {
        found[0]
        for ticked in TICKS.findall(text)
        for found in [SETTING.match(ticked)]
        if found is not None
    }


def named(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text()) if block.name]


def test_there_are_pages() -> None:
    assert {
        "own-environment",
        "own-algorithm",
        "own-controller",
        "own-network",
        "own-launcher",
        "own-sink",
        "learning-curves",
        "http-api",
        "settings-map",
        "staleness",
        "search",
        "performance",
        "tried",
        "decisions",
    } <= {page.stem for page in PAGES}


@EVERY_PAGE
def test_every_fence_is_of_a_kind_that_is_run_or_marked_as_text(page: Path) -> None:
    assert set() == {block.language for block in blocks(page.read_text())} - set(LANGUAGES)


@EVERY_PAGE
def test_a_file_to_be_written_has_at_most_60_lines_and_is_well_formed(page: Path) -> None:
    for block in named(page):
        assert len(block.text.splitlines()) <= 60, block.name
        if block.language == "python":
            compile(block.text, block.name, "exec")
        else:
            tomllib.loads(block.text)


@EVERY_PAGE
def test_configs_of_the_pages_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in named(page):
        (tmp_path / block.name).write_text(block.text)
        if block.language == "toml":
            load_config(str(tmp_path / block.name), ())
    for block in named(page):
        sys.modules.pop(block.name.removesuffix(".py"), None)


def test_the_configuration_and_the_program_of_the_readme_are_accepted(tmp_path: Path) -> None:
    found = {block.language: block.text for block in blocks((ROOT / "README.md").read_text())}
    (tmp_path / "readme.toml").write_text(found["toml"])
    load_config(str(tmp_path / "readme.toml"), ())
    compile(found["python"], "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@EVERY_PAGE
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    found = settings(page.read_text())
    assert set() == {path for path in found if not exists(path)}


def test_the_map_names_a_setting_or_a_dash_in_every_row() -> None:
    for row in rows((DOCS / "settings-map.md").read_text()):
        assert len(row) in {7, 5}, row
        assert "–" in row[-1] or settings(row[-1]), row


def test_a_setting_that_does_not_exist_is_noticed() -> None:
    assert {"balance.max_stale", "algorithm.epochs"} == settings(
        "`balance.max_stale=3` and `algorithm.epochs`, not `tianflow.config.model.Config`"
    )
    assert [False, False, True, True] == [
        exists(path)
        for path in (
            "balance.max_stale",
            "env.normalisation.reward",
            "env.normalisation.returns",
            "algorithm.burn_in",
        )
    ]


@EVERY_PAGE
def test_every_command_that_a_page_runs_is_one(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "console":
            words = [command.line.split() for command in block.commands]
            assert all(word[0] in {"tianflow", "python", "curl"} for word in words), words
            assert {word[1] for word in words if word[0] == "tianflow"} <= COMMANDS


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
    for target in TICKS.findall(page.read_text()):
        if re.fullmatch(r"(tianflow|controllers|tests|dashboards|deploy|configs)/[\w./-]*", target):
            assert (ROOT / target).exists(), target


def test_the_comparison_of_runs_skips_those_without_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = [
        block.text
        for block in blocks((DOCS / "learning-curves.md").read_text())
        if "pstdev" in block.text
    ]
    for name, found in {"a": {"mean_return": 1.0}, "b": {"mean_return": 3.0}, "c": {}}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        summary = json.dumps({"evaluation": found})
        (tmp_path / "runs" / name / "summary.json").write_text(summary)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "learning-curves.md", "exec"), {})
    assert "2 +- 1 over 2 runs\n" == capsys.readouterr().out


# The reader
# --------------------------------------------------------------------------------------------------


def test_expected_lines_must_appear_in_order() -> None:
    assert unseen(("a ... c", "d"), "x\n  a b c  \ny\nd\n") is None
    assert "d" == unseen(("a", "d"), "d\na\n")
    assert "a" == unseen(("a",), "ab\n")


def test_files_are_written_and_commands_see_them(tmp_path: Path) -> None:
    page = (
        '```python\n# said.py\nprint("hello")\n```\n\n```console\n$ python '
        "said.py\nhello\n```\n\n```python\nimport said\n```\n"
    )
    Reader(tmp_path).follow(page)
    assert (tmp_path / "said.py").read_text().startswith("# said.py")


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("```console\n$ false\n```", "exit code 1: false"),
        ("```console\n$ echo said\nasked\n```", "not seen: asked"),
        ("```python\nraise SystemExit(3)\n```", "exit code 3"),
        ("```console\n$ false &\n```", "false & ended with 1"),
    ],
)
def test_a_page_that_fails_names_the_command(page: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=sentence):
        Reader(tmp_path).follow(page)


def test_a_command_may_go_over_several_lines() -> None:
    (block,) = blocks("```console\n$ tianflow train \\\n    cartpole_ppo\nfine\n```")
    assert [("tianflow train      cartpole_ppo", ("fine",))] == [
        (command.line, command.expected) for command in block.commands
    ]
