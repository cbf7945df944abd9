"""Foreign text does not control the terminal of a person who reads it."""

from __future__ import annotations

import io
import json
import logging

import pytest
import typer

from tianflow import logs
from tianflow.cli import common
from tianflow.errors import ConfigError, Problem, RunError, printable

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202eabc"


@pytest.fixture(autouse=True)
def _loggers() -> object:
    root = logging.getLogger(logs.ROOT)
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.level, root.propagate = before


def is_safe(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\r\u202e")


def test_control_characters_are_shown_as_escapes() -> None:
    assert "a\tb\nc é 中 \\u001b[31m" == printable("a\tb\nc é 中 \x1b[31m")
    assert is_safe(printable(EVIL))
    assert json.loads(f'"{printable(EVIL)}"') == EVIL  # an escape of JSON and TOML, too


@pytest.mark.parametrize(
    "error", [RunError("actor-0", EVIL, EVIL), ConfigError([Problem(EVIL, EVIL, EVIL, EVIL)])]
)
def test_messages_of_errors_are_escaped(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), common.exit_codes():
        raise error
    shown = capsys.readouterr().err
    assert "owned" in shown
    assert is_safe(shown)


def test_output_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    common.echo(EVIL)
    assert is_safe(capsys.readouterr().out)


@pytest.mark.parametrize("as_json", [False, True])
def test_records_of_the_log_are_escaped(as_json: bool) -> None:
    stream = io.StringIO()
    logs.configure(stream=stream, as_json=as_json)
    log = logs.logger("test")
    log.warning("event", reason=EVIL)
    log.warning(EVIL)
    try:
        int(EVIL)
    except ValueError:
        log.exception("it failed")
    shown = stream.getvalue()
    assert "owned" in shown
    assert "ValueError" in shown
    assert shown.count("owned") >= 3
    assert is_safe(shown)
