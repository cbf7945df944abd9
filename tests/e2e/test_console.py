"""The console in a real Chromium: of an active run, and of a service with several runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from tests.e2e import harness
from tests.e2e.harness import LiveRun
from tests.e2e.test_serve import Service, service
from tests.support.effort import EVERY
from tests.support.paths import ROOT
from tianflow.rundir.history import NAME, read_rows

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium (Debian package of that name) is not installed"
    ),
]
PATIENCE_MS = 1000.0 * harness.PATIENCE_S
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
LOOKS = [(WIDE, "light"), (NARROW, "dark"), (WIDE, "dark"), (NARROW, "light")]
"""Widths and colours in which axe looks at a page; the first two by default."""
CARTPOLE: dict[str, object] = {
    "env__id": "CartPole-v1",
    "env__vectorization": "sync",
    "env__wrappers": ["tests.support.environments:Paced"],
    "balance__max_staleness": 2,
}
"""The browser needs the cores."""
REFUSED = re.compile(r"Failed to load resource: .* status of (\d+)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page, and everything that a browser has against it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.refusals: list[int] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "requestfailed",
            lambda request: self.errors.append(
                f"{request.method} {request.url}: {request.failure}"
            ),
        )

    def _heard(self, message: ConsoleMessage) -> None:
        refused = REFUSED.match(message.text)
        if refused:
            self.refusals.append(int(refused[1]))
        elif message.type in {"error", "warning"}:
            self.errors.append(message.text)

    def reads(self, selector: str, text: str) -> None:
        expect(self.page.locator(selector)).to_have_text(text, timeout=PATIENCE_MS)

    def sees(self, selector: str) -> None:
        expect(self.page.locator(selector)).to_be_visible(timeout=PATIENCE_MS)

    def text_in(self, selector: str, text: str) -> None:
        expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE_MS)

    def accessible(self) -> None:
        """Nothing that axe calls serious or critical, whatever the width and the colours."""
        for size, scheme in LOOKS if EVERY == 1 else LOOKS[:2]:
            self.page.set_viewport_size(size)  # type: ignore[arg-type]  # a table of width and height
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of the two
            found = Axe().run(self.page).response["violations"]
            grave = [
                (rule["id"], rule["nodes"][0]["html"])
                for rule in found
                if rule["impact"] in {"serious", "critical"}
            ]
            assert [] == grave, f"{size['width']} pixels, {scheme}"
            assert 0 >= self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            ), size
        self.page.set_viewport_size(WIDE)  # type: ignore[arg-type]  # as above


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]  # a table of width and height
    yield Watched(context.new_page())
    context.close()


def opened(watched: Watched, live: LiveRun, token: str | None = None) -> None:
    control = live.control
    assert control is not None
    watched.page.goto(f"{control.address}/#token={token or control.token}")


def field(name: str) -> str:
    return f'.field[data-name="{name}"]'


def points(page: Page, chart: str) -> str:
    return page.locator(f"{chart} path.line").first.get_attribute("d") or ""


def until_redrawn(watched: Watched, chart: str, times: int = 1) -> None:
    """Wait until the line of ``chart`` has changed ``times`` times."""
    watched.page.locator(chart).scroll_into_view_if_needed()  # outside the viewport it is not drawn
    for _ in range(times):
        before = points(watched.page, chart)
        watched.page.wait_for_function(
            "([chart, before]) => document.querySelector(`${chart} path.line`).getAttribute('d') "
            "!== before",
            arg=[chart, before],
            timeout=PATIENCE_MS,
        )


@pytest.fixture(name="ended", scope="module")
def _ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose runs end beside the first tests."""
    with service(tmp_path_factory.mktemp("ended") / "runs", "--max-runs", "2") as served:
        limits = {"run__max_seconds": 2.0, "evaluation__every_s": 0.5, "evaluation__episodes": 2}
        served.submit("one", balance__max_staleness=1, **limits)
        served.submit("two", balance__max_staleness=3, **limits)
        served.submit(
            "bad",
            env__id="tests.support.environments:RaisingEnv",
            env__kwargs={"at": 200},
            env__max_failures=0,
            **limits | {"run__max_seconds": None},
        )
        yield served


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory, ended: Service) -> Iterator[LiveRun]:
    """A run for both tests of one; the second stops it. ``ended`` begins before it."""
    with harness.run(tmp_path_factory.mktemp("console"), **CARTPOLE) as live:
        live.until_training(more=3)
        yield live


def test_the_page_asks_for_a_token_and_the_read_token_changes_nothing(
    live: LiveRun, watched: Watched
) -> None:
    page = watched.page
    assert live.control is not None
    page.goto(live.control.address)
    for token in ("wrong", live.control.read_token):
        watched.sees("#token")
        expect(page.locator("#token")).to_have_value(
            "", timeout=PATIENCE_MS
        )  # a refused token leads to an empty form
        page.locator("#token").fill(token)
        page.keyboard.press("Enter")
    watched.reads(".head .state", "running")
    page.get_by_role("button", name="Pause").click()
    watched.reads(
        ".head .error[role=alert]", "This token allows reading only; use the control token."
    )
    watched.reads("#bound-now", "2")
    page.get_by_role("button", name="Increase the bound").click()
    watched.reads(
        "#settings-balance form > .error", "This token allows reading only; use the control token."
    )
    assert ([], "running") == (watched.errors, live.status()["state"])
    page.reload()
    watched.reads(".head .state", "running")  # the token lasts as long as the tab


TOML = """top = 1
[env]
id = "a # [b]"  # [c]
kwargs = { size = 3, "odd key" = [1, 2] }
wrappers = [
  "x = 1",
  'y = "2',
]
"normalisation".returns = true
[metrics.kwargs.'my sink']
text = \"\"\"
[run]
seed = 7
\"\"\"
[run]
seed = 7
"""


def test_the_line_of_a_setting_is_found_in_every_form_of_toml(
    live: LiveRun, watched: Watched
) -> None:
    assert live.control is not None
    watched.page.goto(live.control.address)
    found = watched.page.evaluate(
        """async (text) => {
            const { linesOf, lineOf } = await import("/console/toml.js");
            const lines = linesOf(text);
            const all = Object.fromEntries(lines);
            for (const path of ["run.seed.x", "env.none", "none.x"]) all[path] = lineOf(lines, path);
            return all;
        }""",
        TOML,
    )
    rows = TOML.split("\n")
    assert {
        path: line and rows[line - 1].split("=")[0].strip() for path, line in found.items()
    } == {
        "top": "top",
        "env": "[env]",
        "env.id": "id",
        "env.kwargs": "kwargs",
        "env.kwargs.size": "kwargs",
        "env.kwargs.odd key": "kwargs",
        "env.wrappers": "wrappers",
        "env.normalisation": '"normalisation".returns',
        "env.normalisation.returns": '"normalisation".returns',
        "metrics": "[metrics.kwargs.'my sink']",
        "metrics.kwargs": "[metrics.kwargs.'my sink']",
        "metrics.kwargs.my sink": "[metrics.kwargs.'my sink']",
        "metrics.kwargs.my sink.text": "text",
        "run": "[run]",
        "run.seed": "seed",
        "run.seed.x": "seed",
        "env.none": "[env]",
        "none.x": None,
    }
    assert rows.index("[run]") + 1 < found["run"] == len(rows) - 2, "not the one in the text"


def test_numbers_that_arrive_late_or_become_long_move_nothing(
    live: LiveRun, watched: Watched
) -> None:
    """The document of the run is replaced: nothing is known, then short and long numbers."""
    page = watched.page
    counts = {"min": 0, "max": 1, "mean": 1, "p99": 1, "count": 9, "counts": {"1": 9}}
    phases: list[dict[str, object]] = [
        {"min": None, "max": None, "mean": None, "p99": None, "count": 0, "counts": {}},
        counts,
        counts | {"mean": 123.4, "p99": 1234.5, "max": 12},
        counts | {"mean": 123.4, "p99": 1234, "max": 1234, "min": 100},
    ]
    phase = [0]
    states = ["busy", "waiting", "idle", "blocked:draw"]
    shares = dict.fromkeys(states, 1.0 / len(states))
    diagnoses: list[dict[str, object]] = [
        {"verdict": "starting", "advice": "wait", "for_s": 0.1, "suggested": {}, "shares": {}},
        {
            "verdict": "sampling-bound",
            "advice": "the learner waits 37% of the time, actors 12%; " * 12,
            "for_s": 12345.6,
            "suggested": {"actors.count": 123, "actors.hosts": 123, "balance.max_staleness": 123},
            "steps_per_s": 123456.7,
            "forecast_steps_per_s": 234567.8,
            "shares": {"learner": shares, "actor": shares, "replay": shares},
        },
    ]

    def replaced(route: Route) -> None:
        answer = route.fetch()
        document = answer.json()
        number = phase[0]
        document["staleness"] |= phases[number]
        document["diagnosis"] = diagnoses[number % 2]
        if number < 1:
            del document["staleness"]["violations"]
        evaluation = {"mean_return": 123.4, "version": 10.0}
        document["evaluation"] = {} if number < 2 else evaluation
        document["further_evaluations"] = {} if number < 2 else {"large": evaluation}
        document["trajectories"]["dropped"] = {} if number < 2 else {"straggler": 3}
        if number < 1:
            document["returns"] = document.get("returns", {}) | {"mean": None}
        route.fulfill(response=answer, json=document)

    page.route(re.compile(f"/api/v1/runs/{live.name}$"), replaced)
    page.route(re.compile("/history"), lambda route: route.fulfill(status=404, json={}))
    opened(watched, live)
    watched.reads(".head .state", "running")
    watched.reads("#staleness-now", "–")
    for top in ("#staleness-title", "#chart-speed"):
        page.locator(top).scroll_into_view_if_needed()
        phase[0] = 0
        watched.reads("#staleness-now", "–")
        watch_for_jumps(watched, ".diagnosis .says, .big")
        for number, shown in ((1, "1"), (2, "12"), (3, "1,234"), (1, "1")):
            phase[0] = number
            watched.reads("#staleness-now", shown)
            page.wait_for_timeout(300)  # a shift is reported after the frame that shows it
        assert_nothing_moved(watched)
    watched.text_in("#chart-return .legend", "last evaluation")
    watched.text_in("#chart-return .legend", "evaluation large")


def test_a_schedule_has_its_value_in_force_beside_it(live: LiveRun, watched: Watched) -> None:
    """The document of the run is replaced: it has a schedule before the first update, and after."""
    values: list[float | None] = [None]

    def replaced(route: Route) -> None:
        answer = route.fetch()
        document = answer.json()
        state = {"schedule": {"schedule": "linear"}, "value": values[0]}
        document["settings"]["schedules"] = {"algorithm.learning_rate": state}
        route.fulfill(response=answer, json=document)

    watched.page.route(re.compile(f"/api/v1/runs/{live.name}$"), replaced)
    opened(watched, live)
    watched.reads(f"{field('learning_rate')} .now", " now –")
    values[0] = 2.5e-4
    watched.reads(f"{field('learning_rate')} .now", " now 2.5e−4")
    expect(watched.page.locator(f"{field('entropy_cost')} .now")).to_be_hidden()
    assert [] == watched.errors


def test_a_run_is_watched_and_changed(live: LiveRun, watched: Watched) -> None:
    page = watched.page
    live.until("a history of five rows with updates", lambda: rows_with_updates(live) >= 5)
    opened(watched, live)
    watched.reads(".head .state", "running")
    assert page.url.endswith(f"/#/runs/{live.name}"), "the token is not left in the address"
    watched.reads("#bound-now", "2")
    for chart in ("#chart-losses", "#chart-speed", "#chart-length", "#chart-entropy"):
        page.locator(chart).scroll_into_view_if_needed()  # outside the viewport it is not drawn
        assert points(page, chart).count("L") >= 3, "charts start with the history"
    legend = page.locator("#chart-losses .legend")
    policy = page.locator("#chart-policy-loss .legend")
    expect(policy).to_contain_text(re.compile(r"policy_loss [−\d.]+"), timeout=PATIENCE_MS)
    expect(legend).to_contain_text(re.compile(r"value_loss [\d.]+"), timeout=PATIENCE_MS)
    further = page.locator('[id="chart-statistic-train/ess_ratio"]')
    expect(further).to_contain_text("train/ess_ratio", timeout=PATIENCE_MS)
    for chart in ("#chart-losses", "#chart-speed", "#chart-updates", "#chart-staleness"):
        until_redrawn(watched, chart)
    assert "bound 2" in (page.locator("#chart-staleness svg").get_attribute("aria-label") or "")
    expect(page.locator("#chart-staleness path.cell.level5")).not_to_have_attribute("d", "M0 0")
    nothing_jumps(watched)
    watched.accessible()
    change_by_keyboard(watched, live)
    refusals_are_shown_at_their_fields(watched, live)
    changed_by_two_at_once(watched, live)
    assert [422, 422, 412] == watched.refusals
    act(watched, live)
    nothing_is_polled_while_the_page_is_hidden(watched, live)
    assert [] == watched.errors
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("button", name=f"Stop {live.name}").click()
    assert 0 == live.end()
    watched.reads("#connection", "The run and its server have ended.")


def watch_for_jumps(watched: Watched, own: str = ".diagnosis .says") -> None:
    """Collect in ``window.moved`` each node that moves, with its place and its movement. Texts in
    ``own`` may move each other.
    """
    watched.page.evaluate(
        """(own) => {
            window.moved = [];
            const isOwn = (node) => (node.closest ? node : node.parentElement)?.closest(own);
            const one = (node) => node.nodeName.toLowerCase() + (node.id ? `#${node.id}` : "")
                + [...(node.classList ?? [])].map((css) => `.${css}`).join("");
            const path = (node) => (node && node !== document.body ? [...path(node.parentElement), one(node)] : []);
            const at = (rect) => `${Math.round(rect.x)},${Math.round(rect.y)} ${Math.round(rect.width)}x${Math.round(rect.height)}`;
            const told = ({ node, previousRect, currentRect }) =>
                `${path(node).slice(-4).join(" > ")} "${node.textContent.slice(0, 30)}" from ${at(previousRect)} to ${at(currentRect)}`;
            const look = (entry) => entry.sources.filter(({ node }) => node && !isOwn(node)).map(told);
            const observer = new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.moved.push(...look(entry))));
            observer.observe({ type: "layout-shift" });
        }""",
        own,
    )


def assert_nothing_moved(watched: Watched) -> None:
    moved = watched.page.evaluate("window.moved")
    assert not moved, "moved:\n" + "\n".join(moved)


def nothing_jumps(watched: Watched) -> None:
    """Changing numbers do not move the layout."""
    watch_for_jumps(watched)
    until_redrawn(watched, "#chart-speed", times=4)
    assert_nothing_moved(watched)


def change_by_keyboard(watched: Watched, live: LiveRun) -> None:
    """From the top of the page to a changed bound, without a mouse."""
    page = watched.page
    page.evaluate("document.activeElement.blur()")
    for key in (
        "Tab",
        "Enter",
        "Tab",
        "Tab",
    ):  # the skip link, into the settings, past the title of the first form
        page.keyboard.press(key)
    assert "max_staleness" == page.evaluate("document.activeElement.name")
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    watched.text_in(f"{field('max_staleness')} .was", "was 2")
    page.keyboard.press("Enter")
    watched.reads("#bound-now", "3")
    watched.text_in("#audit tbody tr:first-child", "balance.max_staleness 2 → 3")
    assert 3 == live.status()["staleness"]["bound"]
    page.get_by_role("button", name="Increase the bound").click()
    watched.reads("#bound-now", "4")
    expect(page.locator(f"{field('max_staleness')} input")).to_have_value("4", timeout=PATIENCE_MS)


def refusals_are_shown_at_their_fields(watched: Watched, live: LiveRun) -> None:
    page = watched.page
    page.locator(f"{field('max_staleness')} input").fill("-1")
    page.locator(f"{field('straggler_patience')} input").fill("soon")
    page.locator("#settings-balance button[type=submit]").click()
    watched.text_in(f"{field('straggler_patience')} .error", "Is not a number")
    page.locator(f"{field('straggler_patience')} input").fill("9")
    page.locator("#settings-balance button[type=submit]").click()
    watched.text_in(f"{field('max_staleness')} .error", "accepted")
    assert "max_staleness" == page.evaluate("document.activeElement.name")
    assert ["max_staleness"] == page.locator(".field.refused").evaluate_all(
        "nodes => nodes.map((node) => node.dataset.name)"
    )
    assert "true" == page.locator(f"{field('max_staleness')} input").get_attribute("aria-invalid")
    assert (4, 10.0) == (
        live.status()["staleness"]["bound"],
        settings(live)["straggler_patience"],
    ), "all or none"
    page.get_by_role("button", name="Undo").first.click()
    page.locator(f"{field('controller')} input").fill("<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    watched.sees(f"{field('controller')} .error")
    assert 0 == page.locator("img[src=x]").count()
    page.get_by_role("button", name="Undo").first.click()


def settings(live: LiveRun) -> dict[str, object]:
    found: dict[str, object] = json.loads(live.request(f"/api/v1/runs/{live.name}/balance")[1])
    return found


def changed_by_two_at_once(watched: Watched, live: LiveRun) -> None:
    """A change for an earlier generation of settings is not applied, and not lost."""
    page = watched.page

    generation = live.status()["settings"]["generation"]
    sent: list[str | None] = []

    def swap(route: Route, request: Request) -> None:
        more = {}
        if request.method == "PATCH":
            more = {} if sent else {"if-match": '"1"'}
            sent.append(request.headers.get("if-match"))
        route.continue_(headers={**request.headers, **more})

    page.route("**/balance", swap)
    page.locator(f"{field('straggler_patience')} input").fill("8")
    page.keyboard.press("Enter")
    watched.text_in("#settings-balance form > .error", "apply again")
    assert 10.0 == settings(live)["straggler_patience"]
    page.locator(f"{field('straggler_patience')} input").press("Enter")
    watched.reads("#settings-balance .done", "Applied")
    assert 8.0 == settings(live)["straggler_patience"]
    page.unroute("**/balance")
    assert [f'"{generation}"'] * 2 == sent


def act(watched: Watched, live: LiveRun) -> None:
    page = watched.page
    page.get_by_role("button", name="Pause").click()
    watched.reads(".head .state", "paused")
    assert "paused" == live.status()["state"]
    page.get_by_role("button", name="Resume").click()
    watched.reads(".head .state", "running")
    page.get_by_role("button", name="Checkpoint").click()
    live.until("a checkpoint", live.checkpoints)
    page.get_by_role("button", name="Drain").click()
    watched.sees("dialog")
    page.get_by_role("button", name="Cancel").click()
    assert "running" == live.status()["state"]


def nothing_is_polled_while_the_page_is_hidden(watched: Watched, live: LiveRun) -> None:
    page, requests = watched.page, []
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: "
        "true }); "
    )
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_load_state("networkidle")
    page.on("request", lambda request: requests.append(request.url))
    before = lines_of(live)
    live.until("three more lines of history", lambda: lines_of(live) >= before + 3)
    page.evaluate("1")  # all events of the browser have arrived
    assert [] == requests
    page.evaluate(hide, False)
    until_redrawn(watched, "#chart-speed")
    assert requests


def rows_with_updates(live: LiveRun) -> int:
    rows = read_rows(live.directory / NAME)
    return sum("train/loss" in row["learning"] for row in rows)


def lines_of(live: LiveRun) -> int:
    return len(read_rows(live.directory / NAME))


def test_runs_are_submitted_to_a_service_watched_and_resumed(
    tmp_path: Path, watched: Watched
) -> None:
    page = watched.page
    with service(tmp_path / "runs", "--max-runs", "1") as served:
        page.goto(f"{served.control.address}/#token={served.control.token}")
        watched.reads(".card > .unit", "No runs yet.")
        (tmp_path / "runs" / "lost").mkdir()
        (tmp_path / "runs" / "lost" / "config.toml").touch()
        watched.text_in("tbody th", "on disk")
        watched.reads("tbody .state", "interrupted")
        assert f"{served.control.address}/" == page.url, "the token is not left in the address"
        watched.accessible()
        shutil.rmtree(tmp_path / "runs" / "lost")
        watched.reads(".card > .unit", "No runs yet.")
        page.get_by_role("link", name="Submit a run").click()
        watched.sees("form.submit")
        watched.accessible()
        submit(watched, "one")
        watched.reads("h1", "one running")
        watched.reads("#bound-now", "2")
        until_redrawn(watched, "#chart-speed")
        page.goto(f"{served.control.address}/#/submit")
        submit(watched, "two")
        watched.text_in("h1", "pending")
        watched.sees(".reasons")
        expect(page.locator("aside")).to_be_hidden()
        watched.accessible()
        page.goto(f"{served.control.address}/#/runs/one")
        watched.reads(".head .state", "running")
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop one").click()
        watched.reads(".head .state", "stopped")
        an_ended_run_shows_what_it_was(watched)
        watched.accessible()
        page.get_by_role("link", name="Runs").click()
        served.until("the next run starts", lambda: served.run("two")["state"] == "running")
        watched.reads("tbody tr:nth-child(1) .state", "running")
        the_list_is_sorted_and_filtered(watched)
        page.goto(f"{served.control.address}/#/runs/three")
        watched.text_in("h1", "Run not found")
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("link", name="one").click()
        page.get_by_role("button", name="Resume run").click()
        watched.reads(".head .state", "pending")
        assert [] == watched.errors


def an_ended_run_shows_what_it_was(watched: Watched) -> None:
    """Environment, algorithm, reason, curves, settings and log of a stopped run."""
    page = watched.page
    watched.reads(".lead", "ppo on CartPole-v1")
    watched.text_in("#ending", "Reason:")
    watched.text_in("#ending .summary >> nth=0", "episodes")
    for chart in ("#chart-speed", "#chart-losses", "#chart-length", "#chart-entropy"):
        page.locator(chart).scroll_into_view_if_needed()
        assert points(page, chart).count("L") >= 1, "its history is still shown"
    watched.text_in("#config", "max_staleness")
    assert ["env", "algorithm", "network", "actors"] == page.locator(
        "#config h3"
    ).all_text_contents()[:4]
    assert not {"replay", "inference", "http"} & set(page.locator("#config h3").all_text_contents())
    page.locator("#log summary").click()
    watched.text_in("#log pre", "stop")


def column(page: Page, name: str) -> list[str]:
    """Texts of a column of the list of runs."""
    heads = page.locator("table.runs thead th").all_text_contents()
    return page.locator(
        f"table.runs tbody tr > :nth-child({heads.index(name) + 1})"
    ).all_text_contents()


def the_list_is_sorted_and_filtered(watched: Watched) -> None:
    """The list has the running run `two` and the stopped run `one`."""
    page = watched.page
    assert ["two", "one"] == column(page, "Run")
    assert ["CartPole-v1"] * 2 == column(page, "Environment")
    assert ["ppo"] * 2 == column(page, "Algorithm")
    assert all(re.match(r"\d+:\d\d", text) for text in column(page, "Started"))
    assert all(re.match(r"\d+ (s|min)", text) for text in column(page, "Duration"))
    assert re.match(r"^[\d,]+$", column(page, "Steps")[1])
    assert "descending" == page.locator("thead th[aria-sort]").get_attribute("aria-sort")
    for key, order, names in (
        ("Enter", "ascending", ["one", "two"]),
        ("Space", "descending", ["two", "one"]),
    ):
        page.get_by_role("button", name="Run", exact=True).press(key)
        watched.sees(f'thead th[aria-sort="{order}"] >> text=Run')
        assert names == column(page, "Run")
    page.get_by_label("Filter").fill("cartpole ONE")
    expect(page.locator("tbody tr")).to_have_count(1, timeout=PATIENCE_MS)
    watched.reads(".tools .unit", "1 of 2 runs")
    page.get_by_label("Filter").fill("")
    page.get_by_label("State").select_option("Active")
    expect(page.locator("tbody tr")).to_have_count(1, timeout=PATIENCE_MS)
    assert ["two"] == column(page, "Run")
    page.get_by_label("State").select_option("All states")
    page.get_by_role("button", name="Started").click()


def test_ended_runs_are_compared_and_deleted(ended: Service, watched: Watched) -> None:
    page = watched.page
    for name in ("one", "two", "bad"):
        ended.until(f"{name} ends", lambda name=name: ended.run(name).get("ended"))  # type: ignore[misc]  # bound now
    page.goto(f"{ended.control.address}/#token={ended.control.token}")
    watched.sees("table.runs")
    expect(page.locator("tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
    assert re.match(r"^[\d.]+", column(page, "Return")[1]), "of the run two"
    compare(watched, "one", "two")
    page.get_by_role("link", name="Runs").click()
    page.locator("tbody").get_by_role("link", name="one").click()
    watched.reads(".head .state", "done")
    the_whole_page_is_drawn(watched)
    a_failed_run_shows_its_error_and_its_log(watched)
    page.get_by_role("link", name="Runs").click()
    delete(watched, ended.folder)
    assert [] == watched.errors


BEFORE = ROOT / "tests" / "data" / "before" / "alone" / "ppo"
EVIL = "<img src=x onerror=alert(1)>"


def on_disk(folder: Path, name: str, *, killed: bool = False, **statistics: float) -> None:
    """A run of ``tianflow train`` in the directory of a service, with ``statistics`` (``__`` for
    ``/``) and evaluations ``large`` in its history.
    """
    shutil.copytree(BEFORE, folder / name)
    if killed:
        (folder / name / "summary.json").unlink()
    path = folder / name / NAME
    learning = {key.replace("__", "/"): value for key, value in statistics.items()}
    rows = [
        {
            **row,
            "learning": {
                key: {"count": 1, "mean": value * row["t"]} for key, value in learning.items()
            },
            "marks": [
                *(row.get("marks") or ()),
                {"kind": "evaluation", "name": "large", "t": row["t"], "mean_return": number},
            ],
        }
        for number, row in enumerate(read_rows(path))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_on_disk_are_opened_and_compared_and_not_steered(
    tmp_path: Path, watched: Watched
) -> None:
    page, folder = watched.page, tmp_path / "runs"
    on_disk(folder, "over", mine__score=2.0, train__loss=1.0, rollout__success=0.01)
    on_disk(folder, "killed", killed=True, mine__score=3.0, train__loss=2.0)
    on_disk(folder, "evil", **{EVIL: 1.0})
    texts = {"state": EVIL, "error": EVIL, "reason": EVIL, "seed": 1}
    evaluation = {"version": 7, "mean_return": 2.0, "episodes": 3, EVIL: 0.25}
    (folder / "evil" / "summary.json").write_text(json.dumps({**texts, "evaluation": evaluation}))
    (folder / "evil" / "config.toml").write_text(f"[env]\nid = '{EVIL}'\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with service(folder) as served:
        page.goto(f"{served.control.address}/#token={served.control.token}")
        expect(page.locator("tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
        watched.text_in(".hint", "They can be opened and compared, not changed.")
        assert ["on disk"] * 3 == page.locator("tbody th small").all_text_contents()
        page.get_by_label("State").select_option("Interrupted")
        assert ["killed"] == page.locator("tbody th a").all_text_contents()
        page.get_by_label("State").select_option("On disk")
        expect(page.locator("tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
        watched.accessible()
        page.get_by_label("Select over").check()
        page.get_by_label("Select killed").check()
        delete = page.get_by_role("button", name="Delete")
        expect(delete).to_be_disabled()
        expect(delete).to_have_attribute("title", re.compile("not deleted by this service"))
        own_statistics_are_compared(watched)
        an_opened_run_is_read_only(watched)
        page.goto(f"{served.control.address}/#/runs/evil")
        watched.reads(".head .state", "stopped")
        watched.text_in("#ending", f"evaluation of version 7, 3 episodes, {EVIL} 0.25")
        watched.text_in(".lead", EVIL)
        assert 0 == page.locator("img[src=x]").count()
        assert [] == watched.errors
        assert before == {path: path.read_bytes() for path in before}


def own_statistics_are_compared(watched: Watched) -> None:
    """From the list with the runs over and killed selected."""
    page = watched.page
    page.get_by_role("button", name="Compare").click()
    watched.reads("h1", "2 runs compared")
    expect(page.locator("#compare-return path.line")).to_have_count(2, timeout=PATIENCE_MS)
    watched.text_in("#compare-speed", "over two updates or more")
    expect(page.locator("#compare-evaluation-large path.line")).to_have_count(
        2, timeout=PATIENCE_MS
    )
    best = page.locator(".comparison tbody tr", has_text="Best evaluation large").locator("td")
    assert [str(len(read_rows(BEFORE / NAME)) - 1)] * 2 == best.all_text_contents()
    page.locator("#statistics summary").click()
    assert ["mine/score", "rollout/success"] == page.locator(
        "#statistics label"
    ).all_text_contents()
    page.get_by_role("checkbox", name="mine/score").check()
    chart = '[id="compare-statistic-mine/score"]'
    expect(page.locator(f"{chart} path.line")).to_have_count(2, timeout=PATIENCE_MS)
    watched.text_in(f"{chart} .unit", "mean over updates")
    assert "statistic=mine%2Fscore" in page.url
    watched.accessible()
    page.reload()
    expect(page.locator(f"{chart} path.line")).to_have_count(2, timeout=PATIENCE_MS)
    expect(page.get_by_role("checkbox", name="mine/score")).to_be_checked()
    page.get_by_role("checkbox", name="rollout/success").check()
    watched.text_in('[id="compare-statistic-rollout/success"] .unit', "mean over episodes")
    page.get_by_role("checkbox", name="mine/score").uncheck()
    expect(page.locator(chart)).to_have_count(0)
    states = page.locator(".comparison tbody tr").first.locator("td").all_text_contents()
    assert ["stopped", "interrupted"] == states
    steps = page.locator(".comparison tbody tr", has_text="Steps").first.locator("td")
    assert "–" not in steps.all_text_contents(), "also of a run without a summary"


def an_opened_run_is_read_only(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="Runs").click()
    page.locator("tbody").get_by_role("link", name="killed").click()
    watched.reads(".head .state", "interrupted")
    watched.text_in("#on-disk", "This page only reads the run. It is on disk and not in the store")
    watched.text_in("#on-disk", "`tianflow train --resume killed` continues it.")
    watched.text_in("#ending", "Interrupted")
    page.locator("#chart-return").scroll_into_view_if_needed()
    assert points(page, "#chart-return").count("L") > 3
    watched.text_in("#config", "CartPole-v1")
    watched.text_in("#audit", "balance.max_staleness")
    for name in ("Pause", "Resume run", "Stop", "Checkpoint", "Drain", "Delete", "Apply"):
        expect(page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    for hidden in ("#log", "#settings"):
        expect(page.locator(hidden)).to_be_hidden()
    watched.accessible()


def compare(watched: Watched, *names: str) -> None:
    """Select runs in the list, and look at them beside each other."""
    page = watched.page
    button = page.get_by_role("button", name="Compare")
    expect(button).to_be_disabled()
    for name in names:
        page.get_by_label(f"Select {name}").check()
    watched.text_in(".tools .unit", "2 selected")
    button.click()
    watched.reads("h1", "2 runs compared")
    lines = page.locator("#compare-return path.line")
    expect(lines).to_have_count(2, timeout=PATIENCE_MS)
    over_steps = points(page, "#compare-return")
    assert over_steps.count("L") >= 1
    assert 2 == len(
        set(lines.evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).stroke)"))
    )
    assert all(
        name in (page.locator("#compare-return .legend").text_content() or "") for name in names
    )
    page.get_by_label("time", exact=True).check()
    page.wait_for_function(
        "before => document.querySelector('#compare-return path.line').getAttribute('d') !== before",
        arg=over_steps,
    )
    table = dict(
        zip(
            page.locator(".comparison tbody th").all_text_contents(),
            page.locator(".comparison tbody tr").evaluate_all(
                "rows => rows.map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))"
            ),
            strict=True,
        )
    )
    assert ["1", "3"] == table["balance.max_staleness"]
    assert ["ppo", "ppo"] == table["Algorithm"]
    assert all("evaluation" in text for text in table["Final return"])
    assert "run.name" not in table
    assert "env.id" not in table
    watched.accessible()


def a_failed_run_shows_its_error_and_its_log(watched: Watched) -> None:
    page = watched.page
    page.get_by_role("link", name="Runs").click()
    page.locator("tbody").get_by_role("link", name="bad").click()
    watched.reads(".head .state", "failed")
    watched.reads(".lead", "ppo on tests.support.environments:RaisingEnv")
    watched.text_in("#failure", "step broke")
    watched.text_in("#log pre", "Traceback")
    watched.accessible()


def the_whole_page_is_drawn(watched: Watched) -> None:
    """Charts below the window are drawn for a picture of the whole page and for paper."""
    page = watched.page
    expect(page.locator("#chart-entropy path.line")).to_have_attribute(
        "d", re.compile("L"), timeout=PATIENCE_MS
    )
    assert 0 == page.evaluate("scrollY")
    page.emulate_media(media="print")
    expect(page.get_by_role("button", name="Delete")).to_be_hidden()
    expect(page.locator("#chart-entropy svg")).to_be_visible()
    page.emulate_media(media="screen")


def delete(watched: Watched, folder: Path) -> None:
    """Delete a run in the list, and another one on its page."""
    page = watched.page
    assert (folder / "two").is_dir()
    page.get_by_label("Select one").uncheck()
    page.get_by_role("button", name="Delete").click()
    watched.text_in("dialog", "This cannot be undone.")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
    page.get_by_role("button", name="Delete").click()
    watched.accessible()
    page.get_by_role("button", name="Delete two").click()
    expect(page.locator("tbody tr")).to_have_count(2, timeout=PATIENCE_MS)
    assert not (folder / "two").exists()
    page.locator("tbody").get_by_role("link", name="bad").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete bad").click()
    expect(page.locator("tbody tr")).to_have_count(1, timeout=PATIENCE_MS)
    assert ["one"] == column(page, "Run")


def submit(watched: Watched, name: str) -> None:
    """Submit a shipped config with changed settings, after two refusals at their lines."""
    page = watched.page
    watched.sees("form.submit")
    editor = page.get_by_label("Settings", exact=True)
    expect(editor).to_have_value(re.compile("CartPole-v1"), timeout=PATIENCE_MS)
    page.get_by_label("Config").select_option("cartpole_dqn")
    expect(editor).to_have_value(re.compile('name = "dqn"'), timeout=PATIENCE_MS)
    page.get_by_label("Config").select_option("cartpole_ppo")
    expect(editor).to_have_value(re.compile('name = "ppo"'), timeout=PATIENCE_MS)
    text = editor.input_value()
    for old, new in (
        ("max_staleness = 1", "max_staleness = 2"),
        ("target_return = 475.0", "target_return = 1e6"),
    ):
        assert old in text
        text = text.replace(old, new)
    assert "[actors]\ncount = 1\n" in text
    page.get_by_label("Name").fill(name)
    wrong = text.replace("count = 1", "count = -1")
    line = wrong.split("\n").index("count = -1") + 1
    editor.fill(wrong)  # it is checked without a press of a button
    watched.text_in(".problems", f"Line {line}actors.count: ")
    watched.reads(".numbers .wrong", f"✕ {line}")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_function(
        "() => { const area = document.querySelector('textarea');"
        " return area.value.slice(area.selectionStart, area.selectionEnd) === 'count = -1'; }"
    )
    editor.fill(text + "\n[env")
    watched.text_in(".problems", f"Line {len(text.splitlines()) + 2}Is not TOML")
    editor.fill(text)
    watched.reads(".submit .done", "The settings are valid")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page).to_have_url(re.compile(f"#/runs/{name}$"), timeout=PATIENCE_MS)
