"""Names in the documents exist: commands and their flags, settings, addresses, metrics, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.dashboards.test_make import labels_emitted
from tests.documents.test_docs import SETTING, TICKS, exists
from tests.support.pages import PAGES, ROOT
from tianflow.cli.main import app
from tianflow.server.run.app import ACTIONS, PARTS
from tianflow.server.service import openapi

TEXTS = [
    ROOT / name
    for name in (
        "README.md",
        "DESIGN.md",
        "CONTRIBUTING.md",
        "deploy/README.md",
        "dashboards/README.md",
        "benchmarks/README.md",
    )
]
RESULTS = ROOT / "benchmarks" / "results"
EVERY_TEXT = pytest.mark.parametrize(
    "text", [*TEXTS, *PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
FOLDERS = r"(?:tianflow|controllers|tests|dashboards|deploy|configs|benchmarks|docs|\.ci)/"
COMMAND = r"(?:[A-Z_]+=\S+ )?tianflow (?=-?-?[a-z])"
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SERIES = re.compile(r"\btianflow_(?!controllers)[a-z_]+[a-z]\b(?!_|\.\.\.)")
ADDRESS = re.compile(r"(?<![\w.])/(?:api/v1[\w/.{}]*|(?:livez|readyz|metrics|openapi)[\w.]*)")


def commands(text: str) -> Iterator[str]:
    """Commands without ``tianflow`` and without remarks, from lines of a terminal and from
    backticks.
    """
    for line in text.splitlines():
        typed = re.fullmatch(rf"(?: {{4}}|\$ )({COMMAND}.*)", line)
        for found in (
            [typed[1]]
            if typed
            else [ticked for ticked in TICKS.findall(line) if re.match(COMMAND, ticked)]
        ):
            for command in re.split(r" ; | \| ", re.sub(r"\s+#.*", "", found)):
                yield command.partition("tianflow ")[2]


@cache
def known_commands() -> Any:
    return typer.main.get_command(app)


def named_wrongly(command: str) -> list[str]:
    """Unknown parts of ``command``: its name, or its flags."""
    known = known_commands()
    words = command.split()
    while words and hasattr(known, "commands") and not words[0].startswith("-"):  # a group
        if words[0] not in known.commands:
            return [words[0]]
        known = known.commands[words.pop(0)]
    flags = {
        flag for parameter in known.params for flag in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    return [flag for flag in FLAG.findall(" ".join(words)) if flag not in flags]


def addresses() -> list[re.Pattern[str]]:
    paths = openapi.document(parts=PARTS, actions=ACTIONS)["paths"]
    return [
        re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)))
        for path in (*paths, "/openapi.json")
    ]


@EVERY_TEXT
def test_every_command_and_flag_is_known(text: Path) -> None:
    assert {} == {
        command: wrong
        for command in commands(text.read_text())
        if (wrong := named_wrongly(command))
    }


@EVERY_TEXT
def test_every_setting_exists(text: Path) -> None:
    written = text.read_text()
    words = {
        word
        for found in (*TICKS.findall(FENCE.sub("", written)), *commands(written))
        for word in found.split()
    }
    settings = {
        found[0]
        for word in words
        if not word.endswith((".md", ".py")) and (found := SETTING.match(word)) is not None
    }
    if text.name == "own-algorithm.md":
        settings.remove("algorithm.epsilom")  # misspelt on purpose
    assert set() == {path for path in settings if not exists(path)}


@EVERY_TEXT
def test_every_address_answers(text: Path) -> None:
    known = addresses()
    found = set(ADDRESS.findall(text.read_text()))
    assert set() == {
        address
        for address in found
        if not any(path.fullmatch(address.rstrip("./")) for path in known)
    }


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Names of series and of families."""
    return {
        name
        for emitted in labels_emitted()
        for name in (emitted, re.sub(r"_(bucket|count|sum)$", "", emitted))
    }


@EVERY_TEXT
def test_every_metric_is_emitted(text: Path, names: set[str]) -> None:
    written = text.read_text()
    assert set() == set(SERIES.findall(FENCE.sub("", written))) - names
    # a program may look for the beginning of a name
    assert set() == {
        found
        for found in SERIES.findall(written)
        if not any(name.startswith(found) for name in names)
    }


@pytest.mark.parametrize(
    "text",
    [*TEXTS, *PAGES, ROOT / "CHANGELOG.md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_file_is_there(text: Path) -> None:
    written = text.read_text()
    linked = [
        text.parent / target
        for target in re.findall(r'(?:\]\(|src(?:set)?=")([^)#":]+)["#)]', written)
    ]
    ticked = [
        ROOT / name
        for name in TICKS.findall(written)
        if re.fullmatch(FOLDERS + r"[\w./-]*", name) and "NAME" not in name
    ]
    measured = (
        [RESULTS / name for name in re.findall(r"`([a-z_0-9]+\.(?:md|json))`", written)]
        if text.name in {"README.md", "performance.md", "tried.md"}
        else []
    )
    of_a_run = {"control.json", "summary.json", "service.json"}
    missing = [
        path
        for path in (*linked, *ticked, *measured)
        if not path.exists() and path.name not in of_a_run
    ]
    assert [] == missing


def test_a_name_that_does_not_exist_is_noticed() -> None:
    found = list(
        commands(
            "    tianflow sett RUN x.y=1   # a remark\n`A=b tianflow top --evry 1`, `tianflow "
            "config show X --resolved | less`"
        )
    )
    assert ["sett RUN x.y=1", "top --evry 1", "config show X --resolved", ""] == found
    assert [["sett"], ["--evry"], [], [], ["-x"]] == [
        *map(named_wrongly, found),
        named_wrongly("eval RUN -x"),
    ]
    written = ADDRESS.findall(
        "`PATCH /api/v1/runs/ID/balance`, `/api/v1/runs/ID/balances`, `/ready`, `/readyz.`, "
        "metrics/families.py"
    )
    assert ["/api/v1/runs/ID/balance", "/api/v1/runs/ID/balances", "/readyz."] == written
    assert [True, False, True] == [
        any(path.fullmatch(name.rstrip("./")) for path in addresses()) for name in written
    ]
