"""Pictures of panels: they have the series of the panel's queries, from the committed scrape file."""

from __future__ import annotations

import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dashboards import pictures
from tianflow.rundir.control_file import ControlFile, process_start_time

Series = tuple[Mapping[str, str], list[tuple[float, str]]]
START = 1000.0


class Prometheus:
    """Answers questions about ranges as the real one does. ``answers``: series by the beginning of
    an expression.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[Series]] = {}
        self.asked: list[dict[str, str]] = []

    def answer(self, path: str) -> bytes:
        parts = urllib.parse.urlsplit(path)
        assert "/api/v1/query_range" == parts.path
        question = dict(urllib.parse.parse_qsl(parts.query, strict_parsing=True))
        self.asked.append(question)
        found = next(
            (
                series
                for begin, series in self.answers.items()
                if question["query"].startswith(begin)
            ),
            [],
        )
        result = [{"metric": labels, "values": values} for labels, values in found]
        return json.dumps(
            {"status": "success", "data": {"resultType": "matrix", "result": result}}
        ).encode()


@pytest.fixture
def prometheus() -> Prometheus:
    return Prometheus()


@pytest.fixture
def address(prometheus: Prometheus) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(prometheus.answer(self.path))

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def panel(title: str) -> dict[str, Any]:
    return next(panel for panel in pictures.panels() if panel["title"] == title)


def test_every_panel_that_is_shown_is_there_and_has_a_unit_that_can_be_drawn() -> None:
    assert [title for _, title in pictures.SHOWN] == [panel["title"] for panel in pictures.panels()]
    for shown in pictures.panels():
        assert "timeseries" == shown["type"]
        defaults = shown["fieldConfig"]["defaults"]
        assert "stacking" in defaults["custom"] or defaults["unit"] in pictures.UNITS


def test_expressions_are_asked_for_of_the_one_run_over_the_whole_time(
    prometheus: Prometheus, address: str
) -> None:
    prometheus.answers[""] = [({"run": pictures.RUN}, [(START, "1.5")])]
    found = pictures.query(
        address, 'rate(tianflow_x{run=~"$run"}[$__rate_interval])', START, START + 60.0
    )
    assert [{"metric": {"run": "pictured"}, "values": [[START, "1.5"]]}] == found
    expected = {
        "query": 'rate(tianflow_x{run=~"pictured"}[20s])',
        "start": "1000.0",
        "end": "1060.0",
        "step": "5",
    }
    assert [expected] == prometheus.asked


@pytest.mark.parametrize(
    ("legend", "labels", "name"),
    [
        ("{{run}} mean", {"run": "pictured"}, "mean"),
        ("{{run}} {{state}}", {"run": "pictured", "state": "busy"}, "busy"),
        ("{{run}} shard {{shard}}", {"shard": "0"}, "shard 0"),
        ("failed", {}, "failed"),
    ],
)
def test_a_line_has_its_name_without_that_of_the_run(
    legend: str, labels: dict[str, str], name: str
) -> None:
    assert name == pictures.series_name(legend, labels)


def test_lines_lie_at_their_times_and_limits_are_steps(
    prometheus: Prometheus, address: str
) -> None:
    prometheus.answers["tianflow_credits_in_use"] = [
        ({"run": "pictured"}, [(START + 5.0, "3"), (START + 10.0, "4")])
    ]
    prometheus.answers["tianflow_credits_limit"] = [
        ({"run": "pictured"}, [(START, "8"), (START + 10.2, "9")])
    ]
    assert {
        "title": "Credits",
        "unit": "",
        "times": [0.0, 5.0, 10.0],
        "shares": False,
        "series": {
            "in use": {"steps": False, "values": [None, 3.0, 4.0]},
            "in force": {"steps": True, "values": [8.0, None, 9.0]},
        },
    } == pictures.measured_panel(panel("Credits"), address, START, START + 10.0)


def test_shares_are_drawn_on_top_of_each_other(prometheus: Prometheus, address: str) -> None:
    prometheus.answers["sum by (run, state)"] = [
        ({"run": "pictured", "state": state}, [(START + at, value) for at in (0.0, 5.0)])
        for state, value in (("busy", "0.75"), ("idle", "0.25"))
    ]
    found = pictures.measured_panel(panel("Learner's time"), address, START, START + 5.0)
    assert found["shares"]
    assert {"busy": [0.75, 0.75], "idle": [0.25, 0.25]} == {
        name: series["values"] for name, series in found["series"].items()
    }


@pytest.mark.parametrize("title", [title for _, title in pictures.SHOWN])
def test_a_panel_without_series_keeps_its_place(address: str, title: str) -> None:
    found = pictures.measured_panel(panel(title), address, START, START + 60.0)
    assert (title, {}) == (found["title"], found["series"])


def test_the_scrape_file_is_the_committed_one_with_one_target(tmp_path: Path) -> None:
    path = pictures.configured(tmp_path / "prometheus", "127.0.0.1:9999")
    assert (pictures.HERE / "prometheus" / "prometheus.yml").read_text() == path.read_text()
    (targets,) = (path.parent / "targets").glob("*.json")
    assert [{"targets": ["127.0.0.1:9999"]}] == json.loads(targets.read_text())


def test_where_the_run_listens_is_in_its_control_file(tmp_path: Path) -> None:
    address = "http://127.0.0.1:1234"
    ControlFile(
        run="pictured",
        pid=1,
        start_time=process_start_time(1),
        address=address,
        token="c",
        read_token="r",
    ).write(tmp_path)
    with pictures.started(sys.executable, "-c", "import time; time.sleep(60)") as process:
        assert "127.0.0.1:1234" == pictures.address_of(tmp_path, process)
    assert process.poll() is not None


def test_a_run_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    with pictures.started(sys.executable, "-c", "raise SystemExit(3)") as process:
        process.wait(20.0)
        with pytest.raises(SystemExit, match="code 3"):
            pictures.address_of(tmp_path, process)


def test_pictures_are_on_one_page_that_is_photographed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, str, list[str]]] = []
    pages: list[str] = []

    def measured(folder: Path, minutes: float, config: str, settings: list[str]) -> list[Any]:
        assert folder.is_dir()
        asked.append((minutes, config, settings))
        return [{"title": "</script>"}]

    async def photograph(page: Path) -> None:
        pages.append(page.read_text())  # noqa: ASYNC240 - nothing else runs

    monkeypatch.setattr(pictures, "measured", measured)
    monkeypatch.setattr(pictures, "photograph", photograph)
    assert 0 == pictures.main([])
    assert 0 == pictures.main(["1.5", "cartpole_ppo", "balance.max_staleness=1"])
    assert [
        (4.0, "cartpole_impala", []),
        (1.5, "cartpole_ppo", ["balance.max_staleness=1"]),
    ] == asked
    assert pages[0].startswith("<!DOCTYPE html>")
    assert '>[{"title":"\\u003c/script>"}]</script>' in pages[0]
