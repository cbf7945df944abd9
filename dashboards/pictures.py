"""Draws some panels as a real Prometheus answers them: ``python -m dashboards.pictures [MINUTES]
[CONFIG] [SETTING=VALUE ...]``.

Trains for so many minutes with Prometheus scraping, changes the bound half-way, asks for the
panels' expressions over that time, and leaves ``panels-light.png`` and ``panels-dark.png`` here.
Needs prometheus and chromium, and the extra ``dev``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboards import make
from dashboards.panels import Json
from tianflow.report.charts import Line, line_chart, share_chart
from tianflow.report.markup import Markup, element
from tianflow.report.style import CSS
from tianflow.rundir.control_file import ControlFile

HERE = Path(__file__).parent
SHOWN = (
    *(
        ("overview", title)
        for title in ("Return", "Environment steps", "Learner's time", "Actors' time")
    ),
    *(("balance", title) for title in ("Where staleness comes from", "Credits")),
)
STEP_S, WINDOW = 5, "20s"
UNITS = {"ops": "per second", "short": "", "s": "seconds", "percentunit": "share"}
RUN = "pictured"


def panels() -> list[Json]:
    """Those of `SHOWN`, as they are made."""
    boards = {"overview": make.overview(), "balance": make.balance()}
    return [
        next(panel for panel in boards[board]["panels"] if panel["title"] == title)
        for board, title in SHOWN
    ]


def ask(address: str, query: str, start: float, end: float) -> list[Json]:
    """What ``query`` was at every step from ``start`` to ``end``."""
    query = query.replace("$run", RUN).replace("$__rate_interval", WINDOW)
    words = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": STEP_S})
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{words}", timeout=30.0) as response:  # noqa: S310 - the Prometheus of this program
        found: list[Json] = json.load(response)["data"]["result"]
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    """A series' name, without the one run that there is."""
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", "" if label == "run" else value)
    return legend.replace("{{run}}", "").strip()


def drawn(panel: Json, address: str, start: float, end: float) -> Markup:
    """A panel's picture."""
    times = [float(STEP_S * place) for place in range(int(end - start) // STEP_S + 1)]
    series: dict[str, list[float | None]] = {}
    for target in panel["targets"]:
        for found in ask(address, target["expr"], start, end):
            values: dict[int, float] = {
                round((at - start) / STEP_S): float(value) for at, value in found["values"]
            }
            series[named(target["legendFormat"], found["metric"])] = [
                values.get(place) for place in range(len(times))
            ]
    key, colours = (
        f"p{panel['title'].replace(' ', '-')}",
        {name: place % 8 for place, name in enumerate(series)},
    )
    if "stacking" in panel["fieldConfig"]["defaults"]["custom"]:
        return share_chart(
            key=key, title=panel["title"], times=times, parts=series, colours=colours
        )
    unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    held = {
        name for name in series if name in {"bound", "target", "in force", "asked for", "ceiling"}
    }
    lines = [
        Line(name, values, colours[name], steps=name in held) for name, values in series.items()
    ]
    return line_chart(key=key, title=panel["title"], unit=unit, times=times, lines=lines)


# A run and its Prometheus
# ---------------------------------------------------------------------------------------------


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended in the end."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 - named in this file
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60.0)


def address_of(directory: Path, training: subprocess.Popen[bytes]) -> str:
    """Where the run listens, as soon as it does."""
    while (file := ControlFile.read(directory)) is None:
        if training.poll() is not None:
            raise SystemExit(f"the run ended at once, with {training.returncode}")
        time.sleep(0.2)
    return file.address.removeprefix("http://")


def configured(folder: Path, target: str) -> Path:
    """The committed scrape file, with one target."""
    shutil.copytree(HERE / "prometheus", folder)
    for path in (folder / "targets").glob("*.json"):
        path.unlink()
    (folder / "targets" / "run.json").write_text(json.dumps([{"targets": [target]}]))
    return folder / "prometheus.yml"


def measured(folder: Path, minutes: float, config: str, settings: Sequence[str]) -> list[Markup]:
    """Pictures of a run of so many minutes."""
    program = (sys.executable, "-m", "tianflow")
    given = ("run.target_return=null", "run.max_env_steps=null", f"run.name={RUN}", *settings)
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with started(*program, "train", config, "--runs-dir", str(folder), *given) as training:
        scraping = configured(folder / "prometheus", address_of(folder / RUN, training))
        arguments = (
            f"--config.file={scraping}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={listen}",
        )
        with started("prometheus", *arguments):
            start = time.time()
            time.sleep(minutes * 30.0)
            subprocess.run(  # noqa: S603
                [*program, "set", RUN, "balance.max_staleness=4", "--runs-dir", str(folder)],
                check=True,
            )
            time.sleep(minutes * 30.0)
            return [
                drawn(panel, f"http://{listen}", start, start + minutes * 60.0)
                for panel in panels()
            ]


async def photograph(page: Path) -> None:
    """Leave a light and a dark picture of ``page``."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        schemes: tuple[Any, ...] = ("light", "dark")
        for scheme in schemes:
            view = await browser.new_page(
                viewport={"width": 1160, "height": 600}, color_scheme=scheme
            )
            await view.goto(page.as_uri())
            await view.screenshot(path=HERE / f"panels-{scheme}.png", full_page=True)
        await browser.close()


def main(arguments: Sequence[str]) -> int:
    """Train, ask, draw."""
    minutes, config, *settings = [*arguments, *("4", "cartpole_impala")[len(arguments) :]]
    with tempfile.TemporaryDirectory() as name:
        pictures = measured(Path(name), float(minutes), config, settings)
        sheet = element("main", element("div", *pictures, class_="charts"))
        head = element("head", element("meta", charset="utf-8"), element("style", CSS))
        page = Path(name) / "page.html"
        page.write_text(
            "<!DOCTYPE html>\n" + element("html", head, element("body", sheet), lang="en"),
            encoding="utf-8",
        )
        asyncio.run(photograph(page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
