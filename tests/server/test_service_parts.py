"""What a service is made of, each part alone: its store, what configs may name, its tokens, metrics
put together.
"""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.support import environments
from tests.support.fakes_run import FakeRun
from tests.support.refusing import full_disk
from tianflow.config.imports import at_run, at_service, require_allowed, require_trusted
from tianflow.errors import ConfigError
from tianflow.observability.prometheus.prometheus import Exporter
from tianflow.server.service import run_process
from tianflow.server.service.metrics import ServiceCollector, exposition
from tianflow.server.service.run_process import RunFiles
from tianflow.server.service.store import ReusedKeyError, RunStore, StoreError, TakenError
from tianflow.server.service.tokens import read_or_create

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs.sqlite")


def add(store: RunStore, name: str, **more: Any) -> None:
    store.add(name, config={"env": {"id": name}}, source="test", now=1.0, **more)


# RunStore
# --------------------------------------------------------------------------------------------------


def test_a_record_survives_reopening_the_store(store: RunStore, tmp_path: Path) -> None:
    add(store, "a")
    store.begin("a", now=2.0)
    record = RunStore(tmp_path / "runs.sqlite").get(
        "a"
    )  # the first one was never closed: its process may have been killed
    assert record is not None
    assert ("a", "running", '{"env": {"id": "a"}}', "test", 1.0, 2.0, None, "") == (
        record.id,
        record.state,
        record.config,
        record.source,
        record.submitted,
        record.started,
        record.ended,
        record.reason,
    )


def test_running_runs_come_before_pending_ones(store: RunStore) -> None:
    for name in "abcd":
        add(store, name)
    store.begin("c", now=2.0)
    store.end("b", state="done", reason="target", now=3.0)
    assert ["c", "a", "d"] == [record.id for record in store.startable(9)]
    assert ["c", "a"] == [record.id for record in store.startable(2)]
    assert {"running": 1, "pending": 2, "done": 1} == store.counts()


def test_an_end_is_stored_and_a_queued_run_has_none(store: RunStore) -> None:
    add(store, "a")
    store.begin("a", now=2.0)
    store.end("a", state="failed", reason="it broke", now=3.0)
    ended = store.get("a")
    assert ended is not None
    assert ("failed", "it broke", 3.0) == (ended.state, ended.reason, ended.ended)
    store.queue("a")
    queued = store.get("a")
    assert queued is not None
    assert ("pending", "", None, 2.0) == (queued.state, queued.reason, queued.ended, queued.started)


def test_a_second_start_keeps_the_time_of_the_first(store: RunStore) -> None:
    add(store, "a")
    store.begin("a", now=2.0)
    store.begin("a", now=9.0)
    record = store.get("a")
    assert record is not None
    assert 2.0 == record.started


def test_a_run_stopped_meanwhile_does_not_begin(store: RunStore) -> None:
    add(store, "a")
    assert store.begin("a", now=2.0)
    store.end("a", state="stopped", reason="somebody", now=3.0)
    assert not store.begin("a", now=4.0)
    record = store.get("a")
    assert record is not None
    assert ("stopped", "somebody", 3.0) == (record.state, record.reason, record.ended)


def test_a_name_is_taken_once(store: RunStore) -> None:
    add(store, "a")
    with pytest.raises(TakenError, match="'a'"):
        add(store, "a")


def test_a_key_gives_the_same_run_again_and_no_other(store: RunStore) -> None:
    first, new = store.add("a", config={}, source="s", now=1.0, key="k", body="digest")
    again, newer = store.add("b", config={}, source="s", now=2.0, key="k", body="digest")
    assert (True, False) == (new, newer)
    assert first == again
    assert store.get("b") is None
    with pytest.raises(ReusedKeyError):
        store.add("b", config={}, source="s", now=2.0, key="k", body="another")


def test_pages_go_from_the_newest_to_the_oldest(store: RunStore) -> None:
    for name in "abcde":
        add(store, name)
    first = store.page(before=None, limit=2)
    second = store.page(before=first[-1].number, limit=2)
    third = store.page(before=second[-1].number, limit=2)
    assert [["e", "d"], ["c", "b"], ["a"]] == [
        [record.id for record in page] for page in (first, second, third)
    ]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="format 99"):
        RunStore(path)
    assert [path] == list(tmp_path.iterdir())
    assert before == path.read_bytes()


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    path.write_bytes(b"not a database, and long enough to be looked at" * 10)
    with pytest.raises(StoreError, match="runs.sqlite"):
        RunStore(path)


def test_a_damaged_store_is_either_refused_or_read(store: RunStore, tmp_path: Path) -> None:
    for number in range(40):
        add(store, f"run-{number}", key=f"key-{number}")
    store.close()
    good, dice, seen = (tmp_path / "runs.sqlite").read_bytes(), random.Random(2), Counter[str]()
    for number in range(24):
        bits = bytearray(good)
        for _ in range(dice.choice((1, 5, 40))):
            bits[dice.randrange(len(bits))] = dice.randrange(256)
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(bits[: dice.randrange(len(bits)) if number % 4 == 0 else None])
        seen[asked_everything(path)] += 1
    assert {"refused", "read"} == set(seen)


def asked_everything(path: Path) -> str:
    try:
        store = RunStore(path)
    except StoreError:
        return "refused"
    try:
        store.page(before=None, limit=500)
        store.startable(500)
        store.counts()
        store.begin("run-1", now=1.0)
        store.end("run-2", state="done", reason="", now=1.0)
        add(store, "another", key="another")
    except StoreError:
        return "refused"
    finally:
        store.close()
    return "read"


def test_a_damaged_record_does_not_affect_others(store: RunStore, tmp_path: Path) -> None:
    add(store, "whole")
    add(store, "damaged")
    store.close()
    path = tmp_path / "runs.sqlite"
    bits = path.read_bytes()
    path.write_bytes(bits.replace(b'{"id": "damaged"}', b'{"id": "\xff\xfe\xfdaged"}'))
    assert bits != path.read_bytes()
    assert ["damaged", "whole"] == [
        record.id for record in RunStore(path).page(before=None, limit=10)
    ]


def test_a_refusal_of_the_disk_is_a_store_error(store: RunStore) -> None:
    store.close()
    with pytest.raises(StoreError):
        store.startable(1)


# RunFiles
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "paused"),
    [
        (None, False),
        ("", False),
        ('{"action": "pause"}\n', True),
        ('{"action": "pause"}\n{"action": "change"}\n', True),
        ('{"action": "pause"}\n{"action": "resume"}\n', False),
        ('{"action": "resume"}\n{"action": "pause"}\n{"acti', True),
        (
            '{"action": "pause"}\n\udcff\udcfe\n'
            + "[" * 100_000
            + '\n5\n"resume"\n[]\n{"action": {}}\n{"action": ["resume"]}\n',
            True,
        ),
    ],
)
def test_a_pause_is_known_from_the_audit_log(
    tmp_path: Path, lines: str | None, paused: bool
) -> None:
    files = RunFiles(tmp_path)
    files.run("a").mkdir()
    if lines is not None:
        (files.run("a") / "audit.jsonl").write_text(lines, errors="surrogateescape")
    assert paused == files.paused("a")


def test_a_log_retains_its_newest_lines_while_its_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_process, "LONGEST_LOG", 100)
    files = RunFiles(tmp_path)
    files.own.mkdir()
    files.trim("a")  # there is none yet
    with files.log("a").open("ab", buffering=0) as log:
        for number in range(25):
            log.write(b"%03d\n" % number)
        files.trim("a")
        assert 100 == files.log("a").stat().st_size, "it is not too long yet"
        log.write(b"025\n")
        files.trim("a")
        log.write(b"026\n")
    assert [*range(14, 27)] == [int(line) for line in files.log("a").read_text().split()]


@pytest.mark.parametrize("text", [b"", b'{"state": "do', b"\xff", b"[" * 100_000, b"[]", b"5"])
def test_a_damaged_summary_is_none(tmp_path: Path, text: bytes) -> None:
    files = RunFiles(tmp_path)
    files.run("a").mkdir()
    (files.run("a") / "summary.json").write_bytes(text)
    assert files.summary("a") is None


@pytest.mark.parametrize(
    "name", ["tokens", "tokens.toml", "lock", "runs.sqlite", "x", "x.config", "x.log"]
)
def test_no_name_of_a_run_is_that_of_a_file_of_the_service_or_of_another_run(
    tmp_path: Path, name: str
) -> None:
    files = RunFiles(tmp_path)
    taken = {
        files.tokens,
        *(files.own / own for own in ("lock", "runs.sqlite", "runs.sqlite-wal", "runs.sqlite-shm")),
    }
    others = {
        path
        for other in {"x", "y", "x.log", "x.config"} - {name}
        for path in (files.config(other), files.log(other))
    }
    assert not {files.config(name), files.log(name)} & (taken | others)


# What a config may name
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("env", "id", "os:system"),
        ("env", "id", "my_module:Env-v0"),
        ("env", "id", " os:system"),
        ("env", "wrappers", ["gymnasium.wrappers:TimeLimit", "os:system"]),
        ("network", "name", "torch.nn:Linear"),
        ("algorithm", "name", "os:system"),
        ("balance", "controller", ["staleness", "os:system"]),
        ("balance", "controller", ":"),
        ("placement", "launcher", "subprocess:Popen"),
        ("metrics", "sinks", ["tensorboard", "os:1"]),
        ("env", "kwargs", {"inner": {"factory": "os:system"}}),
        ("env", "kwargs", {"list": [["os:system"]]}),
        ("env", "kwargs", {"os:system": 1}),
        ("not", "known", "os:system"),
    ],
)
def test_objects_of_modules_that_are_not_allowed_are_refused(
    section: str, key: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        require_allowed(
            {section: {key: value}}, ["tests.support.environments", "gymnasium.wrappers"]
        )
    (problem,) = caught.value.problems
    assert problem.path.startswith(f"{section}.{key}")
    assert "gymnasium.wrappers" in problem.accepted


@pytest.mark.parametrize(
    ("value", "module"),
    [
        ("rooms.large:Room", "rooms.large"),
        (" rooms : Room", "rooms"),
        ("rooms:Box.sample", "rooms"),
        ("tests.support.environments:Path", "pathlib"),
        ("tests.support.environments:gym.Env", None),
        ("tests.support.environments:np", None),
        ("a b; rm -rf:Room", None),
        ("x" * 65 + ":Room", None),
    ],
)
def test_a_refusal_says_which_option_would_permit_the_module(
    value: str, module: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "Path", Path, raising=False)
    monkeypatch.setattr(environments, "np", os, raising=False)
    tables = {"env": {"id": value}}
    options = {
        at_service: "`--allow-import {}`, added to the options of `tianflow serve`, permits it",
        at_run: 'http.allowed_imports = ["{}"] in the settings of the run permits it',
    }
    for permit, words in options.items():
        with pytest.raises(ConfigError) as caught:
            require_allowed(tables, ["tests.support.environments"], permit=permit)
        (problem,) = caught.value.problems
        if module is None:
            assert "permits" not in problem.accepted
        else:
            assert problem.accepted.endswith(words.format(module))


def test_a_refused_checkpoint_says_how_to_trust_its_module() -> None:
    with pytest.raises(ConfigError) as caught:
        require_trusted({"env": {"id": "rooms:Room", "wrappers": ["rooms.dark:Dark"]}}, ["other"])
    assert ["rooms", "rooms.dark"] == [
        module
        for module, problem in zip(("rooms", "rooms.dark"), caught.value.problems, strict=True)
        if f"`--trust`, or trust=['{module}'] in Python, permits it" in problem.accepted
    ]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("env", "id", "CartPole-v1"),
        ("env", "id", "ALE/Pong-v5"),
        ("env", "id", "tests.support.environments:CounterEnv"),
        ("env", "id", "tests.support.environments.deeper:Env"),
        ("learner", "device", "cuda:0"),
        ("env", "kwargs", {"url": "http://127.0.0.1:80/", "when": "12:30", "path": "C:\\x"}),
        ("run", "name", "anything"),
        ("run", "init_from", "A-run_1.b"),
        ("ray", "address", "auto"),
        ("ray", "address", "local"),
    ],
)
def test_installed_and_allowed_names_pass(section: str, key: str, value: object) -> None:
    require_allowed({section: {key: value}}, ["tests.support.environments"])


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("env.id", "tests.support.environments:gym.Env", "an attribute with a dot"),
        ("env.id", "tests.support.environments:CounterEnv.__init__", "an attribute with a dot"),
        ("env.wrappers", "tests.support.environments:np", "is not a class or a function"),
        ("network.name", "tests.support.environments:spaces", "is not a class or a function"),
        ("metrics.sinks", "tests.support.environments:Path", "is defined in 'pathlib'"),
        ("env.kwargs.maker", "tests.support.environments:Path", "is defined in 'pathlib'"),
    ],
)
def test_objects_that_an_allowed_module_imports_are_refused(
    path: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "Path", Path, raising=False)
    monkeypatch.setattr(environments, "np", os, raising=False)
    monkeypatch.setattr(environments, "spaces", os, raising=False)
    with pytest.raises(ConfigError, match=reason):
        require_allowed({path: value}, ["tests.support.environments"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metrics.kwargs.tensorboard.directory", "elsewhere"),
        ("metrics.kwargs.tensorboard", {"directory": "/elsewhere"}),
        ("metrics.kwargs", {"mlflow": {"tracking_uri": "sqlite:///x.db"}}),
        ("metrics", {"kwargs": {"mlflow": {"tracking_uri": "runs"}}}),
        ("metrics.kwargs.mlflow.experiment", "http://elsewhere"),
        ("metrics.kwargs.wandb.dir", "x"),
        ("metrics.kwargs.wandb.settings.root_dir", "x"),
        ("metrics.kwargs.wandb.tags", ["a", "../x"]),
        ("env.kwargs.log", "/etc/passwd"),
        ("env.kwargs", {"files": [{"name": "a/../../x"}]}),
        ("env.kwargs.log", ".."),
        ("env.kwargs.log", "~/x"),
        ("env.kwargs.log", "file:///x"),
        ("network.kwargs.weights", "/x"),
        ("run.init_from", "/elsewhere/A"),
        ("run.init_from", "runs/A"),
        ("run.init_from", "A/checkpoints/v1-0000000004"),
        ("run.init_from", ".."),
        ("run", {"init_from": "~"}),
        ("ray.address", "10.0.0.1:6379"),
        ("ray", {"address": "elsewhere:6379"}),
    ],
)
def test_places_outside_of_the_run_are_refused_once_by_path(path: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        require_allowed({path: value}, [])
    (problem,) = caught.value.problems
    assert problem.path.startswith(path)
    assert problem.accepted


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metrics.kwargs.tensorboard.flush_s", 1.0),
        ("metrics.kwargs", {"wandb": {"project": "robots", "tags": ["a b", "c"]}}),
        ("metrics.kwargs", {"tests.support.environments:CounterEnv": {"text": "a.b"}}),
        ("env.kwargs", {"mode": "1/2", "map": "maps/a.xml", "dots": "a..b", "web": "http://x/"}),
    ],
)
def test_other_arguments_pass(path: str, value: object) -> None:
    require_allowed({path: value}, ["tests.support.environments"])


def test_settings_that_are_not_allowed_import_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never_imported.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    tables = {"env": {"id": "never_imported:Env"}}
    with pytest.raises(ConfigError):
        require_allowed(tables, ["tests.support.environments"])
    for trust in (False, ["tests"], []):
        with pytest.raises(ConfigError, match="--trust"):
            require_trusted(tables, trust)
    for trust in (True, ["never_imported"]):
        require_trusted(tables, trust)
    assert "never_imported" not in sys.modules


def test_a_module_with_the_prefix_of_an_allowed_one_is_not_allowed() -> None:
    with pytest.raises(ConfigError):
        require_allowed(
            {"env": {"id": "tests.environments_of_others:Env"}}, ["tests.support.environments"]
        )


# Tokens
# --------------------------------------------------------------------------------------------------


def test_tokens_are_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    made = read_or_create(path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert made == read_or_create(path)
    assert len({made.control, made.read, ""}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "control = 1\nread = 2\n",
        'control = "a"\n',
        'control = "a"\nread = "a"\n',
        'control = ""\nread = ""\n',
        "]",
    ],
)
def test_an_invalid_token_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="token-file"):
        read_or_create(path)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    read_or_create(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_or_create(path)


def test_a_token_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        read_or_create(tmp_path / "missing" / "tokens.toml")


def test_tokens_that_a_full_disk_refused_are_created_at_the_next_start(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(ConfigError, match="cannot be used"):
        read_or_create(tmp_path / "tokens.toml")
    assert [] == list(tmp_path.iterdir())
    assert read_or_create(tmp_path / "tokens.toml") == read_or_create(tmp_path / "tokens.toml")


# Metrics
# --------------------------------------------------------------------------------------------------


def page_of(name: str, accept: str = "") -> str:
    run = FakeRun(name=name)
    run.train(3)
    return (
        Exporter(runs=lambda: [run.statistics()], requests={200: 7}).exposition(accept)[0].decode()
    )


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_metrics_of_all_runs_are_one_page_that_parses(accept: str) -> None:
    collector = ServiceCollector(counts={"running": 2}, restarts=3, requests={200: 5})
    body, content_type = exposition(
        collector, [page_of("a", accept), page_of("b", accept), ""], accept
    )
    assert ("openmetrics" in content_type) == bool(accept)
    parse = parse_openmetrics if accept else text_string_to_metric_families
    samples = [sample for family in parse(body.decode()) for sample in family.samples]
    names = [family.name for family in parse(body.decode())]
    assert len(set(names)) == len(names)
    runs = {sample.labels["run"] for sample in samples if sample.name == "tianflow_env_steps_total"}
    assert {"a", "b"} == runs
    assert [5.0] == [
        sample.value for sample in samples if sample.name == "tianflow_http_requests_total"
    ]  # the service's own only
    assert 1 == sum(sample.name == "tianflow_build_info" for sample in samples)
    states = {
        sample.labels["state"]: sample.value
        for sample in samples
        if sample.name == "tianflow_service_runs"
    }
    assert {"pending": 0.0, "running": 2.0, "done": 0.0, "failed": 0.0, "stopped": 0.0} == states
    assert [3.0] == [
        sample.value for sample in samples if sample.name == "tianflow_service_run_restarts_total"
    ]


def test_metrics_of_each_run_are_its_own() -> None:
    def told(page: str) -> dict[tuple[Any, ...], float]:
        samples = [
            sample for family in text_string_to_metric_families(page) for sample in family.samples
        ]
        return {
            (s.name, *sorted(s.labels.items())): s.value
            for s in samples
            if s.labels.get("run") == "a"
        }

    page = page_of("a")
    body, _ = exposition(
        ServiceCollector(counts={}, restarts=0, requests={}), [page, page_of("b")], ""
    )
    assert len(told(page)) > 50
    assert told(page) == told(body.decode())


def test_a_label_may_hold_other_line_separators() -> None:
    name = "a\u2028b\x85c"
    body, _ = exposition(ServiceCollector(counts={}, restarts=0, requests={}), [page_of(name)], "")
    samples = [
        sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    ]
    assert {name} == {sample.labels["run"] for sample in samples if "run" in sample.labels}


@pytest.mark.parametrize("tables", [{"cluster": {"curve": False}}, {"cluster.curve": "false"}])
def test_no_port_without_a_key_is_opened_over_http(tables: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.curve.*lets processes without a key join the run"
    ):
        require_allowed(tables, [])
    require_allowed({"cluster": {"curve": True, "listen": "tcp://*:*"}}, [])
