"""One page of a run: right numbers in the curves, everything escaped, and nothing that needs a
network.
"""

from __future__ import annotations

import datetime as dt
import html.parser
import json
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import tianflow
from tests.support.settings import cartpole
from tianflow.cli import main as cli
from tianflow.cli.report import write_report
from tianflow.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Band,
    Dot,
    Line,
    Mark,
    line_chart,
    share_chart,
)
from tianflow.report.markup import Markup, element
from tianflow.report.page import facts, page
from tianflow.report.records import Records, ReportError, find, read
from tianflow.report.scales import Axis, time_axis, value_axis
from tianflow.rundir.history import LIMIT, NAME, read_rows

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
EVIL = '</script><script>alert("1")</script>&\x00\ud800'


class Page(html.parser.HTMLParser):
    """Every element with its attributes, and whether they all close."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert [] == self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def row(t: float, **fields: Any) -> dict[str, Any]:
    return {
        "t": t,
        "span_s": 1.0,
        "time": 1.79e9 + t,
        "state": "running",
        "env_steps": int(100 * t),
        "updates": int(t),
        "mean_return": t,
        "steps_per_s": 100.0,
        "staleness": {"count": 1, "min": 0, "mean": 0.5, "p99": 1, "max": 1, "bound": 1},
        "queue": 1,
        "credits": {"limit": 4, "in_use": 2},
        "shares": {"learner": {"busy": 0.75, "waiting:batch": 0.25}, "actor": {"busy": 1.0}},
        "dropped": {"stale": 2},
        "bottleneck": "balanced",
        "marks": [],
        **fields,
    }


def records(*rows: dict[str, Any], **fields: Any) -> Records:
    given_ = {
        "name": "one",
        "rows": rows,
        "summary": {},
        "audit": (),
        "config_text": "",
        "config": {},
        **fields,
    }
    return Records(**given_)


def polylines(text: str, figure: str) -> dict[str, list[list[tuple[float, float]]]]:
    """Points of the lines of a figure, by name."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    [body] = re.findall(f'<figure id="{figure}">.*?</figure>', text, re.DOTALL)
    for points, name in re.findall(
        r'<polyline class="[^"]*" points="([^"]*)" data-series="([^"]*)">', body
    ):
        places = [place.partition(",") for place in points.split()]
        found.setdefault(name, []).append([(float(x), float(y)) for x, _, y in places])
    return found


def assert_drawn(
    points: Sequence[tuple[float, float]],
    times: Sequence[float],
    values: Sequence[float],
    x: Axis,
    y: Axis,
) -> None:
    """``points`` are where the numbers belong, to the hundredth of a unit to which they are
    written.
    """
    assert len(values) == len(points)
    for (across, down), t, value in zip(points, times, values, strict=True):
        assert x.low + (across - LEFT) / (WIDTH - LEFT - RIGHT) * (x.high - x.low) == pytest.approx(
            t, abs=0.011 * (x.high - x.low) / 400
        )
        fraction = (HEIGHT - BOTTOM - down) / (HEIGHT - TOP - BOTTOM)
        assert y.low + fraction * (y.high - y.low) == pytest.approx(
            value, abs=0.011 * (y.high - y.low) / 150
        )


# Scales
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "zero", "whole", "labels"),
    [
        ([0.0, 100.0], True, False, ("0", "20", "40", "60", "80", "100")),
        ([0.0, 10_000.0], True, False, ("0", "2k", "4k", "6k", "8k", "10k")),
        ([0.0, 3.1e6], True, False, ("0", "1M", "2M", "3M", "4M")),
        ([0.0, 0.2], True, False, ("0", "0.05", "0.10", "0.15", "0.20")),
        ([0.0, 1.0], True, True, ("0", "1")),
        ([0.0], True, True, ("0", "1")),
        ([], True, False, ("0", "0.2", "0.4", "0.6", "0.8", "1.0")),
        ([-7.0, 480.0], False, False, ("0", "100", "200", "300", "400", "500")),
    ],
)
def test_ticks_are_round_and_cover_the_values(
    values: list[float], zero: bool, whole: bool, labels: tuple[str, ...]
) -> None:
    axis = value_axis(values, zero=zero, whole=whole)
    assert labels == axis.labels
    assert all(axis.low <= value <= axis.high for value in values)


numbers = st.floats(-1e99, 1e99)


@given(values=st.lists(numbers, max_size=5), zero=st.booleans(), whole=st.booleans())
def test_every_axis_has_a_few_ticks_in_order(values: list[float], zero: bool, whole: bool) -> None:
    axis = value_axis(values, zero=zero, whole=whole)
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 12
    assert len(axis.labels) == len(axis.ticks)
    assert all(earlier < later for earlier, later in pairwise(axis.ticks))
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)


@pytest.mark.parametrize(
    ("times", "unit", "labels"),
    [
        ([0.0, 10.0], "s", ("0", "2", "4", "6", "8", "10")),
        ([0.0, 600.0], "min", ("0", "2", "4", "6", "8", "10")),
        ([0.0, 4 * 3600.0], "h", ("0", "1", "2", "3", "4")),
        ([0.0, 5 * 86400.0], "d", ("0", "1", "2", "3", "4", "5")),
        ([0.1, 10.0], "s", ("0", "2", "4", "6", "8", "10")),
        ([500.0, 500.0], "min", ("8.335", "8.340", "8.345", "8.350")),
        ([], "s", ("0", "0.2", "0.4", "0.6", "0.8", "1.0")),
    ],
)
def test_time_is_counted_in_what_suits_it(
    times: list[float], unit: str, labels: tuple[str, ...]
) -> None:
    axis = time_axis(times)
    assert (unit, labels) == (axis.unit, axis.labels)


# Charts
# --------------------------------------------------------------------------------------------------


def chart(values: Sequence[float | None], **options: Any) -> str:
    return line_chart(
        key="k",
        title="T",
        unit="u",
        times=list(map(float, range(len(values)))),
        lines=[Line("a", values, 0)],
        **options,
    )


def test_a_line_is_where_its_numbers_are() -> None:
    values = [1.0, 5.0, 2.5]
    [points] = polylines(chart(values), "k")["a"]
    assert_drawn(
        points, [0.0, 1.0, 2.0], values, time_axis([0.0, 2.0]), value_axis(values, zero=True)
    )


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf, 1e300])
def test_what_is_no_number_is_a_gap(nothing: float | None) -> None:
    runs = polylines(chart([1.0, 2.0, nothing, 3.0, nothing]), "k")["a"]
    assert [2, 1] == [len(points) for points in runs]
    assert "nan" not in chart([1.0, nothing])
    assert 1 == chart([1.0, 2.0, nothing, 3.0]).count(
        "<circle"
    )  # a line of one point would not be seen


@pytest.mark.parametrize("values", [[], [None], [math.nan, None]])
def test_a_chart_of_nothing_says_so(values: list[float | None]) -> None:
    assert "Nothing was recorded." in chart(values)
    assert "<svg" not in chart(values)


@pytest.mark.parametrize("value", [0.0, 7.0, -7.0, 1e-9, 1e99])
@pytest.mark.parametrize("zero", [True, False])
def test_constant_values_are_a_level_line_inside(value: float, zero: bool) -> None:
    [points] = polylines(chart([value] * 3, zero=zero), "k")["a"]
    [height] = {y for _, y in points}
    assert TOP <= height <= HEIGHT - BOTTOM


def test_a_step_holds_for_the_time_up_to_its_point() -> None:
    text = line_chart(
        key="k",
        title="T",
        unit="u",
        times=[0.0, 1.0, 2.0],
        lines=[Line("b", [1.0, 1.0, 4.0], 1, steps=True)],
    )
    [points] = polylines(text, "k")["b"]
    assert_drawn(
        points,
        [0, 0, 1, 1, 2],
        [1, 1, 1, 4, 4],
        time_axis([0.0, 2.0]),
        value_axis([1.0, 4.0], zero=True),
    )


def test_a_band_reaches_from_the_least_to_the_greatest() -> None:
    text = chart([1.0, 2.0], band=Band("w", [0.0, 1.0], [2.0, 4.0], 2))
    [points] = re.findall(r'<polygon class="band c2" points="([^"]*)"', text)
    heights = [float(place.partition(",")[2]) for place in points.split()]
    y = value_axis([0.0, 4.0], zero=True)
    expected = [
        HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM) for value in (2.0, 4.0, 1.0, 0.0)
    ]
    assert pytest.approx(expected, abs=0.01) == heights


def test_shares_are_stacked_to_the_whole() -> None:
    parts = {"busy": [0.25, None, 0.5], "waiting": [0.75, None, 0.5]}
    text = share_chart(
        key="k", title="T", times=[0.0, 1.0, 2.0], parts=parts, colours={"busy": 0, "waiting": 1}
    )
    drawn = re.findall(r'<polygon class="share c(\d)" points="([^"]*)"', text)
    assert ["0", "0", "1", "1"] == [colour for colour, _ in drawn]  # the gap parts each of them
    top = {float(points.split()[0].partition(",")[2]) for colour, points in drawn if colour == "1"}
    assert {TOP} == top
    assert "busy 38%" in text


def test_a_chart_is_told_in_words_too() -> None:
    [picture] = Page(
        chart([1.0, 5.0, 2.5], dots=[Dot(1.0, 9.0, "nine")], dots_name="evaluations")
    ).named("svg")
    text = chart([1.0, 5.0, 2.5], dots=[Dot(1.0, 9.0, "nine")], dots_name="evaluations")
    assert ("img", "k-title", "k-text") == (
        picture["role"],
        picture["aria-labelledby"],
        picture["aria-describedby"],
    )
    assert '<title id="k-title">T, u</title>' in text
    assert "a: first 1, last 2.5, least 1, greatest 5. evaluations: 1, the last 9." in text


def test_marks_at_one_place_share_a_line_that_names_them_all() -> None:
    marks = [Mark(1.0, "first"), Mark(1.0001, "second"), Mark(99.0, "outside")]
    assert ["first; second"] == re.findall(
        r'<line class="mark"[^>]*><title>([^<]*)', chart([1.0, 2.0, 3.0], marks=marks)
    )


def test_text_is_escaped_wherever_it_stands() -> None:
    made = element("p", EVIL, Markup("<b>"), title=EVIL)
    safe = "&lt;/script&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;\ufffd\ufffd"
    assert f'<p title="{safe}">{safe}<b></p>' == made


# The page
# --------------------------------------------------------------------------------------------------


def test_everything_that_a_run_can_say_is_escaped() -> None:
    evil = {
        "state": EVIL,
        "bottleneck": EVIL,
        "shares": {"learner": {EVIL: 1.0}},
        "dropped": {EVIL: 1},
        "marks": [
            {"t": 1.0, "kind": "change", "paths": [EVIL]},
            {"t": 1.0, "kind": "evaluation", "mean_return": 1.0, "version": EVIL},
        ],
    }
    audit = ({"time": EVIL, "source": EVIL, "action": EVIL, "new": {EVIL: EVIL}},)
    config = {"env": {"id": EVIL}, "algorithm": {"name": EVIL}}
    summary = {"state": EVIL, "reason": EVIL, "error": EVIL, "trajectories": {"dropped": {EVIL: 1}}}
    for told in ({}, summary):
        text = page(
            records(
                row(0.0, **evil),
                row(1.0, **evil),
                name=EVIL,
                audit=audit,
                config=config,
                config_text=EVIL,
                summary=told,
            ),
            now=NOW,
        )
        text.encode("utf-8")
        assert [] == Page(text).named("script")
        assert "alert" in Page(text).text


def test_a_page_needs_no_network_and_no_script() -> None:
    text = page(records(row(0.0), row(1.0)), now=NOW)
    found = Page(text)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(
        name for name, _ in found.elements
    )
    assert {"src", "href", "srcset"}.isdisjoint(
        key for _, attributes in found.elements for key in attributes
    )
    assert "url(" not in text
    assert "http" not in re.sub("http-equiv", "", text)
    assert "default-src 'none'" in str(
        [attributes.get("content") for attributes in found.named("meta")]
    )


def test_ids_are_of_one_element_each_and_what_is_referred_to_is_there() -> None:
    found = Page(page(records(row(0.0, replay={"items": 3}), row(1.0)), now=NOW))
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for picture in found.named("svg"):
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (row(0.0),),
        ({"t": 1.0},),
        ({"t": 1.0, "marks": 3, "shares": 4, "dropped": [], "staleness": "x"},),
    ],
)
def test_a_page_is_made_of_few_or_strange_lines(rows: tuple[dict[str, Any], ...]) -> None:
    found = Page(page(records(*rows), now=NOW))
    assert "one: report" in found.text
    assert ("No history was kept" in found.text) == (not rows)


def test_the_bound_is_a_step_line_and_an_unbounded_time_a_gap_in_it() -> None:
    bounded = row(0.0)["staleness"]
    text = page(
        records(row(0.0), row(1.0), row(2.0, staleness={**bounded, "bound": None}), row(3.0)),
        now=NOW,
    )
    assert [3, 2] == [len(points) for points in polylines(text, "staleness")["bound"]]
    free = {**bounded, "bound": None}
    assert "bound: none" in page(
        records(row(0.0, staleness=free), row(1.0, staleness=free)), now=NOW
    )


def test_a_run_that_goes_on_is_told_from_its_last_line() -> None:
    found = facts(
        records(row(1.0), row(3.0, steps_per_s=300.0, span_s=3.0, bottleneck="learning-bound"))
    )
    assert ("0:03", "300", "250") == (found["time"], found["environment steps"], found["steps/s"])
    assert "learning-bound 75%, balanced 25%" == found["verdicts"]
    assert "mean 0.5, greatest 1, bound 1" == found["staleness"]


def test_a_resumed_run_does_not_show_what_it_came_to_before(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"state": "done"}', encoding="utf-8")
    (tmp_path / NAME).write_text(json.dumps(row(1.0, state="done")) + "\n", encoding="utf-8")
    assert {"state": "done"} == read(tmp_path).summary
    with (tmp_path / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row(2.0)) + "\n")
    assert {} == read(tmp_path).summary


def test_changes_are_listed_with_what_was_before() -> None:
    record = {
        "time": "2026-01-02T03:04:05.678+00:00",
        "source": "cli",
        "action": "change",
        "old": {"balance.max_staleness": 1},
        "new": {"balance.max_staleness": 4},
    }
    text = page(records(row(0.0), audit=(record,) * 501), now=NOW)
    assert 500 == text.count("<td>balance.max_staleness: 1 → 4</td>")
    assert "<td>2026-01-02 03:04:05</td><td>cli</td>" in text
    assert "1 older ones are left out." in text


def test_marks_that_the_history_left_out_are_counted() -> None:
    rows = (
        row(0.0, marks_left_out=1200),
        row(1.0, marks_left_out="x"),
        row(2.0, marks_left_out=34),
        row(3.0),
    )
    assert " 1,234 more of what happened" in page(records(*rows), now=NOW)
    assert "more of what happened" not in page(records(row(0.0)), now=NOW)


# The command
# --------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / NAME).write_text("", encoding="utf-8")
    assert tmp_path / "first" == find("first", tmp_path)
    assert tmp_path / "first" == find(str(tmp_path / "first"), Path("nowhere"))
    done = run("report", "frist", "--runs-dir", str(tmp_path))
    assert 1 == done.exit_code
    assert "runs in" in done.stderr
    assert "did you mean 'first'?" in done.stderr
    with pytest.raises(ReportError, match="none"):
        find("", tmp_path / "empty")


def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("", encoding="utf-8")
    (tmp_path / "there").mkdir()
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(tmp_path, tmp_path / "there", now=NOW)
    assert {NAME, "there"} == {path.name for path in tmp_path.iterdir()}


def test_a_report_whose_name_no_disk_takes_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(tmp_path, tmp_path / ("x" * 300), now=NOW)


def test_a_history_of_days_is_drawn_in_as_many_lines_as_a_run_writes(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(
        "".join(json.dumps(row(float(t))) + "\n" for t in range(3 * LIMIT)), encoding="utf-8"
    )
    found = read(tmp_path).rows
    assert (3 * LIMIT // 4, 3.0, 3.0 * LIMIT - 1.0) == (len(found), found[0]["t"], found[-1]["t"])


@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_the_curves_of_a_real_run_are_its_history(tmp_path: Path) -> None:
    settings = cartpole(
        run={"name": "one", "max_updates": None, "max_seconds": 1.5}, balance={"max_staleness": 2}
    )
    directory = tianflow.train(settings, runs_dir=tmp_path).directory
    done = run("report", "one", "--runs-dir", str(tmp_path), "-o", str(tmp_path / "out.html"))
    assert (0, f"{tmp_path / 'out.html'}\n") == (done.exit_code, done.stdout)
    assert 0 == run("report", "one", "--runs-dir", str(tmp_path)).exit_code
    assert (directory / "report.html").is_file()
    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    rows = read_rows(directory / NAME)
    x = time_axis([line["t"] for line in rows])
    speeds = [(line["t"], line["steps_per_s"]) for line in rows if line["steps_per_s"] is not None]
    [points] = polylines(text, "speed")["steps/s"]
    assert_drawn(
        points,
        [t for t, _ in speeds],
        [v for _, v in speeds],
        x,
        value_axis([v for _, v in speeds], zero=True),
    )
    [queue], [in_use], [limit] = polylines(text, "queue").values()
    y = value_axis(
        [value for line in rows for value in (line["queue"], *line["credits"].values())],
        zero=True,
        whole=True,
    )
    assert_drawn(queue, [line["t"] for line in rows], [line["queue"] for line in rows], x, y)
    assert_drawn(
        in_use, [line["t"] for line in rows], [line["credits"]["in_use"] for line in rows], x, y
    )
    assert_drawn(
        limit[::2], [line["t"] for line in rows], [line["credits"]["limit"] for line in rows], x, y
    )
    assert {2} == {line["staleness"]["bound"] for line in rows}
    assert (
        f"{json.loads((directory / 'summary.json').read_text())['env_steps']:,}" in Page(text).text
    )
