"""Log records of a host process reach the log of the coordinator, and a flood of them does not."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tianflow import api, logs
from tianflow.channels.messages import MESSAGES, RecordLogged
from tianflow.hosts.log_records import LONGEST, MOST, WINDOW_S, LinkLogHandler


class Host:
    """A host with a handler, whose messages are kept."""

    def __init__(self) -> None:
        self.sent: list[RecordLogged] = []
        self.now = 100.0
        self.handler = LinkLogHandler(self.sent.append, now=lambda: self.now)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    host.handler.install()
    yield host
    host.handler.uninstall()


def test_a_record_carries_its_severity_and_bound_values_as_text(host: Host) -> None:
    log = logs.logger("scratch", component="actor-3")
    log.warning("the disk is full", free=0, path=Path("/x"))
    log.info("a word")
    log.debug("a detail")
    assert host.sent == [
        RecordLogged(
            logging.WARNING,
            "scratch",
            "the disk is full",
            {"component": "actor-3", "free": "0", "path": "/x"},
        ),
        RecordLogged(logging.INFO, "scratch", "a word", {"component": "actor-3"}),
    ]
    packed = [msgpack.unpackb(msgpack.packb(MESSAGES.encode(record))) for record in host.sent]
    assert host.sent == [MESSAGES.decode(record) for record in packed]


def test_an_exception_comes_with_its_traceback(host: Host) -> None:
    try:
        Path("/no such folder/file").read_bytes()
    except OSError:
        logs.logger("scratch").exception("cannot read")
    assert "FileNotFoundError: " in host.sent[0].values["exception"]
    assert "test_log_records.py" in host.sent[0].values["exception"]


def test_a_record_that_cannot_be_written_costs_the_code_that_logs_nothing(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError("no text")

    # Passed to the handler alone: that of pytest raises.
    for fields in (
        {"msg": "%d", "args": ("not a number",)},
        {"msg": "a value", "value": Broken()},
        {"msg": "after them"},
    ):
        host.handler.handle(logging.makeLogRecord({"name": "tianflow.scratch", **fields}))
    assert ["after them"] == [record.event for record in host.sent]
    assert {"TypeError", "ValueError"} <= set(
        re.findall(r"^\w+Error", capsys.readouterr().err, re.MULTILINE)
    )


def test_a_long_text_is_cut(host: Host) -> None:
    logs.logger("scratch").warning("m" * 9_999, value="v" * 9_999)
    assert (LONGEST, LONGEST) == (len(host.sent[0].event), len(host.sent[0].values["value"]))


def test_records_of_a_flood_are_counted_and_the_next_window_says_how_many(host: Host) -> None:
    log = logs.logger("scratch")
    for number in range(MOST + 7):
        log.warning("again", number=number)
    assert [str(number) for number in range(MOST)] == [r.values["number"] for r in host.sent]
    host.now += WINDOW_S
    log.warning("later")
    log.warning("later still")
    assert [{"dropped_records": "7"}, {}] == [record.values for record in host.sent[MOST:]]


def test_threads_share_the_limit(host: Host) -> None:
    def flood() -> None:
        for _ in range(200):
            logs.logger("scratch").warning("again")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    host.now += WINDOW_S
    logs.logger("scratch").warning("later")
    assert {"dropped_records": str(800 - MOST)} == host.sent[-1].values


class Kept(logging.Handler):
    """Keeps the records of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str, dict[str, object]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = record.name, record.levelno, record.getMessage(), logs.details_of(record)
        self.records.append(found)


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["inline", "processes"])
def test_what_an_environment_logs_is_in_the_log_of_the_run(launcher: str, tmp_path: Path) -> None:
    kept, root = Kept(), logging.getLogger("tianflow")
    root.addHandler(kept)
    settings: dict[str, Any] = {
        "env": {"id": "tests.support.environments:LoggingEnv", "num_envs": 1},
        "algorithm": {"name": "a2c"},
        "placement": {"launcher": launcher},
        "evaluation": {"episodes": 1},
        "run": {"max_updates": 3, "name": "logs"},
    }
    try:
        api.train(settings, runs_dir=tmp_path)
    finally:
        root.removeHandler(kept)
    found = [record for record in kept.records if record[0] == "tianflow.scratch"]
    assert {(logging.WARNING, "an episode begins")} == {record[1:3] for record in found}
    assert all({"level", "self", "stacklevel", "episode"} <= set(values) for *_, values in found)
    hosts = {values.get("host") for *_, values in found}
    assert ({"actors-0", "evaluator"} <= hosts) == (launcher == "processes")
