"""One page of a run: its numbers and its history, everything escaped, and no network.

``tests/e2e/test_report.py`` looks at the charts in a browser.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tianflow
from tests.support.settings import cartpole
from tianflow.cli import main as cli
from tianflow.cli.report import write_report
from tianflow.report.markup import Markup, element
from tianflow.report.page import ROWS, facts, page
from tianflow.report.records import Records, ReportError, find, read
from tianflow.report.scripts import bundled
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
        self.scripts: dict[str, str] = {}
        self.feed(text)
        assert [] == self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            kind = self.named("script")[-1].get("type") or "program"
            self.scripts[kind] = self.scripts.get(kind, "") + data
        else:
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


def content(text: str) -> dict[str, Any]:
    """The history that the page holds for its script."""
    found: dict[str, Any] = json.loads(Page(text).scripts["application/json"])
    return found


# The page
# --------------------------------------------------------------------------------------------------


def test_text_is_escaped_wherever_it_stands() -> None:
    made = element("p", EVIL, Markup("<b>"), title=EVIL)
    safe = "&lt;/script&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;\ufffd\ufffd"
    assert f'<p title="{safe}">{safe}<b></p>' == made


def test_a_report_names_every_evaluation_and_the_best_version() -> None:
    config = {"evaluation": {"further": {"large": {}, "none": {}}}}
    mark = {"t": 1.0, "kind": "evaluation", "mean_return": 3.0, "version": 2, "episodes": 4}
    marks = [{**mark, "mean_return": 2.0}, {**mark, "name": "large"}]
    found = facts(records(row(1.0, marks=marks), config=config))
    assert ("2 (version 2, 4 episodes)", "3 (version 2, 4 episodes)", "–") == tuple(
        found[name] for name in ("evaluated", "evaluated (large)", "evaluated (none)")
    )
    assert "best" not in found
    best = {"mean_return": 5.0, "version": 1, "episodes": 4}
    large = {**best, "mean_return": 4.0, "success": 0.75, "crashes": 2.0}
    summary = {"further_evaluations": {"large": large}, "best": best}
    found = facts(records(row(1.0, marks=marks), config=config, summary=summary))
    assert (
        "4 (version 1, 4 episodes, crashes 2, success 0.75)",
        "5 (version 1, 4 episodes)",
    ) == tuple(found[name] for name in ("evaluated (large)", "best"))


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
        found = Page(text)
        assert [{"type": "application/json", "id": "history"}, {}] == found.named("script")
        assert "alert" in found.text
        assert "alert" not in found.scripts["program"]
        [first, _] = content(text)["rows"]
        assert {EVIL: 1.0} == first["shares"]["learner"]


def test_a_page_needs_no_network_and_runs_its_own_script_only() -> None:
    text = page(records(row(0.0), row(1.0)), now=NOW)
    found = Page(text)
    assert {"link", "img", "iframe", "object"}.isdisjoint(name for name, _ in found.elements)
    assert {"src", "href", "srcset"}.isdisjoint(
        key for _, attributes in found.elements for key in attributes
    )
    assert "url(" not in text.replace("`url(#${this.clip})`", "")
    assert "import" not in re.findall(r"^\w+", found.scripts["program"], re.MULTILINE)
    [allowed] = [meta["content"] for meta in found.named("meta") if "http-equiv" in meta]
    digest = base64.b64encode(hashlib.sha256(found.scripts["program"].encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'" in str(
        allowed
    )


def test_the_page_holds_the_history_and_the_target_for_its_charts() -> None:
    rows = (row(0.0, mean_return=math.nan), row(1.0, marks=[{"t": 1.0, "kind": "resumed"}]))
    found = content(page(records(*rows, config={"run": {"target_return": 475.0}}), now=NOW))
    assert 475.0 == found["target"]
    assert [rows[0] | {"mean_return": None}, rows[1]] == found["rows"]
    assert None is content(page(records(row(0.0)), now=NOW))["target"]


def test_a_long_history_is_thinned_to_the_pixels_of_a_chart() -> None:
    rows = content(page(records(*(row(float(t)) for t in range(2 * ROWS))), now=NOW))["rows"]
    assert (ROWS, 2.0, 2.0 * ROWS - 1.0) == (len(rows), rows[0]["span_s"], rows[-1]["t"])


def test_a_program_that_would_end_its_element_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.js").write_text('const text = "</SCRIPT>";\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.js would end"):
        bundled(tmp_path / "bad.js")


def test_ids_are_of_one_element_each() -> None:
    found = Page(page(records(row(0.0, replay={"items": 3}), row(1.0)), now=NOW))
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert ["charts", "history"] == ids


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (row(0.0),),
        ({"t": 1.0},),
        ({"t": 1.0, "marks": 3, "shares": 4, "dropped": [], "staleness": "x"},),
    ],
)
def test_a_page_is_made_of_few_or_strange_lines(
    tmp_path: Path, lines: tuple[dict[str, Any], ...]
) -> None:
    (tmp_path / NAME).write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    found = Page(page(read(tmp_path), now=NOW))
    assert f"{tmp_path.name}: report" in found.text
    assert ("This run has no history" in found.text) == (not lines)
    assert bool(lines) == bool(found.named("script"))


def test_a_run_that_goes_on_is_told_from_its_last_line() -> None:
    found = facts(
        records(row(1.0), row(3.0, steps_per_s=300.0, span_s=3.0, bottleneck="learning-bound"))
    )
    assert ("0:03", "300", "250") == (found["time"], found["environment steps"], found["steps/s"])
    assert "learning-bound 75%, balanced 25%" == found["verdicts"]
    assert "mean 0.5, maximum 1, bound 1" == found["staleness"]


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
    assert "1 older ones are not shown." in text


def test_marks_that_the_history_left_out_are_counted() -> None:
    rows = (
        row(0.0, marks_left_out=1200),
        row(1.0, marks_left_out="x"),
        row(2.0, marks_left_out=34),
        row(3.0),
    )
    assert " 1,234 further events have no mark" in page(records(*rows), now=NOW)
    assert "further events" not in page(records(row(0.0)), now=NOW)


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
def test_the_page_of_a_real_run_holds_its_history(tmp_path: Path) -> None:
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
    assert rows == content(text)["rows"]
    assert {2} == {line["staleness"]["bound"] for line in rows}
    assert (
        f"{json.loads((directory / 'summary.json').read_text())['env_steps']:,}" in Page(text).text
    )
