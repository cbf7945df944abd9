"""What `tianflow diagnose` prints."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tianflow.cli.main import app
from tianflow.errors import TianflowError
from tianflow.server.common import client

DOCUMENT = {
    "id": "one",
    "verdict": "sampling-bound",
    "advice": "the learner waits 41% of the time",
    "component": None,
    "for_s": 12.4,
    "window_s": 5.0,
    "suggested": {"actors.count": 7},
    "shares": {"learner": {"busy": 0.59, "waiting:batch": 0.41}, "actor": {"busy": 1.0}},
}


@pytest.fixture(name="answer")
def _answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    answer: dict[str, Any] = dict(DOCUMENT)

    def find(_runs_dir: object, run: str | None) -> SimpleNamespace:
        if run not in (None, "one"):
            raise TianflowError(f"no run {run!r} is going on")
        return SimpleNamespace(run="one")

    def request(_contact: object, method: str, path: str) -> dict[str, Any]:
        assert ("GET", "/diagnosis") == (method, path)
        return answer

    monkeypatch.setattr(client, "find", find)
    monkeypatch.setattr(client, "request", request)
    return answer


@pytest.mark.usefixtures("answer")
def test_the_verdict_its_advice_and_the_shares_behind_it_are_printed() -> None:
    assert CliRunner().invoke(app, ["diagnose"]).stdout.splitlines() == [
        "one: sampling-bound for 12 s",
        "  the learner waits 41% of the time",
        "  try: tianflow set one actors.count=7",
        "  learner over 5 s: busy 59%, waiting:batch 41%",
        "  actor over 5 s: busy 100%",
    ]


def test_what_is_suggested_can_be_typed_section_by_section_and_what_needs_a_new_run_is_told_apart(
    answer: dict[str, Any],
) -> None:
    answer["suggested"] = {
        "actors.count": 33,
        "actors.hosts": 33,
        "balance.max_staleness": 33,
        "replay.error_buffer": 1234567.0,
    }
    said = CliRunner().invoke(app, ["diagnose", "one"]).stdout.splitlines()
    assert [
        "  try: tianflow set one actors.count=33",
        "  try: tianflow set one balance.max_staleness=33",
        "  try: tianflow set one replay.error_buffer=1234567",
        "  in a new run: actors.hosts=33",
    ] == said[2:6]


def test_who_stands_still_is_named(answer: dict[str, Any]) -> None:
    answer |= {"verdict": "stalled", "component": "actor-1", "suggested": {}, "shares": {}}
    assert [
        "one: stalled (actor-1) for 12 s",
        "  the learner waits 41% of the time",
    ] == CliRunner().invoke(app, ["diagnose", "one"]).stdout.splitlines()


def test_as_json_it_is_what_the_run_says(answer: dict[str, Any]) -> None:
    assert answer == json.loads(CliRunner().invoke(app, ["diagnose", "--json"]).stdout)


@pytest.mark.usefixtures("answer")
def test_a_run_that_is_not_going_on_is_code_1() -> None:
    done = CliRunner().invoke(app, ["diagnose", "two"])
    assert (1, "no run 'two' is going on\n") == (done.exit_code, done.stderr)
