"""Pictures of panels with the data of a real Prometheus: ``python -m dashboards.pictures [MINUTES]
[CONFIG] [SETTING=VALUE ...]``.

It trains for ``MINUTES`` while Prometheus scrapes, changes the bound half-way, and queries the
panels' expressions over that time. It writes ``panels-light.png`` and ``panels-dark.png`` beside
this file. It needs prometheus, chromium and the extra ``dev``.
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
from tianflow.report.markup import element
from tianflow.report.scripts import bundled, data, policy
from tianflow.report.style import css
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
PROGRAM = HERE / "pictures.js"
LIMITS = frozenset({"bound", "target", "in force", "asked for", "ceiling"})
"""Series that hold their value until the next one."""
UNITS = {"ops": "per second", "short": "", "s": "seconds", "percentunit": "share"}
RUN = "pictured"


def panels() -> list[Json]:
    """The panels of `SHOWN`, as `dashboards.make` makes them."""
    boards = {"overview": make.overview(), "balance": make.balance()}
    return [
        next(panel for panel in boards[board]["panels"] if panel["title"] == title)
        for board, title in SHOWN
    ]


def query(address: str, expression: str, start: float, end: float) -> list[Json]:
    """The series of ``expression`` at every step from ``start`` to ``end``."""
    given = {
        "query": expression.replace("$run", RUN).replace("$__rate_interval", WINDOW),
        "start": start,
        "end": end,
        "step": STEP_S,
    }
    words = urllib.parse.urlencode(given)
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{words}", timeout=30.0) as response:  # noqa: S310 - the Prometheus of this program
        found: list[Json] = json.load(response)["data"]["result"]
    return found


def series_name(legend: str, labels: dict[str, str]) -> str:
    """The name of a series, without the name of the only run."""
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", "" if label == "run" else value)
    return legend.replace("{{run}}", "").strip()


def measured_panel(panel: Json, address: str, start: float, end: float) -> Json:
    """Title, unit, times and series of a panel."""
    times = [float(STEP_S * place) for place in range(int(end - start) // STEP_S + 1)]
    series: dict[str, Json] = {}
    for target in panel["targets"]:
        for found in query(address, target["expr"], start, end):
            values: dict[int, float] = {
                round((at - start) / STEP_S): float(value) for at, value in found["values"]
            }
            name = series_name(target["legendFormat"], found["metric"])
            series[name] = {
                "steps": name in LIMITS,
                "values": [values.get(place) for place in range(len(times))],
            }
    defaults = panel["fieldConfig"]["defaults"]
    shares = "stacking" in defaults["custom"]
    return {
        "title": panel["title"],
        "unit": "share of time" if shares else UNITS[defaults["unit"]],
        "times": times,
        "shares": shares,
        "series": series,
    }


def page(panels: Sequence[Json]) -> str:
    """The pictures of ``panels`` as an HTML document."""
    script = bundled(PROGRAM)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        element("style", css()),
    )
    sheet = element("main", element("div", class_="charts", id="charts"), data(panels, "panels"))
    body = element("body", sheet, element("script", script))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


# A run and its Prometheus
# ---------------------------------------------------------------------------------------------


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is terminated on exit."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 - named in this file
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60.0)


def address_of(directory: Path, training: subprocess.Popen[bytes]) -> str:
    """The address of the run, as soon as it listens."""
    while (file := ControlFile.read(directory)) is None:
        if training.poll() is not None:
            raise SystemExit(f"the run exited at the start with code {training.returncode}")
        time.sleep(0.2)
    return file.address.removeprefix("http://")


def configured(folder: Path, target: str) -> Path:
    """A copy of the scrape file with one target."""
    shutil.copytree(HERE / "prometheus", folder)
    for path in (folder / "targets").glob("*.json"):
        path.unlink()
    (folder / "targets" / "run.json").write_text(json.dumps([{"targets": [target]}]))
    return folder / "prometheus.yml"


def measured(folder: Path, minutes: float, config: str, settings: Sequence[str]) -> list[Json]:
    """Panels of a run that trains for ``minutes``."""
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
                measured_panel(panel, f"http://{listen}", start, start + minutes * 60.0)
                for panel in panels()
            ]


async def photograph(path: Path) -> None:
    """Take a light and a dark screenshot of the page at ``path``."""
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
            await view.goto(path.as_uri())
            await view.screenshot(path=HERE / f"panels-{scheme}.png", full_page=True)
        await browser.close()


def main(arguments: Sequence[str]) -> int:
    """Train, query, draw."""
    minutes, config, *settings = [*arguments, *("4", "cartpole_impala")[len(arguments) :]]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "page.html"
        text = page(measured(Path(name), float(minutes), config, settings))
        path.write_text(text, encoding="utf-8")
        asyncio.run(photograph(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
