"""Dashboards and rules speak of what the exporter really emits, and lie on disk as they are
made.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards import make, targets
from tests.support.fakes_run import FakeRun
from tianflow.core.statistics import SinkStatistics
from tianflow.observability.prometheus.prometheus import Exporter
from tianflow.rundir.control_file import NAME as NAME_OF_RUN
from tianflow.rundir.control_file import SERVICE, ControlFile, process_start_time
from tianflow.server.service.metrics import ServiceCollector, exposition
from tianflow.server.service.run_process import RunFiles

FOLDER = Path(make.__file__).parent
BOARDS = {path.stem: json.loads(text) for path, text in make.files().items()}
NAME = re.compile(r"\btianflow_[a-z0-9_]+")
MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


def panel_expressions() -> list[str]:
    """Expressions of panels and annotations."""
    boards = BOARDS.values()
    panels = (panel for board in boards for panel in board["panels"] if panel["type"] != "row")
    events = (event for board in boards for event in board["annotations"]["list"])
    return [
        *(target["expr"] for panel in panels for target in panel["targets"]),
        *(event["expr"] for event in events),
    ]


def rules_text() -> str:
    return re.sub(r"#.*", "", (FOLDER / "prometheus" / "rules.yml").read_text())


@pytest.fixture(scope="module")
def emitted() -> dict[str, list[dict[str, str]]]:
    return labels_emitted()


def labels_emitted() -> dict[str, list[dict[str, str]]]:
    """Label sets of every series of a run in which everything has happened."""
    run = FakeRun(replay=True)
    run.servers = 1
    run.restarts = {("actors-0", "died"): 1}
    run.evaluation = {"mean_return": 1.0, "version": 1.0, "success": 0.5}
    run.sinks = {"tensorboard": SinkStatistics(3, 1)}
    run.train(3)
    page, _ = Exporter(runs=lambda: [run.statistics()], requests={200: 1}).exposition("")
    text, _ = exposition(
        ServiceCollector(counts={"failed": 1}, restarts=1, requests={200: 1}), [page.decode()], ""
    )
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_every_name_in_a_panel_is_emitted(emitted: dict[str, list[dict[str, str]]]) -> None:
    used = {name for expression in panel_expressions() for name in NAME.findall(expression)}
    assert len(used) > 40
    assert set() == used - set(emitted)


def test_every_name_in_a_rule_is_emitted(emitted: dict[str, list[dict[str, str]]]) -> None:
    used = set(NAME.findall(rules_text()))
    assert len(used) > 6
    assert set() == used - set(emitted)


@pytest.mark.parametrize("expression", [*panel_expressions(), rules_text()])
def test_every_label_that_is_matched_takes_that_value(
    emitted: dict[str, list[dict[str, str]]], expression: str
) -> None:
    for name, matchers in re.findall(r"(tianflow_[a-z0-9_]+)\{([^}]*)\}", expression):
        for label, value in MATCHER.findall(matchers):
            values = {labels.get(label, "") for labels in emitted[name]}
            assert value == "$run" or any(re.fullmatch(value, one) for one in values), (
                f"{name} has no {label}={value}, only {values}"
            )


def test_the_dashboards_on_disk_are_those_that_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 == make.main(["--check"])
    monkeypatch.setattr(make, "FOLDER", tmp_path)
    assert 1 == make.main(["--check"])
    assert 0 == make.main([])
    assert 0 == make.main(["--check"])
    (tmp_path / "overview.json").write_text("{}")
    assert 1 == make.main(["--check"])


@pytest.mark.parametrize("name", ["overview", "balance"])
def test_a_dashboard_has_a_stable_uid_and_asks_for_its_data_source(name: str) -> None:
    board = BOARDS[name]
    assert f"tianflow-{name}" == board["uid"]
    assert ["datasource", "run"] == [variable["name"] for variable in board["templating"]["list"]]
    for event in board["annotations"]["list"]:
        assert "${datasource}" == event["datasource"]["uid"]
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert "${datasource}" == panel["datasource"]["uid"]
        assert all("${datasource}" == target["datasource"]["uid"] for target in panel["targets"])
        assert panel["description"].endswith(".")


@pytest.mark.parametrize("name", ["overview", "balance"])
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len(BOARDS[name]["panels"]) == len({panel["id"] for panel in BOARDS[name]["panels"]})


def test_what_grafana_is_given_is_where_compose_puts_it() -> None:
    compose = (FOLDER / "compose.yaml").read_text()
    provider = (FOLDER / "grafana" / "provisioning" / "dashboards" / "tianflow.yaml").read_text()
    assert 2 == compose.count("network_mode: host")
    for source in ("./prometheus", "./grafana/provisioning", "./grafana/dashboards"):
        assert (FOLDER / source).is_dir()
        assert f"- {source}:" in compose
    path = re.search(r"path: (\S+)", provider)
    assert path is not None
    assert f"./grafana/dashboards:{path[1]}:ro" in compose


def test_targets_are_the_runs_that_go_on(tmp_path: Path) -> None:
    mine = os.getpid()
    for name, start_time in (("alive", process_start_time(mine)), ("ended", 1)):
        (tmp_path / name).mkdir()
        address = f"http://127.0.0.1:{len(name)}"
        ControlFile(
            run=name, pid=mine, start_time=start_time, address=address, token="a", read_token="b"
        ).write(tmp_path / name)
    file = tmp_path / "runs.json"
    assert ["127.0.0.1:5"] == targets.write(tmp_path, file)
    assert [{"targets": ["127.0.0.1:5"]}] == json.loads(file.read_text())


def test_a_service_is_a_target_instead_of_the_runs_it_holds(tmp_path: Path) -> None:
    mine = os.getpid()

    def announce(directory: Path, name: str, address: str) -> None:
        directory.mkdir(exist_ok=True)
        began = process_start_time(mine)
        file = ControlFile(
            run="",
            pid=mine,
            start_time=began,
            address=f"http://{address}",
            token="a",
            read_token="b",
        )
        file.write(directory, name)

    announce(tmp_path, SERVICE, "127.0.0.1:1")
    announce(tmp_path / "held", NAME_OF_RUN, "127.0.0.1:2")
    announce(tmp_path / "alone", NAME_OF_RUN, "127.0.0.1:3")
    files = RunFiles(tmp_path)
    files.own.mkdir()
    files.log("held").touch()
    assert ["127.0.0.1:1", "127.0.0.1:3"] == targets.addresses(tmp_path)
    (tmp_path / SERVICE).unlink()
    assert ["127.0.0.1:3", "127.0.0.1:2"] == targets.addresses(tmp_path), (
        "one that is gone holds none"
    )


@needs_promtool
def test_promtool_accepts_the_scrape_file_and_the_rules() -> None:
    for kind, name in (("config", "prometheus.yml"), ("rules", "rules.yml")):
        command = ["promtool", "check", kind, str(FOLDER / "prometheus" / name)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert 0 == checked.returncode, checked.stdout + checked.stderr


HELD_BACK = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'tianflow_replay_limiter_blocked_seconds_total{{run="a", side="draw"}}'
        values: '0+{blocked}x30'
      - series: 'tianflow_replay_limiter_blocked_seconds_total{{run="a", side="insert"}}'
        values: '0+60x30'
      - series: 'tianflow_component_time_seconds_total{{run="a", component="learner", state="busy"}}'
        values: '0+60x30'
      - series: 'tianflow_actors{{run="a"}}'
        values: '{actors}x30'
      - series: 'tianflow_run_state{{run="a", state="running"}}'
        values: '1x30'
    promql_expr_test:
      - expr: 'count(ALERTS{{alertname="TianflowDrawsHeldBack", alertstate="firing"}})'
        eval_time: {minute}m
        exp_samples: [{samples}]
"""


@needs_promtool
@pytest.mark.parametrize(
    ("blocked", "actors", "minute", "fires"),
    [(57, 1, 25, True), (57, 1, 8, False), (40, 1, 25, False), (57, 0, 25, False)],
)
def test_draws_held_back_for_ten_minutes_while_actors_run_alert(
    tmp_path: Path, blocked: int, actors: int, minute: int, fires: bool
) -> None:
    rules = FOLDER / "prometheus" / "rules.yml"
    samples = "{labels: '{}', value: 1}" if fires else ""
    file = tmp_path / "test.yml"
    file.write_text(
        HELD_BACK.format(
            rules=rules, blocked=blocked, actors=actors, minute=minute, samples=samples
        )
    )
    checked = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert 0 == checked.returncode, checked.stdout + checked.stderr
