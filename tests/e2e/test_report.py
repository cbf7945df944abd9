"""The charts of a report in a real Chromium, from a file: numbers where they belong, gaps, marks,
hostile texts, paper, and the pictures of dashboards by the same script.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from dashboards import pictures
from tests.report.test_report import EVIL, records, row
from tianflow.report.page import page as report

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium (Debian package of that name) is not installed"
    ),
]
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
FITTING = """() => [...document.querySelectorAll("figure:not([hidden]) svg")].every(
    (svg) => Math.abs(svg.viewBox.baseVal.width - svg.clientWidth) <= 1
)"""
POINT = re.compile(r"([ML])([\d.]+) ([\d.]+)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Viewed:
    """A document opened from a file. Errors, requests and dialogs fail the test."""

    def __init__(self, browser: Browser, folder: Path, text: str, **options: Any) -> None:
        path = folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.errors: list[str] = []
        self.page: Page = browser.new_page(**options)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.goto(path.as_uri())
        expect(self.page.locator("figure svg path").first).to_be_attached()

    def _requested(self, url: str) -> None:
        if not url.endswith("/page.html"):
            self.errors.append(url)

    def titles(self) -> list[str]:
        return self.page.locator("figure:visible h3").all_text_contents()

    def legend(self, key: str) -> list[str]:
        return self.page.locator(f"#{key} .legend li").all_text_contents()

    def paths(self, key: str, css: str) -> list[str]:
        """The shapes of a chart with this class."""
        shapes = self.page.locator(f"#{key} svg path.{css}").all()
        return [shape.get_attribute("d") or "" for shape in shapes]


def runs(path: str) -> list[list[tuple[float, float]]]:
    """Points of each piece of a line."""
    found: list[list[tuple[float, float]]] = []
    for command, x, y in POINT.findall(path):
        if command == "M":
            found.append([])
        found[-1].append((float(x), float(y)))
    return found


def bounded(t: float, bound: int | None) -> dict[str, Any]:
    staleness = {"count": 1, "min": 0, "mean": 0.5, "p99": 1, "max": 1, "counts": {"0": 1, "1": 1}}
    return row(t, staleness=staleness | {"bound": bound})


def test_lines_are_where_their_numbers_are(browser: Browser, tmp_path: Path) -> None:
    speeds = [0.0, 100.0, 25.0, None, 50.0, 75.0]
    rows = [row(10.0 * t, steps_per_s=speed) for t, speed in enumerate(speeds)]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    assert {"Staleness over time", "Return", "Speed", "Learner", "Actors"} <= set(viewed.titles())
    [path] = viewed.paths("chart-speed", "line")
    first, second = runs(path)
    assert (3, 2) == (len(first), len(second))
    (bottom, top) = (first[0][1], first[1][1])
    assert bottom > top
    for (_, y), speed in zip([*first, *second], [0.0, 100.0, 25.0, 50.0, 75.0], strict=True):
        assert bottom + (top - bottom) * speed / 100.0 == pytest.approx(y, abs=0.11)
    places = [x for x, _ in [*first, *second]]
    steps = [later - earlier for earlier, later in itertools.pairwise(places)]
    assert [steps[0], steps[0], 2 * steps[0], steps[0]] == pytest.approx(steps, abs=0.3)
    assert ["steps/s 75"] == viewed.legend("chart-speed")
    assert [] == viewed.errors


def in_bursts(period: int, seconds: int, until: int) -> list[dict[str, Any]]:
    """A row a second, with an update and its 300 steps every ``period`` seconds ``until`` then."""
    rows, updates = [], 0
    for t in range(1, seconds + 1):
        burst = t % period == 0 and t <= until
        updates += burst
        rates = {"steps_per_s": 300.0 * burst, "updates_per_s": 1.0 * burst}
        rows.append(row(float(t), updates=updates, env_steps=300 * updates, **rates))
    return rows


def test_speeds_of_slow_updates_are_those_of_whole_cycles(browser: Browser, tmp_path: Path) -> None:
    viewed = Viewed(browser, tmp_path, report(records(*in_bursts(3, 60, 60)), now=NOW))
    captions = viewed.page.locator("#chart-speed figcaption").text_content() or ""
    assert "over two updates or more" in captions
    assert ["steps/s 100"] == viewed.legend("chart-speed")
    [path] = viewed.paths("chart-speed", "line")
    [points] = runs(path)
    assert 60 == len(points)
    assert 1 == len({y for _, y in points[2:]}), "no zigzag after the first update"
    assert ["updates/s 0.33"] == viewed.legend("chart-updates")
    assert [] == viewed.errors


def test_the_speed_of_a_stalled_run_falls(browser: Browser, tmp_path: Path) -> None:
    rows = in_bursts(3, 60, 30)
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    assert ["steps/s 16.7"] == viewed.legend("chart-speed"), "600 steps in the last 36 seconds"
    [path] = viewed.paths("chart-speed", "line")
    heights = [y for _, y in runs(path)[0]]
    assert heights[33:] == sorted(heights[33:])
    assert heights[33] < heights[-1], "y grows downwards"


def test_a_pause_has_the_speed_of_its_own_seconds(browser: Browser, tmp_path: Path) -> None:
    rows = in_bursts(3, 30, 30)
    paused = [row(t, updates=10, steps_per_s=0.0, state="paused") for t in (31.0, 32.0)]
    viewed = Viewed(browser, tmp_path, report(records(*rows, *paused), now=NOW))
    assert ["steps/s 0"] == viewed.legend("chart-speed")


def learned(**values: float) -> dict[str, Any]:
    """Learning of a row, by name with ``__`` for the group."""
    return {name.replace("__", "/"): {"count": 2, "mean": value} for name, value in values.items()}


def test_losses_join_rows_without_updates_and_the_legend_holds_their_last_value(
    browser: Browser, tmp_path: Path
) -> None:
    losses = [2.0, 1.0, None, 0.5, 0.25, None]
    rows = [
        row(10.0 * t, mean_length=float(t), learning={} if x is None else learned(train__loss=x))
        for t, x in enumerate(losses)
    ]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    path, other = viewed.paths("chart-losses", "line")
    assert [4] == [len(points) for points in runs(path)]
    assert "M0 0" == other
    assert ["loss 0.25", "value_loss –"] == viewed.legend("chart-losses")
    [length] = viewed.paths("chart-length", "line")
    assert [6] == [len(points) for points in runs(length)]
    assert [] == viewed.errors


def test_charts_of_statistics_are_those_that_the_run_has(browser: Browser, tmp_path: Path) -> None:
    known = learned(train__entropy=0.5, train__kl=0.01, mine__score=3.0, rollout__success=1.0)
    rows = [row(float(t), learning=known if t % 2 else {}) for t in range(6)]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    titles = viewed.titles()
    assert {"Losses", "Entropy", "KL divergence", "mine/score", "rollout/success"} <= set(titles)
    assert not {"Policy loss", "Clip fraction", "Exploration", "Action values"} & set(titles)
    assert ["kl 0.01"] == viewed.legend("chart-kl")
    further = viewed.page.locator('[id="chart-statistic-mine/score"] .legend li')
    assert ["score 3"] == further.all_text_contents()
    assert [] == viewed.errors


def test_a_history_of_an_older_version_has_charts_without_learning(
    browser: Browser, tmp_path: Path
) -> None:
    viewed = Viewed(browser, tmp_path, report(records(*map(row, map(float, range(6)))), now=NOW))
    assert {"Return", "Losses", "Episode length", "Speed"} <= set(viewed.titles())
    assert "Entropy" not in viewed.titles()
    assert ["loss –", "value_loss –"] == viewed.legend("chart-losses")
    assert [] == viewed.errors


def test_a_bound_is_a_step_and_an_unbounded_time_a_gap_in_it(
    browser: Browser, tmp_path: Path
) -> None:
    rows = [bounded(float(t), bound) for t, bound in enumerate([1, 3, None, 2, 2])]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    [bound] = viewed.paths("chart-staleness", "limit")
    assert (2, 2) == (bound.count("M"), bound.count("V"))
    assert "bound 2" in viewed.legend("chart-staleness")
    assert [] == viewed.errors


def test_shares_are_stacked_to_the_whole(browser: Browser, tmp_path: Path) -> None:
    rows = [row(float(t)) for t in range(12)]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    areas = viewed.paths("chart-learner-time", "area")
    heights = [sorted({y for points in runs(area) for _, y in points}) for area in areas]
    assert heights[0][0] == heights[1][1]  # waiting begins where busy ends
    whole = heights[0][1] - heights[1][0]
    assert 0.75 == pytest.approx((heights[0][1] - heights[0][0]) / whole, abs=0.01)
    assert ["busy 75%", "waiting for batch 25%"] == viewed.legend("chart-learner-time")


def test_a_mark_is_named_where_the_pointer_is(browser: Browser, tmp_path: Path) -> None:
    change = {"t": 5.0, "kind": "change", "paths": ["balance.max_staleness"]}
    rows = [row(float(t), marks=[change] if t == 5 else []) for t in range(11)]
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW))
    chart = viewed.page.locator("#chart-speed svg")
    x = float(chart.locator("line.mark").get_attribute("x1") or 0)
    chart.hover(position={"x": x, "y": 40})
    expect(viewed.page.locator("#chart-speed .when")).to_have_text("5 s · balance.max_staleness")


def test_hostile_texts_stay_texts(browser: Browser, tmp_path: Path) -> None:
    evil = {
        "shares": {"learner": {EVIL: 1.0}},
        "dropped": {EVIL: 1},
        "learning": {EVIL: {"count": 1, "mean": 1.0}},
        "bottleneck": EVIL,
        "marks": [{"t": 1.0, "kind": "change", "paths": [EVIL]}],
    }
    rows = [row(float(t), **evil) for t in range(3)]
    audit = ({"time": EVIL, "source": EVIL, "action": EVIL, "new": {EVIL: EVIL}},)
    text = report(records(*rows, name=EVIL, audit=audit, config_text=EVIL), now=NOW)
    viewed = Viewed(browser, tmp_path, text)
    assert 'alert("1")' in "".join(viewed.legend("chart-dropped"))
    assert 2 == viewed.page.locator("script").count()
    assert [] == viewed.errors


def test_every_chart_is_on_paper_though_it_was_never_in_sight(
    browser: Browser, tmp_path: Path
) -> None:
    rows = [row(float(t)) for t in range(20)]
    size = {"width": 500, "height": 200}
    viewed = Viewed(browser, tmp_path, report(records(*rows), now=NOW), viewport=size)
    viewed.page.emulate_media(media="print")
    charts = viewed.page.locator("figure:visible svg").all()
    assert len(charts) >= 7
    viewed.page.wait_for_function(FITTING)  # each was drawn again for the width of the paper
    for chart in charts:
        assert chart.locator("path.line, path.area").count()
    assert b"%PDF" == viewed.page.pdf()[:4]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_in_light_and_dark(
    browser: Browser, tmp_path: Path, scheme: Any
) -> None:
    rows = [row(float(t), replay={"items": t, "capacity": 9}) for t in range(9)]
    audit = ({"time": "2026-01-02", "source": "cli", "action": "stop"},)
    text = report(records(*rows, audit=audit, config_text="[env]"), now=NOW)
    viewed = Viewed(browser, tmp_path, text, color_scheme=scheme)
    background = viewed.page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = int(re.findall(r"\d+", background)[0]) < 128
    assert dark == (scheme == "dark")
    speed = viewed.page.locator("#chart-speed svg").get_attribute("aria-label") or ""
    assert "steps/s: 100 now, from 100 to 100." in speed
    # The page's policy keeps the checker's script out, so its copy has none.
    unguarded = re.sub(r"<meta http-equiv[^>]*>", "", text)
    found = Axe().run(Viewed(browser, tmp_path, unguarded, color_scheme=scheme).page)
    assert [] == [violation["id"] for violation in found.response["violations"]]


def test_panels_are_drawn_by_the_same_script(browser: Browser, tmp_path: Path) -> None:
    times = [5.0 * step for step in range(5)]

    def panel(title: str, *, shares: bool, **values: list[float | None]) -> dict[str, Any]:
        series = {
            name: {"steps": name == "bound", "values": value} for name, value in values.items()
        }
        return {"title": title, "unit": "", "times": times, "shares": shares, "series": series}

    text = pictures.page(
        [
            panel("Lines", shares=False, mean=[1.0, 2.0, None, 1.0, 2.0], bound=[4.0] * 5),
            panel(
                "Shares",
                shares=True,
                busy=[0.5, 0.5, None, 1.0, 1.0],
                idle=[0.5, 0.5, None, 0.0, 0.0],
            ),
            panel("Empty", shares=False),
        ]
    )
    viewed = Viewed(browser, tmp_path, text)
    assert ["Lines", "Shares", "Empty"] == viewed.titles()
    [lines, shares, _] = viewed.page.locator("figure svg").all()
    mean = lines.locator("path.line").first.get_attribute("d") or ""
    assert [2, 2] == [len(points) for points in runs(mean)]
    assert 1 == lines.locator("path.steps").count()
    busy = shares.locator("path.area").first.get_attribute("d") or ""
    assert 2 == busy.count("Z")
    assert [] == viewed.errors
