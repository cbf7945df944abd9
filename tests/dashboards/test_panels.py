"""Panels have what Grafana needs to show them: fields, places, units, legends and thresholds."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from dashboards import make
from tests.dashboards.test_make import labels_emitted

Json = dict[str, Any]
BOARDS: dict[str, Json] = {path.stem: json.loads(text) for path, text in make.files().items()}
FIELDS = {
    "id",
    "type",
    "title",
    "description",
    "datasource",
    "targets",
    "gridPos",
    "fieldConfig",
    "options",
}
OPTIONS = {
    "stat": {"textMode", "colorMode", "graphMode", "orientation", "reduceOptions"},
    "timeseries": {"legend", "tooltip"},
    "heatmap": {"calculate", "yAxis", "color", "legend", "tooltip"},
}
UNITS = {"short", "s", "ops", "bytes", "Bps", "percentunit"}
"""Of those that Grafana knows by these names."""
COLUMNS = 24
COLOURS = {"text", "green", "yellow", "orange", "red", "blue"}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Names of the labels of every series."""
    return {
        name: {label for found in sets for label in found}
        for name, sets in labels_emitted().items()
    }


def faults(panel: Json, labels: dict[str, set[str]]) -> list[str]:
    """Everything for which Grafana would show ``panel`` otherwise than it is meant, or not
    at all.
    """
    if missing := FIELDS - set(panel):
        return [f"has no {', '.join(sorted(missing))}"]
    found = []
    if missing := OPTIONS.get(panel["type"], {"a known type"}) - set(panel["options"]):
        found.append(f"as {panel['type']} has no {', '.join(sorted(missing))}")
    if not (panel["title"].strip() and panel["description"].endswith(".")):
        found.append("does not say what it shows")
    return [*found, *_place(panel["gridPos"]), *_defaults(panel), *_targets(panel, labels)]


def _place(place: Json) -> list[str]:
    whole = all(isinstance(place.get(key), int) for key in "xywh")
    inside = (
        whole
        and place["x"] >= 0 <= place["y"]
        and place["w"] > 0 < place["h"]
        and place["x"] + place["w"] <= COLUMNS
    )
    return [] if inside else ["lies outside of the grid"]


def _defaults(panel: Json) -> list[str]:
    if panel["type"] == "heatmap":
        return [] if panel["options"].get("yAxis", {}).get("unit") in UNITS else ["has no unit"]
    defaults, found = panel["fieldConfig"]["defaults"], []
    if defaults.get("unit") not in UNITS:
        found.append(f"has the unit {defaults.get('unit')}")
    if (
        panel["type"] == "timeseries"
        and defaults.get("unit") == "percentunit"
        and (defaults.get("min"), defaults.get("max")) != (0, 1)
    ):
        found.append("is a share that does not go from 0 to 1")
    if panel["type"] == "stat":
        steps = defaults.get("thresholds", {}).get("steps", [])
        values = [step["value"] for step in steps[1:]]
        if not steps or steps[0]["value"] is not None or values != sorted(set(values)):
            found.append("has thresholds that do not rise from the base")
        if not {step["color"] for step in steps} <= COLOURS:
            found.append("has a threshold of no colour")
    return found


def _targets(panel: Json, labels: dict[str, set[str]]) -> list[str]:
    targets, found = panel["targets"], []
    if [chr(ord("A") + place) for place in range(len(targets))] != [
        target.get("refId") for target in targets
    ] or not targets:
        found.append("has queries that are not told apart")
    if len(targets) != len(
        {(target.get("expr"), target.get("legendFormat")) for target in targets}
    ):
        found.append("asks the same twice")
    for target in targets:
        if target.get("datasource") != panel["datasource"] or panel["datasource"] != {
            "type": "prometheus",
            "uid": "${datasource}",
        }:
            found.append("asks another data source")
        legend, known = target.get("legendFormat", ""), labels_of(target.get("expr", ""), labels)
        if not legend.strip():
            found.append("has a line without a name")
        found += [
            f"names a line by {label}, which it does not have"
            for label in re.findall(r"{{(\w+)}}", legend)
            if label not in known
        ]
        if panel["type"] == "heatmap" and (target.get("format") != "heatmap" or legend != "{{le}}"):
            found.append("is a heatmap of no buckets")
    return found


def labels_of(expression: str, labels: dict[str, set[str]]) -> set[str]:
    """Labels that what ``expression`` gives has: those of an aggregation, or else of the series."""
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    if grouped:
        kept = {label.strip() for label in grouped[0].split(",")}
        return kept - {"le"} if "histogram_quantile" in expression else kept
    return {
        label
        for name in re.findall(r"\btianflow_\w+", expression)
        for label in labels.get(name, ())
    }


PANELS = [
    pytest.param(panel, id=f"{name}: {panel['type']} {panel['title']}")
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
ROWS = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] == "row"]
EVENTS = {event["name"]: event for event in BOARDS["overview"]["annotations"]["list"]}


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_what_grafana_needs(panel: Json, labels: dict[str, set[str]]) -> None:
    assert [] == faults(panel, labels)


def test_a_row_is_a_heading_over_the_whole_width() -> None:
    assert {
        "Learning",
        "Speed",
        "Processes",
        "Inference servers",
        "Nodes",
        "Service",
        "Replay",
    } == {row["title"] for row in ROWS}
    for row in ROWS:
        assert (0, COLUMNS, 1) == tuple(row["gridPos"][key] for key in "xwh")
        assert (False, []) == (row["collapsed"], row["panels"])


def test_panels_of_learning_and_processes_have_one_query() -> None:
    """With all runs selected, a panel has one line for each run, statistic or process."""
    title, several = "", []
    for panel in BOARDS["overview"]["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
        elif title in {"Learning", "Speed", "Processes"} and len(panel["targets"]) > 1:
            several.append(panel["title"])
    assert [] == several


def test_annotations_have_what_grafana_needs(labels: dict[str, set[str]]) -> None:
    assert ["Changes", "Restarts", "Checkpoints", "Resumes"] == list(EVENTS)
    assert BOARDS["overview"]["annotations"] == BOARDS["balance"]["annotations"]
    for event in EVENTS.values():
        assert event["enable"]
        assert event["iconColor"] in COLOURS
        assert event["titleFormat"]
        assert {"run"} == set(re.findall(r"{{(\w+)}}", event["textFormat"]))
        assert {"run"} == labels_of(event["expr"], labels)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_of_a_dashboard_are_told_apart(name: str) -> None:
    panels = BOARDS[name]["panels"]
    assert list(range(1, len(panels) + 1)) == sorted(panel["id"] for panel in panels)
    assert len(panels) == len({(panel["type"], panel["title"]) for panel in panels})


@pytest.mark.parametrize("name", BOARDS)
def test_no_panel_hangs_in_the_air(name: str) -> None:
    """Grafana would move it up, and others with it."""
    panels = BOARDS[name]["panels"]
    filled = {
        (x, panel["gridPos"]["y"] + panel["gridPos"]["h"])
        for panel in panels
        for x in columns(panel)
    }
    for panel in panels:
        assert 0 == panel["gridPos"]["y"] or any(
            (x, panel["gridPos"]["y"]) in filled for x in columns(panel)
        ), panel["title"]


def columns(panel: Json) -> range:
    return range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])


@pytest.mark.parametrize("name", BOARDS)
def test_variables_of_a_dashboard_are_filled_and_used(name: str) -> None:
    board = BOARDS[name]
    source, run = board["templating"]["list"]
    assert ("datasource", "prometheus") == (source["type"], source["query"])
    assert ("query", "${datasource}") == (run["type"], run["datasource"]["uid"])
    assert run["multi"]
    assert run["includeAll"]
    assert run["refresh"] in {
        1,
        2,
    }  # when it is opened, or when its time changes; 0 would never ask
    assert isinstance(board["schemaVersion"], int)


def broken(panel: Json, change: Callable[[Json], object]) -> Json:
    other = copy.deepcopy(panel)
    change(other)
    return other


def steps_of(panel: Json) -> list[Json]:
    steps: list[Json] = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return steps


STAT = next(panel for panel in BOARDS["overview"]["panels"] if panel["title"] == "Violations")
LINES = next(panel for panel in BOARDS["overview"]["panels"] if panel["title"] == "Learner's time")
HEATMAP = next(panel for panel in BOARDS["balance"]["panels"] if panel["type"] == "heatmap")


@pytest.mark.parametrize(
    ("panel", "change", "fault"),
    [
        (LINES, lambda panel: panel.pop("gridPos"), "has no gridPos"),
        (LINES, lambda panel: panel.update(type="graph"), "as graph has no a known type"),
        (LINES, lambda panel: panel["options"].pop("tooltip"), "as timeseries has no tooltip"),
        (LINES, lambda panel: panel.update(description=""), "does not say what it shows"),
        (LINES, lambda panel: panel["gridPos"].update(x=13), "lies outside of the grid"),
        (LINES, lambda panel: panel["gridPos"].update(h=0), "lies outside of the grid"),
        (
            LINES,
            lambda panel: panel["fieldConfig"]["defaults"].update(unit="percent"),
            "has the unit percent",
        ),
        (
            LINES,
            lambda panel: panel["fieldConfig"]["defaults"].pop("max"),
            "is a share that does not go from 0 to 1",
        ),
        (
            STAT,
            lambda panel: panel["fieldConfig"]["defaults"]["thresholds"]["steps"].reverse(),
            "has thresholds that do not rise from the base",
        ),
        (
            STAT,
            lambda panel: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0].update(
                color="rde"
            ),
            "has a threshold of no colour",
        ),
        (
            LINES,
            lambda panel: panel["targets"][0].update(refId="B"),
            "has queries that are not told apart",
        ),
        (
            LINES,
            lambda panel: panel["targets"].append({**panel["targets"][0], "refId": "B"}),
            "asks the same twice",
        ),
        (
            LINES,
            lambda panel: panel["targets"][0].update(datasource={"uid": "x"}),
            "asks another data source",
        ),
        (
            LINES,
            lambda panel: panel["targets"][0].update(legendFormat=" "),
            "has a line without a name",
        ),
        (
            LINES,
            lambda panel: panel["targets"][0].update(legendFormat="{{sink}}"),
            "names a line by sink, which it does not have",
        ),
        (HEATMAP, lambda panel: panel["targets"][0].pop("format"), "is a heatmap of no buckets"),
    ],
)
def test_a_panel_without_it_would_be_found(
    panel: Json, change: Callable[[Json], object], fault: str, labels: dict[str, set[str]]
) -> None:
    assert fault in faults(broken(panel, change), labels)
