"""Plain English in the package: help of commands, messages, docstrings, comments, console labels.

Documents have their own tests, in `tests.documents.test_prose`, with the same list of words.
"""

from __future__ import annotations

import ast
import html.parser
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.documents.test_prose import BEGINNING, DIALECT
from tests.support.paths import ROOT
from tianflow.cli.main import app

PACKAGE = ROOT / "tianflow"
CONSOLE = PACKAGE / "server" / "common" / "console"
PARTS = sorted(
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
)
MESSAGE_NAMES = frozenset({"accepted", "advice", "detail", "hint", "message", "problem", "reason"})
"""Variables that hold parts of a message."""
MESSAGE_CALLS = frozenset(
    {"Problem", "critical", "debug", "echo", "error", "exception", "info", "print_error", "warning"}
)
NOT_IMPERATIVE = re.compile(r"(?:And|Or|What|Who|How|Where)\b|\w+(?:s|ed|ing)\b")
"""Beginnings that an imperative sentence does not have."""
VERBS = frozenset({"Add", "Allow", "Do", "Ignore", "Import", "Listen", "Make", "Use", "Wait"})
"""Beginnings that a noun phrase does not have, besides the verbs of commands."""
FOREIGN = frozenset({"help", "install_completion", "show_completion"})
"""Options whose help is that of click and typer."""


def words(text: str) -> list[str]:
    """Words of ``text`` that plain English avoids. Code in backticks, and ``name = value``, is skipped."""
    prose = re.sub(r"^\s+\w+: ", "", text, flags=re.MULTILINE)  # the name of an argument
    prose = re.sub(r"``.*?``|`[^`]*`|\b[\w.]+ = \S+", "CODE", prose, flags=re.DOTALL)
    prose = re.sub(r"[^\S\n]*\n[^\S\n]*(?=\S)", " ", prose)
    return [found.lower() for found in (*DIALECT.findall(prose), *BEGINNING.findall(prose))]


# Help of commands
# --------------------------------------------------------------------------------------------------


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group below ``command``, by the words that call it."""
    if path:
        yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


TREE = typer.main.get_command(app)
COMMANDS = dict(commands(TREE))
EVERY_COMMAND = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def summary(command: Any) -> str:
    """The first paragraph of a command's help, on one line."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def problems_of_summary(text: str) -> list[str]:
    """Why ``text`` is not one imperative sentence in plain words."""
    found = words(text)
    if NOT_IMPERATIVE.match(text):
        found.append("not imperative")
    if not re.fullmatch(r"[A-Z][^.!?]*\.", text):
        found.append("not one sentence")
    return found


def problems_of_help(text: str, verbs: frozenset[str]) -> list[str]:
    """Why ``text`` is not a noun phrase in plain words; ``verbs`` begin the help of commands."""
    found = words(text)
    if not re.fullmatch(r"[A-Z].*\.", text):
        found.append("no capital letter, or no full stop")
    if text.split(" ", maxsplit=1)[0] in verbs or re.match(
        r"(?:And|Or|What|Who|How|Where)\b", text
    ):
        found.append("not a noun phrase")
    return found


def test_commands_are_found() -> None:
    assert {("train",), ("config",), ("config", "show")} <= COMMANDS.keys()


@EVERY_COMMAND
def test_the_summary_of_a_command_is_one_imperative_sentence(path: tuple[str, ...]) -> None:
    assert [] == problems_of_summary(summary(COMMANDS[path]))


@EVERY_COMMAND
def test_the_summary_of_a_command_fits_the_list_of_commands(path: tuple[str, ...]) -> None:
    arguments = [*path[:-1], "--help"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).stdout.splitlines()
    assert 1 == sum(line.split() == [path[-1], *summary(COMMANDS[path]).split()] for line in shown)


@EVERY_COMMAND
def test_further_help_of_a_command_is_plain(path: tuple[str, ...]) -> None:
    assert [] == words("\n\n".join((COMMANDS[path].help or "").split("\n\n")[1:]))


@pytest.mark.parametrize("path", [(), *COMMANDS], ids=" ".join)
def test_the_help_of_an_option_or_argument_is_a_noun_phrase(path: tuple[str, ...]) -> None:
    command = COMMANDS[path] if path else TREE
    verbs = VERBS | {summary(other).split(" ")[0] for other in COMMANDS.values()}
    helps = {
        parameter.name: getattr(parameter, "help", None) or ""
        for parameter in command.params
        if parameter.name not in FOREIGN
    }
    assert {} == {
        name: found for name, text in helps.items() if (found := problems_of_help(text, verbs))
    }


# Messages, docstrings and comments
# --------------------------------------------------------------------------------------------------


def texts(node: ast.AST) -> str:
    """All string literals below ``node``, joined; values within f-strings become X."""
    found: list[str] = []

    def visit(inner: ast.AST) -> None:
        if isinstance(inner, ast.JoinedStr):
            parts = (
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in inner.values
            )
            found.append("".join(parts))
            return
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            found.append(inner.value)
        for child in ast.iter_child_nodes(inner):
            visit(child)

    visit(node)
    return "\n".join(found)


def messages(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Texts that a user may read: of errors, of log records, of helps."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield texts(node.exc)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in MESSAGE_CALLS or called.endswith("Error"):
                yield texts(node)
            yield from (texts(word.value) for word in node.keywords if word.arg == "help")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {name.id for target in targets for name in ast.walk(target)
                     if isinstance(name, ast.Name)}  # fmt: skip
            if names & MESSAGE_NAMES:
                yield texts(node.value)


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Docstrings of modules, classes, functions and attributes."""
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


STRING_OR_COMMENT = re.compile(
    r""""{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"""
    r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
"""Finds the same comments as `tokenize`, in a tenth of its time."""


def comments(source: str) -> Iterator[str]:
    """Blocks of comments, without directives for tools."""
    block: list[str] = []
    last, line, seen = -1, 0, 0
    for found in STRING_OR_COMMENT.finditer(source):
        if found["comment"] is None:
            continue
        line, seen = line + source.count("\n", seen, found.start()), found.start()
        if line != last + 1:
            yield "\n".join(block)
            block = []
        last = line
        text = found["comment"].lstrip("#").strip()
        block.append(re.sub(r"^(?:noqa: [A-Z0-9, ]+|type: ignore\[[^]]*\]|fmt: \w+)", "", text))
    yield "\n".join(block)


def prose_of(source: str) -> Iterator[str]:
    """Everything in a module that is written for people."""
    nodes = list(ast.walk(ast.parse(source)))
    yield from messages(nodes)
    yield from docstrings(nodes)
    yield from comments(source)


def modules(part: str) -> list[Path]:
    """The files of a package, or a single module."""
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("part", PARTS)
def test_messages_docstrings_and_comments_are_plain(part: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), text): avoided
        for path in modules(part)
        for text in prose_of(path.read_text(encoding="utf-8"))
        if (avoided := words(text))
    }
    assert {} == found


def test_parts_are_found() -> None:
    assert {"api", "coordinator", "exchange", "planning"} <= set(PARTS)


# Labels of the console
# --------------------------------------------------------------------------------------------------

SCRIPT = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|"(?P<double>(?:[^"\\\n]|\\.)*)"|`(?P<template>(?:[^`\\]|\\.)*)`""",
    re.DOTALL,
)


class Labels(html.parser.HTMLParser):
    """Collects the texts of a page, and the attributes that are read aloud."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in {"aria-label", "title"}]


def labels_of(path: Path) -> list[str]:
    """Texts and comments of a file of the console."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        page = Labels()
        page.feed(source)
        return page.found
    found = [(match.lastgroup, match[match.lastgroup or 0]) for match in SCRIPT.finditer(source)]
    return [re.sub(r"\$\{[^}]*\}", "X", text) for _, text in found]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONSOLE.iterdir()) if path.suffix in {".js", ".html", ".css"}],
    ids=lambda path: path.name,
)
def test_labels_and_comments_of_the_console_are_plain(path: Path) -> None:
    labels = labels_of(path)
    assert labels
    assert {} == {text: avoided for text in labels if (avoided := words(text))}


def test_labels_of_the_console_are_found() -> None:
    assert {"Diagnosis", "Try "} <= set(labels_of(CONSOLE / "diagnosis.js"))
    assert "Skip to settings" in labels_of(CONSOLE / "index.html")


# The checks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Train a policy from CONFIG.", []),
        ("Trains a policy.", ["not imperative"]),
        ("What holds it.", ["not imperative"]),
        ("Train. Then stop.", ["not one sentence"]),
        ("Train a policy", ["not one sentence"]),
        ("Train whoever asks.", ["whoever"]),
    ],
)
def test_a_summary_that_is_not_plain_is_noticed(text: str, found: list[str]) -> None:
    assert found == problems_of_summary(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Number of actors.", []),
        ("Train here.", ["not a noun phrase"]),
        ("How many actors.", ["not a noun phrase"]),
        ("number of actors", ["no capital letter, or no full stop"]),
        ("Actors that are kept.", ["kept"]),
    ],
)
def test_a_help_that_is_not_plain_is_noticed(text: str, found: list[str]) -> None:
    assert found == problems_of_help(text, frozenset({"Train"}))


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(f'{x} is no number')",
        "Problem('a.b', 1, 'are none', 'one')",
        "log.warning('nobody answers')",
        "message = f'{x} is told'",
        "Option(help='Whoever asks.')",
        "def f():\n    'Who asks.'",
        "x = 1\n'''Anew.'''",
        "x = 1  # kept\n",
    ],
)
def test_dialect_in_a_module_is_noticed(source: str) -> None:
    assert any(map(words, prose_of(source)))


def test_code_and_plain_words_are_not_dialect() -> None:
    plain = "raise ValueError(f'{told} is not a number')\nx = 'kept'  # noqa: E501 - it is long\n"
    assert not any(map(words, prose_of(plain)))
    assert [] == words("Call `keep`, or ``nobody``.")
